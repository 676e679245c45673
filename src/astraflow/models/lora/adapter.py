"""The files of a LoRA adapter, as peft reads and writes them; torch-free.

`adapter_config.json` is peft's. `adapter_base.json` beside it names the base by its content, so that an adapter is
never put on another one.
"""

from __future__ import annotations

import json
import math
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from astraflow.config.schema import LoraSection
from astraflow.errors import ModelError
from astraflow.types import Adapter

CONFIG, BASE, TENSORS = "adapter_config.json", "adapter_base.json", "adapter_model.safetensors"
PREFIX = "base_model.model."  # of the names of tensors
_FREE = frozenset((
    "task_type", "auto_mapping", "peft_version", "base_model_name_or_path", "revision", "inference_mode", "r",
    "lora_alpha", "lora_dropout", "use_rslora", "target_modules", "exclude_modules", "layers_to_transform",
    "layers_pattern", "megatron_core", "qalora_group_size",
))  # fmt: skip
"""Settings of peft that do not matter beside the tensors, or are read here. All others must have no effect."""
_PLAIN: Mapping[str, tuple[Any, ...]] = {
    "peft_type": ("LORA",), "bias": ("none", None), "init_lora_weights": (True, False, "gaussian"),
}  # fmt: skip
"""Settings with other neutral values than none, false and empty. Other ways to start an adapter change its base."""
_NEUTRAL: tuple[Any, ...] = (None, False, [], {}, "")


def write_adapter_files(
    directory: Path, section: LoraSection, targets: Sequence[str], model: str, base: str
) -> list[Path]:
    """Both JSON files of an adapter on `model`. `targets`: last parts of the names of the layers that have one."""
    directory.mkdir(parents=True, exist_ok=True)
    alpha = int(section.alpha) if section.alpha.is_integer() else section.alpha
    settings = {
        "peft_type": "LORA", "task_type": "CAUSAL_LM", "base_model_name_or_path": model, "r": section.rank,
        "lora_alpha": alpha, "lora_dropout": 0.0, "target_modules": sorted(targets), "bias": "none",
        "fan_in_fan_out": False, "inference_mode": True,
    }  # fmt: skip
    paths = []
    for name, content in ((CONFIG, settings), (BASE, {"xxh3": base})):
        paths.append(directory / name)
        paths[-1].write_text(json.dumps(content, indent=2) + "\n", encoding="utf-8")
    return paths


def read_adapter(files: Mapping[str, bytes]) -> Adapter | None:
    """What the files of a version say of its tensors; None: they are a whole model.

    Raises: ModelError: an adapter of a kind that is not merged here, or without its base.
    """
    if CONFIG not in files:
        return None
    settings = _decoded(files, CONFIG)
    for name, value in settings.items():
        allowed = _PLAIN.get(name, _NEUTRAL)
        if name not in _FREE and value not in allowed:
            raise ModelError(f"{CONFIG} {name}", value, "is not supported", f"use plain LoRA ({name}={allowed[0]!r})")
    rank: Any = settings.get("r")
    alpha: Any = settings.get("lora_alpha")
    root = settings.get("use_rslora") or False
    numbers = type(rank) is int and rank > 0 and type(alpha) in (int, float) and math.isfinite(alpha)
    if not numbers or type(root) is not bool or settings.get("peft_type") != "LORA":
        raise ModelError(
            CONFIG, f"peft_type={settings.get('peft_type')!r}, r={rank!r}, lora_alpha={alpha!r}, use_rslora={root!r}",
            "must be LORA with numbers and a flag", "write it as peft does",
        )  # fmt: skip
    base = _decoded(files, BASE).get("xxh3") if BASE in files else None
    if not isinstance(base, str) or not base:
        raise ModelError(
            BASE, base, "must name the base of the adapter", f'publish {{"xxh3": ...}} with it as {BASE}: '
            "models.load.content_checksum of the model directory",
        )  # fmt: skip
    return Adapter(alpha / (math.sqrt(rank) if root else rank), base)


def _decoded(files: Mapping[str, bytes], name: str) -> dict[str, Any]:
    try:
        content = json.loads(files[name])
    except ValueError as error:
        raise ModelError(name, str(error), "must be JSON", "publish the version again") from error
    if not isinstance(content, dict):
        raise ModelError(name, type(content).__name__, "must be an object", "publish the version again")
    return content
