"""A base in 4 bits: rounded once, the same numbers for trainer and engines."""

from __future__ import annotations

import copy
import json
from pathlib import Path

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from transformers import GPT2Config, GPT2LMHeadModel

from astraflow.config.schema import LoraSection
from astraflow.errors import ModelError
from astraflow.models.load import load_model, state_tensors
from astraflow.models.lora.layers import add_lora, effective_tensors, lora_tensors, peft_names
from astraflow.models.lora.merge import load_adapter
from astraflow.models.lora.nf4 import BLOCK, Nf4Linear, pack, pack_linears, unpack, write_rounded
from astraflow.models.registry import model_directory
from astraflow.models.tiny_char import write_tiny_char

IDS = torch.arange(3, 45)[None]
SECTION = LoraSection(rank=4, alpha=6.0, targets=["q_proj", "down_proj"], quantize="nf4")


@pytest.fixture(scope="session")
def source(tmp_path_factory: pytest.TempPathFactory) -> Path:
    directory = tmp_path_factory.mktemp("model") / "tiny"
    write_tiny_char(directory, 0)
    return directory


@pytest.fixture(scope="session")
def rounded(source: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    directory = tmp_path_factory.mktemp("rounded") / "tiny"
    write_rounded(directory, source)
    return directory


def again(weight: torch.Tensor, dtype: torch.dtype = torch.float32) -> torch.Tensor:
    return unpack(*pack(weight), weight.shape, dtype)


@settings(deadline=None, max_examples=40)
@given(rows=st.integers(1, 9), columns=st.integers(1, 70), power=st.integers(-20, 20), seed=st.integers(0, 99))
def test_rounding_twice_is_rounding_once(rows: int, columns: int, power: int, seed: int) -> None:
    weight = torch.randn(rows, columns, generator=torch.Generator().manual_seed(seed)) * 2.0**power
    once = again(weight)
    assert once.shape == weight.shape
    assert torch.equal(again(once), once)
    assert torch.equal(again(weight, torch.bfloat16).float(), once)  # a bfloat16 engine holds the same numbers
    largest = torch.nn.functional.pad(weight.reshape(-1), (0, -weight.numel() % BLOCK)).view(-1, BLOCK).abs().amax(1)
    error = (once - weight).abs().reshape(-1)
    bound = largest.repeat_interleave(BLOCK)[: len(error)]
    assert (error <= 0.157 * bound).all()  # half of the widest step between two levels, and the rounding of the scale


def test_a_block_of_zeros_stays_zero() -> None:
    assert torch.equal(again(torch.zeros(2, 64)), torch.zeros(2, 64))


def test_levels_are_those_of_bitsandbytes() -> None:
    functional = pytest.importorskip("bitsandbytes.functional")
    weight = torch.randn(40, 128).bfloat16().float()  # scales need no rounding
    theirs, state = functional.quantize_4bit(weight, blocksize=BLOCK, quant_type="nf4", compress_statistics=False)
    codes, scales = pack(weight)
    assert torch.equal(scales.float(), state.absmax)
    assert torch.equal(codes, theirs.view(-1))
    assert torch.equal(
        unpack(codes, scales, (40, 128), torch.float32), functional.dequantize_4bit(theirs, state).bfloat16().float()
    )


@pytest.mark.parametrize("bias", [True, False])
def test_a_packed_layer_computes_what_its_weight_says(bias: bool) -> None:
    layer = torch.nn.Linear(48, 30, bias=bias)
    with torch.no_grad():
        layer.weight.copy_(again(layer.weight))
    plain = copy.deepcopy(layer)
    holder = torch.nn.Module()
    holder.layer, holder.get_output_embeddings = layer, lambda: None
    pack_linears(holder)  # type: ignore[arg-type]
    assert isinstance(layer, Nf4Linear) and torch.equal(layer.unpacked(), plain.weight)
    assert dict(layer.named_parameters()).keys() == ({"bias"} if bias else set())
    x = torch.randn(2, 7, 48)
    one, other = x.clone().requires_grad_(), x.clone().requires_grad_()
    upstream = torch.randn(2, 7, 30)
    found, expected = layer(one), plain(other)
    torch.testing.assert_close(found, expected)
    found.backward(upstream)
    expected.backward(upstream)
    torch.testing.assert_close(one.grad, other.grad)
    with torch.autocast("cpu", torch.bfloat16):
        assert layer(x).dtype == torch.bfloat16
        torch.testing.assert_close(layer(x), plain(x), rtol=0.02, atol=0.02)


def test_a_rounded_directory_is_the_model_with_other_linear_layers(source: Path, rounded: Path) -> None:
    before, after = state_tensors(load_model(source)), state_tensors(load_model(rounded))
    assert before.keys() == after.keys()
    for name, tensor in before.items():
        expected = again(tensor) if name.endswith("_proj.weight") else tensor
        assert torch.equal(after[name], expected), name
    beside = {path.name for path in source.iterdir() if path.suffix != ".safetensors"}
    assert beside <= {path.name for path in rounded.iterdir()}


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_halves_are_stored_so_that_nothing_is_lost(source: Path, tmp_path: Path, dtype: torch.dtype) -> None:
    load_model(source).to(dtype).save_pretrained(tmp_path / "half")
    write_rounded(tmp_path / "rounded", tmp_path / "half")
    pack_linears(load_model(tmp_path / "rounded"))  # it would refuse
    stored = json.loads((tmp_path / "rounded" / "config.json").read_text())["dtype"]
    assert stored == ("bfloat16" if dtype == torch.bfloat16 else "float32")


def test_trainer_and_engine_compute_with_the_same_weights(rounded: Path) -> None:
    torch.manual_seed(0)
    model = load_model(rounded)
    base = sum(t.nbytes for n, t in state_tensors(model).items() if n.endswith("_proj.weight"))
    add_lora(model, SECTION)
    small = lora_tensors(model)
    for tensor in small.values():
        tensor.normal_(0, 0.05)
    packed = sum(
        module.codes.nbytes + module.scales.nbytes for module in model.modules() if isinstance(module, Nf4Linear)
    )
    assert packed * 32 == base * 4.25 and len(small) == 2 * 2 * 2
    for dtype in ("float32", "bfloat16"):
        engine = load_model(rounded, dtype)
        load_adapter(engine, peft_names(small), 1.5, {})
        effective = effective_tensors(model, engine.dtype)
        served = state_tensors(engine)
        assert effective.keys() == served.keys()
        assert all(torch.equal(effective[name], served[name]) for name in served)
    with torch.no_grad():
        torch.testing.assert_close(
            model(input_ids=IDS, use_cache=False).logits, _merged(rounded, small)(input_ids=IDS, use_cache=False).logits
        )


def _merged(directory: Path, small: dict[str, torch.Tensor]) -> torch.nn.Module:
    model = load_model(directory)
    load_adapter(model, peft_names(small), 1.5, {})
    return model


def test_other_weights_than_were_written_are_refused(source: Path) -> None:
    with pytest.raises(ModelError, match=r"lora.quantize=nf4 finds other weights in model.layers.0"):
        pack_linears(load_model(source))


def test_a_model_without_linear_layers_is_refused(source: Path, tmp_path: Path) -> None:
    GPT2LMHeadModel(GPT2Config(vocab_size=61, n_embd=32, n_layer=1, n_head=2)).save_pretrained(tmp_path / "gpt2")
    with pytest.raises(ModelError, match=r"lora.quantize=nf4 finds no linear layers in GPT2LMHeadModel"):
        write_rounded(tmp_path / "rounded", tmp_path / "gpt2")


def test_the_registry_makes_it_once_until_the_model_changes(source: Path, tmp_path: Path) -> None:
    own = tmp_path / "model"
    own.mkdir()
    for file in source.iterdir():
        (own / file.name).write_bytes(file.read_bytes())
    first = model_directory(f"nf4:{own}", tmp_path / "cache", 0)
    made = (first / "model.safetensors").stat().st_mtime_ns
    assert model_directory(f"nf4:{own}", tmp_path / "cache", 0) == first
    assert (first / "model.safetensors").stat().st_mtime_ns == made
    write_tiny_char(tmp_path / "other", 1)
    (own / "model.safetensors").write_bytes((tmp_path / "other" / "model.safetensors").read_bytes())
    assert model_directory(f"nf4:{own}", tmp_path / "cache", 0) != first
    assert model_directory("nf4:tiny-char", tmp_path / "cache", 0).is_dir()
