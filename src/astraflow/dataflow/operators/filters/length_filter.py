"""An operator that leaves out episodes that are too short, too long or cut."""

from __future__ import annotations

from astraflow.contracts import Operator
from astraflow.dataflow.operators.scored import leave_out, require
from astraflow.types import Group


class LengthFilter(Operator):
    """Leaves episodes out of the group (unscored) by their sampled tokens, over all branches of this policy.

    Args: min_tokens, max_tokens: bounds that are kept themselves; max_tokens 0: none.
    truncated: also leave out episodes with a branch that a length limit cut (DAPO's overlong filtering,
        arXiv:2503.14476 section 3.4).
    min_episodes: with fewer scored episodes left, the group is dropped as "length_filter".
    """

    def __init__(
        self, *, min_tokens: int = 1, max_tokens: int = 0, truncated: bool = False, min_episodes: int = 2
    ) -> None:
        require(min_tokens >= 0, "length_filter.min_tokens", min_tokens, "must be >= 0", "use 0 for no bound")
        require(
            max_tokens == 0 or max_tokens >= min_tokens, "length_filter.max_tokens", max_tokens,
            f"must be >= min_tokens ({min_tokens})", "use 0 for no bound",
        )  # fmt: skip
        require(min_episodes >= 1, "length_filter.min_episodes", min_episodes, "must be >= 1", "use 2")
        self._min, self._max, self._truncated, self._left = min_tokens, max_tokens, truncated, min_episodes

    def on_group(self, group: Group) -> Group | str:
        unwanted = [
            k
            for k, (tokens, cut) in enumerate(zip(group.num_tokens, group.num_truncated, strict=True))
            if tokens < self._min or 0 < self._max < tokens or (self._truncated and cut)
        ]
        return leave_out(group, unwanted, "length_filter", self._left)
