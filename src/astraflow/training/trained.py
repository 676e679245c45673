"""What of a model is trained and makes up its versions: all its weights, or a LoRA adapter on a fixed base."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Protocol

import torch
from safetensors import SafetensorError
from safetensors.torch import load_file
from transformers import PreTrainedModel

from astraflow.config.schema import PolicySection
from astraflow.errors import TrainingError
from astraflow.models.load import DTYPES, content_checksum, effective_checksum, load_model, load_tensors, state_tensors
from astraflow.models.lora.adapter import BASE, CONFIG, TENSORS, read_adapter, write_adapter_files
from astraflow.models.lora.layers import add_lora, effective_tensors, load_lora, lora_tensors, peft_names
from astraflow.models.lora.merge import merged_weight
from astraflow.training.checkpoint import ADAPTER, TrainingState, model_files, write_adapter
from astraflow.training.multi.bases import Bases
from astraflow.training.parallel.loading import open_model
from astraflow.training.parallel.ranks import ALONE, Ranks, device_of
from astraflow.types import Adapter

Tensors = Mapping[str, torch.Tensor]


class Trained(Protocol):
    """A model and the part of it that versions hold."""

    model: PreTrainedModel
    files: list[Path]
    """What is published beside the tensors."""
    source: Path
    """The directory that `model` is of; of several ranks its weights are there still (`parallel.loading`)."""

    def copy(self) -> dict[str, torch.Tensor]:
        """What is trained, by its names in `model`, as published; later steps do not change it."""

    def published(self, copied: Tensors) -> Tensors:
        """`copied` under the names that a version has."""

    def whole(self, copied: Tensors) -> Tensors:
        """The whole model as of `copied`, the newest copy; later steps do not change it."""

    def effective(self, dtype: str) -> str:
        """Checksum of what an engine of `dtype` computes with under a version that is published now."""

    def master(self) -> Tensors | None:
        """`master` of a TrainingState."""

    def merged(self, version: Tensors) -> Tensors:
        """The whole model of a published version; for ranks, none of which has all of it."""

    def write(self, building: Path, version: Tensors) -> None:
        """What the checkpoint of a published version has beside the whole model."""

    def restore(self, state: TrainingState) -> None:
        """Take over `master`; the model itself was loaded from the checkpoint where that is needed."""


def load_trained(
    section: PolicySection, directory: Path, resumed: Path | None, place: Path, ranks: Ranks = ALONE,
    bases: Bases | None = None,
) -> Trained:  # fmt: skip
    """The model of a policy, as the checkpoint `resumed` left it if there is one.

    Args: directory: the policy's model. place: where the published files of an adapter are written, by rank 0. bases:
    what adapters of this process rest on; None: on a model of their own.
    Raises: ModelError, TrainingError: what cannot be loaded.
    """
    if section.lora is None:
        return WholeModel(resumed or directory, directory, section.trainer.dtype, ranks)
    return AdapterOnly(section, directory, resumed, place, ranks, bases)


class WholeModel:
    """All weights are trained and published."""

    def __init__(self, source: Path, directory: Path, dtype: str, ranks: Ranks) -> None:
        """`dtype`: of what is published; training goes on in float32."""
        self.model, self.source, self.files = open_model(source, ranks), source, model_files(directory)
        self._dtype, self._ranks = DTYPES[dtype], ranks

    def copy(self) -> dict[str, torch.Tensor]:
        """See `Trained`."""
        return {
            name: tensor.detach().to("cpu", self._dtype, copy=True)
            if tensor.is_floating_point()
            else tensor.cpu().clone()
            for name, tensor in state_tensors(self.model).items()
        }

    def published(self, copied: Tensors) -> Tensors:
        """See `Trained`."""
        return copied

    def whole(self, copied: Tensors) -> Tensors:
        """See `Trained`."""
        return copied

    def effective(self, dtype: str) -> str:
        """See `Trained`."""
        return effective_checksum(self.copy(), dtype)

    def master(self) -> Tensors | None:
        """See `Trained`. Of ranks always: another number of them rounds otherwise, and nodes have the model's files."""
        return state_tensors(self.model) if self._ranks.many or self._dtype != torch.float32 else None

    def merged(self, version: Tensors) -> Tensors:
        """See `Trained`."""
        return version

    def write(self, building: Path, version: Tensors) -> None:
        """See `Trained`."""

    def restore(self, state: TrainingState) -> None:
        """See `Trained`."""
        if state.master is not None:
            load_tensors(self.model, state.master)


