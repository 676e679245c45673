"""LoRA: one arithmetic for trainer and engine, files as peft has them."""

from __future__ import annotations

import json
import shutil
from pathlib import Path

import peft
import pytest
import torch
from safetensors.torch import load_file, save_file
from transformers import AutoModelForCausalLM, GPT2Config, GPT2LMHeadModel, PreTrainedModel

from astraflow.config.schema import LoraSection
from astraflow.errors import ModelError
from astraflow.models.load import content_checksum, effective_checksum, load_model, load_tensors, state_tensors
from astraflow.models.lora.adapter import BASE, CONFIG, TENSORS, read_adapter, write_adapter_files
from astraflow.models.lora.layers import LoraLinear, add_lora, effective_tensors, load_lora, lora_tensors, peft_names
from astraflow.models.lora.merge import load_adapter, merge_pair, merged_checksum
from astraflow.models.tiny_char import write_tiny_char

SECTION = LoraSection(rank=4, alpha=6.0)
# peft asks transformers by a name that it is about to drop.
OLD_NAMES = pytest.mark.filterwarnings("ignore:.is_gradient_checkpointing:FutureWarning")
OLD_FILES = pytest.mark.parametrize("extra", ["tied", "old", "other file"])
IDS = torch.arange(3, 45)[None]


@pytest.fixture(scope="session")
def tiny(tmp_path_factory: pytest.TempPathFactory) -> Path:
    directory = tmp_path_factory.mktemp("model") / "tiny"
    write_tiny_char(directory, 0)
    return directory


def trained(directory: Path, section: LoraSection = SECTION, seed: int = 0) -> PreTrainedModel:
    """A model with an adapter that has learnt something."""
    torch.manual_seed(seed)
    model = load_model(directory)
    add_lora(model, section)
    with torch.no_grad():
        for name, tensor in lora_tensors(model).items():
            if name.endswith("lora_B.weight"):
                tensor.normal_(0, 0.05)
    return model


@torch.no_grad()
def logits(model: PreTrainedModel) -> torch.Tensor:
    return model(input_ids=IDS, use_cache=False).logits


def test_a_fresh_adapter_changes_nothing_and_only_it_is_trained(tiny: Path) -> None:
    model = load_model(tiny)
    before = logits(model)
    targets = add_lora(model, SECTION)
    assert targets == ["down_proj", "gate_proj", "k_proj", "o_proj", "q_proj", "up_proj", "v_proj"]
    torch.testing.assert_close(logits(model), before)
    assert {n for n, p in model.named_parameters() if p.requires_grad} == set(lora_tensors(model))
    assert len(lora_tensors(model)) == 2 * 2 * len(targets)


@pytest.mark.parametrize("targets", [["all-linear"], ["q_proj", "down_proj"]])
def test_merged_weights_compute_what_base_and_adapter_compute(tiny: Path, targets: list[str]) -> None:
    model = trained(tiny, LoraSection(rank=4, alpha=6.0, targets=targets))
    merged = load_model(tiny)
    assert (logits(model) - logits(merged)).abs().max() > 1e-2, "the adapter does nothing"
    load_tensors(merged, effective_tensors(model))
    torch.testing.assert_close(logits(merged), logits(model), atol=1e-5, rtol=0)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_an_engine_merges_to_the_same_bits_as_the_trainer(tiny: Path, dtype: torch.dtype) -> None:
    model = trained(tiny)
    engine = load_model(tiny, "float32" if dtype is torch.float32 else "bfloat16")
    first, base = trained(tiny, seed=1), {}
    for source in (first, model):  # what the adapter before left must be gone
        load_adapter(engine, peft_names(lora_tensors(source)), SECTION.alpha / SECTION.rank, base)
    ours, theirs = state_tensors(engine), effective_tensors(model, dtype)
    assert ours.keys() == theirs.keys()
    assert all(ours[n].dtype == dtype and torch.equal(ours[n], theirs[n]) for n in ours)


def test_a_layer_that_the_next_adapter_leaves_out_is_as_in_the_base(tiny: Path) -> None:
    engine, base = load_model(tiny), {}
    before = {name: tensor.clone() for name, tensor in state_tensors(engine).items()}
    load_adapter(engine, peft_names(lora_tensors(trained(tiny))), 1.5, base)
    some = peft_names(lora_tensors(trained(tiny, LoraSection(rank=2, targets=["q_proj"]))))
    load_adapter(engine, some, 1.5, base)
    changed = {name for name, tensor in state_tensors(engine).items() if not torch.equal(tensor, before[name])}
    assert changed == {f"model.layers.{i}.self_attn.q_proj.weight" for i in range(2)}


def test_the_sum_is_rounded_once_whatever_the_number_of_threads() -> None:
    torch.manual_seed(0)
    weight, a, b = torch.randn(700, 300).to(torch.bfloat16), torch.randn(16, 300), torch.randn(700, 16)
    expected = (weight.double() + 0.3 * (b.double() @ a.double())).to(torch.bfloat16)
    threads = torch.get_num_threads()
    results = []
    for count in (1, 2):
        torch.set_num_threads(count)
        results.append(merge_pair(weight, a, b, 0.3))
    torch.set_num_threads(threads)
    assert torch.equal(results[0], results[1])
    assert torch.equal(results[0], expected)


