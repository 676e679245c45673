"""Steps that several ranks do together, beside the same step of one: run by `ranks.run_ranks`."""

from __future__ import annotations

import copy
from collections.abc import Iterator
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np
import torch
import torch.distributed as dist
from transformers import (
    GPT2Config,
    GPT2LMHeadModel,
    LlamaConfig,
    LlamaForCausalLM,
    PreTrainedModel,
    Qwen3Config,
    Qwen3ForCausalLM,
)

from astraflow.algorithms.corrections import Corrected, Reject, Truncate
from astraflow.algorithms.losses.cispo import Cispo
from astraflow.algorithms.losses.contract import PolicyLoss
from astraflow.algorithms.losses.decoupled_ppo import DecoupledPpo
from astraflow.algorithms.losses.gspo import Gspo
from astraflow.algorithms.losses.m2po import M2po
from astraflow.algorithms.losses.ppo_clip import PpoClip
from astraflow.config.schema import KlSection
from astraflow.errors import AstraFlowError
from astraflow.models.load import state_tensors
from astraflow.models.scoring.forward import packed_logprobs, prepare_model
from astraflow.models.scoring.packing import TokenRows, rows_from_lists
from astraflow.training.optimize.frozen import freeze
from astraflow.training.optimize.minibatches import placed_packs
from astraflow.training.parallel.ranks import ALONE, Ranks
from astraflow.training.parallel.scoring import scoring_of
from astraflow.training.parallel.sharding import whole
from astraflow.training.reference import KlPenalty, Reference
from astraflow.training.step import StepInterrupted, Stepper
from one_step import OF_THE_CUT, VERSION, still_settings

FROZEN = {"llama": ("embed_tokens", "layers.0"), "qwen3": ("embed_tokens",), "gpt2": ("wte", "h.1.attn")}
LENGTHS = (5, 40, 12, 12, 33, 7, 9, 21, 64, 3, 17, 12, 28, 50, 6, 11)
GROUPS = np.repeat(np.arange(4), 4)


def tiny(family: str, seed: int = 0) -> PreTrainedModel:
    """A model with weights so large that positions matter."""
    torch.manual_seed(seed)
    shape: dict[str, Any] = {
        "vocab_size": 61, "hidden_size": 32, "intermediate_size": 64, "num_hidden_layers": 2, "num_attention_heads": 4,
        "num_key_value_heads": 2, "max_position_embeddings": 512, "pad_token_id": 0, "bos_token_id": 1,
        "eos_token_id": 2,
    }  # fmt: skip
    model: PreTrainedModel
    match family:
        case "llama":
            model = LlamaForCausalLM(LlamaConfig(**shape, tie_word_embeddings=False))
        case "qwen3":
            model = Qwen3ForCausalLM(Qwen3Config(**shape, head_dim=8, tie_word_embeddings=True))
        case _:
            small = {"n_embd": 32, "n_layer": 2, "n_head": 4, "n_positions": 512, "bos_token_id": 1, "eos_token_id": 2}
            model = GPT2LMHeadModel(GPT2Config(vocab_size=61, **small))
    with torch.no_grad():
        for parameter in model.parameters():
            if parameter.ndim == 2:
                parameter.mul_(6.0)
    return prepare_model(model.eval())


def batch(lengths: tuple[int, ...] = LENGTHS, seed: int = 1) -> TokenRows:
    """Uneven rows, some with a start in common, sampled at versions 3 to 5, with logprobs near those of `tiny`."""
    draw = np.random.default_rng(seed)
    examples = []
    for i, length in enumerate(lengths):
        mask = draw.random(length) < 0.5
        mask[: min(3, length - 1)], mask[-1] = False, True
        ids = draw.integers(3, 61, length)
        ids[: min(3, length - 1)] = i // 4  # siblings have a prompt
        examples.append((ids, mask))
    rows = rows_from_lists(examples)
    row_of = np.repeat(np.arange(len(lengths)), np.diff(rows.starts))
    return replace(
        rows,
        behavior_logprobs=draw.normal(-4, 0.6, len(row_of)).astype(np.float32),
        advantages=draw.normal(size=len(lengths)).astype(np.float32)[row_of],
        versions=np.where(rows.trained, 3 + row_of % 3, -1).astype(np.int32),
        weights=np.where(np.arange(len(lengths)) % 4 == 0, 0.5, 1.0).astype(np.float32),
    )


