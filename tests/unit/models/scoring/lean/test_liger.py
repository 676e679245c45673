"""Liger's kernels: where they go, and what is said where they cannot be. What they compute is tested on a GPU."""

from __future__ import annotations

import sys
import types

import pytest
import torch
from transformers import GPT2Config, GPT2LMHeadModel, PreTrainedModel, Qwen3Config, Qwen3ForCausalLM

from astraflow.config.load import check_run
from astraflow.errors import ConfigError, ModelError
from astraflow.models.scoring.forward import packed_logprobs, prepare_model
from astraflow.models.scoring.lean.layers import gated, rms_norm
from astraflow.models.scoring.lean.liger import use_liger
from astraflow.models.scoring.packing import pack_rows, rows_from_lists


def qwen3() -> PreTrainedModel:
    torch.manual_seed(0)
    shape = {
        "hidden_size": 32,
        "intermediate_size": 64,
        "num_hidden_layers": 2,
        "num_attention_heads": 4,
        "head_dim": 8,
    }
    return prepare_model(Qwen3ForCausalLM(Qwen3Config(vocab_size=61, num_key_value_heads=2, **shape)))


@pytest.fixture
def calls(monkeypatch: pytest.MonkeyPatch) -> list[tuple]:
    """The package, with the signatures of its two functions; what they were called with beside tensors."""
    seen: list[tuple] = []

    class LigerRMSNormFunction:
        @staticmethod
        def apply(X, W, eps, offset=0.0, casting_mode="llama", in_place=True, row_mode=None):
            seen.append((eps, offset, casting_mode, in_place))
            return rms_norm(X, W, eps)

    class LigerSiLUMulFunction:
        @staticmethod
        def apply(a, b, gate_multiplier=1.0, down_multiplier=1.0):
            seen.append((gate_multiplier, down_multiplier))
            return gated(a, b)

    for name, content in (
        ("liger_kernel", {}), ("liger_kernel.ops", {}),
        ("liger_kernel.ops.rms_norm", {"LigerRMSNormFunction": LigerRMSNormFunction}),
        ("liger_kernel.ops.swiglu", {"LigerSiLUMulFunction": LigerSiLUMulFunction}),
    ):  # fmt: skip
        module = types.ModuleType(name)
        vars(module).update(content)
        monkeypatch.setitem(sys.modules, name, module)
    return seen


@pytest.fixture
def on_gpu(monkeypatch: pytest.MonkeyPatch):
    """Models say that they are on one while this is used."""
    return lambda: monkeypatch.setattr(PreTrainedModel, "device", property(lambda self: torch.device("cuda")))


def test_norms_and_mlps_of_all_layers_use_it(calls, on_gpu, monkeypatch):
    (pack,) = pack_rows(rows_from_lists([(torch.arange(3, 30).numpy(), torch.arange(27).numpy() > 2)]), 100)
    model = qwen3()
    expected = packed_logprobs(model, pack, 1.0).logprobs
    assert not calls
    on_gpu()
    use_liger(model)
    monkeypatch.undo()
    found = packed_logprobs(model, pack, 1.0).logprobs
    assert torch.equal(found, expected)
    norms, mlps = [c for c in calls if len(c) == 4], [c for c in calls if len(c) == 2]
    assert len(norms) == 2 * 4 + 1 and len(mlps) == 2
    assert set(norms) == {(1e-6, 0.0, "llama", False)}
    found.sum().backward()
    assert all(parameter.grad is not None for parameter in model.parameters())


def test_without_a_gpu_it_is_refused(calls):
    with pytest.raises(ModelError, match=r"trainer.kernels=liger needs a GPU, not the device cpu; use kernels"):
        use_liger(qwen3())


def test_without_the_package_it_is_refused(on_gpu, monkeypatch):
    model = qwen3()
    monkeypatch.setitem(sys.modules, "liger_kernel", None)
    on_gpu()
    with pytest.raises(ModelError, match=r"cannot load liger-kernel .*; pip install 'astraflow\[liger\]'"):
        use_liger(model)


def test_layers_that_it_does_not_know_are_refused(calls, on_gpu):
    model = prepare_model(GPT2LMHeadModel(GPT2Config(vocab_size=61, n_embd=32, n_layer=1, n_head=2)))
    on_gpu()
    with pytest.raises(ModelError, match="finds no norm or MLP that it knows in GPT2LMHeadModel"):
        use_liger(model)


def test_a_run_file_that_asks_for_it_on_the_cpu_is_refused():
    raw = {
        "run": {"name": "r", "steps": 6},
        "sources": {"train": {"type": "calculator"}},
        "workflow": {"type": "tool_use", "environment": "calculator"},
        "policies": {"actor": {"model": "tiny-char", "trainer": {"kernels": "liger", "device": "cpu"}}},
    }
    with pytest.raises(ConfigError, match=r"policies.actor.trainer.kernels='liger' needs a GPU"):
        check_run(raw, "run file")