@pytest.mark.parametrize(
    ("target", "said"),
    [
        ("q_prog", "did you mean 'q_proj'"),
        ("lm_head", "its output layer is left out"),
        ("", "known:"),
        (".*_proj", "give names, no patterns; "),
    ],
)
def test_a_target_that_is_no_layer_is_named(tiny: Path, target: str, said: str) -> None:
    with pytest.raises(ModelError, match=f"lora.targets={target} is no linear layer") as caught:
        add_lora(load_model(tiny), LoraSection(targets=["v_proj", target]))
    assert said in str(caught.value)


def test_a_model_without_linear_layers_has_no_place_for_an_adapter() -> None:
    model = GPT2LMHeadModel(GPT2Config(n_embd=8, n_layer=1, n_head=1, vocab_size=11, n_positions=8))
    with pytest.raises(ModelError, match=r"lora\.targets=all-linear is no linear layer of this model.*known: none"):
        add_lora(model, SECTION)


def test_a_rank_beyond_a_layer_is_refused_with_the_limit(tiny: Path) -> None:
    model = load_model(tiny)
    most = min(model.model.layers[0].self_attn.k_proj.weight.shape)
    said = rf"lora.rank={most + 1} is beyond the smaller dimension of \S+k_proj \({most}\); use at most {most}"
    with pytest.raises(ModelError, match=said):
        add_lora(model, LoraSection(rank=most + 1, targets=["k_proj", "down_proj"]))
    assert all(p.requires_grad for p in model.parameters())
    add_lora(model, LoraSection(rank=most, targets=["k_proj"]))


def test_an_adapter_that_does_not_fit_changes_nothing(tiny: Path) -> None:
    good = peft_names(lora_tensors(trained(tiny)))
    name = next(n for n in good if n.endswith("layers.1.mlp.up_proj.lora_B.weight"))
    engine, base = load_model(tiny), {}
    before = {n: t.clone() for n, t in state_tensors(engine).items()}
    for bad, said in [
        ({n: t for n, t in good.items() if n != name}, "lacks one of its two matrices"),
        ({**good, name: good[name][:-1]}, "must make"),
        ({**good, name: good[name][:, :-1]}, "must make"),
        ({**good, name: good[name][..., None]}, "must make"),
        ({**good, "base_model.model.model.layers.9.mlp.up_proj.lora_A.weight": good[name]}, "is on no weight"),
        ({**good, "model.norm.weight": good[name]}, "is on no weight"),
    ]:
        with pytest.raises(ModelError, match=said):
            load_adapter(engine, bad, 1.5, base)
    assert all(torch.equal(t, before[n]) for n, t in state_tensors(engine).items())
    with pytest.raises(ModelError, match="does not fit policies"):
        load_lora(trained(tiny), {n: t for n, t in good.items() if n != name})


def files_of(directory: Path) -> dict[str, bytes]:
    return {path.name: path.read_bytes() for path in directory.iterdir() if path.suffix == ".json"}


@OLD_NAMES
def test_peft_reads_what_is_written(tiny: Path, tmp_path: Path) -> None:
    model = trained(tiny)
    targets = add_lora(load_model(tiny), SECTION)
    write_adapter_files(tmp_path, SECTION, targets, str(tiny), content_checksum(tiny))
    save_file(peft_names(lora_tensors(model)), tmp_path / TENSORS, {"format": "pt"})
    theirs = peft.PeftModel.from_pretrained(AutoModelForCausalLM.from_pretrained(tiny), tmp_path)
    torch.testing.assert_close(logits(theirs), logits(model), atol=1e-5, rtol=0)


@OLD_NAMES
@pytest.mark.parametrize("use_rslora", [False, True])
def test_an_adapter_of_peft_is_merged(tiny: Path, tmp_path: Path, use_rslora: bool) -> None:
    config = peft.LoraConfig(
        r=4, lora_alpha=6, target_modules=["q_proj", "v_proj"], use_rslora=use_rslora, init_lora_weights=False,
        task_type="CAUSAL_LM",
    )  # fmt: skip
    theirs = peft.get_peft_model(AutoModelForCausalLM.from_pretrained(tiny), config)
    expected = logits(theirs)
    theirs.save_pretrained(tmp_path)
    (tmp_path / BASE).write_text(json.dumps({"xxh3": content_checksum(tiny)}))
    adapter = read_adapter(files_of(tmp_path))
    assert adapter is not None
    engine = load_model(tiny)
    load_adapter(engine, load_file(tmp_path / TENSORS), adapter.scaling, {})
    torch.testing.assert_close(logits(engine), expected, atol=1e-5, rtol=0)


