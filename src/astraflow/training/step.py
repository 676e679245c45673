"""One step on one batch: packed microbatches accumulate a gradient that does not depend on their cut.

    rows ─► packs ─► for each pack: logprobs ─► losses ─► x coefficients (denominators of the whole update) ─► sum
                                                                              gradients add up ─► clip ─► optimizer

A step is one update of the weights on the whole batch, or several on minibatches of it (`optimize.minibatches`). A loss
or gradient that is not finite skips the update (the weights stay as they are, the step counts); three in a row end the
trainer.
"""

from __future__ import annotations

import contextlib
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field, replace

import numpy as np
import torch
from transformers import PreTrainedModel

from astraflow.algorithms.aggregate import coefficients
from astraflow.algorithms.importance import log_ratios, ratio_sums
from astraflow.algorithms.losses.contract import PolicyLoss, Prepared, TrainedTokens
from astraflow.config.schema import OptimizerSection
from astraflow.errors import TrainingError
from astraflow.models.load import DTYPES
from astraflow.models.scoring.forward import Scores, prepare_model
from astraflow.models.scoring.packing import Pack, TokenRows
from astraflow.training.credit.chains import Chains, with_rewards
from astraflow.training.credit.critic import Critic, Judged
from astraflow.training.feed.session import Interrupted
from astraflow.training.optimize.loss_scale import LossScale
from astraflow.training.optimize.minibatches import PlacedPacks, placed_packs, selections, spread, with_facts
from astraflow.training.optimize.optimizers import build_optimizer, learning_rate
from astraflow.training.optimize.tally import Done, Totals, batch_metrics
from astraflow.training.parallel.division import scored, turns
from astraflow.training.parallel.ranks import ALONE, Ranks
from astraflow.training.parallel.scoring import Scoring, clipped_norm, scoring_of
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
    arithmetic: str = "float32"  # or bfloat16, float16: that of forward and backward passes over float32 weights
    epochs: int = 1  # passes over a batch
    minibatches: int = 1  # updates of a pass
    seed: int = 0  # of the cut into minibatches


@dataclass
class StepCounts:
    """Part of the training state: survives a restart."""

    step: int = 0  # steps done or skipped
    skipped: int = 0  # updates
    skipped_in_a_row: int = 0
    scale: LossScale = field(default_factory=LossScale)  # of float16 arithmetic


@dataclass(frozen=True)
class _Update:
    """What one update of the weights is made from."""

    placed: PlacedPacks
    proximal: list[np.ndarray] | None = None  # [N] of each pack: logprobs before the first update; None: this is it


