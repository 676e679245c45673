"""Supervised steps that several ranks do together: run by `ranks.run_ranks`."""

from __future__ import annotations

from pathlib import Path

import torch.distributed as dist

from astraflow.config.schema import RunConfig
from astraflow.training.parallel.ranks import Ranks
from astraflow.training.sft import run_sft


def saved(rank: int, place: Path, directory: Path, config: RunConfig) -> float:
    """The loss of the last step; the model is saved as `place`/sft."""
    return run_sft(directory, place / "sft", config, "actor", Ranks(rank, dist.get_world_size()))["loss"]
