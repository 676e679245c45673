from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
import torch
from tests.support.decoding import TOLERANCE, ask, decoder_of, fresh_logprobs, other_weights, run, start
from torch import nn

from astraflow.engines.local.compute import packed
from astraflow.engines.local.compute.packed import PackedLinear, held_tensors, pack
from astraflow.engines.local.weights import LiveWeights
from astraflow.models.linear import has_bfloat16, has_onednn
from astraflow.models.load import load_model, load_tensors, state_tensors

pytestmark = pytest.mark.skipif(not has_onednn(), reason="packed weights need a CPU with AVX-512")
DTYPES = ["float32", pytest.param("bfloat16", marks=pytest.mark.skipif(not has_bfloat16(), reason="no bfloat16"))]


@pytest.fixture(autouse=True)
def gains(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(packed, "prefers_onednn", lambda: True)
    monkeypatch.setattr(packed, "pays", lambda count, weight: True)


def layers(model: nn.Module) -> list[PackedLinear]:
    return [module for module in model.modules() if isinstance(module, PackedLinear)]


@pytest.mark.parametrize("dtype", DTYPES)
def test_a_packed_copy_gives_the_products_of_its_weight(endless_dir: Path, dtype: str) -> None:
    model = load_model(endless_dir, dtype).requires_grad_(False)
    pack(model)
    assert len(layers(model)) == sum(isinstance(module, nn.Linear) for module in model.modules())
    for layer in layers(model):
        layer.bias = nn.Parameter(torch.ones(layer.out_features, dtype=model.dtype))
        for shape in [(1, 3), (7,), (2, 0), (2, 40)]:
            rows = torch.randn(*shape, layer.in_features, dtype=model.dtype)
            expected = nn.functional.linear(rows, layer.weight, layer.bias)
            torch.testing.assert_close(layer(rows), expected)


def test_rows_go_on_under_new_weights(endless_dir: Path) -> None:
    decoder = decoder_of(model := load_model(endless_dir).requires_grad_(False))
    new, fresh = other_weights(endless_dir, 3), load_model(endless_dir)
    with torch.inference_mode():
        start(decoder, [ask("a", [5, 6, 7, 8, 9], 40)])
        for _ in range(9):
            decoder.step()
        load_tensors(model, new)
        decoder.renew(1)
    generation = run(decoder)["a"]
    expected = fresh_logprobs(fresh, [5, 6, 7, 8, 9], generation, 1.0)
    np.testing.assert_allclose(generation.logprobs[:9], expected[:9], atol=TOLERANCE)
    load_tensors(fresh, new)
    expected = fresh_logprobs(fresh, [5, 6, 7, 8, 9], generation, 1.0)
    np.testing.assert_allclose(generation.logprobs[9:], expected[9:], atol=TOLERANCE)


@pytest.mark.parametrize("dtype", DTYPES)
def test_a_copy_that_stayed_behind_shows_in_the_checksum(endless_dir: Path, dtype: str) -> None:
    model = load_model(endless_dir, dtype).requires_grad_(False)
    pack(model)
    weights = LiveWeights(model, endless_dir)
    said = weights.effective(1)
    assert held_tensors(model).keys() == state_tensors(model).keys()
    layer = layers(model)[1]
    with torch.no_grad():
        layer.weight[0, 0] += 1
    stale = weights.effective(1)
    pack(model)
    renewed = weights.effective(1)
    with torch.no_grad():
        layer.weight[0, 0] -= 1
    assert len({said.checksum, stale.checksum, renewed.checksum, weights.effective(1).checksum}) == 4
    assert held_tensors(model).keys() - state_tensors(model).keys(), "a copy alone, under a name of its own"
