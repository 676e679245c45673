"""Credit for each call of an episode of several turns."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Literal

from astraflow.contracts import Operator
from astraflow.dataflow.operators.scored import mean_std, require
from astraflow.types import Group


class PerCall(Operator):
    """`A_kc = (G_kc - b_c) [/ (std_c + eps)]` with the discounted return `G_kc = r_kc + gamma * G_k(c+1)`.

    `r_kc` is the reward of call c of episode k (0 where the workflow gave none); the episode's own reward, times
    `outcome`, is added to its last call. So without rewards per call and with gamma < 1, calls far from the end get
    less of the outcome: discounted credit.
    Args: baseline: "call": b_c and std_c over the scored siblings that have a call c; one alone gets exactly 0.
        "group": over all calls of all siblings. "none": b = 0, and no std.
    normalize: divide by std.
    Unscored siblings take no part. Equal siblings give exactly 0 with baseline "call".
    Source: reward to go with a baseline per time step, as in REINFORCE (Williams 1992) and turn-level GRPO
    (arXiv:2505.11821 section 3).
    """

    phase = "credit"

    def __init__(
        self,
        *,
        gamma: float = 1.0,
        outcome: float = 1.0,
        baseline: Literal["call", "group", "none"] = "call",
        normalize: bool = False,
        eps: float = 1e-6,
    ) -> None:
        known = ("call", "group", "none")
        require(0 <= gamma <= 1, "per_call.gamma", gamma, "must be 0 to 1", "use 1 for no discount")
        require(outcome >= 0, "per_call.outcome", outcome, "must be >= 0", "use 1, or 0 to count calls only")
        require(baseline in known, "per_call.baseline", baseline, f"must be one of {', '.join(known)}", "use call")
        require(
            not (normalize and baseline == "none"), "per_call.normalize", normalize, "must be false without a baseline",
            "use baseline = 'call'",
        )  # fmt: skip
        require(eps > 0, "per_call.eps", eps, "must be > 0", "use 1e-6")
        self._gamma, self._outcome, self._baseline, self._eps = gamma, outcome, baseline, eps
        self._normalize = normalize
        self.makes = ("normalized",) if normalize else ()
        self.min_siblings = 1 if baseline == "none" else 2

    def on_group(self, group: Group) -> Group | str:
        returns, of_call = self._compared(group)
        lines = [self._line(values) for values in of_call]
        credit = [tuple((g - lines[c][0]) * lines[c][1] for c, g in enumerate(calls)) for calls in returns]
        group.call_advantages = credit
        return group

    def sees_difference(self, group: Group, min_std: float) -> bool:
        return any(mean_std(values)[1] > min_std for values in self._compared(group)[1])

    def _compared(self, group: Group) -> tuple[list[list[float]], list[list[float]]]:
        """Returns of each episode; and, for each number of a call, the returns that it is compared with."""
        returns = [self._returns(group, k) for k in range(len(group.rewards))]
        most = max(map(len, returns), default=0)
        if self._baseline == "group":
            return returns, [[g for calls in returns for g in calls]] * most
        return returns, [[calls[c] for calls in returns if len(calls) > c] for c in range(most)]

    def _returns(self, group: Group, k: int) -> list[float]:
        """Reward to go of each call of one episode; empty when it is unscored."""
        reward = group.rewards[k]
        if reward is None or not group.num_calls[k]:
            return []
        calls = list(group.rewards_per_call[k]) or [0.0] * group.num_calls[k]
        calls[-1] += self._outcome * reward
        to_go = 0.0
        for c in range(len(calls) - 1, -1, -1):
            to_go = calls[c] = calls[c] + self._gamma * to_go
        return calls

    def _line(self, values: Sequence[float]) -> tuple[float, float]:
        """Baseline and scale."""
        if self._baseline == "none":
            return 0.0, 1.0
        mean, std = mean_std(values)
        return mean, 1.0 / (std + self._eps) if self._normalize and std else 1.0
