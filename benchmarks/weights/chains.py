"""A reader that is 1, 2, 4 or 8 versions behind: the chain of deltas, one merged delta, or everything again."""

from __future__ import annotations

import shutil
import statistics
import time
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

from astraflow.weights.fetch.http import HttpReader
from astraflow.weights.fetch.route import Counts, Held, Reader, bring
from astraflow.weights.files.build import Base
from astraflow.weights.server import start_server
from astraflow.weights.store import FileStore
from astraflow.wire.client import HttpClient
from benchmarks.weights.training import Tensors

BEHIND = (1, 2, 4, 8)


def measure_chains(name: str, versions: Sequence[Tensors], place: Path, repeat: int) -> list[dict[str, Any]]:
    """Over HTTP on loopback; seconds of fetching, applying and verifying, the median of `repeat`."""
    last = len(versions) - 1
    store = _store(versions, place)
    server = start_server(place)
    client = HttpClient(server.url, None)
    try:
        reader = HttpReader(client, f"/weights/{store.policy}", store.policy)
        made = []
        for behind in (behind for behind in BEHIND if behind <= last):
            measured = _Behind(store, reader, versions, behind)
            made.append({"training": name, "behind": behind, **measured.row(repeat)})
        return made
    finally:
        client.close()
        server.stop()
        shutil.rmtree(place, ignore_errors=True)


def _store(versions: Sequence[Tensors], place: Path) -> FileStore:
    """All versions as deltas on the first, the last one also whole."""
    store = FileStore(place, "actor", full_every=len(versions) - 1, durable=False)
    base: Base | None = None
    for version, tensors in enumerate(versions):
        content = store.publish(version, tensors, base=base)
        base = Base(version, tensors, {entry.name: entry.xxh3 for entry in content.tensors})
    return store


class _Behind:
    """One reader, again and again from the version that it starts from."""

    def __init__(self, store: FileStore, reader: Reader, versions: Sequence[Tensors], behind: int) -> None:
        self._store, self._reader, self._behind = store, reader, behind
        self._last = len(versions) - 1
        self._start = self._last - behind
        self._tensors = versions[self._start]

    def row(self, repeat: int) -> dict[str, Any]:
        infos = self._store.infos()
        chain = [infos[version] for version in range(self._start + 1, self._last + 1)]
        row: dict[str, Any] = {"full MB": infos[self._last].full_nbytes / 1e6}
        row["full s"], _ = _median(lambda: self._fetch([self._last], held=False), repeat)
        if all(info.base >= 0 for info in chain):
            row["chain MB"] = sum(info.delta_nbytes for info in chain) / 1e6
            row["chain s"], _ = _median(lambda: self._fetch([info.version for info in chain]), repeat)
            if self._behind > 1:  # the first reader waits for the merge, further ones find it
                row["first merged s"], nbytes = self._fetch([self._last])
                row["merged MB"] = nbytes / 1e6
                row["merged s"], _ = _median(lambda: self._fetch([self._last]), repeat)
        return row

    def _fetch(self, wanted: Sequence[int], *, held: bool = True) -> tuple[float, int]:
        at = Held(self._store.manifest(self._start), _copied(self._tensors)) if held else None
        counts = Counts()
        begin = time.perf_counter()
        for version in wanted:
            at = bring(self._reader, at, version, counts=counts)
        seconds = time.perf_counter() - begin
        if counts.refused_deltas or counts.torn_parts:
            raise SystemExit(f"{counts} while fetching version {wanted[-1]}")
        return seconds, counts.nbytes


def _copied(tensors: Mapping[str, Any]) -> Tensors:
    return {name: tensor.clone() for name, tensor in tensors.items()}


def _median(action: Callable[[], tuple[float, int]], repeat: int) -> tuple[float, int]:
    taken = [action() for _ in range(repeat)]
    return statistics.median(seconds for seconds, _ in taken), taken[0][1]
