"""Warnings made from the rows of metrics.jsonl.

    rows of one policy, oldest first ─► a window of them ─► each rule: holds or not ─► a sentence, now and then

Pure: the same rows give the same warnings, wherever they are asked for (log, console, report). A warning that goes on
is said again after 20 more steps, then 40, 80, ...
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from typing import NamedTuple

from astraflow.config.schema import RunConfig
from astraflow.observe.health.rules import RULES
from astraflow.observe.health.window import Limits, Row, Window

_PAUSE = 20  # steps after which a warning that goes on is said again


class Warned(NamedTuple):
    """One warning. `rule`: its name, as in docs/metrics.md."""

    policy: str
    step: int
    rule: str
    message: str


class Watch:
    """Fed with all rows of a run, in order; gives what there is to say after each."""

    def __init__(self, limits: Mapping[str, Limits]) -> None:
        self._policies = {name: _Policy(Window(own)) for name, own in limits.items()}

    def add(self, row: Row) -> list[Warned]:
        """Warnings after this row; none for rows that are no steps of a policy that is watched."""
        policy = self._policies.get(str(row.get("policy")))
        if policy is None or row.get("kind") != "step":
            return []
        name, step = str(row["policy"]), int(row["step"])
        policy.window.add(row)
        found = []
        for rule, check in RULES.items():
            message = check(policy.window)
            if message is not None and step >= policy.silent_until.get(rule, 0):
                pause = policy.pauses.get(rule, _PAUSE)
                policy.silent_until[rule], policy.pauses[rule] = step + pause, 2 * pause
                found.append(Warned(name, step, rule, message))
        return found


def warnings_of(rows: Iterable[Row], config: RunConfig) -> list[Warned]:
    """All that was said in the course of a run."""
    watch = Watch(Limits.of(config))
    return [warned for row in rows for warned in watch.add(row)]


@dataclass
class _Policy:
    window: Window
    silent_until: dict[str, int] = field(default_factory=dict)
    pauses: dict[str, int] = field(default_factory=dict)
