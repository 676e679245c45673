"""A model directory that is broken is named by the file and what is wrong with it, before anything is loaded."""

from __future__ import annotations

import json
import os
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import save_file
from transformers import (
    AutoModelForCausalLM,
    GPT2Config,
    LlamaConfig,
    OPTConfig,
    PreTrainedConfig,
    Qwen2Config,
)

from astraflow.errors import ModelError
from astraflow.models.load import load_model, state_tensors
from astraflow.models.registry import model_directory
from astraflow.models.stored import difference, stored_shapes
from astraflow.models.tiny_char import write_tiny_char


@pytest.fixture(scope="module")
def whole(tmp_path_factory: pytest.TempPathFactory) -> Path:
    directory = tmp_path_factory.mktemp("model") / "whole"
    write_tiny_char(directory, 0)
    return directory


@pytest.fixture
def model(whole: Path, tmp_path: Path) -> Path:
    """A copy to be broken."""
    return Path(shutil.copytree(whole, tmp_path / "model"))


def edit(path: Path, change: Callable[[Any], Any]) -> None:
    path.write_text(json.dumps(change(json.loads(path.read_text()))))


def shard(directory: Path) -> None:
    """As save_pretrained does with a large model."""
    AutoModelForCausalLM.from_pretrained(directory).save_pretrained(directory / "cut", max_shard_size="300KB")
    (directory / "model.safetensors").unlink()
    for path in (directory / "cut").glob("model*"):
        path.rename(directory / path.name)


def test_shapes_are_those_of_the_loaded_model(model: Path) -> None:
    expected = {name: tuple(t.shape) for name, t in state_tensors(load_model(model)).items()}
    assert stored_shapes(model) == expected
    shard(model)
    assert len(list(model.glob("model-*.safetensors"))) > 1 and stored_shapes(model) == expected
    assert model_directory(str(model), model, 0) == model


@pytest.mark.parametrize("name", ["config.json", "tokenizer.json"])
@pytest.mark.parametrize(
    ("content", "rule"), [("{", "is not JSON"), ("[]", "holds no JSON object"), ("\ud8ff", "is not JSON")]
)
def test_a_file_that_is_no_json_is_named(model: Path, name: str, content: str, rule: str) -> None:
    (model / name).write_bytes(content.encode("utf-8", "surrogatepass"))
    with pytest.raises(ModelError, match=rf"{name} {rule}"):
        model_directory(str(model), model, 0)


@pytest.mark.parametrize("left", [0, 5, 100, -1])
def test_weights_that_were_cut_off_are_named_with_their_size(model: Path, left: int) -> None:
    path = model / "model.safetensors"
    size = path.stat().st_size
    os.truncate(path, left if left >= 0 else size + left)
    with pytest.raises(ModelError, match=rf"model.safetensors (has {left % size} of|is no safetensors)"):
        model_directory(str(model), model, 0)


def test_a_shard_that_is_missing_or_cut_is_named(model: Path) -> None:
    shard(model)
    second = sorted(model.glob("model-*.safetensors"))[1]
    os.truncate(second, second.stat().st_size - 7)
    with pytest.raises(ModelError, match=rf"{second.name} has \d+ of \d+ bytes"):
        model_directory(str(model), model, 0)
    second.unlink()
    with pytest.raises(ModelError, match=rf"{second.name} cannot be read \(No such file"):
        model_directory(str(model), model, 0)


def test_weights_of_another_name_are_refused(model: Path) -> None:
    (model / "model.safetensors").rename(model / "weights.safetensors")
    with pytest.raises(ModelError, match=r"holds neither model.safetensors nor model.safetensors.index.json"):
        model_directory(str(model), model, 0)


def test_what_is_no_safetensors_is_named(model: Path) -> None:
    (model / "model.safetensors").write_bytes((4).to_bytes(8, "little") + b"oops" + bytes(100))
    with pytest.raises(ModelError, match=r"model.safetensors is no safetensors file"):
        model_directory(str(model), model, 0)


@pytest.mark.parametrize("where", ["vocab", "added_tokens"])
def test_a_tokenizer_with_more_tokens_than_the_model_is_refused(model: Path, where: str) -> None:
    def grow(tokenizer: Any) -> Any:
        if where == "vocab":
            tokenizer["model"]["vocab"]["new"] = 62
        else:
            tokenizer["added_tokens"].append({**tokenizer["added_tokens"][0], "id": 62, "content": "new"})
        return tokenizer

    edit(model / "tokenizer.json", grow)
    with pytest.raises(ModelError, match=r"has tokens up to 62, but the model only has 62.*own tokenizer"):
        model_directory(str(model), model, 0)


def test_a_config_of_another_model_is_refused(model: Path) -> None:
    edit(model / "config.json", lambda config: config | {"vocab_size": 99})
    with pytest.raises(ModelError, match=r"vocab_size=99 is more than the 62 rows of model.embed_tokens.weight"):
        model_directory(str(model), model, 0)