class Stepper:
    """Owns the optimizer of one model. `counts` and `optimizer` are the state that a checkpoint must hold."""

    def __init__(
        self,
        model: PreTrainedModel,
        loss: PolicyLoss,
        settings: StepSettings,
        should_stop: Callable[[], bool] = lambda: False,
        ranks: Ranks = ALONE,
        score: Scoring | None = None,
    ) -> None:
        """`ranks`: all of them make the same calls; then `score` is that of the model spread over them."""
        self.model, self.loss, self.settings = prepare_model(model), loss, settings
        self._ranks, self._score = ranks, score or scoring_of(model, ranks)
        self._should_stop = should_stop  # asked before each pack, until the weights change
        self._changed = False
        self.optimizer = build_optimizer(model, settings.optimizer)
        self.counts = StepCounts()
        self.penalty: KlPenalty | None = None
        self.critic: Critic | None = None

    def step(
        self, rows: TokenRows, version: int, groups: np.ndarray | None = None, chains: Chains | None = None
    ) -> dict[str, float]:
        """Train on `rows` with weights of `version`; returns metrics by slash name, means over all updates.

        Args: groups: [R] which rows stay in one minibatch, by number; None: each is on its own. chains: what a critic
        judges; its advantages are then rewards of calls.
        Raises: TrainingError: a malformed batch, or the third non-finite gradient in a row. StepInterrupted:
        `should_stop` said so; nothing has changed.
        """
        begin = time.perf_counter()
        if chains is not None:
            rows = with_rewards(rows, chains)
        placed = self._placed(rows, groups)
        packed = time.perf_counter()
        number = self.counts.step + 1
        metrics = {"lr": learning_rate(self.settings.optimizer, number, self.settings.total_steps)}
        if self.critic is not None and self.critic.warming_up(number):
            metrics["lr"] = 0.0
        metrics |= batch_metrics(placed.packs, version)
        self._changed = False
        if placed.packs:
            rows, placed, judged = self._known(rows, placed, chains, metrics)
            done, optimizer_s, critic_s, known = Done(), 0.0, 0.0, time.perf_counter()
            several = self.settings.epochs * self.settings.minibatches > 1
            for update in self._updates(rows, version, groups) if several else [_Update(placed)]:
                totals = self._accumulate(update, version)
                accumulated = time.perf_counter()
                while not self._update(update, totals, metrics["lr"], done):
                    totals = self._accumulate(update, version)
                applied = time.perf_counter()
                optimizer_s += applied - accumulated
                if judged is not None and self.critic is not None:
                    in_a_row = self.critic.skipped_in_a_row
                    done.critic.append(self.critic.update(update.placed, judged, number, self._pass, self._ranks))
                    self.counts.skipped += self.critic.skipped_in_a_row > in_a_row
                    critic_s += time.perf_counter() - applied
            metrics |= done.metrics()
            metrics["perf/optimizer_s"] = optimizer_s
            metrics["perf/forward_backward_s"] = time.perf_counter() - known - optimizer_s - critic_s
            if judged is not None:
                metrics["perf/critic_s"] += critic_s
        self.counts.step = number
        if self._scaled:
            metrics["loss_scale"] = self.counts.scale.value
        metrics["skipped_steps"] = float(self.counts.skipped)
        metrics["perf/pack_s"] = packed - begin
        metrics["perf/step_s"] = time.perf_counter() - begin
        metrics["perf/tokens_per_s"] = metrics["input_tokens"] / metrics["perf/step_s"]
        return metrics

    def _known(
        self, rows: TokenRows, placed: PlacedPacks, chains: Chains | None, metrics: dict[str, float]
    ) -> tuple[TokenRows, PlacedPacks, Judged | None]:
        """The batch with what is known of it before the first update: reference logprobs, advantages, values."""
        begin, judged = time.perf_counter(), None
        if self.penalty is not None:
            packs = self.penalty.prepare(placed.packs, lambda score: self.scored(placed, score))
            placed, rows = placed._replace(packs=packs), with_facts(rows, placed, packs)
            metrics["perf/reference_s"] = time.perf_counter() - begin
        if self.critic is not None and chains is not None:
            begin = time.perf_counter()
            rows, judged, said = self.critic.judge(rows, chains, placed, lambda score: self.scored(placed, score))
            placed = placed._replace(packs=[
                replace(pack, advantages=rows.advantages[places])
                for pack, places in zip(placed.packs, placed.places, strict=True)
            ])  # fmt: skip
            metrics |= said | {"perf/critic_s": time.perf_counter() - begin}
        return rows, placed, judged

    def _updates(self, rows: TokenRows, version: int, groups: np.ndarray | None) -> Iterator[_Update]:
        """The minibatches of a batch; asked for the next one after the update on the one before."""
        settings, flat = self.settings, None
        if self.loss.needs_proximal:
            whole = self._placed(rows, groups)
            flat = spread(whole, self.scored(whole, self._logprobs), len(rows.versions))
        groups = np.arange(len(rows.weights)) if groups is None else groups
        seed = (settings.seed, self.counts.step)
        for selected in selections(rows, groups, settings.epochs, settings.minibatches, seed):
            part = self._placed(rows, groups, selected)
            proximal = None if flat is None else [flat[places] for places in part.places]
            yield _Update(part, proximal)

    def _placed(self, rows: TokenRows, groups: np.ndarray | None, select: np.ndarray | None = None) -> PlacedPacks:
        budget = self.settings.tokens_per_microbatch
        return placed_packs(rows, budget, select, groups=groups, num_teams=self._ranks.num_teams)

    @torch.no_grad()
    def scored(self, placed: PlacedPacks, score: Callable[[Pack], torch.Tensor]) -> list[np.ndarray]:
        """What `score` gives for the targets of each pack: [N] float32. Raises: StepInterrupted."""

        def under_pass(pack: Pack) -> torch.Tensor:
            with self._pass():
                return score(pack)

        return scored(placed.owners, placed.packs, under_pass, self._ranks)

    def _accumulate(self, update: _Update, version: int) -> Totals:
        packs = update.placed.packs
        num_tokens, num_sequences = sum(p.num_targets for p in packs), sum(len(p.rows) for p in packs)
        prepared = self._prepare(update, version) if self.loss.needs_batch and len(packs) > 1 else None
        totals = Totals()
        for i, counts in turns(update.placed.owners, packs, self._ranks):
            pack = packs[i]
            logprobs, entropies, log_norms = self._scores(pack)
            tokens = trained_tokens([pack], logprobs, version, update.proximal and update.proximal[i : i + 1])
            losses, sums = self.loss(tokens, prepared)
            weights = torch.from_numpy(pack.weights).to(logprobs.device)
            sizes = tokens.lengths[tokens.sequences]
            factors = coefficients(self.loss.aggregation, weights, sizes, num_tokens, num_sequences)
            factors = factors if counts else torch.zeros_like(factors)
            if self.settings.entropy:
                losses = losses - self.settings.entropy * entropies
            if self.settings.z_loss:
                losses = losses + self.settings.z_loss * log_norms.square()
                sums = sums | {"policy/log_norm": log_norms.detach().sum()}
            if self.penalty is not None:
                added, of_penalty = self.penalty(logprobs, pack)
                losses, sums = losses + added, sums | of_penalty
            loss = (factors * losses).sum()
            (loss * self.counts.scale.value if self._scaled else loss).backward()  # type: ignore[no-untyped-call]
            with torch.no_grad():
                log_ratio = log_ratios(logprobs, tokens.behavior_logprobs)
                ratios = ratio_sums(log_ratio, tokens.sequences, len(tokens.lengths))
                facts = sums | ratios | {"loss": loss.detach(), "entropy": entropies.detach().sum()}
                told = counts and self._ranks.speaks
                for name, value in facts.items():
                    totals.add(name, value if told else torch.zeros_like(value))
                largest = log_ratio.amax()
                before = totals.largest_log_ratio
                totals.largest_log_ratio = largest if before is None else torch.maximum(before, largest)
        return totals

    @torch.no_grad()
    def _prepare(self, update: _Update, version: int) -> Prepared:
        packs = update.placed.packs
        if self._ranks.many:
            parts = scored(update.placed.owners, packs, self._logprobs, self._ranks)
            logprobs = torch.from_numpy(np.concatenate(parts)).to(self.model.device)
        else:
            logprobs = torch.cat([self._logprobs(pack) for pack in packs])
        return self.loss.prepare(trained_tokens(packs, logprobs, version, update.proximal))

    def _logprobs(self, pack: Pack) -> torch.Tensor:
        return self._scores(pack).logprobs

    def _scores(self, pack: Pack) -> Scores:
        with self._pass():
            return self._score(pack, self.settings.temperature)

    def _pass(self) -> contextlib.AbstractContextManager[object]:
        """What a forward pass runs under. Raises: StepInterrupted."""
        if not self._changed and self._ranks.any(self._should_stop()):
            self.optimizer.zero_grad(set_to_none=True)
            raise StepInterrupted
        device = self.model.device.type
        dtype = DTYPES[self.settings.arithmetic]
        return contextlib.nullcontext() if dtype == torch.float32 else torch.autocast(device, dtype)

    @property
    def _scaled(self) -> bool:
        return self.settings.arithmetic == "float16"

    def _update(self, update: _Update, totals: Totals, lr: float, done: Done) -> bool:
        """Step, or skip it. False: float16 had no room for the gradient; it is to be computed again, scaled less."""
        if self._scaled:
            self.counts.scale.undo(self.model)
        norm = clipped_norm(self.model, self.settings.optimizer.grad_clip, self._ranks)
        assert totals.largest_log_ratio is not None
        names, biggest = list(totals.sums), self._ranks.max(totals.largest_log_ratio)
        added_up = self._ranks.sum(torch.stack([totals.sums[name].float() for name in names]).double())
        values = torch.cat([torch.stack([norm, biggest]).double(), added_up])
        grad_norm, largest, *sums = values.tolist()  # the only synchronisation of the update
        by_name = dict(zip(names, sums, strict=True))
        if np.isfinite(by_name["loss"]) and np.isfinite(grad_norm):
            for group in self.optimizer.param_groups:
                group["lr"] = lr
            self.optimizer.step()
            self.counts.skipped_in_a_row = 0
            if self._scaled:
                self.counts.scale.held()
        elif self._scaled and np.isfinite(by_name["loss"]) and self.counts.scale.lowered():
            self.optimizer.zero_grad(set_to_none=True)
            return False
        else:
            self._skip(by_name["loss"], grad_norm)
        self._changed = True  # or skipped, which counts once
        self.optimizer.zero_grad(set_to_none=True)
        done.updates += 1
        done.tokens += sum(p.num_targets for p in update.placed.packs)
        done.sequences += sum(len(p.rows) for p in update.placed.packs)
        done.grad_norm += grad_norm
        done.largest_log_ratio = max(done.largest_log_ratio, largest)
        done.sums = {name: done.sums.get(name, 0.0) + value for name, value in by_name.items()}
        return True

    def _skip(self, loss: float, grad_norm: float) -> None:
        self.counts.skipped += 1
        self.counts.skipped_in_a_row += 1
        if self.counts.skipped_in_a_row >= MAX_SKIPPED_IN_A_ROW:
            self.optimizer.zero_grad(set_to_none=True)
            raise TrainingError(
                "loss", loss, f"or its gradient ({grad_norm}) was not finite in {MAX_SKIPPED_IN_A_ROW} steps in a row",
                "lower optimizer.lr or optimizer.grad_clip, and look at policy/ratio_max, logprob_gap/p99 and the "
                "batches in skipped_batches/ of the run directory",
            )  # fmt: skip


def trained_tokens(
    packs: list[Pack], logprobs: torch.Tensor, version: int, proximal: list[np.ndarray] | None = None
) -> TrainedTokens:
    """What a loss sees of `packs`, whose targets have `logprobs` under the weights as they are, of `version`.

    Args: proximal: [N] of each pack, logprobs before the first update on the batch; None: `logprobs` are those.
    """

    def column(parts: list[np.ndarray]) -> torch.Tensor:
        return torch.from_numpy(np.concatenate(parts)).to(logprobs.device)

    tokens = TrainedTokens.of(
        logprobs,
        column([p.behavior_logprobs for p in packs]),
        column([p.advantages for p in packs]),
        column([np.bincount(p.target_sequence) for p in packs]),
        column([(version - p.versions).astype(np.float32) for p in packs]),
    )
    if (found := [p.engines for p in packs if p.engines is not None]) and len(found) == len(packs):
        tokens = replace(tokens, engines=np.concatenate(found))
    return tokens if proximal is None else replace(tokens, proximal_logprobs=column(proximal))
