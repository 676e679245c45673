"""A model of which no rank ever holds all: laid out without memory, divided, and each part read from its file."""

from __future__ import annotations

import logging
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any, NamedTuple

import torch
from huggingface_hub.errors import StrictDataclassError
from torch import nn
from transformers import AutoConfig, AutoModelForCausalLM, GenerationConfig, PreTrainedModel
from transformers.utils import GENERATION_CONFIG_NAME

from astraflow.models.linear import speed_up_linears
from astraflow.models.load import check_finite, load_model, state_tensors
from astraflow.models.stored import stored_shapes
from astraflow.training.parallel.ranks import Ranks

log = logging.getLogger(__name__)


class Stored(NamedTuple):
    """Where the weights of a laid out model lie, and where they are to be."""

    directory: Path
    device: torch.device


def open_model(directory: Path, ranks: Ranks) -> PreTrainedModel:
    """The float32 model of `directory`; of several ranks without its weights (on the device `meta`), but for a model
    whose files name them otherwise than it does itself: each rank has all of it then.

    Raises: ModelError: as `load_model`.
    """
    if ranks.many and (model := _outlined(directory)) is not None:
        return model
    return load_model(directory)


@torch.no_grad()
def fill(model: PreTrainedModel, stored: Stored) -> None:
    """Give a laid out model memory for this rank's parts, and read them. What has memory already stays.

    Raises: ModelError: a weight of a part is not finite.
    """
    empty = {id(p): name for name, p in model.named_parameters() if p.is_meta}
    made: dict[int, nn.Parameter] = {}  # tied ones stay one
    for module in model.modules():
        for name, parameter in module._parameters.items():
            if parameter is not None and parameter.is_meta:
                if id(parameter) not in made:
                    memory = torch.empty_like(parameter, device=stored.device)
                    made[id(parameter)] = nn.Parameter(memory, requires_grad=parameter.requires_grad)
                module._parameters[name] = made[id(parameter)]
        for name, buffer in module._buffers.items():
            module._buffers[name] = buffer if buffer is None else buffer.to(stored.device)
    if empty:
        from torch.distributed.tensor import DTensor  # a second to load

        from astraflow.training.parallel.parts import read_weights

        own, names = state_tensors(model), _names(model, stored.directory)
        read = {there: own[name] for name, there in names.items() if name in empty.values()}
        read_weights(stored.directory, read)
        parts = {name: tensor.to_local() if isinstance(tensor, DTensor) else tensor for name, tensor in read.items()}
        check_finite(parts, stored.directory)


def _outlined(directory: Path) -> PreTrainedModel | None:
    try:
        config = AutoConfig.from_pretrained(str(directory), local_files_only=True)
        with _parameters_without_memory():
            laid_out: Any = AutoModelForCausalLM
            model: PreTrainedModel = laid_out.from_config(config, dtype=torch.float32, attn_implementation="sdpa")
    except (OSError, ValueError, KeyError, RuntimeError, ImportError, StrictDataclassError):
        return None  # `load_model` says what it is
    if len(_names(model, directory)) < len(state_tensors(model)):
        log.info("%s: weights have other names there, so each rank loads all of them", directory)
        return None
    if (directory / GENERATION_CONFIG_NAME).is_file():
        model.generation_config = GenerationConfig.from_pretrained(str(directory), local_files_only=True)
    model.eval()  # type: ignore[no-untyped-call]
    speed_up_linears(model)
    return model


def _names(model: PreTrainedModel, directory: Path) -> Mapping[str, str]:
    """The names that the files have for the weights of `model`, as far as they have them in their shape."""
    shapes, prefix = stored_shapes(directory), f"{model.base_model_prefix}."
    found = {}
    for name, tensor in state_tensors(model).items():
        there = name if name in shapes else name.removeprefix(prefix)  # a decoder saved without its head
        if shapes.get(there) == tuple(tensor.shape):
            found[name] = there
    return found


@contextmanager
def _parameters_without_memory() -> Iterator[None]:
    """Parameters that are made inside are on `meta`; buffers, which no file has, are as they always are."""
    register = nn.Module.register_parameter

    def without_memory(module: nn.Module, name: str, parameter: nn.Parameter | None) -> None:
        if parameter is not None and not parameter.is_meta:  # nobody has written to it yet, so it costs nothing
            parameter = nn.Parameter(parameter.to("meta"), requires_grad=parameter.requires_grad)
        register(module, name, parameter)

    nn.Module.register_parameter = without_memory  # type: ignore[method-assign, assignment]
    try:
        yield
    finally:
        nn.Module.register_parameter = register  # type: ignore[method-assign]
