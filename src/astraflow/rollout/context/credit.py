"""From the calls of an episode and what its workflow says to trajectories: whose reward is it?

| the workflow says                        | reward of the policy     | rewards per call                        |
|------------------------------------------|--------------------------|-----------------------------------------|
| `1.0`                                    | 1.0 of each              | none                                    |
| `{"actor": 1.0, "judge": 0.0}`           | its own                  | none                                    |
| `{"actor@plan": 1.0, "actor@code": 0.0}` | the mean of its agents   | that of the agent that made the call    |
| the same and `"actor": 0.7`              | 0.7                      | the same; 0.7 for agents that have none |
| `rewards_per_call`                       | as above, without agents | as they are                             |
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from math import fsum

from astraflow.errors import EpisodeError
from astraflow.rollout.context.trie import trajectories
from astraflow.rollout.gateway.contexts import agent_of, policy_of
from astraflow.types import Call, Outcome, Trajectory


def rewarded(calls: Mapping[str, Sequence[Call]], outcome: Outcome) -> list[Trajectory]:
    """The branches of all policies. `calls`: by policy.

    Raises: EpisodeError: a reward for a policy that is not there, or not one for each call or agent that was asked for.
    """
    per_call = outcome.rewards_per_call
    if isinstance(per_call, list):
        if len(calls) > 1:
            known = ", ".join(sorted(calls))
            raise EpisodeError(f"rewards_per_call={per_call} must name a policy: {{policy: [...]}}; known: {known}")
        per_call = dict.fromkeys(calls, per_call)
    given = outcome.reward
    named = given if isinstance(given, Mapping) else dict.fromkeys(calls, given)
    if unknown := sorted({*per_call, *map(policy_of, named)} - set(calls)):
        raise EpisodeError(f"policy={unknown[0]!r} is not in this episode; known: {', '.join(sorted(calls))}")
    branches: list[Trajectory] = []
    for policy, own in calls.items():
        agents = {agent_of(name): r for name, r in named.items() if policy_of(name) == policy and agent_of(name)}
        reward = named.get(policy)
        of_calls: Sequence[float] = per_call.get(policy, ())
        if agents:
            if of_calls:
                raise EpisodeError(
                    f"rewards_per_call.{policy}={len(of_calls)} values come beside rewards of agents; give one of them"
                )
            reward, of_calls = _of_agents(policy, own, reward, agents)
        branches += trajectories(own, policy, reward, of_calls)
    return branches


def _of_agents(
    policy: str, calls: Sequence[Call], own: float | None, agents: Mapping[str, float | None]
) -> tuple[float | None, Sequence[float]]:
    """Reward of the policy and of its calls; unscored when an agent that called is."""
    rewards = [agents.get(call.agent, own) for call in sorted(calls, key=lambda call: call.index)]
    missing = {call.agent for call in calls} - set(agents)
    if missing and own is None:
        raise EpisodeError(
            f"reward={sorted(agents)} names no reward for agent {min(missing)!r} of {policy}; give each agent one, or "
            f"{policy!r} one for all others"
        )
    scored = [reward for reward in rewards if reward is not None]
    if len(scored) < len(rewards):
        return None, ()
    said = [reward for name, reward in agents.items() if reward is not None and any(c.agent == name for c in calls)]
    return (own if own is not None else fsum(said) / len(said) if said else None), scored