@pytest.mark.parametrize(
    ("change", "what"),
    [
        ({"hidden_size": 64}, r"embed_tokens.weight.shape=\(62, 128\) .* must be \(62, 64\)"),
        ({"intermediate_size": 32}, r"layers.0.mlp.\w+.weight.shape=.* must be .*32"),
        ({"num_key_value_heads": 1}, r"layers.0.self_attn.k_proj.weight.shape=\(64, 128\) .* must be \(32, 128\)"),
        ({"head_dim": 16}, r"layers.0.self_attn.\w+.weight.shape="),
    ],
)
def test_a_config_whose_sizes_are_others_is_refused_by_the_name_of_a_weight(
    model: Path, change: dict[str, Any], what: str
) -> None:
    edit(model / "config.json", lambda config: config | change)
    with pytest.raises(ModelError, match=f"tensor model.{what}"):
        model_directory(str(model), model, 0)
    with pytest.raises(ModelError, match=f"tensor model.{what}"):
        load_model(model)


def test_a_config_with_more_layers_is_refused_by_the_name_of_what_is_missing(model: Path) -> None:
    more = {"num_hidden_layers": 3, "layer_types": ["full_attention"] * 3}
    edit(model / "config.json", lambda config: config | more)
    with pytest.raises(ModelError, match=r"tensor model.layers.2.self_attn.q_proj.weight=missing"):
        model_directory(str(model), model, 0)
    with pytest.raises(ModelError, match=r"lacks \d+ of the weights .*model.layers.2"):
        load_model(model)


def test_a_config_that_contradicts_itself_is_refused(model: Path) -> None:
    edit(model / "config.json", lambda config: config | {"layer_types": ["full_attention"]})
    with pytest.raises(ModelError, match=r"cannot be loaded .*`layer_types` \(1\)"):
        load_model(model)


@pytest.mark.parametrize(
    "make",
    [
        lambda: OPTConfig(
            vocab_size=62, hidden_size=32, ffn_dim=16, num_hidden_layers=1, num_attention_heads=2, word_embed_proj_dim=8
        ),
        lambda: GPT2Config(vocab_size=62, n_embd=32, n_layer=1, n_head=2),
        lambda: LlamaConfig(
            vocab_size=62, hidden_size=32, intermediate_size=16, num_hidden_layers=1, num_attention_heads=4,
            num_key_value_heads=1,
        ),
        lambda: Qwen2Config(
            vocab_size=62, hidden_size=32, intermediate_size=16, num_hidden_layers=1, num_attention_heads=4,
            num_key_value_heads=2,
        ),
    ],
)  # fmt: skip
def test_models_that_fit_are_let_through(model: Path, make: Callable[[], PreTrainedConfig]) -> None:
    AutoModelForCausalLM.from_config(make()).save_pretrained(model)
    assert model_directory(str(model), model, 0) == model


@pytest.mark.parametrize("value", [float("nan"), float("inf")])
@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_weights_that_are_not_finite_are_named_when_they_are_loaded(model: Path, value: float, dtype: str) -> None:
    broken = AutoModelForCausalLM.from_pretrained(model)
    with torch.no_grad():
        broken.model.layers[1].mlp.up_proj.weight[3, 4] = value
    broken.save_pretrained(model)
    with pytest.raises(ModelError, match=r"tensor model.layers.1.mlp.up_proj.weight=not finite .*\(1 of 49152 numbers"):
        load_model(model, dtype)


def test_a_directory_that_may_not_be_read_is_named(model: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(path: object) -> list[str]:
        raise PermissionError(13, "Permission denied")

    monkeypatch.setattr(os, "listdir", refuse)
    with pytest.raises(ModelError, match=r"model=.* cannot be read \(Permission denied\)"):
        model_directory(str(model), model, 0)


def test_models_differ_in_shapes_and_names_but_not_in_tied_heads() -> None:
    one = {"a.weight": (2, 3), "b.weight": (3,)}
    assert difference(one, one) is None
    assert difference(one, {**one, "lm_head.weight": (9, 2)}) is None
    assert difference(one, {**one, "a.weight": (2, 4)}) == "a.weight is (2, 3), not (2, 4)"
    assert difference(one, {"a.weight": (2, 3)}) == "b.weight is (3,), not missing"
    assert difference({"lm_head.weight": (1, 2)}, {"lm_head.weight": (2, 2)}) is not None


def test_an_empty_file_has_no_shapes(tmp_path: Path) -> None:
    save_file({"a": torch.zeros(2, 3)}, tmp_path / "model.safetensors")
    assert stored_shapes(tmp_path) == {"a": (2, 3)}
    (tmp_path / "model.safetensors").write_bytes(b"")
    with pytest.raises(ModelError):
        stored_shapes(tmp_path)
