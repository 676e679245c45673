from __future__ import annotations

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from astraflow.engines.local.compute.sampler import _truncated, _weights, row_key, sample, uniforms
from astraflow.errors import EngineError

ROW = np.dtype(
    [("temperature", float), ("logprob_temperature", float), ("top_p", float), ("top_k", np.int64), ("min_p", float)]
)


def rows(count: int, temperature: float = 1.0, top_p: float = 1.0, top_k: int = 0, min_p: float = 0.0) -> np.ndarray:
    return np.array([(temperature, temperature or 1.0, top_p, top_k, min_p)] * count, ROW)


def draw(logits: torch.Tensor, count: int = 20000, **settings: float) -> np.ndarray:
    keys = np.array([row_key(0, i) for i in range(count)], np.uint64)
    numbers = uniforms(keys, np.zeros(count, np.int64))
    return sample(logits.expand(count, -1), rows(count, **settings), numbers)[0]


@pytest.mark.parametrize("temperature", [0.6, 1.0, 1.4])
def test_frequencies_are_the_probabilities(temperature: float) -> None:
    logits = torch.tensor([[2.0, 0.5, -1.0, 0.0, 1.0]])
    counts = np.bincount(draw(logits, temperature=temperature), minlength=5)
    expected = torch.softmax(logits[0] / temperature, 0).numpy() * counts.sum()
    assert ((counts - expected) ** 2 / expected).sum() < 20  # chi squared, 4 degrees of freedom: p = 5e-4


def test_top_k_keeps_the_k_most_likely() -> None:
    logits = torch.tensor([[0.0, 3.0, 1.0, 2.0, -1.0]])
    assert set(draw(logits, top_k=2)) == {1, 3}
    assert set(draw(logits, top_k=1)) == {1}
    assert set(draw(logits, top_k=99)) == {0, 1, 2, 3, 4}


def test_top_p_keeps_the_smallest_set_that_reaches_p() -> None:
    logits = torch.log(torch.tensor([[0.5, 0.3, 0.15, 0.05]]))
    assert set(draw(logits, top_p=0.5)) == {0}
    assert set(draw(logits, top_p=0.51)) == {0, 1}
    assert set(draw(logits, top_p=0.9)) == {0, 1, 2}


def test_top_p_counts_what_top_k_left() -> None:
    logits = torch.log(torch.tensor([[0.4, 0.3, 0.2, 0.1]]))
    assert set(draw(logits, top_k=2, top_p=0.55)) == {0}  # 0.4 / 0.7 = 0.571


def test_min_p_keeps_what_is_near_the_most_likely() -> None:
    logits = torch.log(torch.tensor([[0.5, 0.3, 0.15, 0.05]]))
    assert set(draw(logits, min_p=0.59)) == {0, 1}
    assert set(draw(logits, min_p=0.11)) == {0, 1, 2}
    assert set(draw(logits, min_p=1.0)) == {0}
    assert set(draw(logits, min_p=0.29, top_p=0.52)) == {0}  # 0.5 / 0.95 = 0.526: top-p counts what min-p left


@pytest.mark.parametrize("settings", [{"top_p": 0.9}, {"top_k": 3000}, {"min_p": 0.2}, {"top_k": 2000, "top_p": 0.7}])
def test_a_large_vocabulary_is_cut_as_a_sort_of_all_of_it_says(settings: dict[str, float]) -> None:
    torch.manual_seed(0)
    flat = torch.randn(4, 5000) * torch.tensor([[0.1], [1.0], [3.0], [0.0]])
    ordered, order = torch.softmax(flat.double(), -1).sort(dim=-1, descending=True, stable=True)
    if top_k := int(settings.get("top_k", 0)):
        ordered[:, top_k:] = 0
    ordered = ordered * (ordered >= settings.get("min_p", 0) * ordered[:, :1])
    ordered = ordered / ordered.sum(-1, keepdim=True)
    kept = (ordered > 0) & (ordered.cumsum(-1) - ordered < settings.get("top_p", 1.0))
    for row in range(3):  # of equal logits, the last row, any may be kept
        ids = set(draw(flat[row : row + 1], 400, **settings))
        assert ids <= set(order[row][kept[row]].tolist())
    weights, _ = _weights(flat)
    cut, _ = _truncated(weights, weights.sum(-1).double(), rows(4, **settings))
    assert (cut.flatten(1) > 0).sum(-1).tolist() == pytest.approx(kept.sum(-1).tolist(), abs=1)


