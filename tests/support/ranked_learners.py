"""Learners of several ranks, from batches that depend on the step alone: run by `ranks.run_ranks`, or in a process."""

from __future__ import annotations

import contextlib
import os
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import torch
import torch.distributed as dist

from astraflow.config.schema import RunConfig
from astraflow.errors import AstraFlowError
from astraflow.models.load import state_tensors
from astraflow.testing.engines.effective import random_batch, run_config
from astraflow.training.learner import Learner
from astraflow.training.parallel.ranks import ALONE, Ranks

STEPS, SAVED = 3, 2
VARIANTS: dict[str, dict[str, Any]] = {
    "float32": {"batch": {"tokens_per_microbatch": 64, "max_staleness": 2}, "trainer": {"audit_trajectories": 4}},
    "bfloat16": {"trainer": {"dtype": "bfloat16", "audit_trajectories": 2}},
    "updates": {"batch": {"epochs": 2, "minibatches": 2}, "algorithm": {"kl": {"coef": 0.1}, "loss": "m2po"}},
    "critic": {"algorithm": {"advantage": "gae"}, "critic": {"lr": 1e-3}},
    "lora": {"lora": {"rank": 4}, "trainer": {"audit_trajectories": 4}, "algorithm": {"kl": {"coef": 0.1}}},
    "8 bits": {"optimizer": {"type": "adamw_8bit", "lr": 1e-3}},
}
LAYOUTS: dict[str, dict[str, Any]] = {
    "plain": {},
    "tensor": {"trainer": {"tensor_parallel": 2, "gradient_checkpointing": True, "audit_trajectories": 2}},
    "context": {"trainer": {"context_parallel": 2, "audit_trajectories": 2}},
    "critic in context": {
        "trainer": {"context_parallel": 2},
        "algorithm": {"advantage": "gae"},
        "critic": {"lr": 1e-3},
    },
}


def batch(step: int) -> pa.Table:
    """Two groups; some rows were sampled at the version before."""
    table = random_batch(step, num_rows=7)
    versions = [
        np.where(mask, max(0, step - i % 2), -1).astype(np.int32)
        for i, mask in enumerate(np.asarray(m) for m in table.column("loss_mask").to_pylist())
    ]
    groups = [f"train/{i // 4}/0" for i in range(7)]
    for name, values in (("versions", versions), ("group_id", groups)):
        field = table.schema.field(name)
        table = table.set_column(table.schema.get_field_index(name), field, pa.array(values, field.type))
    return table


def config_of(model: Path, variant: str) -> RunConfig:
    return run_config(model, {"optimizer": {"lr": 1e-2, "schedule": "cosine"}, **(VARIANTS | LAYOUTS)[variant]})


@contextlib.contextmanager
def learner_at(rank: int, place: Path, model: Path, variant: str) -> Iterator[Learner]:
    """A learner of the run directory `place`, finished and closed."""
    ranks = Ranks(rank, dist.get_world_size()) if dist.is_initialized() else ALONE
    learner = Learner(config_of(model, variant), "actor", place, ranks=ranks)
    try:
        yield learner
        learner.finish_saving()
    finally:
        learner.close()


def state_of(learner: Learner) -> dict[str, bytes]:
    """Weights, moments, counts and random state: all that the next step depends on, to leave the process: float64."""
    model, counts = learner.model, learner.stepper.counts
    found = {f"weights/{name}": _whole(tensor) for name, tensor in state_tensors(model).items()}
    for name, parameter in model.named_parameters():
        for moment, value in learner.stepper.optimizer.state.get(parameter, {}).items():
            found[f"{moment}/{name}"] = _whole(value)
    if learner.stepper.critic is not None:
        found |= {f"critic/{name}": tensor for name, tensor in learner.stepper.critic.state().items()}
    found["rng"] = torch.get_rng_state()
    found["counts"] = torch.tensor([learner.version, counts.step, counts.skipped, counts.skipped_in_a_row])
    return {name: tensor.double().numpy().tobytes() for name, tensor in found.items()}


def _whole(tensor: torch.Tensor) -> torch.Tensor:
    if not dist.is_initialized():
        return tensor
    from astraflow.training.parallel.sharding import whole

    return whole(tensor)


def train(learner: Learner, until: int) -> list[dict[str, float]]:
    """Steps up to version `until`; their metrics without durations."""
    return [
        {name: value for name, value in learner.train(batch(step)).items() if not name.startswith("perf/")}
        for step in range(learner.version, until)
    ]


def uninterrupted(rank: int, place: Path, model: Path, variant: str) -> tuple[Any, Any]:
    """State at the end, and metrics of the steps after the one that is saved elsewhere."""
    with learner_at(rank, place / "whole", model, variant) as learner:
        metrics = train(learner, STEPS)
        return state_of(learner), metrics[SAVED:]


def first_half(rank: int, place: Path, model: Path, variant: str) -> tuple[Any, Any]:
    """Up to a checkpoint, and a step that is lost; what was saved, and metrics."""
    with learner_at(rank, place / "cut", model, variant) as learner:
        metrics = train(learner, SAVED)
        saved = state_of(learner)
        learner.save()
        train(learner, SAVED + 1)
        return saved, metrics


def second_half(rank: int, place: Path, model: Path, variant: str) -> tuple[Any, Any]:
    """From the checkpoint to the end."""
    with learner_at(rank, place / "cut", model, variant) as learner:
        assert learner.version == SAVED
        metrics = train(learner, STEPS)
        return state_of(learner), metrics


def cut_and_whole(rank: int, place: Path, model: Path) -> dict[str, list[str]]:
    """For each variant what differs between a run that was cut and one that was not."""
    found = {}
    for variant in VARIANTS:
        expected, of_whole = uninterrupted(rank, place / variant, model, variant)
        first_half(rank, place / variant, model, variant)
        state, metrics = second_half(rank, place / variant, model, variant)
        found[variant] = [name for name in expected if state.get(name) != expected[name]]
        found[variant] += [name for a, b in zip(metrics, of_whole, strict=True) for name in b if a.get(name) != b[name]]
    return found


def disk_full(rank: int, place: Path, model: Path, who: int) -> str:
    """Rank `who` cannot write its part: what each of them is told."""
    import astraflow.training.parallel.parts as parts

    def full(*_: Any, **__: Any) -> None:
        raise OSError(28, "No space left on device")

    with learner_at(rank, place / "run", model, "float32") as learner:
        train(learner, 1)
        learner.save()
        learner.finish_saving()
        train(learner, 2)
        if rank == who:
            parts.HuggingFaceStorageWriter.write_data = full  # type: ignore[assignment]
        learner.save()
        try:
            learner.finish_saving()
        except (AstraFlowError, OSError) as error:
            return str(error)
    return "written"


def dies(rank: int, place: Path, model: Path) -> str:
    """Rank 1 ends in the middle of a step: what the other is told."""
    with learner_at(rank, place / "run", model, "float32") as learner:
        train(learner, 1)
        if rank == 1:
            learner.model.base_model.register_forward_pre_hook(lambda *_: os._exit(9))
        try:
            with Ranks(rank, dist.get_world_size()).watched():
                train(learner, 2)
        except AstraFlowError as error:
            said = str(error)
            learner.close = lambda: None  # type: ignore[method-assign]  # nothing can be published any more
            return said
    return "trained"
