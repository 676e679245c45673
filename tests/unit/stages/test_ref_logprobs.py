"""Reference logprobs: equal to a plain forward pass of the whole sequence, at the run's temperature, forks included."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pytest
import torch
from transformers import AutoModelForCausalLM, FalconConfig

from astraflow.config.schema import LoraSection, RunConfig
from astraflow.errors import ModelError, Problem
from astraflow.models.load import load_model, state_tensors
from astraflow.models.lora.layers import add_lora, lora_tensors, peft_names
from astraflow.models.tiny_char import write_tiny_char
from astraflow.stages.context import StageRun, build_stage
from astraflow.testing.dataflow import small_config
from astraflow.types import WeightVersion
from astraflow.weights.plan import Pins
from astraflow.weights.store import FileStore


@pytest.fixture(autouse=True)
def one_thread() -> None:
    torch.set_num_threads(1)


@pytest.fixture(scope="module")
def directory(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("model") / "tiny-char"
    write_tiny_char(path, 0)
    return path


def config_of(directory: Path, temperature: float = 1.0, **more: Any) -> RunConfig:
    policy = {"model": str(directory), "sampling": {"temperature": temperature}}
    sources = {"warm": {"type": "sums", "demos": True}, "train": {"type": "sums"}}
    return small_config(
        policies={"actor": {**policy, **more}, "other": policy},
        stages={"ref": {"type": "ref_logprobs"}},
        sources=sources,
    )


def rows_of(*rows: tuple[list[int], list[bool], int, int, str]) -> pa.Table:
    """(ids, sampled, parent, fork_at, policy) of one episode per policy, branch by branch."""
    branches: dict[str, int] = {}
    numbers = []
    for *_, policy in rows:
        numbers.append(branches.get(policy, 0))
        branches[policy] = numbers[-1] + 1
    return pa.table(
        {
            "episode_id": ["e"] * len(rows),
            "policy": [r[4] for r in rows],
            "branch": pa.array(numbers, pa.int32()),
            "parent_branch": pa.array([r[2] for r in rows], pa.int32()),
            "fork_at": pa.array([r[3] for r in rows], pa.int32()),
            "token_ids": pa.array([r[0] for r in rows], pa.list_(pa.int32())),
            "loss_mask": pa.array([r[1] for r in rows], pa.list_(pa.bool_())),
        }
    )


def plain(directory: Path, path: list[int], temperature: float) -> np.ndarray:
    """[T] logprob of each token but the first, of a whole sequence."""
    model = load_model(directory)
    with torch.inference_mode():
        logits = model(input_ids=torch.tensor([path])).logits[0, :-1].float() / temperature
    picked = logits.log_softmax(-1).gather(1, torch.tensor(path[1:])[:, None])[:, 0]
    return np.concatenate([[0.0], picked.numpy()])


@pytest.mark.parametrize("temperature", [0.6, 1.0, 1.4])
def test_they_equal_a_plain_forward_pass(directory: Path, temperature: float) -> None:
    stage = build_stage(StageRun(config_of(directory, temperature), "ref", threads=1))
    first, second = [1, 5, 9, 12, 7, 2], [4, 4, 8]
    table = rows_of(
        (first, [False, False, True, True, False, True], -1, 0, "actor"),
        (second, [False, True, True], 0, 4, "actor"),  # after the first four tokens of the other branch
        ([1, 3], [False, True], -1, 0, "other"),
    )
    values = stage.run(table).column("ref_logprobs").to_pylist()
    whole, fork = plain(directory, first, temperature), plain(directory, first[:4] + second, temperature)
    assert np.allclose(values[0], np.where([0, 0, 1, 1, 0, 1], whole, 0.0), atol=1e-5)
    assert np.allclose(values[1], np.where([0, 1, 1], fork[4:], 0.0), atol=1e-5)
    assert np.allclose(values[2], [0.0, plain(directory, [1, 3], temperature)[1]], atol=1e-5)
    assert str(stage.run(table).schema.field("ref_logprobs").type) == "list<item: float>"


def test_after_a_warm_start_the_reference_is_version_0(directory: Path, tmp_path: Path) -> None:
    model = load_model(directory)
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.mul_(1.5)
    store = FileStore(tmp_path, "actor", keep=1, durable=False, pins=Pins(frozenset({0})))
    store.publish(0, state_tensors(model))
    for version in (1, 2, 3):
        store.publish(version, state_tensors(load_model(directory)))
    assert store.versions() == [0, 3], "version 0 stays"
    config = config_of(directory, warm_start={"source": "warm", "steps": 1})
    run = StageRun(config, "ref", threads=1)
    run.hear({"actor": WeightVersion("actor", 3, (store.url,))})
    stage = build_stage(run)
    ids, mask = [1, 5, 9, 12], [False, True, True, True]
    got = stage.run(rows_of((ids, mask, -1, 0, "actor"))).column("ref_logprobs").to_pylist()[0]
    with torch.inference_mode():
        logits = model(input_ids=torch.tensor([ids])).logits[0, :-1].float().log_softmax(-1)
    assert np.allclose(got[1:], logits.gather(1, torch.tensor(ids[1:])[:, None])[:, 0].numpy(), atol=1e-5)
    stage.close()


@pytest.mark.parametrize("options", [{"tokens_per_pass": 0}, {"dtype": "int8"}])
def test_options_are_refused_by_name(directory: Path, options: dict[str, Any]) -> None:
    config = small_config(stages={"ref": {"type": "ref_logprobs", **options}})
    with pytest.raises(Problem, match=rf"stages\.ref\.{next(iter(options))}="):
        build_stage(StageRun(config, "ref"))


def test_the_reference_of_an_adapter_is_its_version_0(directory: Path, tmp_path: Path) -> None:
    section = LoraSection(rank=2, alpha=3.0)
    model = load_model(directory)
    add_lora(model, section)
    with torch.no_grad():
        for tensor in lora_tensors(model).values():
            tensor.normal_(0, 0.3)
    store = FileStore(tmp_path, "actor", durable=False)
    store.publish(0, peft_names(lora_tensors(model)))
    config = config_of(directory, warm_start={"source": "warm", "steps": 1}, lora={"rank": 2, "alpha": 3.0})
    run = StageRun(config, "ref", threads=1)
    run.hear({"actor": WeightVersion("actor", 0, (store.url,))})
    stage = build_stage(run)
    ids, mask = [1, 5, 9, 12], [False, True, True, True]
    got = stage.run(rows_of((ids, mask, -1, 0, "actor"))).column("ref_logprobs").to_pylist()[0]
    with torch.inference_mode():
        logits = [
            m(input_ids=torch.tensor([ids])).logits[0, :-1].log_softmax(-1) for m in (model, load_model(directory))
        ]
    ours, plain = (each.gather(1, torch.tensor(ids[1:])[:, None])[:, 0].numpy() for each in logits)
    assert np.allclose(got[1:], ours, atol=1e-5)
    assert not np.allclose(ours, plain, atol=1e-2)
    stage.close()


def test_a_model_that_packs_would_score_wrongly_is_refused(directory: Path, tmp_path: Path) -> None:
    sizes = {"vocab_size": 62, "hidden_size": 32, "num_hidden_layers": 2, "num_attention_heads": 4}
    torch.manual_seed(1)
    model = AutoModelForCausalLM.from_config(FalconConfig(**sizes, alibi=True, bos_token_id=1, eos_token_id=1))
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.normal_(0, 0.3)
    write_tiny_char(tmp_path, 0)
    (tmp_path / "config.json").unlink()
    model.save_pretrained(tmp_path)
    config = small_config(
        policies={"actor": {"model": str(directory)}}, sources={"train": {"type": "sums"}},
        stages={"ref": {"type": "ref_logprobs", "model": str(tmp_path)}},
    )  # fmt: skip
    stage = build_stage(StageRun(config, "ref", threads=1))
    with pytest.raises(ModelError, match="gives other logprobs packed than alone"):
        stage.run(rows_of(([1, 5, 9], [False, True, True], -1, 0, "actor")))
