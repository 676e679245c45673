"""One way of `bench_dataflow` (TCP, or files on one host), in a process of its own: starts services, times calls.

    ASTRAFLOW_SHARED_MEMORY=0 python -m benchmarks.dataflow_side --folder /tmp/x [--repeat 7]     # TCP

Prints one JSON line per figure.
"""

from __future__ import annotations

import argparse
import json
import threading
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa

from astraflow.observe.process import settle_memory
from astraflow.types import Trajectory
from astraflow.wire.codec import flat_values
from astraflow.wire.local import host_identity
from benchmarks.dataflow_load import (
    GET_BYTES_PER_TOKEN,
    PUT_BYTES_PER_TOKEN,
    RUN_FILE,
    Loop,
    make_lengths,
    make_trajectories,
    service,
    stats,
)

ROWS = 512
GROUP = 8
MEAN_TOKENS = 2048  # of the peer's batch: 25 MB at its 24 bytes a token
EQUAL_BYTES_TOKENS = round(MEAN_TOKENS * 24 / PUT_BYTES_PER_TOKEN)  # 25 MB of ours
READ = ("token_ids", "loss_mask", "behavior_logprobs", "advantages", "versions")  # what a trainer unpacks


def run_file(groups: int, max_staleness: int) -> str:
    """A run whose batch has `groups` groups of eight rows."""
    return RUN_FILE.format(group_size=GROUP, groups=groups, max_staleness=max_staleness)


def read_all(table: pa.Table) -> float:
    """Milliseconds until a trainer has the token columns as flat arrays, every value read once."""
    begin = time.perf_counter()
    for name in READ:
        np.add.reduce(flat_values(table.column(name)), dtype=np.float64)
    return 1e3 * (time.perf_counter() - begin)


def whole(folder: Path, mean: int, repeat: int) -> list[dict[str, Any]]:
    """All rows in one put and one get."""
    lengths = make_lengths(ROWS, mean)
    rows = make_trajectories(lengths)
    puts, gets, reads = [], [], []
    with service(folder, run_file(ROWS // GROUP, 1)) as running:
        loop = Loop(running.url)
        touch_memory(folder)
        for _ in range(repeat + 1):
            puts.append(loop.commit(loop.episodes(rows)))
            header, table, took = loop.get()
            gets.append(took)
            reads.append(read_all(table))
            check(table, lengths)
            del table
            loop.done(header)
    case, tokens = f"{ROWS} rows, {mean} tokens", int(lengths.sum())
    out = []
    for op, values, size in (("put", puts, PUT_BYTES_PER_TOKEN), ("get", gets, GET_BYTES_PER_TOKEN)):
        out.append({"case": case, "op": op, **stats(values[1:]), "mb": round(tokens * size / 1e6, 1)})
    return [*out, {"case": case, "op": "read after get", **stats(reads[1:])}]


def touch_memory(folder: Path) -> None:
    """Use a gigabyte of page cache and give it back.

    A virtual machine may have lent memory that nobody used to its host, and getting it back costs 50 ms for 25 MB
    (measured; docs/performance.md). That is the machine's, and it would be counted as the service's.
    """
    zeros, path = bytes(64 << 20), folder / "touched"
    with path.open("wb") as file:
        for _ in range(16):
            file.write(zeros)
    path.unlink()


def check(table: pa.Table, lengths: np.ndarray) -> None:
    """Nothing was lost on the way."""
    if table.num_rows != len(lengths) or len(flat_values(table.column("token_ids"))) != int(lengths.sum()):
        raise SystemExit(f"rows={table.num_rows} must be {len(lengths)} with {int(lengths.sum())} tokens")


def micro(folder: Path, size: int, repeat: int) -> list[dict[str, Any]]:
    """`size` rows a call: all puts, then all gets."""
    rows = make_trajectories(make_lengths(ROWS, MEAN_TOKENS))
    calls = ROWS // size
    puts, gets = [], []
    with service(folder, run_file(size // GROUP, calls)) as running:
        loop = Loop(running.url)
        for turn in range(repeat + 1):
            episodes = loop.episodes(rows)
            taken_put = [loop.commit(episodes[i : i + size]) for i in range(0, ROWS, size)]
            taken_get = []
            for _ in range(calls):
                header, table, took = loop.get()
                taken_get.append(took)
                if table.num_rows != size:
                    raise SystemExit(f"rows={table.num_rows} must be {size}")
                loop.done(header)
            if turn:
                puts += taken_put
                gets += taken_get
    return [{"case": f"{size} rows a call", "op": op, **stats(v)} for op, v in (("put", puts), ("get", gets))]


def one_row(folder: Path, repeat: int) -> list[dict[str, Any]]:
    """One row a put; then a batch request that waits while the last row of its batch is put."""
    rows = make_trajectories(make_lengths(GROUP, MEAN_TOKENS))
    puts, wakes, behind = [], [], []
    with service(folder, run_file(1, 1)) as running:
        loop = Loop(running.url)
        time.sleep(1.0)
        idle = {"case": "service", "op": "idle memory", "mb": round(running.rss_mb(), 1)}
        started = {"case": "service", "op": "start", **stats([1e3 * running.start_s])}
        for turn in range(repeat * 4 + 1):
            wake, after, taken = wake_up(loop, rows)
            if turn:
                puts += taken
                wakes.append(wake)
                behind.append(after)
    return [
        started, idle, {"case": "1 row a call", "op": "put", **stats(puts)},
        {"case": "wake-up", "op": "from the start of the put", **stats(wakes)},
        {"case": "wake-up", "op": "after the put returned", **stats(behind)},
    ]  # fmt: skip


def wake_up(loop: Loop, rows: Sequence[Trajectory]) -> tuple[float, float, list[float]]:
    """Milliseconds from the start, and from the end, of the last put of a batch to the batch in a waiting trainer."""
    episodes = loop.episodes(rows)
    got: list[Any] = []

    def wait() -> None:
        header, table, _ = loop.get(wait_s=10.0)
        got.extend((time.perf_counter(), header, table))

    taken = [loop.commit([one]) for one in episodes[:-1]]
    trainer = threading.Thread(target=wait)
    trainer.start()
    time.sleep(0.05)  # until its request waits in the service
    begin = time.perf_counter()
    loop.commit(episodes[-1:])
    end = time.perf_counter()
    trainer.join()
    loop.done(got[1])
    return 1e3 * (got[0] - begin), 1e3 * (got[0] - end), taken


def main() -> None:
    """Measure one way."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--folder", type=Path, required=True)
    parser.add_argument("--repeat", type=int, default=7)
    args = parser.parse_args()
    way = "same host" if host_identity() else "TCP"
    folder, repeat = args.folder, args.repeat
    settle_memory()  # as nodes and trainers do
    rows = one_row(folder / "one", repeat)
    rows += whole(folder / "equal-bytes", EQUAL_BYTES_TOKENS, repeat)
    rows += whole(folder / "equal-tokens", MEAN_TOKENS, repeat)
    rows += micro(folder / "micro8", 8, 2)
    rows += micro(folder / "micro32", 32, 2)
    for row in rows:
        print(json.dumps({"way": way, **row}))


if __name__ == "__main__":
    main()
