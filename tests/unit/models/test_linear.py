"""The faster product gives the same numbers, whatever the CPU chose by itself."""

from __future__ import annotations

import pytest
import torch
from torch import nn

from astraflow.models import linear
from astraflow.models.linear import FastLinear, product, speed_up_linears, weight_gradient

needs_operator = pytest.mark.skipif(not torch.backends.mkldnn.is_available(), reason="torch without oneDNN")


@pytest.fixture(params=[True, False])
def fast(request, monkeypatch):
    if request.param and not torch.backends.mkldnn.is_available():
        pytest.skip("torch without oneDNN")
    monkeypatch.setattr(linear, "prefers_onednn", lambda: request.param)
    return request.param


@pytest.mark.parametrize("small", [0, 1 << 13, 1 << 21])
@pytest.mark.parametrize("rows", [1, 8, 9, 31, 127, 128, 129, 191, 192, 700])
def test_products_and_gradients_equal_the_plain_ones_for_any_number_of_rows(fast, rows, small, monkeypatch):
    torch.manual_seed(rows)
    plain = nn.Linear(24, 40, bias=True).double()
    quick = nn.Linear(24, 40, bias=True)
    quick.load_state_dict({k: v.float() for k, v in plain.state_dict().items()})
    speed_up_linears(quick)
    assert (type(quick) is FastLinear) is fast
    monkeypatch.setattr(linear, "_SMALL", small)
    x = torch.randn(rows, 24)
    a, b = x.double().requires_grad_(), x.clone().requires_grad_()
    upstream = torch.randn(rows, 40)
    expected, got = plain(a), quick(b)
    expected.backward(upstream.double())
    got.backward(upstream)
    torch.testing.assert_close(got.double(), expected, atol=1e-5, rtol=1e-5)
    torch.testing.assert_close(b.grad.double(), a.grad, atol=1e-5, rtol=1e-5)
    torch.testing.assert_close(quick.weight.grad.double(), plain.weight.grad, atol=1e-4, rtol=1e-4)
    torch.testing.assert_close(quick.bias.grad.double(), plain.bias.grad, atol=1e-4, rtol=1e-4)


def test_shapes_and_names_of_a_model_stay(fast):
    model = nn.Sequential(nn.Linear(8, 8, bias=False), nn.Linear(8, 4))
    names = list(model.state_dict())
    speed_up_linears(model)
    assert list(model.state_dict()) == names
    assert model(torch.randn(3, 70, 8)).shape == (3, 70, 4)


def test_other_dtypes_go_the_usual_way(fast):
    model = nn.Linear(16, 16)
    speed_up_linears(model)
    with torch.autocast("cpu", torch.bfloat16):
        assert model(torch.randn(256, 16)).dtype == torch.bfloat16
    rows, weight = torch.randn(256, 16, dtype=torch.bfloat16), torch.randn(8, 16, dtype=torch.bfloat16)
    assert torch.equal(product(rows, weight), nn.functional.linear(rows, weight))
    assert torch.equal(weight_gradient(rows, rows), rows.t() @ rows)


def test_the_same_rows_give_the_same_bits_again(fast):
    torch.manual_seed(0)
    rows, weight = torch.randn(300, 32), torch.randn(16, 32)
    assert torch.equal(product(rows, weight), product(rows.clone(), weight.clone()))


@needs_operator
def test_a_row_does_not_depend_on_the_padding(monkeypatch):
    monkeypatch.setattr(linear, "prefers_onednn", lambda: True)
    rows, weight = torch.randn(256, 32), torch.randn(16, 32)
    torch.testing.assert_close(product(rows[:200], weight), product(rows, weight)[:200], atol=1e-6, rtol=1e-6)
