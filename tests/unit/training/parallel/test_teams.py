"""Ranks that compute a pack together: steps, checkpoints and versions are those of one rank."""

from __future__ import annotations

import numpy as np
import pytest
import torch

import ranked_learners as work
import ranked_steps
from astraflow.errors import ModelError, TrainingError
from astraflow.models.checkpoints import latest_checkpoint
from astraflow.models.load import load_model, state_tensors
from astraflow.models.stored import check_parts
from astraflow.testing.engines.effective import write_model
from astraflow.training.parallel.ranks import Ranks
from astraflow.weights.store import FileStore
from ranks import run_ranks

LLAMA = {"num_attention_heads": 12, "num_key_value_heads": 4, "intermediate_size": 24}
FEW = ("PpoClip token", "M2po sequence", "one row", "updates")
MORE = (*FEW, "a pack for each row", "entropy and z-loss", "kl in the reward", "a long row and short ones")


@pytest.mark.parametrize(
    ("family", "data", "tensor", "context", "names"),
    [
        ("llama", 1, 2, 1, MORE),
        ("qwen3", 1, 1, 2, MORE),
        ("gpt2", 1, 1, 2, FEW),
        ("qwen3", 1, 2, 2, FEW),
        ("llama", 1, 1, 4, FEW),  # more ranks than key-value heads
        ("qwen3", 2, 2, 1, FEW),
    ],
)
def test_gradients_and_metrics_do_not_depend_on_the_layout(tmp_path, family, data, tensor, context, names):
    for found in run_ranks(data * tensor * context, ranked_steps.compared, tmp_path, family, tensor, context, names):
        assert found.keys() == {*names}
        assert {name: distance for name, (distance, _) in found.items() if not distance < 2e-6} == {}
        assert {name: metrics for name, (_, metrics) in found.items() if metrics} == {}


@pytest.mark.parametrize(("tensor", "context"), [(2, 1), (1, 2)])
def test_each_gradient_and_one_step_of_the_optimizer_are_those_of_one_rank(tmp_path, tensor, context):
    for found in run_ranks(2, ranked_steps.stepped, tmp_path, "qwen3", tensor, context):
        assert {name: far for name, far in found.items() if not max(far) < 1e-5} == {}


@pytest.fixture(scope="module")
def model(tmp_path_factory):
    return write_model(tmp_path_factory.mktemp("model") / "tiny", tied=True)


@pytest.fixture(scope="module")
def expected(tmp_path_factory, model):
    state, _ = work.uninterrupted(0, tmp_path_factory.mktemp("one"), model, "plain")
    return state


def _run(num_ranks, function, place, *arguments):
    return [function(0, place, *arguments)] if num_ranks == 1 else run_ranks(num_ranks, function, place, *arguments)


@pytest.mark.parametrize(
    ("before", "after"),
    [((2, "tensor"), (1, "plain")), ((1, "plain"), (2, "tensor")), ((2, "tensor"), (2, "context"))],
)
def test_another_layout_goes_on(tmp_path, model, expected, before, after):
    """Rounding differs from the first gradient on; the steps of AdamW make more of it where gradients are small."""
    (num_ranks, variant), (num_after, variant_after) = before, after
    _run(num_ranks, work.first_half, tmp_path, model, variant)
    whole = latest_checkpoint(tmp_path / "cut" / "checkpoints" / "actor")
    assert {name: t.shape for name, t in state_tensors(load_model(whole)).items()} == {
        name: t.shape for name, t in state_tensors(load_model(model)).items()
    }
    for state, _ in _run(num_after, work.second_half, tmp_path, model, variant_after):
        assert state.keys() == expected.keys() and state["rng"] == expected["rng"]
        pairs = {name: (np.frombuffer(state[name]), np.frombuffer(value)) for name, value in expected.items()}
        far = {name: np.linalg.norm(a - b) / max(np.linalg.norm(b), 1e-12) for name, (a, b) in pairs.items()}
        assert {name: distance for name, distance in far.items() if not distance < 1e-4} == {}


@pytest.mark.parametrize("layout", ["tensor", "critic in context"])
def test_the_same_layout_goes_on_bit_for_bit(tmp_path, model, layout):
    run_ranks(2, work.first_half, tmp_path, model, layout)
    ((state, metrics), _) = run_ranks(2, work.second_half, tmp_path, model, layout)
    ((one, of_one), _) = run_ranks(2, work.uninterrupted, tmp_path, model, layout)
    assert [name for name in one if state[name] != one[name]] == [] and metrics == of_one


def test_a_checkpoint_of_parts_is_the_version_that_was_published(tmp_path, model):
    run_ranks(2, work.first_half, tmp_path, model, "tensor")
    saved = state_tensors(load_model(latest_checkpoint(tmp_path / "cut" / "checkpoints" / "actor")))
    published = FileStore(tmp_path / "cut" / "weights", "actor").fetch(work.SAVED)
    assert saved.keys() == published.keys() and all(torch.equal(saved[name], published[name]) for name in saved)


@pytest.mark.parametrize(
    ("change", "tensor", "context", "said"),
    [
        ({}, 5, 1, r"trainer.tensor_parallel \* trainer.context_parallel=5 does not divide the 12 attention heads"),
        ({}, 6, 1, r"trainer.tensor_parallel=6 does not divide the 4 key-value heads"),
        ({"intermediate_size": 25}, 2, 1, r"tensor_parallel=2 does not divide .* MLP's 25 columns"),
        ({}, 1, 6, r"context_parallel=6 neither divides the 4 key-value heads that a rank has nor is a multiple"),
        ({}, 2, 3, r"context_parallel=3 neither divides the 2 key-value heads"),
    ],
)
def test_a_model_that_cannot_be_divided_is_refused(change, tensor, context, said):
    with pytest.raises(ModelError, match=said):
        check_parts(LLAMA | change, tensor, context)
    with pytest.raises(ModelError, match=said):
        check_parts({"text_config": LLAMA | change}, tensor, context)


@pytest.mark.parametrize(("tensor", "context"), [(1, 1), (2, 2), (4, 3), (1, 12), (4, 1)])
def test_a_model_that_can_be_divided_is_not(tensor, context):
    check_parts(LLAMA, tensor, context)
    check_parts({"n_head": 12}, 1, 4)


def test_layers_without_a_plan_are_refused(tmp_path):
    for said in run_ranks(2, ranked_steps.refused, tmp_path, "gpt2", 2, 1):
        assert "model=GPT2LMHeadModel has no plan for tensor parallelism that is known here" in said


def test_ranks_that_are_no_teams_are_refused():
    with pytest.raises(TrainingError, match=r"ranks=4 must be a multiple of trainer.tensor_parallel=3"):
        Ranks(0, 4, 3)
