"""How far the policy is from a reference, estimated from the sampled tokens alone.

With x ~ pi and r = ref(x) / pi(x), three estimators of KL(pi || ref):

| name | per token       | value                                    | as a loss, its mean gradient where x ~ pi    |
|------|-----------------|------------------------------------------|----------------------------------------------|
| k1   | -log r          | unbiased, of either sign, much variance  | 0: that of log pi, whatever the reference is |
| k2   | (log r)^2 / 2   | biased, >= 0, little variance            | that of KL(pi || ref)                        |
| k3   | (r - 1) - log r | unbiased, >= 0, little variance near ref | that of KL(ref || pi)                        |

Source: Schulman, "Approximating KL divergence" (2020), http://joschu.net/blog/kl-approx.html.
"""

from __future__ import annotations

from collections.abc import Callable

import numpy as np
import torch

from astraflow.algorithms.importance import log_ratios

ESTIMATORS: dict[str, Callable[[torch.Tensor], torch.Tensor]] = {
    "k1": lambda log_ratio: log_ratio,
    "k2": lambda log_ratio: log_ratio.square() / 2,
    "k3": lambda log_ratio: torch.expm1(-log_ratio) + log_ratio,
}
"""Name -> the estimate per token [N] from log(pi / ref) [N]."""


def kl_estimates(policy_logprobs: torch.Tensor, ref_logprobs: torch.Tensor, estimator: str) -> torch.Tensor:
    """KL(pi || ref) per sampled token [N], differentiable; log ratios are bounded as those of losses are."""
    return ESTIMATORS[estimator](log_ratios(policy_logprobs, ref_logprobs))


def kl_to_go(estimates: np.ndarray, sequences: np.ndarray) -> np.ndarray:
    """What a token's choice leads to: the sum of the estimates from it to the end of its sequence. [N] -> [N] float64

    It is the return of a reward of minus the KL at each token, undiscounted, as advantages need it.
    Args: sequences: [N] the sequence of each token; its tokens lie together, in order.
    Source: REINFORCE++, arXiv:2501.03262.
    """
    if not len(estimates):
        return np.zeros(0)
    total = np.cumsum(estimates, dtype=np.float64)
    ends = np.flatnonzero(np.append(np.diff(sequences) != 0, True))
    lengths = np.diff(np.append(-1, ends))
    to_go: np.ndarray = np.repeat(total[ends], lengths) - total + estimates
    return to_go
