"""Which policy waits for what, in seconds of the run: how fast each is against the others.

| a policy              | its seconds count as                                                                |
|-----------------------|-------------------------------------------------------------------------------------|
| has a batch, unacked  | `training`                                                                          |
| waits, the gate is    | `rollout`: its groups are played, or wait for stages                                |
| open or closed by it  |                                                                                     |
| waits, others closed  | the names of these: they hold as many groups as `max_staleness` allows, and it      |
| the gate              | gets no new ones before they have trained                                           |

A policy that made its steps, is frozen, or has no trainer yet waits for nobody. With one policy nothing is measured.
"""

from __future__ import annotations

from astraflow.dataflow.machine.plan import Context
from astraflow.dataflow.machine.serving import pacing

TRAINING, ROLLOUT = "training", "rollout"


class Balance:
    """Adds up `PolicyState.waited` from one command to the next."""

    def __init__(self, context: Context) -> None:
        self._context = context
        self._now = self._waits()  # policy -> what it does or waits for

    def look(self, now: float) -> None:
        """After each command."""
        state, policies = self._context.state, self._context.state.policies
        if len(policies) < 2:
            return
        span, state.looked_at = now - state.looked_at, now
        for name, what in self._now.items():
            waited = policies[name].waited
            for cause in what:
                waited[cause] = waited.get(cause, 0.0) + span / len(what)
        self._now = self._waits()

    def _waits(self) -> dict[str, tuple[str, ...]]:
        context, policies = self._context, self._context.state.policies
        taking = [name for name, policy in policies.items() if policy.latest >= 0 and context.takes_groups(name)]
        closed = [name for name in taking if policies[name].in_flight >= pacing.limit(context, name)]
        found: dict[str, tuple[str, ...]] = {}
        for name in taking:
            policy = policies[name]
            if policy.latest + 1 in policy.batches or pacing.ready(context, name):
                found[name] = (TRAINING,)
            elif closed and name not in closed:
                found[name] = tuple(closed)
            else:
                found[name] = (ROLLOUT,)
        return found
