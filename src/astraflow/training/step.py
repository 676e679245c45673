"""One optimizer step over one batch: packed microbatches accumulate a gradient that does not depend on their cut.

    rows ─► packs ─► for each pack: logprobs ─► losses ─► x coefficients (denominators of the whole batch) ─► sum
                                                                             gradients add up ─► clip ─► AdamW

A loss or gradient that is not finite skips the update (the weights stay as they are, the step counts); three in a row
end the trainer.
"""

from __future__ import annotations

import contextlib
import math
import time
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import torch
from torch import nn
from transformers import PreTrainedModel

from astraflow.algorithms.aggregate import coefficients
from astraflow.algorithms.importance import effective_share, log_ratios, ratio_sums
from astraflow.algorithms.losses.contract import PolicyLoss, Prepared, TrainedTokens
from astraflow.config.schema import OptimizerSection
from astraflow.errors import TrainingError
from astraflow.models.scoring.forward import Scores, packed_logprobs, prepare_model
from astraflow.models.scoring.packing import Pack, TokenRows, pack_rows
from astraflow.training.feed.session import Interrupted
from astraflow.training.reference import KlPenalty

MAX_SKIPPED_IN_A_ROW = 3


class StepInterrupted(Interrupted):
    """The trainer was told to end in the middle of a step."""


@dataclass(frozen=True)
class StepSettings:
    """What a step needs beside the model and the loss."""

    optimizer: OptimizerSection
    total_steps: int
    tokens_per_microbatch: int
    temperature: float = 1.0  # of the behaviour
    entropy: float = 0.0  # coefficient of the entropy bonus
    z_loss: float = 0.0  # coefficient of (log Z)^2, Z the sum of exp(logits / T); PaLM, arXiv:2204.02311 section 5
    autocast: bool = False  # bfloat16 arithmetic over float32 weights


@dataclass
class StepCounts:
    """Part of the training state: survives a restart."""

    step: int = 0  # optimizer steps done or skipped
    skipped: int = 0
    skipped_in_a_row: int = 0


@dataclass
class _Totals:
    """Sums over the trained tokens of a batch, kept as tensors: one synchronisation per step."""

    sums: dict[str, torch.Tensor] = field(default_factory=dict)
    largest_log_ratio: torch.Tensor | None = None

    def add(self, name: str, value: torch.Tensor) -> None:
        self.sums[name] = self.sums[name] + value if name in self.sums else value


