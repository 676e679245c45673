"""What an update costs in arithmetic, against torch's own count of it."""

from __future__ import annotations

import copy

import pytest
import torch
from torch.utils.flop_counter import FlopCounterMode

from astraflow.algorithms.losses.ppo_clip import PpoClip
from astraflow.config.schema import LoraSection
from astraflow.models.lora.layers import add_lora
from astraflow.models.scoring.packing import pack_rows
from astraflow.training.optimize.flops import StepCost, peak_tflops
from one_step import gradient_of_step, still_settings

CPU = torch.device("cpu")


@pytest.mark.parametrize("family", ["llama", "qwen3"])
@pytest.mark.parametrize("lora", [False, True], ids=["all", "lora"])
def test_the_count_is_that_of_a_plain_forward_and_backward_pass(make_model, batch, family, lora):
    """Torch counts all pairs of tokens, causal or not, and the head everywhere."""
    model = make_model(family)
    if lora:
        add_lora(model, LoraSection(rank=1))
    cost = StepCost(model)
    (pack,) = pack_rows(batch, 10_000)
    metrics, _ = gradient_of_step(copy.deepcopy(model), PpoClip(), batch, still_settings())
    counted = cost.usage({**metrics, "perf/step_s": 1e-12}, 1, None)["perf/tflops"]
    model.set_attn_implementation("eager")
    ids = torch.from_numpy(pack.token_ids[: pack.cu_lengths[1]])[None]
    with FlopCounterMode(display=False) as counter:
        model(input_ids=ids, use_cache=False).logits.sum().backward()
    length = ids.shape[1]
    ours = cost.usage(
        {"computed_tokens": length, "tokens": length, "context_tokens/mean": float(length), "perf/step_s": 1e-12},
        1,
        None,
    )["perf/tflops"]
    assert ours == pytest.approx(counter.get_total_flops(), rel=0.08)
    assert 0 < counted < ours * pack.num_tokens / length


def test_epochs_count_and_the_share_is_of_the_peak(make_model):
    cost = StepCost(make_model())
    metrics = {"computed_tokens": 100.0, "tokens": 50.0, "context_tokens/mean": 20.0, "perf/step_s": 2.0}
    once, thrice = cost.usage(metrics, 1, None), cost.usage(metrics, 3, 1.5)
    assert once.keys() == {"perf/tflops"} and thrice["perf/tflops"] == pytest.approx(3 * once["perf/tflops"])
    assert thrice["perf/mfu"] == pytest.approx(thrice["perf/tflops"] / 1.5)
    assert cost.usage(metrics | {"computed_tokens": 0.0}, 1, 1.0) == {}


def test_experts_are_not_counted(make_model):
    model = make_model()
    model.config.num_experts = 8
    assert StepCost(model).usage({"computed_tokens": 1.0}, 1, 1.0) == {}


def test_the_peak_is_the_asked_one_or_that_of_a_known_device(monkeypatch):
    assert peak_tflops(3.5, CPU, "float32") == 3.5 and peak_tflops(0.0, CPU, "bfloat16") is None
    gpu = torch.device("cuda", 0)
    for name, peak in (("NVIDIA H200", 989.0), ("NVIDIA A100-SXM4-80GB", 312.0), ("NVIDIA L4", 121.0), ("Other", None)):
        monkeypatch.setattr(torch.cuda, "get_device_name", lambda device, name=name: name)
        assert peak_tflops(0.0, gpu, "bfloat16") == peak
    assert peak_tflops(0.0, gpu, "float32") is None
