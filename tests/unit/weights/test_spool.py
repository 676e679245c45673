"""What is left in the spool when a version is given up."""

from __future__ import annotations

import os
from pathlib import Path

from astraflow.testing.services import serving_weights
from astraflow.testing.weights import make_tensors
from astraflow.types import WeightVersion
from astraflow.weights.client import WeightClient
from astraflow.weights.fetch.spool import LEFT_S, Spooled
from astraflow.weights.store import FileStore


def test_parts_that_were_given_up_go_when_another_version_was_fetched(tmp_path: Path) -> None:
    spool, store = tmp_path / "spool", FileStore(tmp_path / "weights", "actor")
    store.publish(0, make_tensors(0))
    client = WeightClient(spool=spool)
    left, fresh, live = (digit * 32 for digit in "abc")
    for checksum in (left, fresh):
        with Spooled(spool, checksum, 100):
            pass
    with Spooled(spool, live, 100), serving_weights(tmp_path / "weights") as url:
        for checksum in (left, live):
            old = (spool / checksum).stat().st_mtime - LEFT_S - 1
            os.utime(spool / checksum, (old, old))
        client.fetch(WeightVersion("actor", 0, (f"{url}/weights/actor",)))
        assert {item.name for item in spool.iterdir()} == {fresh, live}
    client.close()
