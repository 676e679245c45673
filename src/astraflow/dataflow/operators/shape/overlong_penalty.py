"""An operator that makes answers near the length limit worth less."""

from __future__ import annotations

from astraflow.contracts import Operator
from astraflow.dataflow.operators.scored import require
from astraflow.types import Group


class OverlongPenalty(Operator):
    """Adds a penalty that grows over the last `buffer_tokens` before `max_tokens`, with n the episode's sampled tokens:

    `factor * 0` for `n <= max - buffer`, `factor * ((max - buffer) - n) / buffer` up to `n = max`, then `-factor`.
    Source: soft overlong punishment of DAPO, arXiv:2503.14476 equation 13.
    """

    phase = "shape"

    def __init__(self, *, max_tokens: int, buffer_tokens: int, factor: float = 1.0) -> None:
        require(max_tokens >= 1, "overlong_penalty.max_tokens", max_tokens, "must be >= 1", "use sampling.max_tokens")
        require(
            1 <= buffer_tokens <= max_tokens, "overlong_penalty.buffer_tokens", buffer_tokens,
            f"must be 1 to max_tokens ({max_tokens})", "use a fifth of max_tokens",
        )  # fmt: skip
        require(factor > 0, "overlong_penalty.factor", factor, "must be > 0", "use 1")
        self._free, self._buffer, self._factor = max_tokens - buffer_tokens, buffer_tokens, factor

    def on_group(self, group: Group) -> Group | str:
        group.rewards = [
            r if r is None else r - self._factor * min(max(n - self._free, 0) / self._buffer, 1.0)
            for r, n in zip(group.rewards, group.num_tokens, strict=True)
        ]
        return group
