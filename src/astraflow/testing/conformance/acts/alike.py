"""What participants of every role go through, each with the requests of its role."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from functools import partial
from typing import Any

from astraflow.testing.conformance.stand import POLICY, Stand
from astraflow.testing.services import PlayingNode

ON = 100  # steps of a run that goes on until the act is over
Acts = dict[str, tuple[Callable[[Stand], None], dict[str, Any]]]
"""Name of an act -> what happens, and settings of its run file."""
Reached = Callable[[Stand], int]
"""How far the participant has come."""


def nodes(stand: Stand) -> None:
    """A fake node that answers every lease with made-up tokens."""
    stand.enter(PlayingNode(stand.service.url, stand.token))


def trained(stand: Stand) -> int:
    """Steps that the policy has."""
    return max(0, stand.service.call(lambda: stand.service.shell.machine.state.policies[POLICY].latest))


def goes_on(stand: Stand, rule: str, when: str, reached: Reached, more: int = 2) -> None:
    """It comes further by `more`."""
    before = reached(stand)
    stand.wait(rule, f"go on {when}", lambda: reached(stand) >= before + more)
    stand.findings.hold(rule, True, "")


def answers_lost(stand: Stand, rules: Mapping[str, str]) -> None:
    """Start it; one answer to each of these requests is lost, and it is to send the request again. Name -> rule."""
    for name in rules:
        stand.tap.disturb("lost", partial(_named, name))
    stand.start()
    for name, rule in rules.items():
        lost = partial(stand.seen, lambda x, name=name: x.name == name and x.fault == "lost")  # type: ignore[misc]
        stand.wait(rule, f"send a request ({name})", lost)
        at = lost()[0].at
        again = partial(stand.seen, lambda x, name=name, at=at: x.name == name and x.at > at)  # type: ignore[misc]
        stand.wait(rule, f"send a request again ({name}) whose answer was lost", again)


def disk_full(stand: Stand, name: str, again: str, reached: Reached, more: int = 2) -> None:
    """Start it; requests of this name are answered 507 for a while."""
    stand.tap.disturb("full", partial(_named, name), times=3)
    stand.start()
    full = partial(stand.seen, lambda x: x.fault == "full")
    stand.wait("full", f"{again} again that was answered 507", lambda: len(full()) == 3)
    goes_on(stand, "full", "after 507", reached, more)


def service_away(stand: Stand, rule: str, what: str, reached: Reached, more: int = 2) -> None:
    """Start it; when it has done `what`, the service is away for a second."""
    stand.start()
    stand.wait(rule, what, lambda: reached(stand) >= 1)
    stand.restart_service()
    goes_on(stand, "restart", "after the service was away", reached, more)


def _named(name: str, x: Any) -> bool:
    return bool(x.name == name)
