"""A policy that several ranks train: resumed, published and saved as by one, whatever their number."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from safetensors.torch import load_file

import ranked_learners as work
from astraflow.models.checkpoints import latest_checkpoint
from astraflow.models.load import load_model, state_tensors
from astraflow.models.lora.merge import load_adapter
from astraflow.testing.engines.effective import write_model
from astraflow.weights.store import FileStore
from ranks import run_ranks

COUNTED = {"rng", "counts"}


@pytest.fixture(scope="module")
def model(tmp_path_factory):
    return write_model(tmp_path_factory.mktemp("model") / "tiny", tied=True)


def _run(num_ranks, function, place, *arguments):
    if num_ranks == 1:
        return [function(0, place, *arguments)]
    return run_ranks(num_ranks, function, place, *arguments)


def _distance(one, other):
    """Largest distance of two tensors relative to their norm; what is counted must be equal."""
    assert one.keys() == other.keys() and all(one[name] == other[name] for name in COUNTED)
    pairs = [(np.frombuffer(one[name]), np.frombuffer(other[name])) for name in one.keys() - COUNTED]
    return max(np.linalg.norm(a - b) / max(np.linalg.norm(a), 1e-12) for a, b in pairs)


def test_two_ranks_go_on_bit_for_bit(tmp_path, model):
    for differs in run_ranks(2, work.cut_and_whole, tmp_path, model):
        assert differs == {variant: [] for variant in work.VARIANTS}


@pytest.mark.parametrize(
    ("before", "after", "variant"),
    [(2, 1, "critic"), (1, 2, "critic"), (2, 3, "critic"), (2, 1, "lora"), (1, 2, "lora")],
)
def test_another_number_of_ranks_goes_on(tmp_path, model, before, after, variant):
    """Equal up to rounding only: ranks add up their gradients in another order than one does."""
    ((expected, _), *_) = _run(before, work.uninterrupted, tmp_path, model, variant)
    _run(before, work.first_half, tmp_path, model, variant)
    for state, _ in _run(after, work.second_half, tmp_path, model, variant):
        assert _distance(expected, state) < 1e-5


def test_an_adapter_of_ranks_is_published_and_saved_as_one_of_one_rank(tmp_path, model):
    states = {}
    for num_ranks in (1, 2):
        place = tmp_path / str(num_ranks)
        ((states[num_ranks], _), *_) = _run(num_ranks, work.first_half, place, model, "lora")
        path = latest_checkpoint(place / "cut" / "checkpoints" / "actor")
        published = FileStore(place / "cut" / "weights", "actor").fetch(work.SAVED)
        adapter = load_file(path / "adapter" / "adapter_model.safetensors")
        assert adapter.keys() == published.keys() and all(torch.equal(adapter[n], published[n]) for n in adapter)
        whole = load_model(model)
        load_adapter(whole, adapter, 32 / 4, {})
        merged, saved = state_tensors(whole), state_tensors(load_model(path))
        assert merged.keys() == saved.keys() and all(torch.equal(merged[n], saved[n]) for n in merged)
        assert any("lora_B" in n and t.any() for n, t in adapter.items())
    assert _distance(states[1], states[2]) < 1e-5


def test_codes_of_moments_go_on_with_another_number_of_ranks(tmp_path, model):
    """Here and there a rounding of a gradient makes a moment the next code."""
    (expected, _), *_ = _run(2, work.uninterrupted, tmp_path, model, "8 bits")
    _run(2, work.first_half, tmp_path, model, "8 bits")
    ((state, _),) = _run(1, work.second_half, tmp_path, model, "8 bits")
    assert {name for name in state if "scale" in name} == {name for name in expected if "scale" in name} != set()
    assert _distance(expected, state) < 1e-2
    weights = {name for name in state if name.startswith("weights/")} | COUNTED
    assert _distance({n: expected[n] for n in weights}, {n: state[n] for n in weights}) < 1e-3


@pytest.mark.parametrize("variant", ["float32", "bfloat16"])
def test_what_one_rank_resumes_is_what_two_saved(tmp_path, model, monkeypatch, variant):
    monkeypatch.setattr(work, "STEPS", work.SAVED)
    (expected, _), _ = run_ranks(2, work.first_half, tmp_path, model, variant)
    state, _ = work.second_half(0, tmp_path, model, variant)
    assert state == expected
    root = latest_checkpoint(tmp_path / "cut" / "checkpoints" / "actor")
    saved = state_tensors(load_model(root))
    published = FileStore(tmp_path / "cut" / "weights", "actor").fetch(work.SAVED)
    for name, tensor in saved.items():
        assert torch.equal(tensor, published[name].float())
        exact = torch.tensor(np.frombuffer(state[f"weights/{name}"]), dtype=torch.float32).reshape(tensor.shape)
        assert torch.equal(tensor, exact.to(published[name].dtype).float())


def test_versions_of_ranks_are_those_of_one(tmp_path, model):
    work.uninterrupted(0, tmp_path / "one", model, "float32")
    run_ranks(2, work.uninterrupted, tmp_path / "two", model, "float32")
    stores = [FileStore(tmp_path / name / "whole" / "weights", "actor") for name in ("one", "two")]
    for version in range(1, work.STEPS + 1):
        one, two = (store.fetch(version) for store in stores)
        assert one.keys() == two.keys()
        assert all((one[n] - two[n]).norm() <= 1e-5 * one[n].norm() + 1e-9 for n in one)


@pytest.mark.parametrize("who", [0, 1])
def test_a_full_disk_of_one_rank_is_told_to_all_and_the_older_checkpoint_stays(tmp_path, model, who):
    told = run_ranks(2, work.disk_full, tmp_path, model, who)
    assert all("No space left on device" in words for words in told)
    root = tmp_path / "run" / "checkpoints" / "actor"
    assert latest_checkpoint(root) == root / "step-000001" and [p.name for p in root.iterdir()] == ["step-000001"]


def test_a_rank_that_dies_in_a_step_is_an_error_of_the_others(tmp_path, model):
    told, code = run_ranks(2, work.dies, tmp_path, model)
    assert code == 9 and "another rank of 2=gone so this one cannot go on" in told
