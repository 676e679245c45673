"""TransferQueue 0.1.11 on the workload of `bench_dataflow`: 512 ragged rows, mean 2048 tokens, 24 bytes a token, 25 MB.

In an environment of its own, see peers/README.md:

    .venv-peers-tq/bin/python -m benchmarks.peers.transferqueue [--repeat 7] [--units 2]

Rows live in memory only, nothing is journaled. `put` is `client.put(TensorDict)` of nested tensors that exist already,
`get` is `get_meta` and `get_data`. Prints one JSON line per figure.
"""

from __future__ import annotations

import argparse
import json
import statistics
import time
from collections.abc import Callable
from typing import Any

import numpy as np
import psutil
import ray
import torch
import transfer_queue as tq
from omegaconf import OmegaConf
from tensordict import TensorDict

ROWS, MEAN_TOKENS = 512, 2048
FIELDS = {"input_ids": np.int64, "logprobs": np.float32, "loss_mask": np.int64, "advantages": np.float32}
READY_ROWS = 8


def stats(values: list[float]) -> dict[str, Any]:
    """As in `dataflow_load`."""
    return {
        "median_ms": round(statistics.median(values), 3), "min_ms": round(min(values), 3),
        "max_ms": round(max(values), 3), "n": len(values),
    }  # fmt: skip


def lengths_of(rows: int, mean: float) -> np.ndarray:
    """As in `dataflow_load`."""
    raw = np.random.default_rng(0).lognormal(0.0, 0.6, rows)
    lengths = np.maximum(64, np.clip(raw / raw.mean() * mean, 64, 4 * mean))
    return np.maximum(64, lengths * (mean / lengths.mean())).astype(np.int64)


class Batch:
    """The columns as nested tensors."""

    def __init__(self) -> None:
        rng, lengths = np.random.default_rng(1), lengths_of(ROWS, MEAN_TOKENS)
        self.num_tokens = int(lengths.sum())
        self._ends = np.concatenate([[0], np.cumsum(lengths)])
        self._columns = {
            name: torch.from_numpy(
                rng.integers(0, 150_000, self.num_tokens)
                if kind is np.int64
                else rng.standard_normal(self.num_tokens, kind)
            )
            for name, kind in FIELDS.items()
        }
        self.mb = round(sum(c.numel() * c.element_size() for c in self._columns.values()) / 1e6, 1)

    def rows(self, start: int, end: int) -> TensorDict:
        """Rows `start` to `end`."""
        spans = list(zip(self._ends[start:end], self._ends[start + 1 : end + 1], strict=True))
        columns = {
            name: torch.nested.as_nested_tensor([column[a:b] for a, b in spans], layout=torch.jagged)
            for name, column in self._columns.items()
        }
        return TensorDict(columns, batch_size=end - start)


def timed(call: Callable[[], Any]) -> tuple[float, Any]:
    """Milliseconds and the result."""
    begin = time.perf_counter()
    result = call()
    return 1e3 * (time.perf_counter() - begin), result


def get(client: Any, partition: str, size: int) -> tuple[float, float]:
    """Milliseconds of a whole get, and of `get_meta` alone."""
    begin = time.perf_counter()
    picked, meta = timed(
        lambda: client.get_meta(
            data_fields=list(FIELDS), batch_size=size, partition_id=partition, task_name="train", sampling_config={}
        )
    )
    rows = client.get_data(meta)
    took = 1e3 * (time.perf_counter() - begin)
    if rows.batch_size[0] != size:
        raise SystemExit(f"rows={rows.batch_size[0]} must be {size}")
    return took, picked


def in_calls_of(client: Any, batch: Batch, size: int, repeat: int) -> list[dict[str, Any]]:
    """All rows, `size` a call: all puts, then all gets."""
    parts = [batch.rows(i, i + size) for i in range(0, ROWS, size)]
    puts, gets = [], []
    for turn in range(repeat + 1):
        partition = f"{size}/{turn}"
        taken = [timed(lambda p=p, name=partition: client.put(p, partition_id=name))[0] for p in parts]
        got = [get(client, partition, size)[0] for _ in parts]
        client.clear_partition(partition)
        if turn:
            puts += taken
            gets += got
    case = f"{ROWS} rows, {MEAN_TOKENS} tokens" if size == ROWS else f"{size} rows a call"
    return [{"case": case, "op": "put", **stats(puts)}, {"case": case, "op": "get", **stats(gets)}]


def picks(client: Any, waiting: int, repeat: int) -> dict[str, Any]:
    """Picking rows among so many that are ready; one number a row."""
    name = f"pick/{waiting}"
    client.put(TensorDict({"x": torch.zeros(waiting, 1, dtype=torch.int64)}, batch_size=waiting), partition_id=name)

    def pick() -> Any:
        return client.get_meta(
            data_fields=["x"], batch_size=READY_ROWS, partition_id=name, task_name="t", sampling_config={}
        )

    taken = [timed(pick)[0] for _ in range(repeat + 1)]
    client.clear_partition(name)
    return {"case": f"{READY_ROWS} of {waiting} ready rows", "op": "pick", **stats(taken[1:])}


def memory_mb() -> float:
    """Resident memory of everything that was started, this process left out."""
    return sum(p.memory_info().rss for p in psutil.Process().children(recursive=True)) / 1e6


def main() -> None:
    """Measure."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--repeat", type=int, default=7)
    parser.add_argument("--units", type=int, default=2, help="storage units")
    args = parser.parse_args()
    torch.set_num_threads(1)
    begin = time.perf_counter()
    ray.init(
        num_cpus=8, include_dashboard=False, log_to_driver=False, logging_level="ERROR", object_store_memory=200 << 20
    )
    storage = {"storage_backend": "SimpleStorage", "SimpleStorage": {"num_data_storage_units": args.units}}
    tq.init(OmegaConf.create({"controller": {"polling_mode": True}, "backend": storage}))
    started = 1e3 * (time.perf_counter() - begin)
    client, batch = tq.get_client(), Batch()
    rows = [
        {"case": "service", "op": "start", **stats([started])},
        {"case": "service", "op": "idle memory", "mb": round(memory_mb(), 1)},
    ]
    whole = in_calls_of(client, batch, ROWS, args.repeat)
    rows += [{**row, "mb": batch.mb} for row in whole]
    for size in (8, 32):
        rows += in_calls_of(client, batch, size, 2)
    rows += [picks(client, n, args.repeat) for n in (512, 8_192, 65_536)]
    for row in rows:
        print(json.dumps({"way": "TransferQueue", **row}))
    tq.close()
    ray.shutdown()


if __name__ == "__main__":
    main()
