"""What the worker of a stage goes through. Node and trainer are fakes."""

from __future__ import annotations

import contextlib
from functools import partial
from pathlib import Path

from astraflow.dataflow.machine import commands as c
from astraflow.testing.conformance.acts.alike import ON, Acts, disk_full, nodes, service_away, trained
from astraflow.testing.conformance.checks.stage import StageCheck
from astraflow.testing.conformance.findings import Findings
from astraflow.testing.conformance.rules import STAGE
from astraflow.testing.conformance.stand import HEARTBEAT_S, ActOver, Candidate, Stand, run_file
from astraflow.testing.conformance.stand import STAGE as NAME
from astraflow.testing.services import PublishingTrainer


def a_run_to_its_end(stand: Stand) -> None:
    """Nobody plays for a while, then three steps, then the run is over."""
    stand.start()
    stand.wait("columns.all", "ask for rows", partial(stand.seen, lambda x: x.name == "stage_lease"))
    stand.let_pass(1.5)
    nodes(stand)
    stand.wait("columns.all", "add the columns that three steps need", lambda: trained(stand) >= 3)
    stand.findings.hold("columns.all", True, "")
    stand.ends("worker.finished", "although it was told that the run is over")
    told = stand.seen(lambda x: bool(x.reply.get("finished")) and x.name == "stage_lease" and x.done)
    if told:
        late = told[0].answered + HEARTBEAT_S
        asked = stand.seen(lambda x: x.name == "stage_lease" and x.body.get("n", 0) > 0 and x.at > late)
        stand.findings.hold("worker.finished", not asked, "it leased again after it was told that the run is over")


def lost_answers(stand: Stand) -> None:
    """Answers to a lease and to columns are lost."""
    nodes(stand)
    stand.tap.disturb("lost", lambda x: x.name == "stage_lease" and x.body.get("n", 0) > 0)
    stand.tap.disturb("lost", lambda x: x.name == "stage_columns")
    stand.start()
    lost = partial(stand.seen, lambda x: x.name == "stage_columns" and x.fault == "lost")
    stand.wait("columns.repeat", "hand in columns", lost)
    at = lost()[0].at
    again = partial(stand.seen, lambda x: x.name == "stage_columns" and x.at > at)
    stand.wait("columns.repeat", "hand in columns again whose answer was lost", again)
    stand.wait("columns.all", "go on", lambda: trained(stand) >= 2)


def a_full_disk(stand: Stand) -> None:
    """Columns are answered 507 for a while."""
    nodes(stand)
    disk_full(stand, "stage_columns", "hand in columns", trained)


def a_restart(stand: Stand) -> None:
    """The service is away for a second."""
    nodes(stand)
    service_away(stand, "columns.all", "add the columns that a step needs", trained)


def a_lease_that_runs_out(stand: Stand) -> None:
    """The rows of a lease are offered to others before its columns come."""
    nodes(stand)
    stand.tap.disturb("late", lambda x: x.name == "stage_lease" and x.body.get("n", 0) > 0)
    stand.start()
    late = partial(stand.seen, lambda x: x.fault == "late" and x.status == 200)
    stand.wait("columns.all", "ask for rows", late)
    leases = [(lease["entry_id"], int(lease["attempt"])) for lease in late()[0].reply.get("leases", ())]
    stand.service.submit(c.Expire(rows=[(NAME, *lease) for lease in leases]))
    stand.tap.release()
    stand.wait("columns.all", "go on after columns were refused", lambda: trained(stand) >= 2)


def told_to_end(stand: Stand) -> None:
    """SIGTERM."""
    nodes(stand)
    stand.start()
    stand.wait("columns.all", "add columns", lambda: trained(stand) >= 1)
    stand.tell_to_end()
    stand.ends("worker.leave", "after SIGTERM", code=None)
    left = stand.seen(lambda x: x.name == "stage_leave" and x.status == 200)
    stand.findings.hold("worker.leave", bool(left), "it ended without DELETE /stages/{s}/workers/{id}")


ACTS: Acts = {
    "run": (a_run_to_its_end, {"steps": 3}),
    "lost": (lost_answers, {"steps": ON}),
    "full": (a_full_disk, {"steps": ON}),
    "restart": (a_restart, {"steps": ON}),
    "expired": (a_lease_that_runs_out, {"steps": ON}),
    "end": (told_to_end, {"steps": ON}),
}


def play(act: str, place: Path, candidate: Candidate) -> tuple[Findings, str]:
    """What one act showed, and the end of what the process wrote."""
    findings = Findings(STAGE)
    script, settings = ACTS[act]
    with Stand(place, run_file(candidate, stage=True, **settings), candidate, findings) as stand:
        stand.enter(PublishingTrainer(stand.service.url, place / "weights", stand.token, model=candidate.model))
        with contextlib.suppress(ActOver):
            script(stand)
        state = stand.service.call(lambda: stand.service.shell.machine.state.stages[NAME])
        exchanges, tail = list(stand.tap.exchanges), stand.tail()
    check = StageCheck(findings)
    check.read(exchanges)
    check.refused(state.refused, state.last_problem)
    return findings, tail