def test_logprobs_are_before_top_k_and_top_p() -> None:
    logits = torch.tensor([[0.0, 3.0, 1.0]])
    ids, logprobs = sample(logits, rows(1, temperature=0.5, top_k=1), np.zeros(1))
    assert logprobs[0] == pytest.approx(torch.log_softmax(logits[0] / 0.5, 0)[ids[0]].item())


def test_greedy_rows_report_temperature_one() -> None:
    logits = torch.tensor([[0.0, 3.0, 1.0]])
    ids, logprobs = sample(logits, rows(1, temperature=0.0), np.full(1, 0.999))
    assert ids.tolist() == [1]
    assert logprobs[0] == pytest.approx(torch.log_softmax(logits[0], 0)[1].item())


@given(st.lists(st.floats(-30, 30), min_size=1, max_size=20), st.floats(0, 1, exclude_max=True))
def test_a_drawn_token_is_always_possible(logits: list[float], number: float) -> None:
    ids, logprobs = sample(torch.tensor([logits]), rows(1), np.array([min(number, 1 - 2**-48)]))
    assert 0 <= ids[0] < len(logits)
    assert np.isfinite(logprobs[0])


def test_a_logit_of_minus_infinity_is_never_drawn() -> None:
    assert set(draw(torch.tensor([[-torch.inf, 0.0, -torch.inf, 0.0, -torch.inf]]))) == {1, 3}


@pytest.mark.parametrize("bad", [float("nan"), float("inf")])
@pytest.mark.parametrize("temperature", [0.0, 1.0])
def test_logits_that_are_not_finite_are_named(bad: float, temperature: float) -> None:
    with pytest.raises(EngineError, match="logits=not finite"):
        sample(torch.tensor([[0.0, bad, 1.0]]), rows(1, temperature=temperature), np.full(1, 0.5))


def test_numbers_of_a_key_depend_on_nothing_else_and_are_uniform() -> None:
    keys = np.array([row_key(1, i) for i in range(50)], np.uint64)
    steps = np.arange(200)
    table = np.stack([uniforms(keys, np.full(50, step)) for step in steps])
    np.testing.assert_array_equal(table[:, 7], uniforms(np.full(200, keys[7]), steps))
    assert abs(table.mean() - 0.5) < 0.01
    assert abs(np.corrcoef(table[:-1].ravel(), table[1:].ravel())[0, 1]) < 0.04
    assert len(np.unique(table)) == table.size


@pytest.mark.parametrize("temperature", [0.0, 0.5, 1.0, 2.0])
@pytest.mark.parametrize("told", [0.7, 1.0])
def test_logprobs_may_be_told_at_another_temperature_than_that_of_the_draw(temperature: float, told: float) -> None:
    logits = torch.tensor([[0.0, 1.0, 3.0]]).expand(3, -1)
    settings = rows(3, temperature=temperature)
    settings["logprob_temperature"][1] = told
    uniform = np.full(3, 0.4)
    ids, logprobs = sample(logits, settings, uniform)
    assert len(set(ids.tolist())) == 1  # it changes no draw
    expected = torch.log_softmax(torch.tensor([0.0, 1.0, 3.0]) / told, -1)[ids[1]]
    assert logprobs[1] == pytest.approx(float(expected), abs=1e-6)
    own = torch.log_softmax(torch.tensor([0.0, 1.0, 3.0]) / (temperature or 1), -1)[ids[0]]
    assert logprobs[0] == logprobs[2] == pytest.approx(float(own), abs=1e-6)
