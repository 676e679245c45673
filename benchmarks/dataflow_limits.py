"""What `bench_dataflow` is held against: memory, a bare socket, and the machine alone."""

from __future__ import annotations

import multiprocessing
import socket
import time
from multiprocessing.synchronize import Event
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa

from astraflow.config.load import load_run
from astraflow.dataflow.machine import accounts
from astraflow.dataflow.machine import commands as c
from astraflow.dataflow.machine.records import Entry, Part, QueuedGroup
from astraflow.dataflow.state import Machine
from astraflow.sources.calculator import CalculatorSource
from astraflow.types import Episode, Task
from astraflow.wire import messages as m
from astraflow.wire.codec import stream_pieces
from astraflow.wire.episodes import encode_episodes
from benchmarks.dataflow_load import RUN_FILE, make_lengths, make_trajectories, stats, timed

READY_ROWS, SIBLINGS = 8, 2
MAX_STALENESS = 64  # more than the steps of a measurement: nothing becomes stale


def limits(num_rows: int, mean: int, repeat: int) -> list[dict[str, Any]]:
    """Copying the bytes of one put, and sending them over a bare socket in the same format."""
    made = make_trajectories(make_lengths(num_rows, mean))
    task = Task("train", 0, 0, {})
    episodes = [
        Episode(episode_id=f"train/0/0/{i}", attempt=1, node_id="n", task=task, trajectories=[row])
        for i, row in enumerate(made)
    ]
    header, batch = encode_episodes(episodes, "n")
    body = np.frombuffer(b"".join(stream_pieces(header, batch)), np.uint8)
    target, size = np.zeros_like(body), round(body.nbytes / 1e6, 1)
    rows = [
        {"way": "limit", "case": "memcpy", "op": "copy", **stats(timed(repeat, lambda: np.copyto(target, body)))},
        {"way": "limit", "case": "Arrow IPC, bare TCP", "op": "get", **stats(bare_tcp(batch, repeat))},
    ]
    return [{**row, "mb": size} for row in rows]


def bare_tcp(batch: pa.RecordBatch, repeat: int) -> list[float]:
    """Milliseconds until a table from another process is read, no protocol around it."""
    context = multiprocessing.get_context("spawn")
    listener = socket.create_server(("127.0.0.1", 0))
    port, ready = listener.getsockname()[1], context.Event()
    sink = pa.BufferOutputStream()
    with pa.ipc.new_stream(sink, batch.schema) as writer:
        writer.write_batch(batch)
    child = context.Process(target=_send, args=(port, sink.getvalue().to_pybytes(), repeat + 1, ready), daemon=True)
    child.start()
    try:
        return _pull(listener, ready, repeat, batch.num_rows)
    finally:
        child.join(10)
        listener.close()


def _pull(listener: socket.socket, ready: Event, repeat: int, num_rows: int) -> list[float]:
    ready.wait(30)

    def pull() -> None:
        connection, _ = listener.accept()
        with connection, connection.makefile("rb", buffering=1 << 20) as file:
            if pa.ipc.open_stream(pa.PythonFile(file, mode="r")).read_all().num_rows != num_rows:
                raise SystemExit("rows are missing")

    return timed(repeat, pull)


def _send(port: int, body: bytes, times: int, ready: Event) -> None:
    ready.set()
    for _ in range(times):
        with socket.create_connection(("127.0.0.1", port)) as connection:
            connection.sendall(body)


def selection(folder: Path, waiting: list[int], repeat: int) -> list[dict[str, Any]]:
    """Milliseconds until the machine has picked 8 of so many ready rows, two rows a group, of random versions."""
    folder.mkdir(parents=True)
    path = folder / "run.toml"
    path.write_text(RUN_FILE.format(group_size=SIBLINGS, groups=READY_ROWS // SIBLINGS, max_staleness=MAX_STALENESS))
    config = load_run(path)
    rows = []
    for size in waiting:
        machine = Machine(config, {"train": CalculatorSource(size=1)})
        machine.apply(c.ResumePolicy("actor", m.Resume(trainer_id="t", version=0, urls=(), run_id="r")), 0.0)
        _fill(machine, (size + READY_ROWS * (repeat + 1)) // SIBLINGS)
        taken = [_pick(machine, version) for version in range(repeat + 1)]
        rows.append({"way": "machine", "case": f"{READY_ROWS} of {size} ready rows", "op": "pick", **stats(taken[1:])})
    return rows


def _fill(machine: Machine, size: int) -> None:
    versions = np.random.default_rng(0).permutation(size) % (MAX_STALENESS // 8)
    for i, version in enumerate(versions.tolist()):
        parts = [Part("actor", 1 << 32, [SIBLINGS * i + k], [version], version, 100, 0, 0.5) for k in range(SIBLINGS)]
        group = QueuedGroup(f"train/0/{i}", 1.0, version, [Entry(part, 0.5, 1.0) for part in parts])
        accounts.admit(machine.context, group.group_id, "train")
        machine.routing.pass_on("actor", group)
        machine.context.out.clear()


def _pick(machine: Machine, version: int) -> float:
    begin = time.perf_counter()
    machine.apply(c.TakeBatch("actor", "t", version), 0.0)
    took = time.perf_counter() - begin
    batch = machine.state.policies["actor"].batches[version + 1]
    if sum(len(group.entries) for group in batch.groups) != READY_ROWS:
        raise SystemExit(f"groups={len(batch.groups)} must have {READY_ROWS} rows")
    machine.apply(c.AckBatch("actor", f"actor/{version + 1}", m.Ack(trainer_id="t", version=version + 1)), 0.0)
    return 1e3 * took
