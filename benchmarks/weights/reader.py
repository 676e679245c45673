"""The other side of `live`: a node without its rollouts. Prints one JSON line when a version is in force."""

from __future__ import annotations

import argparse
import json
import time
from pathlib import Path

from astraflow.engines.local.engine import LocalEngine
from astraflow.types import WeightVersion
from astraflow.weights.client import ANNOUNCED_WAIT_S, Fetched, WeightClient


def main() -> None:
    """Fetch each version as soon as it is there, as a node does that was told of it."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--url", required=True)
    parser.add_argument("--last", type=int, required=True)
    parser.add_argument("--model", type=Path, required=True)
    args = parser.parse_args()
    engine, client = LocalEngine(args.model), WeightClient(wait_s=ANNOUNCED_WAIT_S)
    held: Fetched | None = None
    for version in range(args.last + 1):
        nbytes, began = client.counts["bytes"], time.monotonic()
        held = client.fetch(WeightVersion("actor", version, (args.url,)), held)
        fetched = time.monotonic()
        engine.load_weights(version, held.tensors).result()
        live = time.monotonic()
        record = {
            "version": engine.version, "at": live, "fetch_s": fetched - began, "swap_s": live - fetched,
            "nbytes": client.counts["bytes"] - nbytes, "refused_deltas": client.counts["refused_deltas"],
        }  # fmt: skip
        print(json.dumps(record), flush=True)
    engine.close()
    client.close()


if __name__ == "__main__":
    main()
