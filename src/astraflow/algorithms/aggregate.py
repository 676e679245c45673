"""From losses per token to one number, independent of how the batch was cut into microbatches.

Each way gives a coefficient per token; the loss of a step is the sum over its microbatches of
`(coefficient * token_loss).sum()`. The denominators are those of the whole batch and are passed in.
"""

from __future__ import annotations

from typing import Literal

import torch

Aggregation = Literal["token", "sequence"] | float
"""Mean over tokens, mean over sequences of their means, or (a number) mean over sequences of their sums / number."""


def coefficients(
    aggregation: Aggregation, weights: torch.Tensor, tokens_of_sequence: torch.Tensor, num_tokens: int,
    num_sequences: int,
) -> torch.Tensor:  # fmt: skip
    """The coefficients [N] of a loss that asks for `aggregation`. Args: weights, tokens_of_sequence: [N]."""
    if aggregation == "token":
        return token_coefficients(weights, num_tokens)
    if aggregation == "sequence":
        return sequence_coefficients(weights, tokens_of_sequence, num_sequences)
    return constant_coefficients(weights, float(aggregation), num_sequences)


def token_coefficients(weights: torch.Tensor, num_tokens: int) -> torch.Tensor:
    """Every trained token of the batch counts the same: w / `num_tokens`. [N] -> [N]

    Why: with a mean per sequence, tokens of long sequences would count less (DAPO, arXiv:2503.14476 section 3.3).
    """
    return weights / num_tokens


def sequence_coefficients(weights: torch.Tensor, tokens_of_sequence: torch.Tensor, num_sequences: int) -> torch.Tensor:
    """Every trained sequence of the batch counts the same: w / (its trained tokens * `num_sequences`). [N] -> [N]

    Args: tokens_of_sequence: [N] trained tokens of the sequence that each token belongs to.
    Source: GRPO, arXiv:2402.03300 equation 3.
    """
    return weights / (tokens_of_sequence * num_sequences)


def constant_coefficients(weights: torch.Tensor, constant: float, num_sequences: int) -> torch.Tensor:
    """Sums of sequences over a constant: w / (`constant` * `num_sequences`). [N] -> [N]

    Why: neither the length of a sequence nor that of its batch changes what one of its tokens counts.
    Source: Dr. GRPO, arXiv:2503.20783 section 3.2 and appendix A.
    """
    return weights / (constant * num_sequences)
