"""The engine-trainer logprob gap, measured at every step under exactly the weights that sampled each token.

A rising gap means that engine and trainer do not compute the same policy (dtype, temperature, template, stale cache):
training then goes on wrong ratios without any other sign. A few trajectories of each batch are scored again with the
published tensors of every version their tokens carry, whole context included, as the engine did after its swap.
"""

from __future__ import annotations

from collections.abc import Mapping

import numpy as np
import torch

from astraflow.models.scoring.packing import TokenRows, pack_rows
from astraflow.training.parallel.scoring import Scoring

Tensors = Mapping[str, torch.Tensor]


class Auditor:
    """Keeps the newest `keep` published versions and scores `num_rows` rows of each batch under them."""

    def __init__(self, num_rows: int, keep: int, temperature: float, max_gap: float, seed: int) -> None:
        self._num_rows, self._keep = num_rows, keep
        self._temperature, self._max_gap, self._seed = temperature, max_gap, seed
        self.versions: dict[int, Tensors] = {}

    def remember(self, version: int, tensors: Tensors) -> None:
        """Keep `tensors` (immutable, as published) as `version`; the oldest beyond `keep` go."""
        if not self._num_rows:
            return
        self.versions[version] = tensors
        for old in sorted(self.versions)[: -self._keep]:
            del self.versions[old]

    @torch.no_grad()
    def audit(self, score: Scoring, rows: TokenRows, step: int, tokens_per_microbatch: int) -> dict[str, float]:
        """Percentiles of abs(behavior - trainer logprob) over the sampled tokens of a few rows; {} when there are none.

        `logprob_gap/unknown_tokens` counts tokens of versions that are no longer held; they are left out. The same
        percentiles by the engine that sampled are `logprob_gap/<engine>/...`.
        """
        chosen = self._choose(rows, step)
        gaps, engines, unknown = [], [], 0
        for version in np.unique(np.concatenate([_versions(rows, row) for row in chosen])) if len(chosen) else []:
            members = np.array([row for row in chosen if version in _versions(rows, row)])
            tensors = self.versions.get(int(version))
            for pack in pack_rows(rows, tokens_per_microbatch, members):
                mine = pack.versions == version
                if tensors is None:
                    unknown += int(mine.sum())
                    continue
                logprobs = score(pack, self._temperature, tensors).logprobs
                gaps.append(np.abs(logprobs.cpu().numpy()[mine] - pack.behavior_logprobs[mine]))
                if pack.engines is not None:
                    engines.append(pack.engines[pack.target_sequence[mine]])
        metrics = {"logprob_gap/unknown_tokens": float(unknown)} if len(chosen) else {}
        if gaps:
            gap = np.concatenate(gaps).astype(np.float64)
            metrics |= _percentiles("logprob_gap", gap)
            of_token = np.concatenate(engines) if engines else np.empty(0, np.str_)
            for engine in filter(None, np.unique(of_token).tolist()):
                metrics |= _percentiles(f"logprob_gap/{engine}", gap[of_token == engine])
            worst = [value for name, value in metrics.items() if name.endswith("/p99")]
            metrics["logprob_gap/alarm"] = float(not all(value <= self._max_gap for value in worst))  # NaN alarms too
        return metrics

    def _choose(self, rows: TokenRows, step: int) -> np.ndarray:
        """Row numbers, drawn by (seed, step), one of each engine at least; rows sampled under several versions are
        preferred for half of them."""
        trained = np.flatnonzero(rows.trained)
        row_of = np.searchsorted(rows.starts, trained, side="right") - 1
        candidates, first = np.unique(row_of, return_index=True)
        candidates_weight = rows.weights[candidates] > 0
        if not self._num_rows or not candidates_weight.any():
            return np.empty(0, dtype=np.int64)
        versions = rows.versions[trained]
        mixed = np.minimum.reduceat(versions, first) != np.maximum.reduceat(versions, first)
        draw = np.random.default_rng((self._seed, step))
        shuffled = draw.permutation(np.flatnonzero(candidates_weight))
        preferred = shuffled[mixed[shuffled]][: self._num_rows // 2]
        order = np.concatenate([preferred, shuffled[~np.isin(shuffled, preferred)]])
        if rows.engines is not None:  # one of each engine first, in turn where there are more of them than rows
            _, one = np.unique(rows.engines[candidates[order]], return_index=True)
            order = np.concatenate([order[np.roll(one, -step)], np.delete(order, one)])
        return np.sort(candidates[order[: self._num_rows]])


def _percentiles(name: str, gap: np.ndarray) -> dict[str, float]:
    p50, p99 = np.percentile(gap, [50, 99])
    said = {"p50": p50, "p99": p99, "max": gap.max(), "tokens": len(gap)}
    return {f"{name}/{key}": float(value) for key, value in said.items()}


def _versions(rows: TokenRows, row: int) -> np.ndarray:
    """Distinct versions of the sampled tokens of a row."""
    own = slice(rows.starts[row], rows.starts[row + 1])
    return np.unique(rows.versions[own][rows.trained[own]])
