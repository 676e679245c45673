"""Pairs of versions measured layer type by layer type."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from itertools import pairwise
from typing import Any

from benchmarks.delta_codec import Measured, measure, pooled
from benchmarks.weights.training import Tensors, Trained

TYPES = {
    "embed_tokens": "embedding", "lm_head": "head", "q_proj": "attention q", "k_proj": "attention k",
    "v_proj": "attention v", "o_proj": "attention o", "gate_proj": "mlp gate", "up_proj": "mlp up",
    "down_proj": "mlp down",
}  # fmt: skip
"""Module, as Hugging Face names it -> layer type."""

WHOLE = "all"
OTHER = "other"


def layer_type(name: str) -> str:
    """Of a tensor by its Hugging Face name, e.g. `model.layers.0.self_attn.q_proj.weight`."""
    modules = name.split(".")[:-1]
    if modules and modules[-1].endswith("norm"):
        return "norm"
    return next((TYPES[module] for module in reversed(modules) if module in TYPES), OTHER)


def by_type(names: Iterable[str]) -> dict[str, list[str]]:
    """Layer type -> names, in the order of TYPES."""
    order = [*TYPES.values(), "norm", OTHER]
    found: dict[str, list[str]] = {}
    for name in names:
        found.setdefault(layer_type(name), []).append(name)
    return {kind: found[kind] for kind in order if kind in found}


def measure_pairs(run: Trained, versions: Sequence[Tensors], rounds: int) -> dict[str, list[Measured]]:
    """Each version against the one before it: of each layer type, and of all."""
    groups = {WHOLE: list(versions[0]), **by_type(versions[0])}
    found: dict[str, list[Measured]] = {kind: [] for kind in groups}
    for number, (old, new) in enumerate(pairwise(versions), start=1):
        print(f"{run.name}: version {number - 1} to {number}", flush=True)
        for kind, names in groups.items():
            found[kind].append(measure({n: old[n] for n in names}, {n: new[n] for n in names}, rounds))
    return found


def rows(name: str, measured: dict[str, list[Measured]]) -> list[dict[str, Any]]:
    """One row for each layer type, all pairs together; then one for each pair, of all tensors."""
    made: list[dict[str, Any]] = []
    for kind, pairs in measured.items():
        whole = pooled(pairs)
        made.append({"training": name, "layer": kind, "elements": whole.elements // len(pairs), **_means(pairs)})
    made += [
        {"training": name, "layer": f"{WHOLE}, {number - 1} to {number}", "elements": pair.elements, **pair.row()}
        for number, pair in enumerate(measured[WHOLE], start=1)
    ]
    return made


def _means(pairs: Sequence[Measured]) -> dict[str, Any]:
    """Ratios of the sums; bytes of one pair on average."""
    row = pooled(pairs).row()
    return {key: value / len(pairs) if key.endswith(" MB") else value for key, value in row.items()}
