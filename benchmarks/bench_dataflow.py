"""How fast is the data service? Puts, gets, picks, wake-ups, start and memory, beside memcpy, a bare socket and a peer.

| figure         | what is timed                                                                                |
|----------------|----------------------------------------------------------------------------------------------|
| put            | `DataflowClient.commit(episodes)`, encoding included, until it is journaled and acknowledged |
| get            | `DataflowClient.batch(...)` until the table is there, advantages and weights included        |
| read after get | until a trainer has the token columns as flat arrays and has read every value once           |
| wake-up        | a batch request that waits until another thread's put of the last row of its batch returned  |
| pick           | the machine's `TakeBatch` alone                                                              |

The service is `astraflow dataflow` in a process of its own with its journal on disk; clients are a second process,
once over TCP and once on the same host (files). 512 ragged rows: 25 MB of ours, and as many tokens as the peer's 25 MB
(15 MB of ours).

    python -m benchmarks.bench_dataflow [--repeat 15] [--peers .venv-peers-tq/bin/python]
"""

from __future__ import annotations

import argparse
import os
import shutil
import tempfile
from pathlib import Path
from typing import Any

from benchmarks.dataflow_limits import limits, selection
from benchmarks.dataflow_side import EQUAL_BYTES_TOKENS, MEAN_TOKENS, ROWS
from benchmarks.harness import Check, Result, run_side

WAITING = (512, 8_192, 65_536, 1_048_576)
WHOLE = f"{ROWS} rows, {EQUAL_BYTES_TOKENS} tokens"
PEER = Path(".venv-peers-tq/bin/python")
Row = dict[str, Any]


def side(way: str, folder: Path, repeat: int) -> list[Row]:
    """Our figures over one way, measured in a process of its own."""
    env = {"ASTRAFLOW_SHARED_MEMORY": "1" if way == "host" else "0"}
    return run_side("benchmarks.dataflow_side", f"--folder={folder}", f"--repeat={repeat}", env=env)


def peer(python: Path, repeat: int) -> list[Row]:
    """The peer's figures, or a row that says why there are none."""
    if not python.exists():
        return [{"way": "TransferQueue", "case": "not measured", "op": "`make bench-peers-tq` makes its environment"}]
    return run_side("benchmarks.peers.transferqueue", f"--repeat={repeat}", python=str(python))


def value(rows: list[Row], way: str, case: str, op: str, key: str = "median_ms") -> float | None:
    """One figure of the table."""
    found = [row.get(key) for row in rows if (row["way"], row["case"], row["op"]) == (way, case, op)]
    return found[0] if found else None


def checks(rows: list[Row]) -> list[Check]:
    """The figures that the issue asks for."""
    tcp, host = "TCP", "same host"
    picks = [row["median_ms"] for row in rows if (row["way"], row["op"]) == ("machine", "pick")]
    made = [
        Check.at_most("put of 25 MB over TCP", value(rows, tcp, WHOLE, "put"), 30.0, "ms"),
        Check.at_most("put of 25 MB on the same host", value(rows, host, WHOLE, "put"), 15.0, "ms"),
        Check.at_most("get of the same rows over TCP", value(rows, tcp, WHOLE, "get"), 20.0, "ms"),
        Check.at_most("get of the same rows on the same host", value(rows, host, WHOLE, "get"), 5.0, "ms"),
    ]
    for size in (8, 32):
        for op in ("put", "get"):
            for way in (tcp, host):
                case = f"{size} rows a call"
                made.append(Check.at_most(f"{op} of {size} rows, {way}", value(rows, way, case, op), 1.5, "ms"))
    made += [
        Check.at_most(f"put of one row, {w}", value(rows, w, "1 row a call", "put"), 1.0, "ms") for w in (tcp, host)
    ]
    made += [
        Check.at_most("pick 8 of a million ready rows", picks[-1] if picks else None, 0.5, "ms"),
        Check.at_most("pick, a million rows against 512", picks[-1] / picks[0] if picks else None, 2.0, "x"),
        Check.at_most("start", value(rows, host, "service", "start"), 1000.0, "ms"),
        Check.at_most("idle memory", value(rows, host, "service", "idle memory", "mb"), 150.0, "MB"),
    ]
    wake = "after the put returned"
    made += [Check.at_most(f"wake-up, {w}", value(rows, w, "wake-up", wake), 5.0, "ms") for w in (tcp, host)]
    return made


def main() -> None:
    """Measure and write `results/dataflow.json`."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--repeat", type=int, default=15)
    parser.add_argument("--peers", type=Path, default=PEER, help="Python that has TransferQueue")
    parser.add_argument("--folder", type=Path, help="where run directories go; default: a temporary directory")
    args = parser.parse_args()
    folder = Path(tempfile.mkdtemp(prefix="bench-dataflow-", dir=args.folder))
    load = os.getloadavg()[0]
    try:
        rows = side("TCP", folder / "tcp", args.repeat) + side("host", folder / "host", args.repeat)
        rows += limits(ROWS, EQUAL_BYTES_TOKENS, args.repeat)
        rows += selection(folder / "machine", list(WAITING), args.repeat)
    finally:
        shutil.rmtree(folder, ignore_errors=True)
    rows += peer(args.peers, args.repeat)
    settings = {"repeat": args.repeat, "rows": ROWS, "mean_tokens": MEAN_TOKENS, "load_at_start": round(load, 2)}
    result = Result("dataflow", settings, rows, checks(rows))
    result.show()
    print(f"wrote {result.write()}")


if __name__ == "__main__":
    main()