@dataclass(frozen=True)
class Case:
    """A step to compare."""

    loss: PolicyLoss
    lengths: tuple[int, ...] = LENGTHS
    budget: int = 10_000
    settings: dict[str, Any] | None = None
    kl: str = ""  # place of a penalty
    frozen: bool = False  # `FROZEN` of the family


def cases() -> Iterator[tuple[str, Case]]:
    """Every way to aggregate with every kind of loss; then what else can make ranks differ."""
    for aggregation in ("token", "sequence", 32.0):
        losses: list[PolicyLoss] = [
            PpoClip(0.2, 0.3, 3.0, aggregation), M2po(aggregation=aggregation), Gspo(0.3, 0.4, aggregation),
            Cispo(aggregation=aggregation), DecoupledPpo(aggregation=aggregation),
            Corrected(M2po(aggregation=aggregation), [Truncate(1.5, "sequence"), Reject(0.6, 1.7)]),
        ]  # fmt: skip
        for loss in losses:
            yield f"{type(loss).__name__} {aggregation}", Case(loss, budget=90)
    yield "one pack", Case(PpoClip())
    yield "one row", Case(M2po(), lengths=(9,))
    yield "a long row and short ones", Case(PpoClip(), lengths=(90, 3, 4, 5), budget=40)
    yield "a pack for each row", Case(PpoClip(aggregation="sequence"), budget=1)
    yield "entropy and z-loss", Case(PpoClip(), budget=90, settings={"entropy": 0.1, "z_loss": 0.01})
    yield "temperature", Case(PpoClip(), budget=90, settings={"temperature": 0.7})
    yield "updates", Case(DecoupledPpo(), budget=90, settings={"epochs": 2, "minibatches": 2})
    yield "kl in the loss", Case(PpoClip(), budget=90, kl="loss")
    yield "kl in the reward", Case(M2po(), budget=90, kl="reward")
    yield "frozen parts", Case(PpoClip(), budget=90, frozen=True)


def compared(
    rank: int, place: Path, family: str, tensor: int = 1, context: int = 1, names: tuple[str, ...] = ()
) -> dict[str, tuple[float, dict[str, tuple[float, float]]]]:
    """For each case (of `names`, default all): the relative distance of the gradients of all updates, and the metrics
    that differ by more than rounding."""
    ranks = Ranks(rank, dist.get_world_size(), tensor, context)
    found = {}
    for name, case in cases():
        if names and name not in names:
            continue
        reference = [_step(family, case, ALONE) if rank == 0 else None]
        dist.broadcast_object_list(reference)
        assert reference[0] is not None
        alone, one = reference[0]
        together, many = _step(family, case, ranks)
        differ = {
            key: (value, many[key])
            for key, value in one.items()
            if not key.startswith("perf/") and key not in OF_THE_CUT
            and not np.isclose(value, many[key], rtol=1e-5 if key == "grad_norm" else 1e-4, atol=1e-6)
        }  # fmt: skip
        found[name] = (float((together - alone).norm() / alone.norm()), differ)
    return found


def _step(family: str, case: Case, ranks: Ranks) -> tuple[torch.Tensor, dict[str, float]]:
    model = tiny(family)
    if case.frozen:
        freeze(model, FROZEN[family])
    frozen = {name for name, parameter in model.named_parameters() if not parameter.requires_grad}
    assert bool(frozen) == case.frozen
    score = scoring_of(model, ranks)
    settings = still_settings(case.budget, **(case.settings or {}))
    stepper = Stepper(model, copy.deepcopy(case.loss), settings, ranks=ranks, score=score)
    if case.kl:
        other = tiny(family, 1).requires_grad_(False)
        stepper.penalty = KlPenalty(
            KlSection(coef=0.1, place=case.kl), settings.temperature, Reference(other, score=scoring_of(other, ranks))
        )
    seen: list[torch.Tensor] = []
    stepper.optimizer.register_step_pre_hook(
        lambda *_: seen.append(torch.cat([whole(p.grad).flatten() for p in model.parameters() if p.grad is not None]))
    )
    metrics = stepper.step(batch(case.lengths), VERSION, GROUPS[: len(case.lengths)])
    still = {name for name, parameter in model.named_parameters() if parameter not in stepper.optimizer.state}
    assert still == frozen
    return torch.cat(seen), metrics


