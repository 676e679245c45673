"""The node's copy of the weights, and how a vLLM worker is asked which numbers it computes with."""

from __future__ import annotations

import os
from collections.abc import Callable
from contextlib import closing
from pathlib import Path
from types import SimpleNamespace
from typing import Any, ClassVar

import pytest
import torch
from safetensors.torch import load_file, save_file
from torch import nn
from torch.nn.functional import linear

from astraflow.engines.served.shadow import Shadow
from astraflow.engines.vllm.inside.worker import WorkerExtension
from astraflow.errors import EngineError, ModelError
from astraflow.models.load import load_model, state_tensors
from astraflow.models.lora.adapter import read_adapter
from astraflow.testing.engines.effective import POLICIES, UPDATES, random_batch, run_config, write_model
from astraflow.training.learner import Learner
from astraflow.weights.client import Fetched, WeightClient


@pytest.mark.parametrize("name", ["tied", "untied", "LoRA on some layers, untied"])
@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_the_servers_weights_are_the_trainers_after_every_update(
    start: Callable[..., Any], tmp_path: Path, name: str, dtype: str
) -> None:
    model = write_model(tmp_path / "model", tied="untied" not in name)
    held: Fetched | None = None
    with (
        closing(Learner(run_config(model, POLICIES[name]), "actor", tmp_path)) as learner,
        closing(WeightClient()) as client,
    ):
        engine = start(model_dir=model, dtype=dtype).engine
        for version in range(UPDATES):
            if version:
                learner.train(random_batch(version))
            learner.flush()
            latest = learner.store.latest()
            held = client.fetch(type(latest)(latest.policy, version, latest.urls), held)
            engine.load_weights(version, held.tensors, read_adapter(held.files)).result(60)
            assert engine.effective_weights().result(60) == learner.effective_weights(dtype)


def test_the_file_holds_what_was_loaded_and_other_files_of_the_model_lie_beside_it(
    endless_dir: Path, tmp_path: Path
) -> None:
    tensors = state_tensors(load_model(endless_dir))
    shadow = Shadow(endless_dir, "bfloat16", str(tmp_path))
    try:
        assert shadow.directory.parent == tmp_path
        assert (shadow.directory / "config.json").read_bytes() == (endless_dir / "config.json").read_bytes()
        reader = load_file(shadow.path)  # as a server that has it mapped already
        twice = {name: tensor * 2 for name, tensor in tensors.items()}
        shadow.load(twice, None)
        now = load_file(shadow.path)
        assert now.keys() == tensors.keys()
        assert all(torch.equal(now[name], twice[name].bfloat16()) for name in now)
        with pytest.raises(ModelError):
            shadow.load({**tensors, "odd": torch.ones(1)}, None)
        again = load_file(shadow.path)
        assert all(torch.equal(again[name], now[name]) for name in now)
        assert reader.keys() == now.keys()
    finally:
        shadow.close()
    assert not shadow.directory.exists()


def test_copies_of_nodes_that_are_gone_are_removed(endless_dir: Path, tmp_path: Path) -> None:
    gone, mine, foreign = (tmp_path / f"astraflow-served-{pid}-x" for pid in (2**22 + 5, os.getpid(), "odd"))
    for place in (gone, mine, foreign):
        place.mkdir()
    Shadow(endless_dir, "float32", str(tmp_path)).close()
    assert [place.exists() for place in (gone, mine, foreign)] == [False, True, True]


