"""Models that ranks read in parts, beside the same one read whole: run by `ranks.run_ranks`."""

from __future__ import annotations

from pathlib import Path

import torch
import torch.distributed as dist

from astraflow.errors import ModelError
from astraflow.models.load import load_model, state_tensors
from astraflow.training.parallel.loading import Stored, open_model
from astraflow.training.parallel.ranks import Ranks
from astraflow.training.parallel.scoring import load_whole, scoring_of
from astraflow.training.parallel.sharding import whole


def opened(rank: int, place: Path, directory: Path, tensor: int, context: int) -> tuple[bool, list[str]]:
    """Whether the model was laid out without memory, and what differs from it read whole; before and after it was
    given other weights."""
    ranks = Ranks(rank, dist.get_world_size(), tensor, context)
    model, expected = open_model(directory, ranks), load_model(directory)
    laid_out = all(parameter.is_meta for parameter in model.parameters())
    scoring_of(model, ranks, Stored(directory, torch.device("cpu")))
    differ = _different(model, expected)
    with torch.no_grad():
        for parameter in expected.parameters():
            parameter.add_(1)
    load_whole(model, state_tensors(expected), ranks)
    return laid_out, differ + _different(model, expected)


def refused(rank: int, place: Path, directory: Path) -> str:
    """What this rank refuses of the model; of the other one, which is left alone: nothing."""
    ranks = Ranks(rank, dist.get_world_size())
    try:
        scoring_of(open_model(directory, ranks), ranks, Stored(directory, torch.device("cpu")))
    except ModelError as error:
        dist.destroy_process_group()  # as the end of its process does
        return error.thing
    except RuntimeError:
        return ""
    return "read"


def _different(model: torch.nn.Module, expected: torch.nn.Module) -> list[str]:
    own, theirs = state_tensors(model), state_tensors(expected)  # type: ignore[arg-type]
    differ = sorted(own.keys() ^ theirs.keys())
    differ += [name for name in theirs if name in own and not torch.equal(whole(own[name]), theirs[name])]
    buffers = dict(model.named_buffers())
    return differ + [name for name, b in expected.named_buffers() if not torch.equal(buffers[name], b)]
