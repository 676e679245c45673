"""Checkpoints: an ordinary Hugging Face directory, with all that a bit-identical continuation needs beside it.

```
<run>/checkpoints/<policy>/step-000123/
    config.json, generation_config.json, model*.safetensors, tokenizer files     loadable by any tool
    adapter/{adapter_config.json, adapter_model.safetensors}  with LoRA: as peft has it; above, it is merged
    training_state/state.json             counts, names and sizes of all files; written last
    training_state/optimizer.safetensors  moments by parameter name
    training_state/rng.safetensors        state of torch's generator
    training_state/critic.safetensors     weights and moments of the critic, only where there is one
    training_state/master.safetensors     float32 weights, only when the model is saved in bfloat16
    training_state/version-<v>.safetensors  earlier published versions that the logprob audit still needs
```
Built in `.tmp-*`, synced, renamed: what has its final name is whole, and `models.checkpoints` checks the sizes anyway.
No pickle anywhere.
"""

from __future__ import annotations

import json
import os
import shutil
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path

import msgspec
import torch
from safetensors import SafetensorError
from safetensors.torch import load_file, save_file
from torch import nn
from transformers import PreTrainedModel

from astraflow.errors import TrainingError
from astraflow.models.checkpoints import STATE, StateFile, whole_checkpoints
from astraflow.models.lora.adapter import TENSORS
from astraflow.models.lora.layers import effective_tensors, lora_tensors

KEEP = 2
ADAPTER = "adapter"
MOMENTS = ("exp_avg", "exp_avg_sq", "step")
_MODEL_FILE_SUFFIXES = (".json", ".jinja", ".txt", ".model")

Tensors = Mapping[str, torch.Tensor]


@dataclass(frozen=True)
class SavedAdapter:
    """A LoRA adapter: its tensors by peft's names, not copied, and its JSON files."""

    tensors: Tensors
    files: Sequence[Path]


@dataclass
class TrainingState:
    """What a checkpoint holds beside the model. Tensors are not copied: save before they change."""

    version: int
    step: int
    skipped: int
    skipped_in_a_row: int
    optimizer: Tensors
    audit_versions: Mapping[int, Tensors] = field(default_factory=dict)
    master: Tensors | None = None  # None: the model's own files are float32
    critic: Tensors | None = None  # None: the policy has none
    adapter: SavedAdapter | None = None  # None: all weights are trained, or (when loaded) it came with the model


def save_checkpoint(root: Path, model: PreTrainedModel, source: Path, state: TrainingState) -> Path:
    """Write `root/step-<version>` atomically and remove all but the newest `KEEP`; returns its path.

    Args: source: the directory whose tokenizer, template and generation files are copied.
    Raises: TrainingError: the disk is full or not writable; older checkpoints are untouched.
    """
    target = root / f"step-{state.version:06d}"
    building = root / f".tmp-{target.name}"
    try:
        shutil.rmtree(building, ignore_errors=True)
        (building / STATE).mkdir(parents=True)
        _write_model(building, model, source, bfloat16=state.master is not None)
        if state.adapter is not None:
            _write_adapter(building / ADAPTER, state.adapter)
        _write_state(building, state)
        old = root / f".tmp-replaced-{target.name}"
        shutil.rmtree(old, ignore_errors=True)
        if target.exists():  # a half-written one, or the same step done again after a crash
            os.rename(target, old)
        os.rename(building, target)
        _sync(root)
        shutil.rmtree(old, ignore_errors=True)
    except (OSError, SafetensorError) as error:
        shutil.rmtree(building, ignore_errors=True)
        raise TrainingError(
            "checkpoint", str(target), f"cannot be written ({_reason(error)})",
            "free disk space or choose another run.directory; earlier checkpoints are as they were",
        ) from error  # fmt: skip
    for path in whole_checkpoints(root)[:-KEEP]:
        shutil.rmtree(path, ignore_errors=True)
    return target


def save_model(target: Path, model: PreTrainedModel, source: Path) -> None:
    """A plain Hugging Face directory, replaced whole. Raises: TrainingError: it cannot be written."""
    building = target.with_name(f".tmp-{target.name}")
    try:
        shutil.rmtree(building, ignore_errors=True)
        building.mkdir(parents=True)
        _write_model(building, model, source, bfloat16=False)
        for path in building.iterdir():
            _sync(path)
        shutil.rmtree(target, ignore_errors=True)
        os.rename(building, target)
    except (OSError, SafetensorError) as error:
        shutil.rmtree(building, ignore_errors=True)
        raise TrainingError(
            "model directory",
            str(target),
            f"cannot be written ({_reason(error)})",
            "free disk space or choose another place",
        ) from error


