"""Our side: the trainer's own `Stepper`, on the rows of a batch as they come out of the data interface.

python -m benchmarks.training.ours --work '{...}' [recompute | RANK RANKS RENDEZVOUS]
"""

from __future__ import annotations

import numpy as np
import torch
from safetensors.torch import load_file
from transformers import PreTrainedModel

from astraflow.algorithms.losses.ppo_clip import PpoClip
from astraflow.config.schema import OptimizerSection
from astraflow.models.load import load_model
from astraflow.models.scoring.forward import prepare_model
from astraflow.models.scoring.packing import TokenRows
from astraflow.models.scoring.recompute import recompute_activations
from astraflow.training.parallel.ranks import ALONE, RankPlace, Ranks, joined
from astraflow.training.parallel.scoring import scoring_of
from astraflow.training.step import Stepper, StepSettings
from benchmarks.training.work import (
    BETAS,
    CLIP,
    EPS,
    GRAD_CLIP,
    LR,
    PROMPT_TOKENS,
    Batch,
    Step,
    Work,
    fill,
    given_work,
    measure,
    tell,
)


def make_stepper(model: PreTrainedModel, budget: int, ranks: Ranks = ALONE) -> Stepper:
    """With the settings of a run file; learning rate and clipping as of the other sides."""
    optimizer = OptimizerSection(
        lr=LR, betas=BETAS, eps=EPS, weight_decay=0.0, grad_clip=GRAD_CLIP, schedule="constant"
    )  # fmt: skip
    settings = StepSettings(optimizer, total_steps=1000, tokens_per_microbatch=budget)
    score = scoring_of(prepare_model(model), ranks) if ranks.many else None
    return Stepper(model, PpoClip(CLIP), settings, ranks=ranks, score=score)


def token_rows(batch: Batch, behavior: str) -> TokenRows:
    """The batch as flat arrays. `behavior`: file of the logprobs of its tokens."""
    sizes = np.array([len(sequence) for sequence in batch.sequences])
    starts = np.concatenate(([0], np.cumsum(sizes)))
    position = np.arange(starts[-1]) - np.repeat(starts[:-1], sizes)
    trained = position >= PROMPT_TOKENS
    said = load_file(behavior)
    return TokenRows(
        starts=starts,
        token_ids=torch.cat(batch.sequences).numpy().astype(np.int32),
        trained=trained,
        behavior_logprobs=torch.cat([said[str(row)] for row in range(len(sizes))]).numpy(),
        advantages=np.repeat(batch.advantages.numpy(), sizes),
        versions=np.where(trained, 0, -1).astype(np.int32),
        weights=np.ones(len(sizes), dtype=np.float32),
    )


def run(work: Work, ranks: Ranks = ALONE, *, recompute: bool = False) -> None:
    """Measure; rank 0 tells. `recompute`: with gradient checkpointing."""

    def build(model: PreTrainedModel, batch: Batch, work: Work) -> Step:
        if recompute:
            recompute_activations(model)
        stepper, rows = make_stepper(model, work.budget, ranks), token_rows(batch, work.behavior)
        fill(stepper.optimizer)
        return lambda: stepper.step(rows, 0)["grad_norm"]

    result = measure(work, build, load_model)
    if ranks.leads:
        tell(result)


if __name__ == "__main__":
    given, place = given_work()
    if place == ["recompute"]:
        run(given, recompute=True)
    elif place:
        with joined(RankPlace(int(place[0]), int(place[1]), place[2])) as company:
            run(given, company)
    else:
        run(given)
