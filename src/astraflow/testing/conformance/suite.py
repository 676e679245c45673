"""`astraflow conform`: every act of a role, one after the other, each with a service of its own."""

from __future__ import annotations

import logging
import tempfile
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Literal, Protocol

from astraflow.errors import LaunchError
from astraflow.testing.conformance.acts import consumer, rollout, stage, trainer
from astraflow.testing.conformance.findings import Findings
from astraflow.testing.conformance.rules import RULES
from astraflow.testing.conformance.stand import Candidate

Role = Literal["rollout", "trainer", "stage", "consumer"]


class Told(Protocol):
    """Called after each act: its name, what it showed, and the end of what the process wrote."""

    def __call__(self, act: str, findings: Findings, tail: str) -> None: ...


_PLAY: dict[Role, Callable[[str, Path, Candidate], tuple[Findings, str]]] = {
    "rollout": rollout.play,
    "trainer": trainer.play,
    "stage": stage.play,
    "consumer": consumer.play,
}
ACTS: dict[Role, tuple[str, ...]] = {
    "rollout": tuple(rollout.ACTS),
    "trainer": tuple(trainer.ACTS),
    "stage": tuple(stage.ACTS),
    "consumer": tuple(consumer.ACTS),
}


def conform(role: Role, candidate: Candidate, acts: Sequence[str] = (), tell: Told | None = None) -> Findings:
    """Play `acts` (all of them when there are none) and gather what they show.

    Raises: LaunchError: no such act.
    """
    findings = Findings(RULES[role])
    if unknown := sorted(set(acts) - set(ACTS[role])):
        raise LaunchError("act", unknown[0], f"is no act of {role}", f"known: {', '.join(ACTS[role])}")
    # Lost answers are errors of the server, and warnings of ours are part of the play.
    quiet = logging.getLogger()
    if not quiet.handlers:
        quiet.addHandler(logging.NullHandler())
    logging.getLogger("uvicorn.error").setLevel(logging.CRITICAL)
    for act in acts or ACTS[role]:
        with tempfile.TemporaryDirectory(prefix=f"astraflow-{role}-{act}-") as place:
            found, tail = _PLAY[role](act, Path(place), candidate)
        findings.add(found)
        if tell is not None:
            tell(act, found, tail)
    return findings