class Stepper:
    """Owns the optimizer of one model. `counts` and `optimizer` are the state that a checkpoint must hold."""

    def __init__(
        self,
        model: PreTrainedModel,
        loss: PolicyLoss,
        settings: StepSettings,
        should_stop: Callable[[], bool] = lambda: False,
    ) -> None:
        self.model, self.loss, self.settings = prepare_model(model), loss, settings
        self._should_stop = should_stop  # asked before each pack
        self.optimizer = build_optimizer(model, settings.optimizer)
        self.counts = StepCounts()
        self.penalty: KlPenalty | None = None

    def step(self, rows: TokenRows, version: int) -> dict[str, float]:
        """Train on `rows` with weights of `version`; returns metrics by slash name.

        Raises: TrainingError: a malformed batch, or the third non-finite gradient in a row. StepInterrupted:
        `should_stop` said so; nothing has changed.
        """
        begin = time.perf_counter()
        packs = pack_rows(rows, self.settings.tokens_per_microbatch)
        packed = time.perf_counter()
        number = self.counts.step + 1
        metrics = {"lr": learning_rate(self.settings.optimizer, number, self.settings.total_steps)}
        metrics |= batch_metrics(packs, version)
        if packs and self.penalty is not None:
            packs = self.penalty.prepare(packs, self._pass)
            metrics["perf/reference_s"] = time.perf_counter() - packed
        if packs:
            totals = self._accumulate(packs, metrics, version)
            trained = time.perf_counter()
            metrics |= self._update(totals, metrics)
            metrics["perf/forward_backward_s"] = trained - packed - metrics.get("perf/reference_s", 0.0)
            metrics["perf/optimizer_s"] = time.perf_counter() - trained
        self.counts.step = number
        metrics["skipped_steps"] = float(self.counts.skipped)
        metrics["perf/pack_s"] = packed - begin
        metrics["perf/step_s"] = time.perf_counter() - begin
        metrics["perf/tokens_per_s"] = metrics["input_tokens"] / metrics["perf/step_s"]
        return metrics

    def _accumulate(self, packs: list[Pack], sizes_of_batch: dict[str, float], version: int) -> _Totals:
        num_tokens, num_sequences = int(sizes_of_batch["tokens"]), int(sizes_of_batch["sequences"])
        prepared = self._prepare(packs, version) if self.loss.needs_batch and len(packs) > 1 else None
        totals = _Totals()
        for pack in packs:
            logprobs, entropies, log_norms = self._scores(pack)
            tokens = trained_tokens([pack], logprobs, version)
            losses, sums = self.loss(tokens, prepared)
            weights = torch.from_numpy(pack.weights).to(logprobs.device)
            sizes = tokens.lengths[tokens.sequences]
            factors = coefficients(self.loss.aggregation, weights, sizes, num_tokens, num_sequences)
            if self.settings.entropy:
                losses = losses - self.settings.entropy * entropies
            if self.settings.z_loss:
                losses = losses + self.settings.z_loss * log_norms.square()
                sums = sums | {"policy/log_norm": log_norms.detach().sum()}
            if self.penalty is not None:
                added, of_penalty = self.penalty(logprobs, pack)
                losses, sums = losses + added, sums | of_penalty
            loss = (factors * losses).sum()
            loss.backward()  # type: ignore[no-untyped-call]
            with torch.no_grad():
                log_ratio = log_ratios(logprobs, tokens.behavior_logprobs)
                ratios = ratio_sums(log_ratio, tokens.sequences, len(tokens.lengths))
                for name, value in (sums | ratios).items():
                    totals.add(name, value)
                totals.add("loss", loss.detach())
                totals.add("entropy", entropies.detach().sum())
                largest = log_ratio.amax()
                before = totals.largest_log_ratio
                totals.largest_log_ratio = largest if before is None else torch.maximum(before, largest)
        return totals

    @torch.no_grad()
    def _prepare(self, packs: list[Pack], version: int) -> Prepared:
        logprobs = torch.cat([self._scores(pack).logprobs for pack in packs])
        return self.loss.prepare(trained_tokens(packs, logprobs, version))

    def _scores(self, pack: Pack) -> Scores:
        with self._pass():
            return packed_logprobs(self.model, pack, self.settings.temperature)

    def _pass(self) -> contextlib.AbstractContextManager[object]:
        """What a forward pass runs under. Raises: StepInterrupted."""
        if self._should_stop():
            self.optimizer.zero_grad(set_to_none=True)
            raise StepInterrupted
        device = self.model.device.type
        return torch.autocast(device, torch.bfloat16) if self.settings.autocast else contextlib.nullcontext()

    def _update(self, totals: _Totals, batch: dict[str, float]) -> dict[str, float]:
        num_tokens = batch["tokens"]
        norm = torch.nn.utils.clip_grad_norm_(self.model.parameters(), self.settings.optimizer.grad_clip)
        assert totals.largest_log_ratio is not None
        names = list(totals.sums)
        values = torch.stack([norm.float(), totals.largest_log_ratio, *(totals.sums[n].float() for n in names)])
        grad_norm, largest, *sums = values.double().tolist()  # the only synchronisation of the step
        by_name = dict(zip(names, sums, strict=True))
        loss = by_name.pop("loss")
        if np.isfinite(loss) and np.isfinite(grad_norm):
            for group in self.optimizer.param_groups:
                group["lr"] = batch["lr"]
            self.optimizer.step()
            self.counts.skipped_in_a_row = 0
        else:
            self._skip(loss, grad_norm)
        self.optimizer.zero_grad(set_to_none=True)
        ratio, squares = by_name.pop("ratio"), by_name.pop("ratio_squares")
        whole, whole_squares = by_name.pop("sequence_ratio"), by_name.pop("sequence_ratio_squares")
        return {
            "loss": loss,
            "grad_norm": grad_norm,
            "policy/entropy": by_name.pop("entropy") / num_tokens,
            "policy/approx_kl": by_name.pop("approx_kl") / num_tokens,
            "policy/ratio_mean": ratio / num_tokens,
            "policy/ratio_max": float(np.exp(largest)),
            "policy/ess": effective_share(ratio, squares, num_tokens),
            "policy/ess_sequences": effective_share(whole, whole_squares, batch["sequences"]),
            **{name: value / num_tokens for name, value in by_name.items()},
        }

    def _skip(self, loss: float, grad_norm: float) -> None:
        self.counts.skipped += 1
        self.counts.skipped_in_a_row += 1
        if self.counts.skipped_in_a_row >= MAX_SKIPPED_IN_A_ROW:
            self.optimizer.zero_grad(set_to_none=True)
            raise TrainingError(
                "loss", loss, f"or its gradient ({grad_norm}) was not finite in {MAX_SKIPPED_IN_A_ROW} steps in a row",
                "lower optimizer.lr or optimizer.grad_clip, and look at policy/ratio_max and logprob_gap/p99",
            )  # fmt: skip


