"""Checkpoints: an ordinary Hugging Face directory, with all that a bit-identical continuation needs beside it.

```
<run>/checkpoints/<policy>/step-000123/
    config.json, generation_config.json, model*.safetensors, tokenizer files     loadable by any tool
    adapter/{adapter_config.json, adapter_model.safetensors}  with LoRA: as peft has it; above, it is merged
    training_state/state.json             counts, names and sizes of all files; written last
    training_state/*.safetensors          tensors by the names below, in files of any name
```
| tensor                         | what                                                                            |
|--------------------------------|---------------------------------------------------------------------------------|
| `optimizer/<moment>/<name>`    | moments by parameter name                                                       |
| `rng/torch`                    | state of torch's generator                                                      |
| `master/<name>`                | float32 weights, where the model's own files may be others: bfloat16, or ranks  |
| `version-<v>/<name>`           | earlier published versions that the logprob audit still needs                   |
| `critic/<name>`                | weights and moments of the critic, where there is one                           |

One rank writes a file for each kind, several write a file each with their parts of all tensors, as
`torch.distributed.checkpoint` lays them out for safetensors: any number of ranks reads either. Built in `.tmp-*`,
synced, renamed: what has its final name is whole, and `models.checkpoints` checks the sizes anyway. No pickle anywhere.
"""

from __future__ import annotations

import json
import os
import shutil
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path

import msgspec
import torch
from safetensors import SafetensorError, safe_open
from safetensors.torch import save_file
from torch import nn
from transformers import PreTrainedModel

from astraflow.durable import sync_path
from astraflow.errors import TrainingError
from astraflow.models.checkpoints import STATE, StateFile, read_head, whole_checkpoints
from astraflow.models.load import dtype_name, state_tensors
from astraflow.models.lora.adapter import TENSORS
from astraflow.models.lora.layers import effective_tensors, lora_tensors
from astraflow.training.optimize.loss_scale import LossScale
from astraflow.training.optimize.optimizers import moments_of

ADAPTER = "adapter"
PARTS = "DCP_SHARDING_INFO"  # in the metadata of a file that one of several ranks wrote
_MODEL_FILE_SUFFIXES = (".json", ".jinja", ".txt", ".model")

Tensors = Mapping[str, torch.Tensor]
Write = Callable[[Path], None]


@dataclass
class TrainingState:
    """What a checkpoint holds beside the model. Tensors are not copied: save before they change, or give copies."""

    version: int
    step: int
    skipped: int
    skipped_in_a_row: int
    optimizer: Tensors
    rng: Tensors = field(default_factory=lambda: {"torch": torch.get_rng_state()})
    audit_versions: Mapping[int, Tensors] = field(default_factory=dict)
    master: Tensors | None = None  # None: the model's own files are float32
    loss_scale: LossScale = field(default_factory=LossScale)  # of float16
    critic: Tensors | None = None  # None: the policy has none


def named_tensors(state: TrainingState) -> dict[str, dict[str, torch.Tensor]]:
    """The tensors of the training state as they are stored, by kind."""
    kinds = {"optimizer": state.optimizer, "rng": state.rng, "master": state.master, "critic": state.critic}
    kinds |= {f"version-{version}": tensors for version, tensors in state.audit_versions.items()}
    return {
        kind: {f"{kind}/{name}": tensor for name, tensor in tensors.items()}
        for kind, tensors in kinds.items()
        if tensors is not None
    }


def save_checkpoint(
    root: Path, state: TrainingState, write_model: Write, *, write_tensors: Write | None = None, keep: int = 2
) -> Path:
    """Write `root/step-<version>` atomically and remove all but the newest `keep` (0: all stay); returns its path.

    Args: write_model: fills a directory with the Hugging Face files. write_tensors: fills a directory with the tensors
    of the training state; None: they are all in `state`.
    Raises: TrainingError: the disk is full or not writable; older checkpoints are untouched.
    """
    target = root / f"step-{state.version:06d}"
    building = root / f".tmp-{target.name}"
    try:
        shutil.rmtree(building, ignore_errors=True)
        (building / STATE).mkdir(parents=True)
        (write_tensors or partial(_write_tensors, state))(building / STATE)
        write_model(building)
        _write_head(building, state)
        old = root / f".tmp-replaced-{target.name}"
        shutil.rmtree(old, ignore_errors=True)
        if target.exists():  # a half-written one, or the same step done again after a crash
            os.rename(target, old)
        os.rename(building, target)
        sync_path(root)
        shutil.rmtree(old, ignore_errors=True)
    except (OSError, SafetensorError) as error:
        shutil.rmtree(building, ignore_errors=True)
        raise TrainingError(
            "checkpoint", str(target), f"cannot be written ({_reason(error)})",
            "free disk space or choose another run.directory; earlier checkpoints are as they were",
        ) from error  # fmt: skip
    for path in whole_checkpoints(root)[:-keep] if keep else []:
        shutil.rmtree(path, ignore_errors=True)
    return target


