"""Estimators whose advantages the trainer makes, as only it knows what they need: values of a critic, or a teacher."""

from __future__ import annotations

from astraflow.contracts import Operator
from astraflow.dataflow.operators.scored import require
from astraflow.types import Group


class Gae(Operator):
    """Hands the reward of each call on; the trainer makes `A_t` of it with the critic of `policies.*.critic`.

    The episode's own reward, times `outcome`, is added to its last call. What the trainer gets in the place of an
    advantage is the reward of a token's call; it counts once, at the last token of the call.
    Siblings are not compared: a group of one is enough, and one of equal rewards teaches as well as any.
    Source: Schulman et al. 2015, arXiv:1506.02438; PPO, arXiv:1707.06347.
    """

    phase = "credit"

    def __init__(self, *, outcome: float = 1.0) -> None:
        require(outcome >= 0, "gae.outcome", outcome, "must be >= 0", "use 1, or 0 to count calls only")
        self._outcome = outcome

    def on_group(self, group: Group) -> Group | str:
        group.call_advantages = [self._rewards(group, k) for k in range(len(group.rewards))]
        return group

    def sees_difference(self, group: Group, min_std: float) -> bool:
        return True

    def _rewards(self, group: Group, k: int) -> tuple[float, ...]:
        reward, count = group.rewards[k], group.num_calls[k]
        if reward is None or not count:
            return ()
        calls = list(group.rewards_per_call[k]) or [0.0] * count
        calls[-1] += self._outcome * reward
        return tuple(calls)


class Distill(Operator):
    """Advantages of 0: all credit comes from the teacher of `algorithm.distill`, in the trainer.

    Rewards are shown but not learnt from; siblings are not compared.
    Source: on-policy distillation, arXiv:2306.13649.
    """

    phase = "credit"

    def on_group(self, group: Group) -> Group | str:
        group.advantages = [0.0] * len(group.rewards)
        return group

    def sees_difference(self, group: Group, min_std: float) -> bool:
        return True
