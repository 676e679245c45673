"""Ranks of a trainer: processes with a gloo group, forked from one that has loaded torch."""

from __future__ import annotations

import multiprocessing.connection
import time
import traceback
import uuid
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

from astraflow.testing.forked import _CONTEXT, ForkedProcess


def run_ranks(
    num_ranks: int, work: Callable[..., Any], place: Path, *arguments: Any, limit_s: float = 150.0
) -> list[Any]:
    """What `work(rank, place, *arguments)` gives on each rank; for one that died, its exit code.

    Raises: AssertionError: a rank raised. TimeoutError: one did not end in time.
    """
    place.mkdir(parents=True, exist_ok=True)
    rendezvous = place / f"rendezvous-{uuid.uuid4().hex}"  # a file of an earlier group would lead to its ports
    ends: list[multiprocessing.connection.Connection] = []
    processes: list[ForkedProcess] = []
    for rank in range(num_ranks):
        ours, theirs = _CONTEXT.Pipe(duplex=False)
        with theirs:
            processes.append(ForkedProcess(_rank, (rank, num_ranks, str(rendezvous), theirs, work, place, arguments)))
        ends.append(ours)
    deadline = time.monotonic() + limit_s
    results: list[Any] = []
    raised: list[str] = []  # of all ranks: the first one often says only that another is gone
    try:
        for rank, (end, process) in enumerate(zip(ends, processes, strict=True)):
            if not end.poll(max(0.0, deadline - time.monotonic())):
                raise TimeoutError(f"rank {rank} did not end in {limit_s} s")
            try:
                kind, result = end.recv()
            except EOFError:
                results.append(process.wait(60))
                continue
            if kind == "raised":
                raised.append(f"rank {rank}: {result}")
            results.append(result)
    finally:
        for process in processes:
            process.kill()
            process.wait(60)
    if raised:
        raise AssertionError("\n".join(raised))
    return results


def _rank(rank: int, num_ranks: int, rendezvous: str, end: Any, work: Any, place: Path, arguments: Any) -> None:
    torch.set_num_threads(1)
    try:
        dist.init_process_group("gloo", init_method=f"file://{rendezvous}", rank=rank, world_size=num_ranks)
        end.send(("gave", work(rank, place, *arguments)))
        end.poll(60)  # until the test has what all ranks gave: none closes its connections before
    except BaseException:
        end.send(("raised", traceback.format_exc()))