def save_model(target: Path, model: PreTrainedModel, source: Path) -> None:
    """A plain Hugging Face directory, replaced whole. Raises: TrainingError: it cannot be written."""
    building = target.with_name(f".tmp-{target.name}")
    try:
        shutil.rmtree(building, ignore_errors=True)
        building.mkdir(parents=True)
        write_model(building, model, effective_tensors(model) if lora_tensors(model) else state_tensors(model), source)
        for path in building.iterdir():
            sync_path(path)
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


def load_state(path: Path, read: Callable[[Path], Tensors] | None = None) -> TrainingState:
    """The training state of a checkpoint; the caller loads the model from the same directory.

    Restores torch's random state. Args: read: gives the tensors of a directory; None: all of them, whole.
    Raises: TrainingError: unreadable.
    """
    try:
        head = read_head(path)
        kinds: dict[str, dict[str, torch.Tensor]] = {}
        for stored, tensor in (read or _read_tensors)(path / STATE).items():
            kind, _, name = stored.partition("/")
            kinds.setdefault(kind, {})[name] = tensor
        state = TrainingState(
            version=head.version,
            step=head.step,
            skipped=head.skipped,
            skipped_in_a_row=head.skipped_in_a_row,
            loss_scale=LossScale(head.loss_scale, head.good_updates),
            optimizer=kinds.get("optimizer", {}),
            rng=kinds["rng"],
            audit_versions={v: kinds[f"version-{v}"] for v in head.audit_versions},
            master=kinds.get("master"),
            critic=kinds.get("critic"),
        )
        torch.set_rng_state(state.rng["torch"])
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
    moments = moments_of(optimizer)
    expected = {f"{moment}/{name}" for moment in moments for name in trained} if tensors else set()
    if different := sorted(expected ^ set(tensors)):
        raise TrainingError(
            "checkpoint.optimizer", different[0], "is missing or unknown",
            "resume with the model that was checkpointed and its optimizer.type",
        )  # fmt: skip
    for name, parameter in trained.items():
        if not tensors:
            continue
        state = {moment: tensors[f"{moment}/{name}"].to(parameter.device, copy=True) for moment in moments}
        if (found := state[moments[0]].shape) != parameter.shape:
            raise TrainingError(
                f"checkpoint.optimizer.{name}.shape", tuple(found),
                f"must be {tuple(parameter.shape)}", "resume with the model that was checkpointed",
            )  # fmt: skip
        optimizer.state[parameter] = state


def write_model(building: Path, model: PreTrainedModel, tensors: Tensors, source: Path) -> None:
    """The Hugging Face files of `model` with other `tensors` (by its names; tied ones once), in their own dtype.

    Args: source: the directory whose tokenizer, template and generation files are copied.
    """
    model.save_pretrained(building, state_dict=dict(tensors))
    dtype = dtype_name(next(t.dtype for t in tensors.values() if t.is_floating_point()))
    config = building / "config.json"  # save_pretrained writes the dtype of the live model
    config.write_text(json.dumps(json.loads(config.read_text()) | {"dtype": dtype}, indent=2) + "\n")
    for path in model_files(source):
        if not (building / path.name).exists():
            shutil.copyfile(path, building / path.name)


def write_adapter(building: Path, tensors: Tensors, files: Sequence[Path]) -> None:
    """A LoRA adapter as peft has it: its tensors by peft's names, and its JSON files."""
    folder = building / ADAPTER
    folder.mkdir()
    save_file(dict(tensors), folder / TENSORS, {"format": "pt"})
    for path in files:
        shutil.copyfile(path, folder / path.name)


def _write_tensors(state: TrainingState, folder: Path) -> None:
    for kind, tensors in named_tensors(state).items():
        save_file(tensors, folder / f"{kind}.safetensors")


def _read_tensors(folder: Path) -> dict[str, torch.Tensor]:
    """All tensors, whole; of files that ranks wrote too."""
    found: dict[str, torch.Tensor] = {}
    for path in sorted(folder.glob("*.safetensors")):
        with safe_open(path, "pt") as file:
            if is_part(file.metadata()):
                from astraflow.training.parallel.parts import read_whole  # seconds to load

                return read_whole(folder)
            found |= {name: file.get_tensor(name) for name in file.keys()}  # noqa: SIM118 (no mapping)
    return found


def is_part(metadata: Mapping[str, str] | None) -> bool:
    """These are of a file that one of several ranks wrote."""
    return PARTS in (metadata or {})


def _write_head(building: Path, state: TrainingState) -> None:
    folder = building / STATE
    files = sorted(path for path in building.rglob("*") if path.is_file())
    for path in files:
        sync_path(path)
    head = StateFile(
        version=state.version,
        step=state.step,
        skipped=state.skipped,
        skipped_in_a_row=state.skipped_in_a_row,
        loss_scale=state.loss_scale.value,
        good_updates=state.loss_scale.good_updates,
        audit_versions=sorted(state.audit_versions),
        files={str(path.relative_to(building)): path.stat().st_size for path in files},
    )
    (folder / "state.json").write_bytes(msgspec.json.format(msgspec.json.encode(head)))
    sync_path(folder / "state.json")
    sync_path(folder)
    sync_path(building)


def _reason(error: OSError | SafetensorError) -> str:
    """safetensors wraps a full disk in an error of its own, which no OSError tells of."""
    return error.strerror or str(error) if isinstance(error, OSError) else str(error)
