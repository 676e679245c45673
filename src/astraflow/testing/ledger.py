"""The books of a run, read from its journal by somebody outside while processes of the run are killed.

Every look takes the commands that came since the last one, puts them through a machine of its own, and checks after
each what must hold at any moment. Batches are remembered, so that a group that is trained twice is found even when the
first batch is long forgotten. Commands leave the journal only when its service starts, ends, or has logged
`dataflow.snapshot_every` of them; looks must come more often than that.
"""

from __future__ import annotations

import contextlib
import threading
from collections.abc import Iterator
from pathlib import Path
from typing import NamedTuple

import msgspec

from astraflow.config.load import config_from_json
from astraflow.dataflow.journal.recovery import LOG, Logged, newest_snapshot, read_log
from astraflow.dataflow.journal.snapshots import Snapshot
from astraflow.dataflow.machine import commands
from astraflow.dataflow.machine.records import PolicyState, State
from astraflow.dataflow.shell import open_sources
from astraflow.dataflow.state import Machine

_decode = msgspec.json.Decoder(commands.Command).decode


class _Read(NamedTuple):
    snapshot: Snapshot
    log: list[Logged]


class Ledger:
    """What was ever seen in the journal of `run_dir`. `problems`: sentences about what is wrong."""

    def __init__(self, run_dir: Path) -> None:
        self._directory = run_dir / "dataflow"
        self.problems: list[str] = []
        self.batches: dict[tuple[str, int], tuple[str, ...]] = {}  # policy, step -> groups
        self._home: dict[tuple[str, str], int] = {}  # policy, group -> step that trains it
        self._cut: set[tuple[str, str]] = set()  # policy, group: may be in several batches, a piece in each
        self._rows: dict[tuple[str, int, int], int] = {}  # policy, put, row -> step: one row belongs to one episode
        self.num_looks = 0
        self._machine: Machine | None = None
        self._base: Snapshot | None = None  # where `_machine` began
        self._seq = 0  # newest command that it has

    def look(self) -> State | None:
        """Take in the journal as it is now; None: there is nothing in it yet."""
        read = _read(self._directory)
        if read is None:
            return None
        self.num_looks += 1
        if self._machine is None or read.snapshot != self._base:
            config = config_from_json(read.snapshot.meta["config"])
            self._machine = Machine(config, open_sources(config), read.snapshot.state)
            self._base, self._seq = read.snapshot, read.snapshot.seq
            self.examine(self._machine.state)
        for seq, now, command in read.log:
            if seq > self._seq:
                self._seq = seq
                try:
                    self._machine.apply(_decode(command), now)
                except commands.Refusal:
                    continue
                self.examine(self._machine.state)
        return self._machine.state

    def examine(self, state: State) -> None:
        """Check one state against what was seen before."""
        for name, policy in state.policies.items():
            self._check_account(name, state, policy)
            self._check_batches(name, policy)

    @contextlib.contextmanager
    def watching(self, interval_s: float = 0.1) -> Iterator[None]:
        """Look again and again while the block runs, and once at the end."""
        stop, failures = threading.Event(), list[BaseException]()

        def watch() -> None:
            try:
                while not stop.wait(interval_s):
                    self.look()
            except BaseException as error:
                failures.append(error)

        thread = threading.Thread(target=watch, name="ledger", daemon=True)
        thread.start()
        try:
            yield
        finally:
            stop.set()
            thread.join(60.0)
        if failures:
            raise failures[0]
        self.look()

    def _check_account(self, name: str, state: State, policy: PolicyState) -> None:
        """The law, with what is in flight counted group by group."""
        opened = sum(group.purpose == "train" for group in state.groups.values())
        fresh = {g.group_id for b in policy.batches.values() if not b.acked for g in b.groups[b.num_replayed :]}
        if policy.rest is not None:
            fresh.add(policy.rest.group.group_id)  # pieces of it may be part of a batch too
        waiting = len(fresh)
        staged = sum(group.policy == name for group in state.staged.values())
        in_flight = opened + staged + len(policy.queue) + waiting
        if policy.admitted != policy.trained + sum(policy.dropped.values()) + in_flight:
            self.problems.append(
                f"{name}: {policy.admitted} admitted, but {policy.trained} trained + {policy.dropped} dropped "
                f"+ {in_flight} in flight ({opened} open, {staged} staged, {len(policy.queue)} queued, "
                f"{waiting} in batches)"
            )

    def _check_batches(self, name: str, policy: PolicyState) -> None:
        """No group, no row of one that was cut, is in two batches, but what is trained again on purpose."""
        if policy.rest is not None:
            self._cut.add((name, policy.rest.group.group_id))
        for step, batch in policy.batches.items():
            groups = tuple(group.group_id for group in batch.groups)
            known = self.batches.setdefault((name, step), groups)
            if known != groups:
                self.problems.append(f"{name}: batch {step} changed from {known} to {groups}")
            for group in batch.groups[batch.num_replayed :]:
                other = self._home.setdefault((name, group.group_id), step)
                if other != step and (name, group.group_id) not in self._cut:
                    self.problems.append(f"{name}: group {group.group_id} is in batches {other} and {step}")
                for entry in group.entries:
                    for row in entry.part.rows:
                        if (other := self._rows.setdefault((name, entry.part.put, row), step)) != step:
                            self.problems.append(f"{name}: row {entry.part.put}:{row} is in batches {other} and {step}")


def _read(directory: Path) -> _Read | None:
    """What is in the journal now; None: nothing, or it is just changing."""
    try:
        snapshot, _ = newest_snapshot(directory)
    except FileNotFoundError:  # it was replaced meanwhile
        return None
    return _Read(snapshot, read_log(directory / LOG, snapshot.seq)[0]) if snapshot is not None else None