@pytest.mark.parametrize(
    ("change", "said"),
    [
        ({"use_dora": True}, "use_dora=True is not supported"),
        ({"bias": "all"}, "bias=all is not supported"),
        ({"peft_type": "IA3"}, "peft_type=IA3 is not supported"),
        ({"rank_pattern": {"q_proj": 2}}, "rank_pattern"),
        ({"fan_in_fan_out": True}, "fan_in_fan_out=True is not supported"),
        ({"modules_to_save": ["lm_head"]}, "modules_to_save=.* is not supported"),
        ({"alpha_pattern": {"q_proj": 2}}, "alpha_pattern=.* is not supported"),
        ({"init_lora_weights": "pissa"}, "init_lora_weights=pissa is not supported"),
        ({"init_lora_weights": "olora"}, "init_lora_weights=olora is not supported"),
        ({"alora_invocation_tokens": [1, 2]}, "alora_invocation_tokens=.* is not supported"),
        ({"use_qalora": True}, "use_qalora=True is not supported"),
        ({"use_bdlora": {"x": 1}}, "use_bdlora=.* is not supported"),
        ({"layer_replication": [[0, 2]]}, "layer_replication=.* is not supported"),
        ({"setting_of_tomorrow": 1}, "setting_of_tomorrow=1 is not supported"),
        ({"peft_type": None}, "peft_type=None"),
        ({"lora_alpha": float("nan")}, "lora_alpha=nan"),
        ({"lora_alpha": True}, "lora_alpha=True"),
        ({"r": True}, "r=True"),
        ({"use_rslora": "no"}, "use_rslora='no'"),
        ({"r": 0}, "with numbers"),
        ({"base": None}, "must name the base of the adapter"),
        ({"base": ""}, "must name the base of the adapter"),
    ],
)
def test_an_adapter_of_another_kind_is_refused_by_name(tmp_path: Path, change: dict[str, object], said: str) -> None:
    write_adapter_files(tmp_path, SECTION, ["q_proj"], "m", "ab")
    files = files_of(tmp_path)
    if "base" in change:
        if change["base"] is None:
            del files[BASE]
        else:
            files[BASE] = json.dumps({"xxh3": change["base"]}).encode()
    else:
        files[CONFIG] = json.dumps(json.loads(files[CONFIG]) | change).encode()
    with pytest.raises(ModelError, match=said):
        read_adapter(files)
    assert read_adapter({"config.json": b"{}"}) is None


def test_the_base_is_known_by_its_content(tiny: Path, tmp_path: Path) -> None:
    tensors = load_file(tiny / "model.safetensors")
    for place, parts in (("whole", 1), ("parts", 3), ("other", 1)):
        (tmp_path / place).mkdir()
        for part in range(parts):
            mine = {n: t for i, (n, t) in enumerate(sorted(tensors.items())) if i % parts == part}
            save_file(mine, tmp_path / place / (f"part-{part}.safetensors" if parts > 1 else "model.safetensors"))
        if parts > 1:
            index = {"weight_map": {n: f"part-{i % parts}.safetensors" for i, n in enumerate(sorted(tensors))}}
            (tmp_path / place / "model.safetensors.index.json").write_text(json.dumps(index))
        tensors = {n: t + (1e-3 if place == "parts" and t.ndim > 1 else 0) for n, t in tensors.items()}
    known = content_checksum(tiny)
    assert content_checksum(tmp_path / "whole") == content_checksum(tmp_path / "parts") == known
    assert content_checksum(tmp_path / "other") != known
    save_file({"more": torch.ones(3)}, tmp_path / "whole" / "consolidated.safetensors")
    assert content_checksum(tmp_path / "whole") == known, "a file that is no part of the model counts"
    (tmp_path / "other" / "model.safetensors").write_bytes(b"torn")
    with pytest.raises(ModelError, match="cannot be read"):
        content_checksum(tmp_path / "other")
    (tmp_path / "other" / "model.safetensors").rename(tmp_path / "other" / "pytorch_model.bin")
    with pytest.raises(ModelError, match="holds no weights as safetensors; convert it"):
        content_checksum(tmp_path / "other")


@OLD_FILES
@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_what_an_engine_must_have_is_told_from_files_that_hold_more(
    tiny: Path, tmp_path: Path, extra: str, dtype: str
) -> None:
    shutil.copytree(tiny, tmp_path / "model")
    stored = tmp_path / "model" / "model.safetensors"
    tensors = load_file(stored)
    if extra == "tied":
        tensors["lm_head.weight"] = tensors["model.embed_tokens.weight"].clone()
    elif extra == "old":
        tensors["model.layers.0.self_attn.rotary_emb.inv_freq"] = torch.ones(4)
    else:
        save_file({"tok_embeddings.weight": torch.ones(3)}, tmp_path / "model" / "consolidated.safetensors")
    save_file(tensors, stored, {"format": "pt"})
    adapter = peft_names(lora_tensors(trained(tiny)))
    engine = load_model(tmp_path / "model", dtype)
    load_adapter(engine, adapter, 1.5, {})
    expected = effective_checksum(state_tensors(engine))
    assert merged_checksum(tmp_path / "model", adapter, 1.5, dtype) == expected


def test_layers_stay_where_they_are(tiny: Path) -> None:
    model = trained(tiny)
    assert isinstance(model.model.layers[0].self_attn.q_proj, LoraLinear)
    names = {n for n in model.state_dict() if n not in lora_tensors(model)}
    assert names == set(load_model(tiny).state_dict())
