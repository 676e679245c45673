"""From `Publisher.submit` until the engine of a reader has the version. The reader is a process of its own.

    publisher: submit ─► encode, write ─► visible          reader: waits at the store ─► fetch, apply, verify ─► swap

The clock is CLOCK_MONOTONIC, which processes of one host share.
"""

from __future__ import annotations

import json
import queue
import shutil
import statistics
import subprocess
import sys
import threading
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from astraflow.weights.publisher import Publisher
from astraflow.weights.server import start_server
from astraflow.weights.store import FileStore
from benchmarks.weights.training import Tensors, Trained

LIMIT_S = 120.0
Record = dict[str, Any]


def measure_live(run: Trained, versions: Sequence[Tensors], place: Path) -> list[Record]:
    """Over files of this host and over HTTP on loopback; as deltas and, beside them, always whole."""
    return [
        {"training": run.name, "way": way, "travels as": "deltas" if deltas else "full", **row}
        for way in ("files", "HTTP")
        for deltas in (True, False)
        for row in [_one(run, versions, place / f"{way}-{deltas}", over_http=way == "HTTP", deltas=deltas)]
    ]


def _one(run: Trained, versions: Sequence[Tensors], place: Path, *, over_http: bool, deltas: bool) -> Record:
    store = FileStore(place, "actor", keep=4, durable=False)
    publisher, server = Publisher(store, deltas=deltas), start_server(place)
    try:
        publisher.submit(0, versions[0])
        publisher.flush()
        url = server.policy_url("actor") if over_http else store.url
        taken: list[Record] = []
        with _reader(run, url, len(versions) - 1) as records:
            first = records.get(timeout=LIMIT_S)
            for version, tensors in enumerate(versions[1:], start=1):
                begin, busy = time.monotonic(), publisher.seconds
                publisher.submit(version, tensors)
                record = records.get(timeout=LIMIT_S)
                publisher.flush()
                taken.append({**record, "live_s": record["at"] - begin, "publish_s": publisher.seconds - busy})
    finally:
        publisher.close()
        server.stop()
        shutil.rmtree(place, ignore_errors=True)
    if any(record["refused_deltas"] for record in taken):
        raise SystemExit(f"{run.name}: deltas were refused: {taken}")
    middle = {key: statistics.median(r[key] for r in taken) for key in ("live_s", "publish_s", "swap_s")}
    return {
        "publish to live s": middle["live_s"], "longest": max(r["live_s"] for r in taken),
        "of that publishing s": middle["publish_s"], "swap s": middle["swap_s"],
        "MB of a version": statistics.mean(r["nbytes"] for r in taken) / 1e6,
        "first fetch and swap s": first["fetch_s"] + first["swap_s"],
    }  # fmt: skip


@contextmanager
def _reader(run: Trained, url: str, last: int) -> Iterator[queue.Queue[Record]]:
    """A process with an engine; the queue gets a record when each version is live there, from 0 on."""
    command = [
        sys.executable, "-m", "benchmarks.weights.reader", f"--url={url}", f"--last={last}",
        f"--model={run.model_dir()}",
    ]  # fmt: skip
    child = subprocess.Popen(command, stdout=subprocess.PIPE, text=True, cwd=Path(__file__).parents[2])
    records: queue.Queue[Record] = queue.Queue()
    assert child.stdout is not None
    pipe = child.stdout

    def read() -> None:
        for line in pipe:
            records.put(json.loads(line))

    thread = threading.Thread(target=read)
    thread.start()
    try:
        yield records
    finally:
        child.kill()
        child.wait()
        thread.join()
        pipe.close()
