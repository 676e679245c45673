"""What is counted during a step, and its metrics."""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass, field

import numpy as np
import torch

from astraflow.algorithms.importance import effective_share
from astraflow.models.scoring.packing import Pack


@dataclass
class Totals:
    """Sums over the trained tokens of an update, kept as tensors: one synchronisation per update."""

    sums: dict[str, torch.Tensor] = field(default_factory=dict)
    largest_log_ratio: torch.Tensor | None = None

    def add(self, name: str, value: torch.Tensor) -> None:
        """One more microbatch."""
        self.sums[name] = self.sums[name] + value if name in self.sums else value


@dataclass
class Done:
    """The updates of a step so far."""

    updates: int = 0
    tokens: int = 0
    sequences: int = 0
    grad_norm: float = 0.0  # sum
    largest_log_ratio: float = -np.inf
    sums: dict[str, float] = field(default_factory=dict)
    critic: list[dict[str, float]] = field(default_factory=list)  # metrics of its updates

    def metrics(self) -> dict[str, float]:
        """Means over tokens, sequences or updates."""
        sums = dict(self.sums)
        ratio, squares = sums.pop("ratio"), sums.pop("ratio_squares")
        whole, whole_squares = sums.pop("sequence_ratio"), sums.pop("sequence_ratio_squares")
        return {
            "updates": float(self.updates),
            "loss": sums.pop("loss") / self.updates,
            "grad_norm": self.grad_norm / self.updates,
            "policy/entropy": sums.pop("entropy") / self.tokens,
            "policy/approx_kl": sums.pop("approx_kl") / self.tokens,
            "policy/ratio_mean": ratio / self.tokens,
            "policy/ratio_max": float(np.exp(self.largest_log_ratio)),
            "policy/ess": effective_share(ratio, squares, self.tokens),
            "policy/ess_sequences": effective_share(whole, whole_squares, self.sequences),
            **{name: value / self.tokens for name, value in sums.items()},
            **{name: sum(m[name] for m in self.critic) / len(self.critic) for m in self.critic[:1] for name in m},
        }


def batch_metrics(packs: list[Pack], version: int) -> dict[str, float]:
    """Sizes of a batch and its staleness: `version` minus the oldest version among a trajectory's sampled tokens."""
    oldest = [np.minimum.reduceat(p.versions, np.unique(p.target_sequence, return_index=True)[1]) for p in packs]
    staleness = version - np.concatenate(oldest) if packs else np.zeros(0)
    tokens, computed = sum(p.num_targets for p in packs), sum(p.num_computed for p in packs)
    seen = sum(int((p.position_ids + 1).sum()) for p in packs)
    # In float64: the squares of large advantages are more than float32 holds.
    advantages = np.concatenate([p.advantages for p in packs], dtype=np.float64) if packs else np.zeros(1)
    fresh = sum(int((p.versions == version).sum()) for p in packs)
    with np.errstate(invalid="ignore"):  # a batch that is not finite is skipped, and its metrics are left out
        mean, deviation = float(advantages.mean()), float(advantages.std())
    return {
        "tokens": float(tokens),
        "input_tokens": float(sum(p.num_tokens for p in packs)),
        "computed_tokens": float(computed),
        "context_tokens/mean": seen / max(1, computed),
        "sequences": float(len(staleness)),
        "microbatches": float(len(packs)),
        "microbatch_tokens/max": float(max((p.num_computed for p in packs), default=0)),
        "advantage/mean": mean,
        "advantage/std": deviation,
        "staleness/mean": float(staleness.mean()) if packs else 0.0,
        "staleness/max": float(staleness.max()) if packs else 0.0,
        "staleness/fresh_tokens": fresh / tokens if tokens else 1.0,
        **_shares(packs, tokens),
    }


def _shares(packs: list[Pack], tokens: int) -> dict[str, float]:
    """Of the trained tokens, by the engine that sampled them."""
    counts = Counter[str]()
    for pack in packs:
        if pack.engines is not None:
            for name, size in zip(pack.engines.tolist(), np.bincount(pack.target_sequence).tolist(), strict=True):
                counts[name] += size
    return {f"engine_share/{name}": counts[name] / tokens for name in sorted(counts) if name}
