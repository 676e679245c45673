"""Ranks read their own parts of a model, whatever its files look like."""

from __future__ import annotations

import pytest
import torch
from safetensors.torch import load_file, save_file

import ranked_loading
from astraflow.errors import ModelError
from astraflow.training.parallel.loading import open_model
from astraflow.training.parallel.ranks import Ranks
from ranks import run_ranks


@pytest.mark.parametrize(
    ("family", "dtype", "tensor", "context"),
    [
        ("qwen3", torch.float32, 1, 1),  # tied
        ("llama", torch.bfloat16, 2, 1),
        ("llama", torch.float32, 1, 2),
        ("gpt2", torch.float32, 1, 1),
    ],
)
def test_each_rank_reads_its_parts(tmp_path, make_model, family, dtype, tensor, context):
    make_model(family).to(dtype).save_pretrained(tmp_path / "m", max_shard_size="20KB")
    assert len(list((tmp_path / "m").glob("*.safetensors"))) > 1
    assert run_ranks(2, ranked_loading.opened, tmp_path, tmp_path / "m", tensor, context) == [(True, [])] * 2


def test_a_decoder_without_its_head_has_other_names(tmp_path, make_model):
    model = make_model("gpt2")
    model.save_pretrained(tmp_path / "m")
    model.transformer.save_pretrained(tmp_path / "m")
    assert run_ranks(2, ranked_loading.opened, tmp_path, tmp_path / "m", 1, 1) == [(True, [])] * 2


def test_files_with_names_that_only_transformers_knows_are_read_whole(tmp_path, make_model):
    """As some models' files are: there, each rank loads all of it."""
    make_model("llama").save_pretrained(tmp_path / "m")
    path = tmp_path / "m" / "model.safetensors"
    save_file({f"base.{name}": tensor for name, tensor in load_file(path).items()}, path, {"format": "pt"})
    with pytest.raises(ModelError, match="lacks"):
        open_model(tmp_path / "m", Ranks(0, 2))


def test_what_cannot_be_loaded_is_said_as_for_one_rank(tmp_path):
    with pytest.raises(ModelError, match="cannot be loaded"):
        open_model(tmp_path / "nothing", Ranks(0, 2))


def test_a_weight_that_is_not_finite_is_named_by_the_rank_that_reads_it(tmp_path, make_model):
    model = make_model("llama")
    with torch.no_grad():
        model.model.layers[1].mlp.down_proj.weight[-1, -1] = torch.nan
    model.save_pretrained(tmp_path / "m")
    assert run_ranks(2, ranked_loading.refused, tmp_path, tmp_path / "m") == [
        "", "tensor model.layers.1.mlp.down_proj.weight",
    ]  # fmt: skip