def load_state(path: Path) -> TrainingState:
    """The training state of a checkpoint; the caller loads the model from the same directory.

    Restores torch's random state. Raises: TrainingError: unreadable.
    """
    try:
        head = msgspec.json.decode((path / STATE / "state.json").read_bytes(), type=StateFile)
        state = TrainingState(
            version=head.version,
            step=head.step,
            skipped=head.skipped,
            skipped_in_a_row=head.skipped_in_a_row,
            optimizer=load_file(path / STATE / "optimizer.safetensors"),
            audit_versions={v: load_file(path / STATE / f"version-{v}.safetensors") for v in head.audit_versions},
            master=load_file(master) if (master := path / STATE / "master.safetensors").is_file() else None,
            critic=load_file(critic) if (critic := path / STATE / "critic.safetensors").is_file() else None,
        )
        torch.set_rng_state(load_file(path / STATE / "rng.safetensors")["torch"])
    except (OSError, msgspec.DecodeError, SafetensorError, KeyError) as error:
        raise TrainingError(
            "checkpoint", str(path), f"cannot be read ({error})", "delete it to resume from the one before"
        ) from error
    return state


def model_files(directory: Path) -> list[Path]:
    """The config, tokenizer, template and generation settings of a model directory; no weights."""
    return sorted(
        path
        for path in directory.iterdir()
        if path.is_file() and path.suffix in _MODEL_FILE_SUFFIXES and not path.name.endswith(".safetensors.index.json")
    )


def optimizer_tensors(model: nn.Module, optimizer: torch.optim.Optimizer) -> dict[str, torch.Tensor]:
    """The optimizer's state as `<moment>/<parameter name>` -> tensor; empty before the first step."""
    tensors: dict[str, torch.Tensor] = {}
    for name, parameter in model.named_parameters():
        for moment, value in optimizer.state.get(parameter, {}).items():
            tensors[f"{moment}/{name}"] = value
    return tensors


def load_optimizer_tensors(
    model: nn.Module, optimizer: torch.optim.Optimizer, tensors: Mapping[str, torch.Tensor]
) -> None:
    """Inverse of `optimizer_tensors`. Raises: TrainingError: a moment is missing, unknown or of another shape."""
    trained = {name: p for name, p in model.named_parameters() if p.requires_grad}
    expected = {f"{moment}/{name}" for moment in MOMENTS for name in trained} if tensors else set()
    if different := sorted(expected ^ set(tensors)):
        raise TrainingError(
            "checkpoint.optimizer", different[0], "is missing or unknown", "resume with the model that was checkpointed"
        )
    for name, parameter in trained.items():
        if not tensors:
            continue
        state = {moment: tensors[f"{moment}/{name}"].clone() for moment in MOMENTS}
        if state["exp_avg"].shape != parameter.shape:
            raise TrainingError(
                f"checkpoint.optimizer.{name}.shape", tuple(state["exp_avg"].shape),
                f"must be {tuple(parameter.shape)}", "resume with the model that was checkpointed",
            )  # fmt: skip
        optimizer.state[parameter] = state


def _write_model(building: Path, model: PreTrainedModel, source: Path, *, bfloat16: bool) -> None:
    if lora_tensors(model):
        model.save_pretrained(building, state_dict=effective_tensors(model))
    elif bfloat16:
        tensors = {name: tensor.to(torch.bfloat16) for name, tensor in model.state_dict().items()}
        model.save_pretrained(building, state_dict=tensors)
        config = building / "config.json"  # save_pretrained writes the dtype of the live model
        config.write_text(json.dumps(json.loads(config.read_text()) | {"dtype": "bfloat16"}, indent=2) + "\n")
    else:
        model.save_pretrained(building)
    for path in model_files(source):
        if not (building / path.name).exists():
            shutil.copyfile(path, building / path.name)


def _write_adapter(folder: Path, adapter: SavedAdapter) -> None:
    folder.mkdir()
    save_file(dict(adapter.tensors), folder / TENSORS, {"format": "pt"})
    for path in adapter.files:
        shutil.copyfile(path, folder / path.name)


def _write_state(building: Path, state: TrainingState) -> None:
    folder = building / STATE
    save_file(dict(state.optimizer), folder / "optimizer.safetensors")
    save_file({"torch": torch.get_rng_state()}, folder / "rng.safetensors")
    if state.master is not None:
        save_file(dict(state.master), folder / "master.safetensors")
    if state.critic is not None:
        save_file(dict(state.critic), folder / "critic.safetensors")
    for version, tensors in state.audit_versions.items():
        save_file(dict(tensors), folder / f"version-{version}.safetensors")
    files = sorted(path for path in building.rglob("*") if path.is_file())
    for path in files:
        _sync(path)
    head = StateFile(
        version=state.version,
        step=state.step,
        skipped=state.skipped,
        skipped_in_a_row=state.skipped_in_a_row,
        audit_versions=sorted(state.audit_versions),
        files={str(path.relative_to(building)): path.stat().st_size for path in files},
    )
    (folder / "state.json").write_bytes(msgspec.json.format(msgspec.json.encode(head)))
    _sync(folder / "state.json")
    _sync(folder)
    _sync(building)


def _reason(error: OSError | SafetensorError) -> str:
    """safetensors wraps a full disk in an error of its own, which no OSError tells of."""
    return error.strerror or str(error) if isinstance(error, OSError) else str(error)


def _sync(path: Path) -> None:
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)
