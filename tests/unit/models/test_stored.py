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
from transformers import AutoModelForCausalLM

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
