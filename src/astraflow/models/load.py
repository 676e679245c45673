"""Models of a directory and their tensors by Hugging Face name. Never asks the network."""

from __future__ import annotations

import difflib
import json
import threading
from collections.abc import Iterable, Iterator, Mapping
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import torch
import xxhash
from huggingface_hub.errors import StrictDataclassError
from safetensors import SafetensorError, safe_open
from transformers import AutoModelForCausalLM, PreTrainedModel
from transformers.utils import SAFE_WEIGHTS_INDEX_NAME, SAFE_WEIGHTS_NAME
from transformers.utils import logging as transformers_logging

from astraflow.errors import ModelError
from astraflow.models.linear import speed_up_linears

DTYPES = {"float32": torch.float32, "bfloat16": torch.bfloat16, "float16": torch.float16}
_LOADING = threading.Lock()  # transformers patches torch while it loads: of two threads, one would miss weights


def load_model(directory: Path | str, dtype: str = "float32", attention: str = "sdpa") -> PreTrainedModel:
    """The causal language model of `directory`, in eval mode; `dtype` is a name of torch.

    Raises: ModelError: unknown dtype, or the directory holds no model that transformers can load.
    """
    if dtype not in DTYPES:
        raise ModelError("dtype", dtype, f"is not one of {', '.join(DTYPES)}", "choose one of them")
    transformers_logging.disable_progress_bar()  # type: ignore[no-untyped-call]
    try:
        with _LOADING:
            loaded: Any = AutoModelForCausalLM.from_pretrained(
                str(directory), dtype=DTYPES[dtype], attn_implementation=attention, local_files_only=True,
                output_loading_info=True, ignore_mismatched_sizes=True,
            )  # fmt: skip
    except (OSError, ValueError, KeyError, RuntimeError, ImportError, SafetensorError, StrictDataclassError) as error:
        raise ModelError(
            "model", str(directory), f"cannot be loaded ({_first_line(error)})",
            "give a Hugging Face directory of a causal language model with config.json and whole *.safetensors",
        ) from error  # fmt: skip
    model: PreTrainedModel = loaded[0]
    # transformers makes them up, at random: those of another shape, and those that are missing.
    if mismatched := sorted(loaded[1]["mismatched_keys"]):
        name, stored, asked = mismatched[0]
        raise ModelError(
            f"tensor {name}.shape", tuple(stored),
            f"in the files of {directory} must be {tuple(asked)} by its config ({len(mismatched)} weights do not fit)",
            "put the config of these weights beside them",
        )  # fmt: skip
    if missing := sorted(loaded[1]["missing_keys"]):
        raise ModelError(
            "model", str(directory), f"lacks {len(missing)} of the weights that its config asks for ({missing[0]})",
            "give a whole causal language model: config.json and *.safetensors must be of the same one",
        )  # fmt: skip
    check_finite(dict(model.named_parameters()), directory)
    model.eval()  # type: ignore[no-untyped-call]
    speed_up_linears(model)
    return model


@torch.no_grad()
def check_finite(weights: Mapping[str, torch.Tensor], directory: Path | str) -> None:
    """Raises: ModelError: one of the `weights` that were read from `directory` has numbers that are not finite."""
    for name, tensor in weights.items():
        if tensor.is_floating_point() and tensor.numel() and not torch.stack(tensor.aminmax()).isfinite().all():
            bad = int((~tensor.isfinite()).sum())
            raise ModelError(
                f"tensor {name}", "not finite",
                f"in the files of {directory} ({bad} of {tensor.numel()} numbers are NaN or infinite)",
                "give weights from before they broke, as an earlier checkpoint",
            )  # fmt: skip


def state_tensors(model: PreTrainedModel) -> dict[str, torch.Tensor]:
    """Weights by Hugging Face name, detached views of the live ones; tied weights once, under their first name."""
    found: dict[str, torch.Tensor] = {}
    seen: set[int] = set()
    for name, tensor in model.state_dict(keep_vars=True).items():  # with it, tied weights are one object
        if id(tensor) not in seen:
            found[name] = tensor.detach()
        seen.add(id(tensor))
    return found


