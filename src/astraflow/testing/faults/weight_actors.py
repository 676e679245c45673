"""Processes that a drill of the weight plane kills: a relay, and this module with one of two roles.

`read URL VERSION SPOOL RESULT`: fetch a version as a node does and write what came, as JSON.
`publish ROOT FROM TO LOG`: publish versions of `model` one after the other, the number of each to a line before it.
"""

from __future__ import annotations

import json
import socket
import subprocess
import sys
from collections.abc import Callable, Iterator
from contextlib import closing, contextmanager
from pathlib import Path
from typing import Any

import torch

from astraflow.config.env import child_environment
from astraflow.dataflow.client import DataflowClient
from astraflow.testing.dataflow import small_config, sources
from astraflow.testing.network.shaper import Shaper
from astraflow.testing.runs import astraflow_command, wait_until
from astraflow.testing.services import DataflowThread
from astraflow.types import WeightVersion
from astraflow.weights.client import WeightClient
from astraflow.weights.files.build import Base
from astraflow.weights.manifest import MANIFEST, TensorEntry
from astraflow.weights.store import FileStore
from astraflow.wire import messages as m

Popen = Callable[..., Any]
Told = Callable[[], WeightVersion]
POLICY = "actor"
KEEP = 3
LIMIT_S = 60.0


def model(version: int, elements: int = 1 << 19) -> dict[str, torch.Tensor]:
    """The same tensors for the same version; one in a hundred elements differs from version to version."""
    tensors = {"w": torch.randn(elements, generator=torch.Generator().manual_seed(0)).to(torch.bfloat16)}
    for step in range(1, version + 1):
        chosen = torch.randint(elements, (elements // 100,), generator=torch.Generator().manual_seed(step))
        tensors["w"].view(torch.int16)[chosen] += 1
    return tensors


def known(entries: tuple[TensorEntry, ...]) -> dict[str, str]:
    """Checksums by name."""
    return {entry.name: entry.xxh3 for entry in entries}


def start(popen: Popen, place: Path, command: list[str]) -> Any:
    """A process whose words go to `actors.log` in `place`."""
    with (place / "actors.log").open("ab") as out:
        return popen(
            command, stdin=subprocess.DEVNULL, stdout=out, stderr=subprocess.STDOUT, env=child_environment(None)
        )


@contextmanager
def relaying(place: Path, origin: str, near: Shaper, popen: Popen) -> Iterator[tuple[Told, Any]]:
    """A data service that tells of version 0 at `origin`, and a relay behind `near` that has it: what nodes are told,
    and the process."""
    config = small_config(dataflow={"heartbeat_s": 0.1, "dead_after_s": 1.0})
    with DataflowThread(config, place / "run", sources=sources()) as service, closing(socket.socket()) as probe:
        client = DataflowClient(service.url)
        run_id = client.run().run_id
        client.resume(POLICY, m.Resume(trainer_id="t", version=0, urls=(origin,), run_id=run_id))
        probe.bind(("127.0.0.1", 0))
        port = str(probe.getsockname()[1])
        probe.close()  # the relay's server listens there
        where = ["--directory", str(place / "relay"), "--port", port, "--url", near.forward(f"http://127.0.0.1:{port}")]
        relay = start(popen, place, astraflow_command("relay", "--dataflow", service.url, *where))

        def told() -> WeightVersion:
            return client.join(m.Join(node_id="n", name="n", capacity=1, run_id=run_id)).versions[POLICY]

        copied = place / "relay" / run_id / POLICY / "0" / MANIFEST
        try:
            wait_until(lambda: copied.exists() and len(told().urls) == 2, "the relay", LIMIT_S)
            yield told, relay
        finally:
            relay.terminate()
            relay.wait(LIMIT_S)
            client.close()


def read(url: str, version: int, spool: Path, result: Path) -> None:
    """One fetch."""
    client = WeightClient(spool=spool)
    fetched = client.fetch(WeightVersion(POLICY, version, (url,)))
    found = {"checksums": known(fetched.held.manifest.tensors), "counts": client.counts}
    client.close()
    result.write_text(json.dumps(found))


def publish(root: Path, first: int, last: int, log: Path) -> None:
    """Each version as the changes since the one before; the first one of a process has none to compare with."""
    store, base = FileStore(root, POLICY, keep=KEEP, full_every=5, durable=False), None
    for version in range(first, last + 1):
        tensors = model(version)
        with log.open("a") as out:
            out.write(f"{version}\n")
        content = store.publish(version, tensors, keep_existing=True, base=base)
        base = Base(version, tensors, known(content.tensors))


def main(words: list[str]) -> int:
    """0."""
    if words[0] == "read":
        read(words[1], int(words[2]), Path(words[3]), Path(words[4]))
    else:
        publish(Path(words[1]), int(words[2]), int(words[3]), Path(words[4]))
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
