from __future__ import annotations

import json
import os
from pathlib import Path
from typing import Any

import pytest

from astraflow.config.schema import RunConfig
from astraflow.errors import ConfigError, LaunchError
from astraflow.launch.rundir import frozen_changes, held, prepare, read_ready, tail, write_ready


def config(directory: Path, **changes: Any) -> RunConfig:
    raw: dict[str, Any] = {
        "run": {"name": "x", "steps": 3, "directory": str(directory)},
        "sources": {"train": "calculator", "heldout": {"type": "calculator", "split": "heldout"}},
        "workflow": {"type": "tool_use", "environment": "calculator"},
        "policies": {"actor.v1": {"model": "tiny-char"}},
        "evaluation": {"source": "heldout"},
    }
    for where, value in changes.items():
        node = raw
        *path, last = where.split("__")
        for part in path:
            node = node["actor.v1"] if part == "actor" else node.setdefault(part, {})
        node[last] = value
    return RunConfig.model_validate(raw)


def test_a_new_run_gets_its_directory_with_every_setting(tmp_path: Path) -> None:
    directory = prepare(config(tmp_path), resume=False)
    assert directory.path == tmp_path / "x"
    saved = json.loads(directory.config_file.read_text())
    assert saved["policies"]["actor.v1"]["batch"]["max_staleness"] == 1
    assert directory.config() == config(tmp_path)


def test_an_existing_run_is_refused_and_the_fix_named(tmp_path: Path) -> None:
    prepare(config(tmp_path), resume=False)
    with pytest.raises(LaunchError, match=r"already holds a run; go on with it by --resume, or .* --run.name=x-2"):
        prepare(config(tmp_path), resume=False)


def test_nothing_to_resume_is_refused(tmp_path: Path) -> None:
    with pytest.raises(LaunchError, match="holds no run to resume; leave out --resume"):
        prepare(config(tmp_path), resume=True)


def test_resume_takes_more_steps_and_another_learning_rate(tmp_path: Path) -> None:
    prepare(config(tmp_path), resume=False)
    changed = config(tmp_path, run__steps=9, policies__actor__optimizer={"lr": 0.5})
    assert prepare(changed, resume=True).config().run.steps == 9


@pytest.mark.parametrize(
    ("where", "change"),
    [
        ("run.seed", {"run__seed": 5}),
        ("train_source", {"train_source": "heldout"}),
        ("workflow.type", {"workflow__type": "single_turn"}),
        ("workflow.group_size", {"workflow__group_size": 4}),
        ("evaluation.samples", {"evaluation__samples": 7}),
        ("policies", {"policies__critic": {"model": "tiny-char"}}),
        ("policies.actor.v1.model", {"policies__actor__model": "smollm2-135m-instruct"}),
        ("policies.actor.v1.operators", {"policies__actor__operators": ["keep_all"]}),
        ("policies.actor.v1.algorithm.advantage", {"policies__actor__algorithm": {"advantage": "a.b:C"}}),
        ("policies.actor.v1.batch.groups", {"policies__actor__batch": {"groups": 3}}),
    ],
)
def test_what_cannot_change_is_named(tmp_path: Path, where: str, change: dict[str, Any]) -> None:
    old = config(tmp_path)
    problems = frozen_changes(old, config(tmp_path, **change))
    assert any(p.startswith(f"{where}=") and "must stay" in p for p in problems), problems
    prepare(old, resume=False)
    with pytest.raises(ConfigError, match="cannot be resumed with these settings"):
        prepare(config(tmp_path, **change), resume=True)
    assert frozen_changes(old, old) == []


def test_only_one_launcher_at_a_time(tmp_path: Path) -> None:
    directory = prepare(config(tmp_path), resume=False)
    with held(directory), pytest.raises(LaunchError, match="is in use by another launcher"), held(directory):
        pass
    with held(directory):
        pass


def test_a_directory_that_cannot_be_written_is_named(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    with pytest.raises(LaunchError, match=r"cannot be written .*--run.directory"):
        prepare(config(tmp_path / "file"), resume=False)


def test_the_ready_file_speaks_for_one_process_only(tmp_path: Path) -> None:
    path = tmp_path / "dataflow" / "ready.json"
    assert read_ready(path, os.getpid()) is None
    write_ready(path, "http://127.0.0.1:1")
    assert read_ready(path, os.getpid()) == "http://127.0.0.1:1"
    assert read_ready(path, os.getpid() + 1) is None


def test_newest_checkpoint_is_that_of_the_highest_step(tmp_path: Path) -> None:
    directory = prepare(config(tmp_path), resume=False)
    assert directory.newest_checkpoint("actor.v1") is None
    for name in ("step-000002", "step-000010", "step-000003.partial"):
        (directory.checkpoints / "actor.v1" / name).mkdir(parents=True)
    newest = directory.newest_checkpoint("actor.v1")
    assert newest is not None and newest.name == "step-000010"


def test_tail_gives_the_last_lines(tmp_path: Path) -> None:
    path = tmp_path / "a.log"
    assert tail(path) == ""
    path.write_text("\n".join(str(i) for i in range(100)) + "\n\n")
    assert tail(path, num_lines=3) == "97\n98\n99"
