"""What a trainer goes through. The node is a fake that answers every lease with made-up tokens."""

from __future__ import annotations

import contextlib
from functools import partial
from pathlib import Path

from astraflow.errors import WireError
from astraflow.testing.conformance.acts.alike import ON, Acts, answers_lost, disk_full, nodes, service_away, trained
from astraflow.testing.conformance.checks.trainer import INTRUDER, StoreLook, TrainerCheck
from astraflow.testing.conformance.findings import Findings
from astraflow.testing.conformance.rules import TRAINER
from astraflow.testing.conformance.stand import POLICY, ActOver, Candidate, Stand, run_file
from astraflow.testing.conformance.tap import Exchange
from astraflow.wire.messages import Resume


def a_run_to_its_end(stand: Stand) -> None:
    """Nobody plays for a while, then four steps, then the run is over."""
    stand.start()
    stand.wait("resume.first", "resume", lambda: _resumes(stand))
    stand.let_pass(2.5)
    nodes(stand)
    stand.wait("ack.batch", "acknowledge four steps", lambda: trained(stand) >= 4)
    stand.ends("over", "although its last step is acknowledged")
    covered = stand.service.call(lambda: stand.service.shell.machine.state.policies[POLICY].covered)
    stand.findings.hold("checkpoint", covered >= 2, "it reported no checkpoint in four steps, nor at the end")


def lost_answers(stand: Stand) -> None:
    """Answers to a resume, a batch and an acknowledgement are lost."""
    nodes(stand)
    answers_lost(stand, {"resume": "resume.repeat", "batch": "batch.repeat", "ack": "ack.repeat"})
    stand.wait("ack.batch", "go on", lambda: trained(stand) >= 2)


def a_full_disk(stand: Stand) -> None:
    """Acknowledgements are answered 507 for a while."""
    nodes(stand)
    disk_full(stand, "ack", "send an acknowledgement", trained)


def a_restart(stand: Stand) -> None:
    """The service is away for a second."""
    nodes(stand)
    service_away(stand, "ack.batch", "acknowledge a step", trained)


def a_long_wait(stand: Stand) -> None:
    """One answer takes longer than `dataflow.batch_lease_s`."""
    stand.tap.disturb("late", lambda x: x.name == "ack")
    nodes(stand)
    stand.start()
    late = partial(stand.seen, lambda x: x.fault == "late")
    stand.wait("ack.batch", "acknowledge a step", late)
    begin = late()[0].at
    lease_s = stand.config.dataflow.batch_lease_s
    stand.let_pass(1.5 * lease_s)
    beats = stand.seen(lambda x: x.name == "trainer_heartbeat" and begin < x.at < begin + lease_s)
    stand.tap.release()
    stand.findings.hold("heartbeat", bool(beats), f"it sent no heartbeat for {lease_s:g} s while it was busy")
    stand.wait("ack.batch", "go on after a late answer", lambda: trained(stand) >= 2)


def killed(stand: Stand) -> None:
    """`kill -9` after step 3; then it is started again, to the end of the run."""
    stand.tap.disturb("late", lambda x: x.name == "batch" and x.body.get("version") == 3)
    nodes(stand)
    stand.start()
    stand.wait("ack.batch", "acknowledge three steps", lambda: trained(stand) >= 3)
    stand.wait("batch.version", "ask for the next batch", partial(stand.seen, lambda x: x.fault == "late"))
    stand.kill()
    stand.tap.release()
    before = len(_resumes(stand))
    stand.start()
    stand.wait("resume.version", "resume when it is started again", lambda: len(_resumes(stand)) > before)
    stand.wait("replay", "go on from its checkpoint", lambda: trained(stand) >= stand.config.run.steps)
    stand.ends("over", "although its last step is acknowledged")


def replaced(stand: Stand) -> None:
    """Another trainer of the policy takes over."""
    nodes(stand)
    stand.start()
    stand.wait("ack.batch", "acknowledge a step", lambda: trained(stand) >= 1)
    urls = tuple(_resumes(stand)[-1].body["urls"])
    run_id = stand.client().run().run_id
    _take_over(stand, urls, run_id)
    refused = partial(stand.seen, lambda x: x.status == 409 and x.body.get("trainer_id") != INTRUDER)
    stand.wait("heartbeat", "send any request", lambda: refused() or not stand.alive)
    stand.ends("replaced", "although a newer trainer took over", code=None)


def _take_over(stand: Stand, urls: tuple[str, ...], run_id: str) -> None:
    """It goes on meanwhile, so the newest version may change between two looks."""
    for _ in range(20):
        with contextlib.suppress(WireError):
            resume = Resume(trainer_id=INTRUDER, version=trained(stand), urls=urls, run_id=run_id)
            stand.client().resume(POLICY, resume)
            return
    raise ActOver


ACTS: Acts = {
    "run": (a_run_to_its_end, {"steps": 4}),
    "lost": (lost_answers, {"steps": ON}),
    "full": (a_full_disk, {"steps": ON}),
    "restart": (a_restart, {"steps": ON}),
    "busy": (a_long_wait, {"steps": ON}),
    "killed": (killed, {"steps": 6}),
    "replaced": (replaced, {"steps": ON}),
}


def play(act: str, place: Path, candidate: Candidate) -> tuple[Findings, str]:
    """What one act showed, and the end of what the process wrote."""
    findings = Findings(TRAINER)
    script, settings = ACTS[act]
    config = run_file(candidate, **settings)
    with Stand(place, config, candidate, findings) as stand:
        stand.tap.look = StoreLook(POLICY, stand.token)
        with contextlib.suppress(ActOver):
            script(stand)
        run_id = stand.service.call(lambda: stand.service.shell.run_id)
        exchanges, tail = list(stand.tap.exchanges), stand.tail()
    TrainerCheck(findings, run_id, config.run.steps).read(exchanges)
    return findings, tail


def _resumes(stand: Stand) -> list[Exchange]:
    return stand.seen(lambda x: x.name == "resume" and x.status == 200 and x.body.get("trainer_id") != INTRUDER)