def test_a_place_that_is_none_or_has_no_room(
    endless_dir: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    with pytest.raises(EngineError, match=r"engine.share=.* is no directory"):
        Shadow(endless_dir, "float32", str(tmp_path / "missing"))
    monkeypatch.setattr("shutil.disk_usage", lambda _: SimpleNamespace(free=1000))
    with pytest.raises(EngineError, match="has no room"):
        Shadow(endless_dir, "float32", str(tmp_path))


class Method:
    """As vLLM's `quant_method` on a CPU: it computes with what was packed, not with the parameter."""

    def apply(self, layer: Any, rows: torch.Tensor, bias: None) -> torch.Tensor:
        result: torch.Tensor = layer.cpu_linear(rows, layer.weight, bias)
        return result


class Layer(nn.Module):
    """A layer whose kernel has its own copy of the weight."""

    quant_method, params_dtype = Method(), torch.float32

    def __init__(self, weight: torch.Tensor | nn.Parameter, *, keep: bool, sizes: tuple[int, ...] = ()) -> None:
        super().__init__()
        held = weight if isinstance(weight, nn.Parameter) else nn.Parameter(weight.clone(), requires_grad=False)
        self.weight = held if keep else nn.Parameter(torch.empty(0), requires_grad=False)
        self.pack(weight)
        self.output_sizes, self.input_size_per_partition = list(sizes), weight.shape[1]

    def pack(self, weight: torch.Tensor) -> None:
        """The kernel takes another weight."""
        copy = weight.detach().clone()
        self.cpu_linear = lambda rows, _, bias: linear(rows, copy, bias)


class Packed(nn.Module):
    """Names as in vLLM: q, k and v in one, the output layer tied to the embedding."""

    packed_modules_mapping: ClassVar = {"qkv_proj": ["q_proj", "k_proj", "v_proj"]}

    def __init__(self, tensors: dict[str, torch.Tensor]) -> None:
        super().__init__()
        self.embed = Layer(nn.Parameter(torch.cat([tensors["embed.weight"], torch.zeros(3, 700)])), keep=True)
        self.lm_head = Layer(self.embed.weight, keep=True)
        whole = torch.cat([tensors[f"attn.{part}_proj.weight"] for part in "qkv"])
        self.attn = nn.Module()
        self.attn.qkv_proj = Layer(whole, keep=False, sizes=(6, 2, 2))
        self.norm = nn.LayerNorm(700, bias=False)


@pytest.fixture
def packed(tmp_path: Path) -> tuple[WorkerExtension, Packed, str]:
    draw = torch.Generator().manual_seed(0)
    tensors = {
        name: torch.randn(*shape, generator=draw)
        for name, shape in {
            "embed.weight": (9, 700), "attn.q_proj.weight": (6, 700), "attn.k_proj.weight": (2, 700),
            "attn.v_proj.weight": (2, 700),
        }.items()
    }  # fmt: skip
    model = Packed(tensors)
    save_file({**tensors, "norm.weight": torch.ones(700)}, tmp_path / "w.safetensors")
    worker = WorkerExtension()
    worker.model_runner = SimpleNamespace(get_model=lambda: model)
    worker.parallel_config = SimpleNamespace(world_size=1)
    return worker, model, str(tmp_path / "w.safetensors")


def test_weights_that_only_kernels_hold_are_read_back(packed: tuple[WorkerExtension, Packed, str]) -> None:
    worker, _, path = packed
    assert worker.astraflow_differences(path) == {"compared": 5, "differing": [], "unknown": []}


def test_a_kernel_with_older_weights_is_seen(packed: tuple[WorkerExtension, Packed, str]) -> None:
    worker, model, path = packed
    model.lm_head.pack(model.embed.weight * 1.01)  # tied, and its kernel stayed behind
    assert worker.astraflow_differences(path)["differing"] == ["embed.weight"]
    model.lm_head.pack(model.embed.weight)
    with torch.no_grad():
        model.norm.weight[5] += 1e-6
    assert worker.astraflow_differences(path)["differing"] == ["norm.weight"]


def test_what_has_no_known_place_is_said(packed: tuple[WorkerExtension, Packed, str]) -> None:
    worker, model, path = packed
    del model.attn
    assert worker.astraflow_differences(path)["unknown"] == [f"attn.{part}_proj.weight" for part in "kqv"]
    worker.parallel_config.world_size = 2
    assert worker.astraflow_differences(path)["compared"] == 0
