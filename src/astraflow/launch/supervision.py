"""Which process to start, replace or end on which event. Pure: no clock, no process, no file.

    starting ──Ready(dataflow)──► running ──Finished──► finishing ──all gone──► done
                                    │  ▲                   │
                         Exited ────┘  └── Start (backoff) │ Interrupted, or a process that cannot be kept alive
                                                           ▼
                                                        stopping ──all gone──► done

| event       | what happens                                                                                        |
|-------------|-----------------------------------------------------------------------------------------------------|
| Ready       | the dataflow service answers: trainers start, nodes start when their `start_after_s` has passed      |
| Exited      | crashed: start again after a backoff; too often, or refused (exit code 2): the run fails             |
| Finished    | the run is over: workers leave by themselves (trainers write their checkpoint), then dataflow ends   |
| Failed      | the dataflow service says why the run cannot go on: everything ends                                  |
| Interrupted | once: workers get SIGTERM and a limit, then dataflow; twice: SIGKILL for all                         |
| Tick        | whatever is due: starts, planned kills, deadlines                                                    |
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Literal

from astraflow.launch.plan import DATAFLOW, ProcessSpec

Phase = Literal["starting", "running", "finishing", "stopping", "done"]


@dataclass(frozen=True)
class Ready:
    """The dataflow service answers."""


@dataclass(frozen=True)
class Exited:
    """A process ended. `code` as in subprocess: negative for a signal. `tail`: last lines of its log."""

    name: str
    code: int
    tail: str = ""


@dataclass(frozen=True)
class Finished:
    """The dataflow service says that the run is over."""


@dataclass(frozen=True)
class Failed:
    """The dataflow service says that the run cannot go on."""

    reason: str


@dataclass(frozen=True)
class Interrupted:
    """Somebody wants the run to end (Ctrl-C, SIGTERM)."""


@dataclass(frozen=True)
class Tick:
    """Time has passed."""


Event = Ready | Exited | Finished | Failed | Interrupted | Tick


@dataclass(frozen=True)
class Start:
    """Start the process `name`. `attempt` counts from 1."""

    name: str
    attempt: int


@dataclass(frozen=True)
class Signal:
    """SIGTERM (`kill` false) or SIGKILL."""

    name: str
    kill: bool


Instruction = Start | Signal


@dataclass(frozen=True)
class Limits:
    """All waits of the launcher, in seconds, and how often a process may crash."""

    ready_s: float = 300.0  # from start to the first answer of the dataflow service
    leave_s: float = 120.0  # from Finished until workers get SIGTERM
    end_s: float = 20.0  # from SIGTERM to SIGKILL
    left_s: float = 5.0  # until a worker that left by itself is started again: all may be over, told late
    first_backoff_s: float = 0.25
    longest_backoff_s: float = 8.0
    max_crashes: int = 5  # of one process within `crash_window_s`; one more fails the run
    crash_window_s: float = 300.0


@dataclass
class _Slot:
    spec: ProcessSpec
    state: Literal["waiting", "running", "left"] = "waiting"
    not_before: float | None = None  # None: not yet known (the dataflow service does not answer)
    first_start: float | None = None
    started: float = 0.0
    attempts: int = 0
    crashes: list[float] = field(default_factory=list)
    killed_on_purpose: bool = False
    awaiting_planned_exit: bool = False
    term_at: float | None = None  # SIGTERM was sent then
    kill_sent: bool = False
    last_code: int | None = None  # of the newest exit


class Supervision:
    """The state of all processes of one run."""

    def __init__(self, specs: list[ProcessSpec], now: float, limits: Limits | None = None) -> None:
        self.phase: Phase = "starting"
        self.failure: str | None = None  # why the run failed; names the process and its last words
        self.finished = False
        self.interrupts = 0
        self.num_restarts = 0
        self._limits = limits or Limits()
        self._slots = {spec.name: _Slot(spec) for spec in specs}
        self._slots[DATAFLOW].not_before = now
        self._ready = False
        self._finished_at = now

    @property
    def succeeded(self) -> bool:
        """The run is over and every trainer left by itself, its last checkpoint written."""
        trainers = [slot for slot in self._slots.values() if slot.spec.role == "trainer"]
        return self.finished and self.failure is None and all(slot.last_code == 0 for slot in trainers)

    def running(self) -> list[str]:
        """Names of the processes that are alive."""
        return [name for name, slot in self._slots.items() if slot.state == "running"]

    def handle(self, event: Event, now: float) -> list[Instruction]:
        """Take in one event at time `now` (seconds, monotonic) and say what to do."""
        match event:
            case Ready():
                self._on_ready(now)
            case Exited():
                self._on_exit(event, now)
            case Finished() if self.phase in ("starting", "running"):
                self.phase, self.finished, self._finished_at = "finishing", True, now
                self._call_off(lambda slot: _leaves(slot) or slot.attempts == 0 or slot.last_code == 0)
            case Failed() if self.failure is None:
                self.failure = event.reason
                self._stop()
            case Interrupted():
                self.interrupts += 1
                self._stop()
            case _:
                pass
        return self._due(now)

    def _on_ready(self, now: float) -> None:
        self._ready = True
        if self.phase == "starting":
            self.phase = "running"
            for slot in self._workers():
                slot.not_before = now + slot.spec.start_after_s

    def _on_exit(self, event: Exited, now: float) -> None:
        slot = self._slots[event.name]
        planned, slot.awaiting_planned_exit = slot.awaiting_planned_exit, False
        slot.state, slot.last_code, slot.term_at, slot.kill_sent = "left", event.code, None, False
        if slot.spec.role == "dataflow":
            self._ready = False
        if self._expected(slot):
            return
        if planned:
            self._start_again(slot, now + self._limits.first_backoff_s)
            return
        if event.code == 0 and slot.spec.role != "dataflow":  # it saw the end before us, or somebody told it to leave
            self._start_again(slot, now + self._limits.left_s)
            return
        slot.crashes = [t for t in slot.crashes if now - t < self._limits.crash_window_s] + [now]
        if event.code == 2 or (event.code > 0 and self.phase == "starting"):
            self._fail(f"{event.name} refused to start (exit code {event.code})", event.tail)
        elif len(slot.crashes) > self._limits.max_crashes:
            spell = f"{len(slot.crashes)} times in {now - slot.crashes[0]:.0f} s"
            self._fail(f"{event.name} died {spell}, at last of {cause(event.code)}", event.tail)
        else:
            pause = self._limits.first_backoff_s * 2 ** (len(slot.crashes) - 1)
            self._start_again(slot, now + min(pause, self._limits.longest_backoff_s))

    def _expected(self, slot: _Slot) -> bool:
        """This exit is part of the plan: nothing is started again."""
        if self.phase in ("stopping", "done"):
            return True
        if self.phase != "finishing":
            return False
        if slot.spec.role == "trainer":
            return slot.last_code == 0
        return _leaves(slot) or all(worker.state == "left" for worker in self._workers())

    def _start_again(self, slot: _Slot, when: float) -> None:
        self.num_restarts += 1
        slot.state, slot.not_before = "waiting", when

    def _fail(self, what: str, tail: str) -> None:
        self.failure = f"{what}; its last lines:\n{tail}" if tail else f"{what}; its log is empty"
        self._stop()

    def _stop(self) -> None:
        if self.phase != "done":
            self.phase = "stopping"
            self._call_off(lambda slot: True)

    def _call_off(self, which: Callable[[_Slot], bool]) -> None:
        """Starts that were planned and are not wanted any more."""
        for slot in self._slots.values():
            if slot.state == "waiting" and which(slot):
                slot.state = "left"

    def _workers(self) -> list[_Slot]:
        return [slot for name, slot in self._slots.items() if name != DATAFLOW]

    def _due(self, now: float) -> list[Instruction]:
        if self.phase == "finishing" and now - self._finished_at >= self._limits.leave_s:
            self._stop()
        todo: list[Instruction] = list(self._starts(now))
        if self.phase in ("starting", "running"):
            return todo + self._kills(now)
        todo += self._endings(now)
        if all(slot.state == "left" for slot in self._slots.values()):
            self.phase = "done"
        return todo

    def _starts(self, now: float) -> list[Start]:
        todo = []
        for slot in self._slots.values():
            if slot.state == "waiting" and slot.not_before is not None and now >= slot.not_before:
                slot.state, slot.started, slot.attempts = "running", now, slot.attempts + 1
                slot.first_start = now if slot.first_start is None else slot.first_start
                todo.append(Start(slot.spec.name, slot.attempts))
        return todo

    def _kills(self, now: float) -> list[Instruction]:
        """Kills that the run file asks for, and a dataflow service that never answered."""
        todo: list[Instruction] = []
        for slot in self._slots.values():
            if slot.state != "running" or slot.kill_sent:
                continue
            asked = slot.spec.kill_after_s > 0 and not slot.killed_on_purpose and slot.first_start is not None
            if asked and now - (slot.first_start or now) >= slot.spec.kill_after_s:
                slot.killed_on_purpose = slot.awaiting_planned_exit = True
                todo.append(self._kill(slot))
            elif slot.spec.role == "dataflow" and not self._ready and now - slot.started > self._limits.ready_s:
                todo.append(self._kill(slot))
        return todo

    def _endings(self, now: float) -> list[Instruction]:
        """Workers first; the dataflow service once they are gone."""
        running = [slot for slot in self._slots.values() if slot.state == "running"]
        if self.interrupts >= 2:
            return [self._kill(slot) for slot in running if not slot.kill_sent]
        workers = [slot for slot in self._workers() if slot.state != "left"]
        if self.phase == "finishing" and workers:
            return []
        todo: list[Instruction] = []
        for slot in workers or running:
            if slot.term_at is None:
                slot.term_at = now
                todo.append(Signal(slot.spec.name, kill=False))
            elif now - slot.term_at >= self._limits.end_s and not slot.kill_sent:
                todo.append(self._kill(slot))
        return todo

    def _kill(self, slot: _Slot) -> Signal:
        slot.kill_sent = True
        return Signal(slot.spec.name, kill=True)


def _leaves(slot: _Slot) -> bool:
    """It leaves by itself when the run is over, and has nothing left to write."""
    return slot.spec.role in ("node", "stage")


def cause(code: int) -> str:
    """An exit code in words."""
    return f"signal {-code}" if code < 0 else f"exit code {code}"
