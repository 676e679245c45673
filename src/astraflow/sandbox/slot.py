"""A place for one job at a time: a driver that stays, and a candidate's box that waits for the next code."""

from __future__ import annotations

import time
from typing import Any

from msgspec.structs import replace

from astraflow.sandbox.box import Box, BoxError, Program
from astraflow.sandbox.isolation import Way
from astraflow.sandbox.records import Health, Job, OutcomeName, Settings, Verdict

GRACE_S = 2.0  # for the driver to say the rest once the candidate is gone
_STARVED = 0.5  # share of its time that a process was ready to run: it is slow for the host's sake, perhaps
_SIGNALS_OF_TIME = ("signal 9", "signal 24")  # SIGKILL and SIGXCPU, by the limit of CPU


class Slot:
    """Its users are `uid` (candidate) and `uid + 1` (driver). All but `watched` and `end` is for one thread."""

    def __init__(self, way: Way, settings: Settings, uid: int, health: Health) -> None:
        self._way, self._settings, self._uid, self._health = way, settings, uid, health
        self._driver: Box | None = None
        self._warm: Box | None = None
        self.watched: tuple[Box, float] | None = None  # what runs, and since when (monotonic)

    def run(self, job: Job) -> Verdict:
        """Judge it; a job that was cut while the host was busy is tried once more."""
        began = time.monotonic()
        verdict, starved = self._attempt(job)
        if starved:
            self._health.retries += 1
            verdict, _ = self._attempt(job)
        return replace(verdict, wall_s=time.monotonic() - began, isolation=self._way.isolation)

    def warm_up(self) -> None:
        """Start the next candidate's box. Raises: BoxError."""
        if self._warm is None:
            self._warm = self._box("candidate", self._uid)

    def end(self) -> None:
        """Nothing of it stays."""
        for box in (self._driver, self._warm):
            if box is not None:
                self._close(box)
        self._driver = self._warm = None

    def _attempt(self, job: Job) -> tuple[Verdict, bool]:
        """And whether it should be tried again."""
        num = len(job.tests) + len(job.cases)
        try:
            driver = self._ready_driver()
            self.warm_up()
            candidate, self._warm = self._warm, None
            assert candidate is not None
            candidate.ready()
        except BoxError as error:
            self.end()
            return Verdict(outcome="error", num_tests=num, why=str(error)), False
        self.watched = candidate, time.monotonic()
        try:
            return self._judged(job, driver, candidate, num)
        finally:
            self.watched = None
            self._close(candidate)
            if not job.trusted:
                self._end_driver()

    def _judged(self, job: Job, driver: Box, candidate: Box, num: int) -> tuple[Verdict, bool]:
        reports: list[str] = []
        try:
            deadline = time.monotonic() + self._settings.wall_s
            driver.give(_message(job, self._settings), candidate, deadline)
            late = not self._listen(driver, reports, deadline)
        except (OSError, EOFError, ValueError) as error:
            self._end_driver()
            return Verdict(outcome="error", num_tests=num, why=f"the driver failed ({error or 'it ended'})"), False
        starved = False
        if late:
            starved = _was_starved(candidate, self._settings.wall_s)
            self._kill(candidate)
            try:
                finished = self._listen(driver, reports, time.monotonic() + GRACE_S)
            except (OSError, EOFError, ValueError):
                finished = False
            if not finished:
                self._end_driver()
        outcome, why = self._outcome(reports, num, late, candidate)
        passed = sum(not report for report in reports)
        return Verdict(outcome=outcome, num_passed=passed, num_tests=num, why=why), starved and outcome == "timeout"

    def _outcome(self, reports: list[str], num: int, late: bool, candidate: Box) -> tuple[OutcomeName, str]:
        why = next(filter(None, reports), "")
        if not late and not why and len(reports) == num:
            return "passed", ""
        if candidate.memory_killed:
            return "failed", f"memory: more than {self._settings.memory_bytes} bytes"
        if late:
            return "timeout", f"timeout: longer than {self._settings.wall_s:g} s"
        if why.startswith(_SIGNALS_OF_TIME) or (why.endswith("died") and candidate.ended_by(1.0) in (9, 24)):
            return "timeout", f"timeout: more than {self._settings.cpu_s} s of CPU"
        return "failed", why or "the tests did not end"

    def _listen(self, driver: Box, reports: list[str], deadline: float) -> bool:
        """Take reports until the job has ended; False: the deadline came first."""
        while True:
            try:
                told = driver.hear(deadline)
            except TimeoutError:
                return False
            if "end" in told:
                return True
            reports.append(str(told.get("why", "")))

    def _ready_driver(self) -> Box:
        if self._driver is None:
            self._health.drivers += 1
            self._driver = self._box("driver", self._uid + 1)
            self._driver.ready()
        return self._driver

    def _end_driver(self) -> None:
        if self._driver is not None:
            self._close(self._driver)
        self._driver = None

    def _box(self, program: Program, uid: int) -> Box:
        box = Box(self._way, self._settings, program, uid)
        self._health.boxes += 1
        return box

    def _kill(self, box: Box) -> None:
        self._health.kills += 1
        box.kill()

    def _close(self, box: Box) -> None:
        self._health.boxes -= 1
        box.end()


def _message(job: Job, settings: Settings) -> dict[str, Any]:
    """The job as the driver gets it."""
    return {
        "code": job.code, "entries": job.entries, "setup": job.setup, "given": job.given, "tests": job.tests,
        "cases": job.cases, "stop": job.stop, "limit": settings.output_bytes,
        "cpu_s": int(settings.wall_s + GRACE_S) + 1,
    }  # fmt: skip


def _was_starved(candidate: Box, wall_s: float) -> bool:
    """It would have gone on had it got a core: ready to run for half of the time, a good part of that in vain."""
    spent = candidate.spent()
    if spent is None:
        return True
    ready = (spent.ran_ns + spent.waited_ns) / 1e9
    return ready >= _STARVED * wall_s and spent.waited_ns > spent.ran_ns
