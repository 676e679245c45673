"""Publishing a model that is spread over ranks: no GPU and no step ever sees the whole of it.

```
 every rank   step ─► copy of its own blocks ─submit─► [one waits] ─► what changed in them, in checkpoint coordinates ─┐
                       the next step goes on at once                                                          gloo    │
 lowest rank                             host copy of the whole model ◄─ changes ─ encode, checksum, write ◄──────────┘
```
A rank sends its blocks whole the first time, and again after something went wrong.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple

import numpy as np

from astraflow.errors import WeightError
from astraflow.weights.delta.order import ELEMENTS
from astraflow.weights.delta.writer import Described
from astraflow.weights.files.build import MIN_UNCHANGED, Encoded
from astraflow.weights.publisher import Backlog
from astraflow.weights.shards.exchange import Exchange, RankLost, split
from astraflow.weights.shards.host_copy import Block, HostCopy
from astraflow.weights.shards.plan import Owners, owners, plans, share_unchanged
from astraflow.weights.shards.records import Frame, Layout, Outcome, Plan
from astraflow.weights.shards.snapshot import Change, Snapshot, take
from astraflow.weights.store import FileStore

if TYPE_CHECKING:
    import torch


class _Version(NamedTuple):
    """What this rank has of the one that is being published."""

    number: int
    layout: Layout
    copied: Snapshot | str
    files: Iterable[Path]

    @property
    def snapshot(self) -> Snapshot:
        """After a plan without a problem there is one."""
        assert not isinstance(self.copied, str)
        return self.copied

    def failed(self, rank: int, problem: str) -> WeightError:
        """As every rank raises it."""
        return WeightError(
            f"rank {rank}: version", self.number, f"was not published ({problem})",
            "mend that and publish the next one on all ranks; versions before it are as they were",
        )  # fmt: skip


class ShardedPublisher:
    """Versions of a model of which each rank holds a part. Make one on every rank at once, and call it on every rank.

    Tensors are DTensors (FSDP2, tensor parallel) or plain ones; a plain one, or equal blocks, are taken from the lowest
    rank that has them. Where torch.distributed is not initialized, this process alone holds the model.
    """

    def __init__(
        self,
        store: FileStore | None,
        *,
        deltas: bool = True,
        dtype: torch.dtype | None = None,
        on_device: bool = False,
        ranks: Sequence[int] | None = None,
        timeout_s: float = 600.0,
    ) -> None:
        """Args: store: on the lowest of `ranks`; others need none. dtype: floating point tensors are published in it;
        None: as they are. on_device: snapshots stay on the tensors' device (see `shards.snapshot`). ranks: global ones
        that hold parts of the model; None: all. timeout_s: how long ranks wait for each other; the leader's writing
        counts.

        Raises: WeightError: this rank is not one of `ranks`, or it is the lowest and has no store.
        """
        self._exchange = Exchange(ranks, timeout_s)
        if self._exchange.leads and store is None:
            self._exchange.close()  # the others need not wait
            raise WeightError("store", None, "must be given on the lowest rank", "give a FileStore there")
        self._store, self._deltas, self._dtype, self._on_device = store, deltas, dtype, on_device
        self._backlog = Backlog("publish-shards")
        self._skip: frozenset[str] = frozenset()  # tensors of this rank that others send
        # Only the thread touches these.
        self._base: Snapshot | None = None  # what the leader's host copy holds of this rank
        self._host = HostCopy()
        self._checksums: dict[str, str] = {}  # of the host copy's version, as it was published
        self._lost: Exception | None = None  # after it the ranks are not in step any more

    @property
    def seconds(self) -> float:
        """Of work in the thread; only grows."""
        return self._backlog.seconds

    def submit(self, version: int, tensors: Mapping[str, Any], files: Iterable[Path] = ()) -> float:
        """Copy this rank's part and publish soon; returns the seconds that the caller had to wait because two versions
        were still under way.

        Args: tensors: Hugging Face name -> tensor or DTensor; they may change as soon as this returns (on a device: by
        what is queued after it). files: config and tokenizer files, of the lowest rank.
        Raises: WeightError: of this version on this rank, or of an earlier one on any rank.
        """
        files = tuple(files)
        try:
            snapshot = take(version, tensors, dtype=self._dtype, on_device=self._on_device, skip=self._skip)
        except Exception as error:
            problem = _said(error)
            self._backlog.add(lambda: self._publish(version, problem, files))  # so that others do not wait
            raise
        return self._backlog.add(lambda: self._publish(version, snapshot, files))

    def flush(self) -> None:
        """All that was submitted is visible. Raises: WeightError: it could not be published, on whichever rank."""
        self._backlog.flush()

    def close(self) -> None:
        """Finish what was submitted, whatever becomes of it, and leave the group."""
        self._backlog.close()
        self._exchange.close()

    def _publish(self, version: int, snapshot: Snapshot | str, files: Iterable[Path]) -> None:
        """`snapshot`: or why there is none."""
        if self._lost is not None:
            raise self._lost
        try:
            at_hand = _Version(version, self._layout(version, snapshot), snapshot, files)
            if self._exchange.leads:
                self._lead(at_hand)
            else:
                self._follow(at_hand)
        except Exception as error:
            if not isinstance(error, WeightError) or isinstance(error, RankLost):  # other ranks do not know of it
                self._lost, self._base = error, None
                self._host.drop()
                self._exchange.close()
            raise

    def _layout(self, version: int, snapshot: Snapshot | str) -> Layout:
        if isinstance(snapshot, str):
            return Layout(version, problem=self._mine(snapshot))
        try:
            snapshot.wait()
            return snapshot.layout(self._base)
        except Exception as error:  # told to all ranks, this one included
            return Layout(version, problem=self._mine(error))

    def _follow(self, version: _Version) -> None:
        exchange, problem = self._exchange, ""
        exchange.send(0, version.layout)
        plan, _ = exchange.receive(0, Plan)
        if plan.problem:
            raise version.failed(exchange.rank, plan.problem)
        for batch in plan.batches:
            if not problem and not plan.sends.isdisjoint(batch):
                try:
                    blocks = self._blocks(version, plan, batch)
                except Exception as error:  # told to all ranks, this one included
                    blocks, problem = [], self._mine(error)
                arrays = [array for block in blocks for array in (block.positions, block.values)]
                exchange.send(0, Frame(tuple(block.sent for block in blocks), problem), arrays)
        outcome, _ = exchange.receive(0, Outcome)
        self._settle(version, plan, held=outcome.held)
        if outcome.problem:
            raise version.failed(exchange.rank, outcome.problem)

    def _lead(self, version: _Version) -> None:
        others = range(1, self._exchange.size)
        layouts = [version.layout, *(self._exchange.receive(rank, Layout)[0] for rank in others)]
        of, told = self._plan(layouts)
        for rank in others:
            self._exchange.send(rank, told[rank])
        if told[0].problem:
            raise version.failed(0, told[0].problem)
        encoded = self._deltas and not told[0].whole
        base = Encoded(self._host.version, self._checksums, self._host.parts) if encoded else None
        problem = self._collect(version, of, told)
        held = not problem
        if not problem:
            problem = self._write(version, base)
        for rank in others:
            self._exchange.send(rank, Outcome(held, problem))
        self._settle(version, told[0], held=held)
        if problem:
            raise version.failed(0, problem)

    def _plan(self, layouts: Sequence[Layout]) -> tuple[dict[str, Owners], list[Plan]]:
        problem, of = next((layout.problem for layout in layouts if layout.problem), ""), {}
        if not problem:
            try:
                of = owners(layouts)
            except WeightError as error:
                problem = str(error)
        if problem:
            return {}, [Plan(problem=problem)] * len(layouts)
        bases = {layout.base for layout in layouts}
        whole = self._host.version < 0 or bases != {self._host.version}
        return of, plans(layouts, of, whole=whole or share_unchanged(layouts) < MIN_UNCHANGED)

    def _collect(self, version: _Version, of: Mapping[str, Owners], told: Sequence[Plan]) -> str:
        """Move the host copy to the version; returns why not. All that ranks send is taken off the line in any case."""
        problem, silent, host = "", set(), self._host
        host.begin(version.number, of.keys(), encode=self._deltas and not told[0].whole)
        for batch in told[0].batches:
            blocks: dict[str, list[Block]] = {name: [] for name in batch}
            for rank in range(1, self._exchange.size):
                if rank not in silent and not told[rank].sends.isdisjoint(batch):
                    frame, payload = self._exchange.receive(rank, Frame)
                    if frame.problem:
                        silent.add(rank)
                        problem = problem or frame.problem
                    for change in _unpacked(frame, payload, of):
                        blocks[change.sent.name].append(Block(of[change.sent.name][rank].region, change))
            if problem:
                continue
            try:
                for change in self._blocks(version, told[0], batch):
                    blocks[change.sent.name].insert(0, Block(of[change.sent.name][0].region, change))
                for name, of_name in blocks.items():
                    held = next(iter(of[name].values()))
                    host.change(Described(name, held.dtype, held.shape), of_name)
            except Exception as error:  # told to all ranks, this one included
                problem = self._mine(error)
        if problem:
            host.drop()
        else:
            host.end(version.number)
        return problem

    def _write(self, version: _Version, base: Encoded | None) -> str:
        assert self._store is not None
        self._checksums = {}
        try:
            content = self._store.publish(
                version.number, self._host.tensors, version.files, keep_existing=True, base=base
            )
        except Exception as error:  # told to all ranks, this one included
            return self._mine(error)
        self._checksums = {entry.name: entry.xxh3 for entry in content.tensors}
        return ""

    def _blocks(self, version: _Version, plan: Plan, batch: Sequence[str]) -> list[Change]:
        names = [name for name in batch if name in plan.sends]
        return version.snapshot.changes(names, None if plan.whole else self._base)

    def _settle(self, version: _Version, plan: Plan, *, held: bool) -> None:
        self._base = version.snapshot if held else None
        self._skip = frozenset(entry.name for entry in version.layout.held) - plan.sends if held else frozenset()
        self._host.parts.clear()

    def _mine(self, error: Exception | str) -> str:
        return f"rank {self._exchange.rank}: {error if isinstance(error, str) else _said(error)}"


def _said(error: Exception) -> str:
    return str(error) if isinstance(error, WeightError) else repr(error)


def _unpacked(frame: Frame, payload: memoryview, of: Mapping[str, Owners]) -> Iterator[Change]:
    sizes: list[tuple[np.dtype[Any], int]] = []
    for sent in frame.sent:
        held = next(iter(of[sent.name].values()))
        sizes.append((np.dtype(np.uint64 if sent.wide else np.uint32), 0 if sent.whole else sent.count))
        sizes.append((ELEMENTS[held.dtype].signed, sent.count))
    arrays = split(payload, sizes)
    yield from map(Change, frame.sent, arrays[::2], arrays[1::2])
