"""Tensors of a training state in parts: a safetensors file of each rank, as `torch.distributed.checkpoint` has it.

A part says where it lies in the whole tensor, so another number of ranks reads it too.
"""

from __future__ import annotations

import contextlib
import warnings
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import torch
from torch.distributed.checkpoint.api import CheckpointException
from torch.distributed.checkpoint.hf_storage import HuggingFaceStorageReader, HuggingFaceStorageWriter
from torch.distributed.checkpoint.metadata import TensorStorageMetadata
from torch.distributed.checkpoint.state_dict_loader import load
from torch.distributed.checkpoint.state_dict_saver import save
from torch.distributed.tensor import DTensor, empty

from astraflow.errors import TrainingError

Tensors = Mapping[str, torch.Tensor]


def write_parts(folder: Path, tensors: Tensors, group: Any) -> None:
    """Write this rank's part of `tensors` (what is whole is written by one of them), with all ranks of `group`.

    When it returns on rank 0, all are written. Raises: OSError, TrainingError: what went wrong, on whichever rank.
    """
    with _said_as_one():
        save(
            dict(tensors), storage_writer=HuggingFaceStorageWriter(str(folder), save_distributed=True),
            process_group=group,
        )  # fmt: skip


def read_parts(folder: Path, own: Tensors) -> dict[str, torch.Tensor]:
    """What a checkpoint has, with this rank's part of each tensor that lies like one of `own`; the others whole.

    Args: own: the parameters of the model, by name; a stored name ends with that of its parameter.
    """
    return _read(folder, own, alone=False)


def read_whole(folder: Path) -> dict[str, torch.Tensor]:
    """All tensors, in this process alone."""
    return _read(folder, {}, alone=True)


def read_weights(folder: Path, own: Tensors) -> None:
    """Fill `own`, by the names that the weights have in the files of a model directory; each rank by itself."""
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", "torch.distributed is disabled", UserWarning)
        load(dict(own), storage_reader=HuggingFaceStorageReader(str(folder)), no_dist=True)


def _read(folder: Path, own: Tensors, *, alone: bool) -> dict[str, torch.Tensor]:
    reader = HuggingFaceStorageReader(str(folder))
    target = {
        name: _place(name, stored, own)
        for name, stored in reader.read_metadata().state_dict_metadata.items()
        if isinstance(stored, TensorStorageMetadata)
    }
    with _said_as_one(), warnings.catch_warnings():
        warnings.filterwarnings("ignore", "torch.distributed is disabled", UserWarning)
        load(target, storage_reader=HuggingFaceStorageReader(str(folder)), no_dist=alone)
    return target


def _place(name: str, stored: TensorStorageMetadata, own: Tensors) -> torch.Tensor:
    parts = name.split("/")
    like, dtype = own.get(parts[-1]), stored.properties.dtype
    if isinstance(like, DTensor) and like.shape == stored.size:
        return torch.empty_like(like, dtype=dtype, requires_grad=False)
    if isinstance(like, DTensor) and like.shape[:1] == stored.size[:1]:  # something of each row
        return empty(stored.size, dtype=dtype, device_mesh=like.device_mesh, placements=like.placements)
    return torch.empty(stored.size, dtype=dtype)


@contextlib.contextmanager
def _said_as_one() -> Iterator[None]:
    """Raises: the first failure of any rank, instead of a collection of them."""
    try:
        yield
    except CheckpointException as error:
        rank, (first, _) = min(error.failures.items())
        if isinstance(first, OSError):
            raise first from error
        raise TrainingError(
            f"rank {rank}: checkpoint", repr(first), "failed", "look at its log; earlier checkpoints are as they were"
        ) from error
