"""Which layers `lora.targets` names; torch-free, so that a run file is checked before anything is loaded."""

from __future__ import annotations

import difflib
from collections.abc import Iterable, Mapping

from astraflow.errors import ModelError

ALL_LINEAR = "all-linear"
BUILT_IN_LAYERS = ("q_proj", "k_proj", "v_proj", "o_proj", "gate_proj", "up_proj", "down_proj")
"""The linear layers of the built-in models, which need not be on this machine."""
_TABLES = frozenset(("embed_tokens", "wte", "wpe", "lm_head"))  # stored like linear layers
_PATTERN = frozenset("*+?|^$()[]\\")


def matching(target: str, layers: Iterable[str]) -> list[str]:
    """Those of `layers` (dotted names of linear layers) that `target` names. Raises: ModelError: none."""
    layers = list(layers)
    if target == ALL_LINEAR and layers:
        return layers
    found = [name for name in layers if name == target or name.endswith(f".{target}")]
    if not found:
        known = sorted({name.rpartition(".")[2] for name in layers})
        near = difflib.get_close_matches(target, known, n=1)
        hint = "give names, no patterns; " if _PATTERN & set(target) else ""
        hint += f"did you mean '{near[0]}'? known: " if near else "known: "
        raise ModelError(
            "lora.targets", target, "is no linear layer of this model (its output layer is left out)",
            f"{hint}{', '.join(known) or 'none'}, or {ALL_LINEAR}",
        )  # fmt: skip
    return found


def stored_layers(shapes: Mapping[str, tuple[int, ...]]) -> list[str]:
    """What may be linear layers among stored weights: matrices that are neither embeddings nor the output layer."""
    matrices = [name.removesuffix(".weight") for name, shape in shapes.items() if len(shape) == 2]
    return [name for name in matrices if name.rpartition(".")[2] not in _TABLES]