def effective_checksum(tensors: Mapping[str, torch.Tensor], dtype: str | None = None) -> str:
    """xxh3-128 in hex over name, dtype, shape and bytes of `state_tensors`, in the order of their names.

    Args: dtype: numbers are rounded to it first, as a model of that dtype does when it loads them.
    """
    return checksum_of(((name, tensors[name]) for name in sorted(tensors)), dtype)


def content_checksum(directory: Path) -> str:
    """xxh3-128 in hex over the weights in a model directory as they are stored, one tensor at a time.

    Raises: ModelError: unreadable, or stored in another way than as safetensors.
    """
    return checksum_of(stored_tensors(directory))


def stored_tensors(directory: Path) -> Iterator[tuple[str, torch.Tensor]]:
    """The tensors that transformers would load from a model directory, as they are stored, by name, one at a time.

    Raises: ModelError: unreadable, or stored in another way than as safetensors.
    """
    try:
        paths = _weight_files(directory)
        with ExitStack() as stack:
            files = [stack.enter_context(safe_open(path, "pt")) for path in paths]
            owner = {name: file for file in files for name in file.keys()}  # noqa: SIM118 (no mapping)
            for name in sorted(owner):
                yield name, owner[name].get_tensor(name)
    except (OSError, SafetensorError, ValueError, LookupError, TypeError) as error:
        raise ModelError(
            "model", str(directory), f"cannot be read ({_first_line(error)})", "give a whole model directory"
        ) from error
    if not owner:
        raise ModelError(
            "model", str(directory), "holds no weights as safetensors",
            "convert it: AutoModelForCausalLM.from_pretrained(directory).save_pretrained(directory)",
        )  # fmt: skip


def _weight_files(directory: Path) -> list[Path]:
    """As transformers chooses them; other *.safetensors beside them are no part of the model."""
    if (whole := directory / SAFE_WEIGHTS_NAME).is_file():
        return [whole]
    if not (index := directory / SAFE_WEIGHTS_INDEX_NAME).is_file():
        return []
    return [directory / name for name in sorted(set(json.loads(index.read_bytes())["weight_map"].values()))]


def checksum_of(tensors: Iterable[tuple[str, torch.Tensor]], dtype: str | None = None) -> str:
    """As `effective_checksum`, of tensors that come in the order of their names."""
    digest = xxhash.xxh3_128()
    for name, tensor in tensors:
        tensor = tensor.detach()
        if dtype is not None and tensor.is_floating_point():
            tensor = tensor.to(DTYPES[dtype])
        flat = tensor.cpu().contiguous().reshape(-1)
        digest.update(f"{name} {tensor.dtype} {tuple(tensor.shape)}\n".encode())
        if flat.numel():
            digest.update(flat.view(torch.uint8).numpy().data)
    return digest.hexdigest()


def dtype_name(dtype: torch.dtype) -> str:
    """Inverse of `DTYPES`."""
    return next(name for name, known in DTYPES.items() if known == dtype)


@torch.no_grad()
def load_tensors(model: PreTrainedModel, tensors: Mapping[str, torch.Tensor]) -> None:
    """Copy `tensors` into the model in place, in the model's own dtype. Nothing is changed unless all of them fit.

    Raises: ModelError: a name of `state_tensors(model)` is missing or unknown, or a shape differs.
    """
    own = state_tensors(model)
    for name, tensor in tensors.items():
        if name not in own:
            near = difflib.get_close_matches(name, own, n=1)
            hint = f"did you mean '{near[0]}'?" if near else "publish this model's own weights"
            raise ModelError("tensor", name, "is not a weight of this model", hint)
        if tensor.shape != own[name].shape:
            raise ModelError(
                f"tensor {name}.shape", tuple(tensor.shape), f"must be {tuple(own[name].shape)}",
                "use the same model directory for the trainer and the engine",
            )  # fmt: skip
    missing = [name for name in own if name not in tensors]
    if missing:
        raise ModelError(
            "tensors", missing[:3], f"are missing ({len(missing)} of {len(own)})", "publish every weight of the model"
        )
    for name, tensor in tensors.items():
        own[name].copy_(tensor)


def _first_line(error: BaseException) -> str:
    """Of errors of a config the last one, which says what."""
    lines = str(error).strip().split("\n")
    return lines[-1].strip() if isinstance(error, StrictDataclassError) else lines[0]
