"""What a consumer goes through. Node and trainer are fakes."""

from __future__ import annotations

import contextlib
from functools import partial
from pathlib import Path

from astraflow.testing.conformance.acts.alike import ON, Acts, answers_lost, disk_full, goes_on, nodes, service_away
from astraflow.testing.conformance.checks.consumer import ConsumerCheck
from astraflow.testing.conformance.findings import Findings
from astraflow.testing.conformance.rules import CONSUMER
from astraflow.testing.conformance.stand import CONSUMER as NAME
from astraflow.testing.conformance.stand import POLICY, ActOver, Candidate, Stand, run_file
from astraflow.testing.services import PublishingTrainer


def a_run_to_its_end(stand: Stand) -> None:
    """Nobody plays for a while, then three steps, then the run is over."""
    stand.start()
    stand.wait("read.wait", "read", partial(stand.seen, lambda x: x.name == "consume"))
    stand.let_pass(1.5)
    nodes(stand)
    stand.wait("ack.all", "acknowledge the groups of two steps", lambda: _position(stand) >= 4)
    stand.ends("over", "although it was told that the run is over")
    left = _end(stand) - _position(stand)
    stand.findings.hold("ack.all", not left, f"it ended, and {left} groups are not acknowledged")


def lost_answers(stand: Stand) -> None:
    """Answers to a read and to an acknowledgement are lost."""
    nodes(stand)
    rules = {"consume": "read.repeat", "consumer_ack": "ack.repeat"}
    answers_lost(stand, rules)
    for rule in rules.values():
        stand.findings.hold(rule, True, "")
    goes_on(stand, "ack.all", "after answers were lost", _position, 4)


def a_full_disk(stand: Stand) -> None:
    """Acknowledgements are answered 507 for a while."""
    nodes(stand)
    disk_full(stand, "consumer_ack", "send an acknowledgement", _position, 4)


def a_restart(stand: Stand) -> None:
    """The service is away for a second."""
    nodes(stand)
    service_away(stand, "ack.all", "acknowledge", _position, 4)


def killed(stand: Stand) -> None:
    """`kill -9`, and it is started again."""
    nodes(stand)
    stand.start()
    stand.wait("ack.all", "acknowledge", lambda: _position(stand) >= 1)
    stand.kill()
    stand.start()
    goes_on(stand, "ack.all", "after it was killed and started again", _position, 4)


ACTS: Acts = {
    "run": (a_run_to_its_end, {"steps": 3}),
    "lost": (lost_answers, {"steps": ON}),
    "full": (a_full_disk, {"steps": ON}),
    "restart": (a_restart, {"steps": ON}),
    "killed": (killed, {"steps": ON}),
}


def play(act: str, place: Path, candidate: Candidate) -> tuple[Findings, str]:
    """What one act showed, and the end of what the process wrote."""
    findings = Findings(CONSUMER)
    script, settings = ACTS[act]
    with Stand(place, run_file(candidate, consumer=True, **settings), candidate, findings) as stand:
        stand.enter(PublishingTrainer(stand.service.url, place / "weights", stand.token))
        with contextlib.suppress(ActOver):
            script(stand)
        exchanges, tail = list(stand.tap.exchanges), stand.tail()
    ConsumerCheck(findings, stand.starts).read(exchanges)
    return findings, tail


def _position(stand: Stand) -> int:
    return stand.service.call(lambda: stand.service.shell.machine.state.consumers[NAME].positions[POLICY])


def _end(stand: Stand) -> int:
    return stand.service.call(lambda: stand.service.shell.machine.state.logs[POLICY].end)
