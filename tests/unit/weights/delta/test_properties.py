"""Random models through random changes: what arrives is what was sent, bit by bit."""

from __future__ import annotations

from typing import Any

import numpy as np
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from astraflow.weights.delta.apply import apply
from astraflow.weights.delta.encode import encode
from astraflow.weights.delta.merge import merge
from astraflow.weights.delta.order import ELEMENTS
from astraflow.weights.manifest import DTYPES

Tensors = dict[str, torch.Tensor]
NAMES = ["model.embed.weight", "layers.0.norm", "layers.0.q.weight", "b", "größe", "lm_head"]
SHAPES = [(), (0,), (1,), (3, 5), (0, 4), (257,), (40, 50), (7, 1, 11)]
SPECIAL = {  # by width of a float: zeros, infinities, quiet and signalling NaNs with payloads, denormals, largest
    8: ["0" * 16, "8" + "0" * 15, "7ff0000000000000", "fff0000000000000", "7ff8000000000123", "7ff0000000000001",
        "fff8dead00000001", "0000000000000001", "800fffffffffffff", "7fefffffffffffff"],
    4: ["00000000", "80000000", "7f800000", "ff800000", "7fc00123", "7f800001", "ffc0dead", "00000001", "807fffff"],
    2: ["0000", "8000", "7f80", "ff80", "7fc1", "7f81", "ffff", "0001", "807f", "7c00", "fc00", "7e01", "7c01", "83ff"],
    1: ["00", "80", "7f", "ff", "7c", "fc", "7d", "fe", "01", "83"],
}  # fmt: skip


def fill(rng: np.random.Generator, code: str, shape: tuple[int, ...]) -> torch.Tensor:
    """Random bits with many special numbers."""
    element = ELEMENTS[code]
    count = int(np.prod(shape, dtype=int))
    raw = rng.integers(0, 256, (count, element.nbytes), dtype=np.uint8)
    if code == "BOOL":
        raw &= 1
    elif element.floating and count:
        special = np.array([int(text, 16) for text in SPECIAL[element.nbytes]], f"<u{element.nbytes}")
        chosen = rng.random(count) < 0.3
        raw[chosen] = rng.choice(special, int(chosen.sum())).view(np.uint8).reshape(-1, element.nbytes)
    dtype: torch.dtype = getattr(torch, DTYPES[code][0])
    flat = torch.from_numpy(raw.reshape(-1)).view(dtype) if count else torch.empty(0, dtype=dtype)
    return flat.view(shape)


def nudge(rng: np.random.Generator, tensor: torch.Tensor, share: float) -> torch.Tensor:
    """Some elements get other bits, often near the old ones."""
    raw = tensor.contiguous().view(-1).view(torch.uint8).numpy().copy().reshape(-1, tensor.element_size())
    chosen = np.flatnonzero(rng.random(len(raw)) < share)
    if tensor.dtype == torch.bool:
        raw[chosen] ^= 1
    else:
        raw[chosen, 0] += rng.integers(0, 4, len(chosen)).astype(np.uint8)
        wild = chosen[: len(chosen) // 4]
        raw[wild] = rng.integers(0, 256, (len(wild), raw.shape[1]), dtype=np.uint8)
    return torch.from_numpy(raw.reshape(-1)).view(tensor.dtype).view(tensor.shape)


@st.composite
def chains(draw: st.DrawFn) -> list[Tensors]:
    """Versions of a model: tensors stay, change, come, go, are renamed, resized and retyped."""
    rng = np.random.default_rng(draw(st.integers(0, 1 << 32)))
    code, shape = st.sampled_from(list(DTYPES)), st.sampled_from(SHAPES)
    names = draw(st.lists(st.sampled_from(NAMES), unique=True))
    versions = [{name: fill(rng, draw(code), draw(shape)) for name in names}]
    for _ in range(draw(st.integers(1, 4))):
        new: Tensors = {}
        for name, tensor in versions[-1].items():
            match draw(st.sampled_from(["keep", "few", "few", "half", "all", "back", "replace", "remove", "rename"])):
                case "keep":
                    new[name] = tensor
                case "few":
                    new[name] = nudge(rng, tensor, 0.03)
                case "half":
                    new[name] = nudge(rng, tensor, 0.5)
                case "all":
                    new[name] = nudge(rng, tensor, 1.0)
                case "back":
                    new[name] = versions[max(0, len(versions) - 2)].get(name, tensor)
                case "replace":
                    new[name] = fill(rng, draw(code), draw(shape))
                case "rename":
                    new[draw(st.sampled_from(NAMES))] = tensor
        if draw(st.booleans()):
            new[draw(st.sampled_from(NAMES))] = fill(rng, draw(code), draw(shape))
        versions.append(new)
    return versions


@settings(max_examples=200)
@given(chains(), st.sampled_from([1 << 11, 1 << 14, 64 << 20]))
def test_deltas_and_their_sum_lead_to_the_same_bits(codec: Any, versions: list[Tensors], part_bytes: int) -> None:
    manifests = [codec.manifest(number, tensors) for number, tensors in enumerate(versions)]
    deltas = []
    own = codec.copy(versions[0])
    for number in range(1, len(versions)):
        old, new = versions[number - 1], versions[number]
        deltas.append(list(encode(old, new, base=number - 1, version=number, part_bytes=part_bytes)))
        apply(own, deltas[-1], manifests[number - 1], manifests[number])
        assert codec.content(own) == codec.content(new)
    own = codec.copy(versions[0])
    apply(own, list(merge(deltas, part_bytes=part_bytes)), manifests[0], manifests[-1])
    assert codec.content(own) == codec.content(versions[-1])
    # A sum of sums is the sum.
    half = len(deltas) // 2
    if half:
        sums = [list(merge(deltas[:half])), list(merge(deltas[half:]))]
        own = codec.copy(versions[0])
        apply(own, list(merge(sums)), manifests[0], manifests[-1])
        assert codec.content(own) == codec.content(versions[-1])
