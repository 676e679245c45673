"""What a consumer goes through. Node and trainer are fakes."""

from __future__ import annotations

import contextlib
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

from astraflow.testing.conformance.checks.consumer import ConsumerCheck
from astraflow.testing.conformance.findings import Findings
from astraflow.testing.conformance.rules import CONSUMER
from astraflow.testing.conformance.stand import CONSUMER as NAME
from astraflow.testing.conformance.stand import POLICY, ActOver, Candidate, Stand, run_file
from astraflow.testing.services import PlayingNode, PublishingTrainer

_ON = 100  # steps of a run that goes on until the act is over


def a_run_to_its_end(stand: Stand) -> None:
    """Nobody plays for a while, then three steps, then the run is over."""
    stand.start()
    stand.wait("read.wait", "read", partial(stand.seen, lambda x: x.name == "consume"))
    stand.let_pass(1.5)
    _nodes(stand)
    stand.wait("ack.all", "acknowledge the groups of two steps", lambda: _position(stand) >= 4)
    stand.ends("over", "although it was told that the run is over")
    left = _end(stand) - _position(stand)
    stand.findings.hold("ack.all", not left, f"it ended, and {left} groups are not acknowledged")


def lost_answers(stand: Stand) -> None:
    """Answers to a read and to an acknowledgement are lost."""
    rules = {"consume": "read.repeat", "consumer_ack": "ack.repeat"}
    for name in rules:
        stand.tap.disturb("lost", lambda x, name=name: x.name == name)  # type: ignore[misc]
    _nodes(stand)
    stand.start()
    for name, rule in rules.items():
        lost = partial(stand.seen, lambda x, name=name: x.name == name and x.fault == "lost")  # type: ignore[misc]
        stand.wait(rule, f"send a request ({name})", lost)
        at = lost()[0].at
        again = partial(stand.seen, lambda x, name=name, at=at: x.name == name and x.at > at)  # type: ignore[misc]
        stand.wait(rule, f"send a request again ({name}) whose answer was lost", again)
        stand.findings.hold(rule, True, "")
    _goes_on(stand, "ack.all", "after answers were lost")


def a_full_disk(stand: Stand) -> None:
    """Acknowledgements are answered 507 for a while."""
    _nodes(stand)
    stand.tap.disturb("full", lambda x: x.name == "consumer_ack", times=3)
    stand.start()
    full = partial(stand.seen, lambda x: x.fault == "full")
    stand.wait("full", "send an acknowledgement again that was answered 507", lambda: len(full()) == 3)
    _goes_on(stand, "full", "after 507")


def a_restart(stand: Stand) -> None:
    """The service is away for a second."""
    _nodes(stand)
    stand.start()
    stand.wait("ack.all", "acknowledge", lambda: _position(stand) >= 1)
    stand.restart_service()
    _goes_on(stand, "restart", "after the service was away")


def killed(stand: Stand) -> None:
    """`kill -9`, and it is started again."""
    _nodes(stand)
    stand.start()
    stand.wait("ack.all", "acknowledge", lambda: _position(stand) >= 1)
    stand.kill()
    stand.start()
    _goes_on(stand, "ack.all", "after it was killed and started again")


ACTS: dict[str, tuple[Callable[[Stand], None], dict[str, Any]]] = {
    "run": (a_run_to_its_end, {"steps": 3}),
    "lost": (lost_answers, {"steps": _ON}),
    "full": (a_full_disk, {"steps": _ON}),
    "restart": (a_restart, {"steps": _ON}),
    "killed": (killed, {"steps": _ON}),
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


def _goes_on(stand: Stand, rule: str, when: str) -> None:
    before = _position(stand)
    stand.wait(rule, f"go on {when}", lambda: _position(stand) >= before + 4)
    stand.findings.hold(rule, True, "")


def _nodes(stand: Stand) -> None:
    stand.enter(PlayingNode(stand.service.url, stand.token))


def _position(stand: Stand) -> int:
    return stand.service.call(lambda: stand.service.shell.machine.state.consumers[NAME].positions[POLICY])


def _end(stand: Stand) -> int:
    return stand.service.call(lambda: stand.service.shell.machine.state.logs[POLICY].end)