@torch.no_grad()
def under_other_weights(rank: int, place: Path) -> tuple[float, float, bool]:
    """How far scores under other weights, and under the own ones after that, are from those of a whole model; whether
    the weights are as they were. What a pass gathered must not be used when the weights are others."""
    ranks = Ranks(rank, dist.get_world_size())
    own, other, spread = tiny("qwen3"), tiny("qwen3", 1), tiny("qwen3")
    score, score_other = scoring_of(spread, ranks), tiny("qwen3", 1)
    scoring_of(score_other, ranks)
    (pack,) = placed_packs(batch(), 10_000).packs
    before = [whole(p).clone() for p in spread.parameters()]
    parts = state_tensors(score_other)
    expected = packed_logprobs(other, pack, 1.0).logprobs
    far = max((score(pack, 1.0, given).logprobs - expected).abs().max() for given in (parts, state_tensors(other)))
    after = (score(pack, 1.0).logprobs - packed_logprobs(own, pack, 1.0).logprobs).abs().max()
    same = all(torch.equal(whole(p), b) for p, b in zip(spread.parameters(), before, strict=True))
    return float(far), float(after), same


def stepped(rank: int, place: Path, family: str, tensor: int, context: int) -> dict[str, tuple[float, float]]:
    """For each parameter how far its gradient, and itself after one step of AdamW, are from those of one rank."""
    ranks = Ranks(rank, dist.get_world_size(), tensor, context)
    alone, many = (_after_one_step(family, of) for of in (ALONE, ranks))
    return {
        name: tuple(float((a - b).norm() / a.norm()) for a, b in zip(alone[name], many[name], strict=True))
        for name in alone
    }  # type: ignore[misc]


def _after_one_step(family: str, ranks: Ranks) -> dict[str, list[torch.Tensor]]:
    model = tiny(family)
    stepper, seen = _stepper_of(model, 1e-3, ranks), {}

    def keep(*_: Any) -> None:
        seen.update({name: [whole(p.grad).clone()] for name, p in model.named_parameters() if p.grad is not None})

    stepper.optimizer.register_step_pre_hook(keep)
    stepper.step(batch(), VERSION)
    for name, parameter in model.named_parameters():
        seen[name].append(whole(parameter.detach()))
    return seen


def refused(rank: int, place: Path, family: str, tensor: int, context: int) -> str:
    """What is said of a model that cannot be divided so."""
    try:
        scoring_of(tiny(family), Ranks(rank, dist.get_world_size(), tensor, context))
    except AstraFlowError as error:
        return str(error)
    return "divided"


def learn(rank: int, place: Path, family: str, steps: int, lr: float) -> list[float]:
    """How far the losses of some steps are from those of one rank."""
    ranks = Ranks(rank, dist.get_world_size())
    model = tiny(family)
    many = _stepper_of(model, lr, ranks)
    one = _stepper_of(tiny(family), lr, ALONE)
    rows = batch()
    losses = []
    for _ in range(steps):
        losses.append(abs(many.step(rows, VERSION)["loss"] - one.step(rows, VERSION)["loss"]))
    return losses


def interrupted(rank: int, place: Path) -> tuple[bool, int]:
    """One rank is told to stop before its second pass: all of them leave the step, and nothing has changed."""
    ranks, asked = Ranks(rank, dist.get_world_size()), []

    def should_stop() -> bool:
        asked.append(1)
        return rank == 1 and len(asked) > 1

    model = tiny("llama")
    stepper = Stepper(model, PpoClip(), still_settings(40, lr=1e-2), should_stop, ranks, scoring_of(model, ranks))
    before = [whole(p.detach()).clone() for p in model.parameters()]
    try:
        stepper.step(batch(), VERSION)
    except StepInterrupted:
        same = all(torch.equal(whole(p.detach()), b) for p, b in zip(model.parameters(), before, strict=True))
        return same and all(p.grad is None for p in model.parameters()), len(asked)
    return False, len(asked)


def not_finite(rank: int, place: Path) -> tuple[float, bool]:
    """A bad row of one rank: all skip the update. The skipped updates, and whether the weights are as they were."""
    ranks = Ranks(rank, dist.get_world_size())
    model, rows = tiny("llama"), batch()
    stepper = _stepper_of(model, 1e-2, ranks)
    before = [whole(p.detach()).clone() for p in model.parameters()]
    advantages = rows.advantages.copy()
    advantages[: rows.starts[1]] = np.nan
    metrics = stepper.step(replace(rows, advantages=advantages), VERSION)
    same = all(torch.equal(whole(p.detach()), b) for p, b in zip(model.parameters(), before, strict=True))
    return metrics["skipped_steps"], same


def _stepper_of(model: PreTrainedModel, lr: float, ranks: Ranks) -> Stepper:
    return Stepper(model, M2po(), still_settings(90, lr=lr), ranks=ranks, score=scoring_of(model, ranks))
