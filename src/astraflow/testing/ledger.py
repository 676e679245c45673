"""The books of a run, read from its journal by somebody outside while processes of the run are killed.

Every look replays the journal through the machine, read-only, and checks what must hold at any moment; batches are
remembered over looks, so that a group that is trained twice is found even when the first batch is long forgotten.
"""

from __future__ import annotations

import contextlib
import sqlite3
import threading
from collections.abc import Iterator
from pathlib import Path

import msgspec

from astraflow.config.load import config_from_json
from astraflow.dataflow.machine import commands
from astraflow.dataflow.machine.records import PolicyState, State
from astraflow.dataflow.shell import open_sources
from astraflow.dataflow.state import Machine

_decode = msgspec.json.Decoder(commands.Command).decode


class Ledger:
    """What was ever seen in the journal of `run_dir`. `problems`: sentences about what is wrong."""

    def __init__(self, run_dir: Path) -> None:
        self._path = run_dir / "dataflow" / "journal.sqlite"
        self.problems: list[str] = []
        self.batches: dict[tuple[str, int], tuple[str, ...]] = {}  # policy, step -> groups
        self._home: dict[tuple[str, str], int] = {}  # policy, group -> step that trains it
        self._rows: dict[tuple[str, int, int], int] = {}  # policy, put, row -> step: one row belongs to one episode
        self.num_looks = 0

    def look(self) -> State | None:
        """Read the journal as it is now; None: there is none yet."""
        state = read_state(self._path)
        if state is not None:
            self.examine(state)
        return state

    def examine(self, state: State) -> None:
        """Check one state against what was seen before."""
        self.num_looks += 1
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
        waiting = sum(len(batch.groups) for batch in policy.batches.values() if not batch.acked)
        in_flight = opened + len(policy.queue) + waiting
        if policy.admitted != policy.trained + sum(policy.dropped.values()) + in_flight:
            self.problems.append(
                f"{name}: {policy.admitted} admitted, but {policy.trained} trained + {policy.dropped} dropped "
                f"+ {in_flight} in flight ({opened} open, {len(policy.queue)} queued, {waiting} in batches)"
            )

    def _check_batches(self, name: str, policy: PolicyState) -> None:
        for step, batch in policy.batches.items():
            groups = tuple(group.group_id for group in batch.groups)
            known = self.batches.setdefault((name, step), groups)
            if known != groups:
                self.problems.append(f"{name}: batch {step} changed from {known} to {groups}")
            for group in batch.groups:
                if (other := self._home.setdefault((name, group.group_id), step)) != step:
                    self.problems.append(f"{name}: group {group.group_id} is in batches {other} and {step}")
                for entry in group.entries:
                    for row in entry.part.rows:
                        if (other := self._rows.setdefault((name, entry.part.put, row), step)) != step:
                            self.problems.append(f"{name}: row {entry.part.put}:{row} is in batches {other} and {step}")


def read_state(journal: Path) -> State | None:
    """The state that a recovery would find in `journal` now; None: no journal, or nothing in it."""
    if not journal.exists():
        return None
    with contextlib.closing(sqlite3.connect(f"file:{journal}?mode=ro", uri=True, timeout=10.0)) as db:
        try:
            db.execute("BEGIN")
            meta = dict(db.execute("SELECT key, value FROM meta").fetchall())
            snapshot = db.execute("SELECT state FROM snapshot").fetchone()
            log = db.execute("SELECT now, command FROM log ORDER BY seq").fetchall()
        except sqlite3.OperationalError:  # it is being created, or its service is just starting again
            return None
    if "config" not in meta:
        return None
    config = config_from_json(meta["config"])
    machine = Machine(config, open_sources(config), snapshot[0] if snapshot else None)
    for now, command in log:
        try:
            machine.apply(_decode(command), now)
        except commands.Refusal:
            continue
    return machine.state