class AdapterOnly:
    """A LoRA adapter in float32 on the weights of the run file's model, which stay as they are."""

    def __init__(
        self, section: PolicySection, directory: Path, resumed: Path | None, place: Path, ranks: Ranks,
        bases: Bases | None,
    ) -> None:  # fmt: skip
        assert section.lora is not None
        self.source = directory
        if bases is None:
            self.model = open_model(directory, ranks)
        else:
            packed, device = section.lora.quantize == "nf4", device_of(section.trainer.device)
            self.model = bases.open(directory, packed=packed, device=device)
        targets = add_lora(self.model, section.lora)
        if ranks.leads:
            write_adapter_files(place, section.lora, targets, section.model, content_checksum(directory))
        ranks.tell(b"" if ranks.leads else None)  # they are written
        self._adapter_files = [place / CONFIG, place / BASE]
        self.files = [*model_files(directory), *self._adapter_files]
        if resumed is not None:
            self._load(resumed)

    def copy(self) -> dict[str, torch.Tensor]:
        """See `Trained`."""
        return {name: tensor.to("cpu", copy=True) for name, tensor in lora_tensors(self.model).items()}

    def published(self, copied: Tensors) -> Tensors:
        """See `Trained`."""
        return peft_names(copied)

    def whole(self, copied: Tensors) -> Tensors:
        """See `Trained`. Merged at once: what it is of has not changed since."""
        return effective_tensors(self.model)

    def effective(self, dtype: str) -> str:
        """See `Trained`."""
        return effective_checksum(effective_tensors(self.model, DTYPES[dtype]))

    def master(self) -> Tensors | None:
        """See `Trained`."""
        return None

    def merged(self, version: Tensors) -> Tensors:
        """See `Trained`."""
        scaling = self._adapter().scaling
        base = state_tensors(load_model(self.source))
        return {name: merged_weight(name, weight, version, scaling) for name, weight in base.items()}

    def write(self, building: Path, version: Tensors) -> None:
        """See `Trained`."""
        write_adapter(building, version, self._adapter_files)

    def restore(self, state: TrainingState) -> None:
        """Nothing: the adapter came with the model."""

    def _adapter(self) -> Adapter:
        adapter = read_adapter({path.name: path.read_bytes() for path in self._adapter_files})
        assert adapter is not None
        return adapter

    def _load(self, checkpoint: Path) -> None:
        folder = checkpoint / ADAPTER
        try:
            tensors = load_file(folder / TENSORS)
            then = read_adapter({name: (folder / name).read_bytes() for name in (CONFIG, BASE)})
        except (OSError, SafetensorError) as error:
            raise TrainingError(
                "checkpoint", str(checkpoint), f"holds no adapter that can be read ({error})",
                "resume with the policies.*.lora of the run, or start a new run from it as the model",
            ) from error  # fmt: skip
        now = self._adapter()
        assert then is not None
        if then.base != now.base:
            raise TrainingError(
                "checkpoint adapter base", then.base, f"is not the model of the policy now ({now.base})",
                "put back the model that the run began with, or start a new run from the checkpoint as the model",
            )  # fmt: skip
        load_lora(self.model, tensors)
        if then.scaling != now.scaling:
            raise TrainingError(
                "policies.*.lora alpha / rank", now.scaling, f"is not that of the checkpoint ({then.scaling})",
                "resume with the policies.*.lora of the run, or start a new run from it as the model",
            )  # fmt: skip
