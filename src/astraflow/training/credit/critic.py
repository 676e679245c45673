"""A critic: a decoder that says for each sampled token what reward its episode will still get, learnt beside a policy.

rewards of tokens ─┐
values before ─────┴► GAE ─► advantages of the policy's updates, targets of the critic's ─► minibatch: one update each
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from contextlib import AbstractContextManager
from dataclasses import dataclass, replace
from pathlib import Path

import numpy as np
import torch
from torch import nn
from transformers import PreTrainedModel

from astraflow.algorithms.gae import gae, value_losses
from astraflow.config.schema import CriticSection, OptimizerSection
from astraflow.errors import TrainingError
from astraflow.models.load import load_model
from astraflow.models.scoring.forward import target_states
from astraflow.models.scoring.guard import prepared_as_itself
from astraflow.models.scoring.packing import Pack, TokenRows
from astraflow.training.checkpoint import load_optimizer_tensors, optimizer_tensors
from astraflow.training.credit.chains import Chains
from astraflow.training.optimize.minibatches import PlacedPacks, spread
from astraflow.training.optimize.optimizers import build_optimizer, learning_rate
from astraflow.training.parallel.ranks import Ranks

MAX_SKIPPED_IN_A_ROW = 3

Under = Callable[[], AbstractContextManager[object]]
ScoreAll = Callable[[Callable[[Pack], torch.Tensor]], list[np.ndarray]]


class ValueModel(nn.Module):
    """A decoder with one number per position in the place of logits. Starts by saying 0 everywhere."""

    def __init__(self, decoder: PreTrainedModel) -> None:
        super().__init__()
        self.decoder, self.head = decoder, nn.Linear(decoder.config.get_text_config().hidden_size, 1)
        nn.init.zeros_(self.head.weight)
        nn.init.zeros_(self.head.bias)

    def forward(self, pack: Pack) -> torch.Tensor:
        """[N] float32: the value of what stands before each trained token of `pack`."""
        states = target_states(self.decoder, pack)
        with torch.autocast(states.device.type, enabled=False):  # a value rounded to bfloat16 is off by 0.4 %
            values: torch.Tensor = self.head(states.float())[:, 0]
        return values


@dataclass(frozen=True)
class Judged:
    """What the critic said of a batch before the first update. Flat columns [T] of its rows, NaN where not trained."""

    before: np.ndarray
    targets: np.ndarray


class Critic:
    """The critic of one policy and its optimizer."""

    def __init__(self, section: CriticSection, optimizer: OptimizerSection, total_steps: int, directory: Path) -> None:
        """`directory`: the model that it starts from. `optimizer`: of the policy; the critic has its own `lr`.

        Raises: ModelError: it cannot be loaded or trained.
        """
        self._section, self._total_steps = section, total_steps
        self._optimizing = optimizer.model_copy(update={"lr": section.lr})
        decoder = prepared_as_itself(load_model(directory), "critic.model").base_model
        assert isinstance(decoder, PreTrainedModel)
        self.model = ValueModel(decoder)
        self.optimizer = build_optimizer(self.model, self._optimizing)
        self.skipped_in_a_row = 0

    def warming_up(self, step: int) -> bool:
        """In `step` (from 1) the critic learns alone."""
        return step <= self._section.warmup_steps

    def judge(
        self, rows: TokenRows, chains: Chains, placed: PlacedPacks, scored: ScoreAll
    ) -> tuple[TokenRows, Judged, dict[str, float]]:
        """Rows with advantages by GAE, what the critic learns from, and metrics by slash name.

        Args: rows: their advantages are the rewards of tokens. placed: all of them. scored: what a way to score a pack
        gives for all of them.
        """
        section = self._section
        before = spread(placed, scored(self.model), len(rows.advantages))
        rewards, said = rows.advantages[chains.places], before[chains.places]
        credit = gae(rewards, said, chains.last, section.gamma, section.lam)
        of_targets = credit
        if section.target_lam is not None:
            of_targets = gae(rewards, said, chains.last, section.gamma, section.target_lam)
        targets = said + of_targets
        metrics = {
            "critic/value": float(said.mean()),
            "critic/return": float(targets.mean()),
            "critic/explained_variance": _explained(targets, said),
            "advantage/mean": float(credit.mean()),
            "advantage/std": float(credit.std()),
        }
        if section.normalize:
            credit = (credit - credit.mean()) / (credit.std() + 1e-8)
        flat, wanted = np.zeros_like(rows.advantages), np.full_like(before, np.nan)
        flat[chains.places], wanted[chains.places] = credit, targets
        return replace(rows, advantages=flat), Judged(before, wanted), metrics

    def update(self, placed: PlacedPacks, judged: Judged, step: int, under: Under, ranks: Ranks) -> dict[str, float]:
        """One optimizer step on these packs of a judged batch, in `step` (from 1); metrics by slash name.

        Each of `ranks` holds the whole critic; one of each team computes its packs.
        Args: under: of each forward pass.
        Raises: TrainingError: the third loss or gradient in a row that is not finite.
        """
        self.optimizer.zero_grad(set_to_none=True)
        num_tokens = sum(pack.num_targets for pack in placed.packs)
        totals = torch.zeros(2, dtype=torch.float64)
        for pack, places, owner in zip(*placed, strict=True):
            if owner != ranks.team or not ranks.speaks:
                continue
            with under():
                values = self.model(pack)
            before, targets = (torch.from_numpy(x[places]).to(values.device) for x in (judged.before, judged.targets))
            losses, clipped = value_losses(values, before, targets, self._section.clip)
            loss = (torch.from_numpy(pack.weights).to(values.device) * losses).sum() / num_tokens
            loss.backward()  # type: ignore[no-untyped-call]
            totals += torch.stack([loss.detach().double(), clipped.double().sum() / num_tokens]).cpu()
        lr = learning_rate(self._optimizing, step, self._total_steps)
        return self._apply(ranks.sum(totals).tolist(), lr, ranks)

    def _apply(self, totals: list[float], lr: float, ranks: Ranks) -> dict[str, float]:
        if ranks.many:
            for parameter in self.model.parameters():
                own = torch.zeros_like(parameter) if parameter.grad is None else parameter.grad
                parameter.grad = ranks.sum(own)
        norm = float(torch.nn.utils.clip_grad_norm_(self.model.parameters(), self._optimizing.grad_clip))
        loss, clipped = totals
        if np.isfinite(norm) and np.isfinite(loss):
            for group in self.optimizer.param_groups:
                group["lr"] = lr
            self.optimizer.step()
            self.skipped_in_a_row = 0
        else:
            self._skip(loss, norm)
        self.optimizer.zero_grad(set_to_none=True)
        return {"critic/loss": loss, "critic/clip_fraction": clipped, "critic/grad_norm": norm, "critic/lr": lr}

    def _skip(self, loss: float, norm: float) -> None:
        self.skipped_in_a_row += 1
        if self.skipped_in_a_row >= MAX_SKIPPED_IN_A_ROW:
            self.optimizer.zero_grad(set_to_none=True)
            raise TrainingError(
                "critic/loss", loss, f"or its gradient ({norm}) was not finite {MAX_SKIPPED_IN_A_ROW} times in a row",
                "lower critic.lr, and look at the size of rewards",
            )  # fmt: skip

    def state(self) -> dict[str, torch.Tensor]:
        """All that a checkpoint must hold, live."""
        weights = {f"model/{name}": tensor.detach() for name, tensor in self.model.named_parameters()}
        moments = optimizer_tensors(self.model, self.optimizer)
        counts = {"skipped_in_a_row": torch.tensor(self.skipped_in_a_row)}
        return weights | {f"optimizer/{name}": tensor for name, tensor in moments.items()} | counts

    @torch.no_grad()
    def restore(self, state: Mapping[str, torch.Tensor]) -> None:
        """Inverse of `state`. Raises: TrainingError: it is that of another model."""
        own = dict(self.model.named_parameters())
        saved = {name.removeprefix("model/"): tensor for name, tensor in state.items() if name.startswith("model/")}
        fits = own.keys() == saved.keys() and all(own[name].shape == tensor.shape for name, tensor in saved.items())
        if not fits:
            raise TrainingError(
                "checkpoint critic", len(saved), f"tensors are not those of this critic ({len(own)})",
                "resume with the policies.*.critic of the run",
            )  # fmt: skip
        for name, tensor in saved.items():
            own[name].copy_(tensor)
        moments = {n.removeprefix("optimizer/"): t for n, t in state.items() if n.startswith("optimizer/")}
        load_optimizer_tensors(self.model, self.optimizer, moments)
        self.skipped_in_a_row = int(state["skipped_in_a_row"])


def _explained(targets: np.ndarray, said: np.ndarray) -> float:
    """1 - Var(G - V) / Var(G): 1 where the critic knows, 0 where it says a constant; 0 too where G is one."""
    spread_of = float(targets.var())
    return 1.0 - float((targets - said).var()) / spread_of if spread_of > 0 else 0.0