def trained_tokens(packs: list[Pack], logprobs: torch.Tensor, version: int) -> TrainedTokens:
    """What a loss sees of `packs`, whose targets have `logprobs` under the weights as they are, of `version`."""

    def column(parts: list[np.ndarray]) -> torch.Tensor:
        return torch.from_numpy(np.concatenate(parts)).to(logprobs.device)

    return TrainedTokens.of(
        logprobs,
        column([p.behavior_logprobs for p in packs]),
        column([p.advantages for p in packs]),
        column([np.bincount(p.target_sequence) for p in packs]),
        column([(version - p.versions).astype(np.float32) for p in packs]),
    )


def batch_metrics(packs: list[Pack], version: int) -> dict[str, float]:
    """Sizes of a batch and its staleness: `version` minus the oldest version among a trajectory's sampled tokens."""
    oldest = [np.minimum.reduceat(p.versions, np.unique(p.target_sequence, return_index=True)[1]) for p in packs]
    staleness = version - np.concatenate(oldest) if packs else np.zeros(0)
    tokens = sum(p.num_targets for p in packs)
    fresh = sum(int((p.versions == version).sum()) for p in packs)
    return {
        "tokens": float(tokens),
        "input_tokens": float(sum(p.num_tokens for p in packs)),
        "sequences": float(len(staleness)),
        "microbatches": float(len(packs)),
        "staleness/mean": float(staleness.mean()) if packs else 0.0,
        "staleness/max": float(staleness.max()) if packs else 0.0,
        "staleness/fresh_tokens": fresh / tokens if tokens else 1.0,
    }


def learning_rate(section: OptimizerSection, step: int, total_steps: int) -> float:
    """Learning rate of step `step` (from 1 to `total_steps`): linear warm-up, then the schedule down to 0 (or flat)."""
    if step <= section.warmup_steps:
        return section.lr * step / (section.warmup_steps + 1)
    done = min(1.0, (step - 1 - section.warmup_steps) / max(1, total_steps - section.warmup_steps))
    match section.schedule:
        case "constant":
            return section.lr
        case "linear":
            return section.lr * (1 - done)
        case "cosine":
            return section.lr * 0.5 * (1 + math.cos(math.pi * done))


def build_optimizer(model: nn.Module, section: OptimizerSection) -> torch.optim.AdamW:
    """AdamW over all parameters; matrices decay, vectors (norms, biases) do not."""
    matrices = [p for p in model.parameters() if p.requires_grad and p.ndim >= 2]
    vectors = [p for p in model.parameters() if p.requires_grad and p.ndim < 2]
    groups: list[dict[str, Any]] = [{"params": matrices}, {"params": vectors, "weight_decay": 0.0}]
    return torch.optim.AdamW(
        [group for group in groups if group["params"]],
        lr=section.lr,
        betas=section.betas,
        eps=section.eps,
        weight_decay=section.weight_decay,
        fused=True,
    )
