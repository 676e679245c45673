from __future__ import annotations

import json
from contextlib import closing
from pathlib import Path
from typing import Any

import pytest

from astraflow.config.schema import RunConfig
from astraflow.dataflow.journal.log import Journal
from astraflow.errors import ConfigError, JournalError, LaunchError, Problem, SourceError
from astraflow.launch.claim import claim, frozen_changes, is_held
from astraflow.launch.rundir import RunDirectory, write_ready


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


def taken(config: RunConfig, *, resume: bool) -> RunDirectory:
    """A claim that ended."""
    with claim(config, resume=resume) as directory:
        return directory


def test_a_new_run_gets_its_directory_with_every_setting(tmp_path: Path) -> None:
    directory = taken(config(tmp_path), resume=False)
    assert directory.path == tmp_path / "x"
    saved = json.loads(directory.config_file.read_text())
    assert saved["policies"]["actor.v1"]["batch"]["max_staleness"] == 1
    assert directory.config() == config(tmp_path)


def test_an_existing_run_is_refused_and_the_fix_named(tmp_path: Path) -> None:
    taken(config(tmp_path), resume=False)
    with pytest.raises(LaunchError, match=r"already holds a run; go on with it by --resume, or .* --run.name=x-2"):
        taken(config(tmp_path), resume=False)


def test_nothing_to_resume_is_refused(tmp_path: Path) -> None:
    with pytest.raises(LaunchError, match="holds no run to resume; leave out --resume"):
        taken(config(tmp_path), resume=True)


def test_resume_takes_more_steps_and_another_learning_rate(tmp_path: Path) -> None:
    taken(config(tmp_path), resume=False)
    changed = config(tmp_path, run__steps=9, policies__actor__optimizer={"lr": 0.5})
    assert taken(changed, resume=True).config().run.steps == 9


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
        ("policies.actor.v1.sampling.temperature", {"policies__actor__sampling": {"temperature": 0.7}}),
        ("policies.actor.v1.batch.groups", {"policies__actor__batch": {"groups": 3}}),
    ],
)
def test_what_cannot_change_is_named(tmp_path: Path, where: str, change: dict[str, Any]) -> None:
    old = config(tmp_path)
    problems = frozen_changes(old, config(tmp_path, **change))
    assert any(p.startswith(f"{where}=") and "must stay" in p for p in problems), problems
    taken(old, resume=False)
    with pytest.raises(ConfigError, match="cannot be resumed with these settings"):
        taken(config(tmp_path, **change), resume=True)
    assert frozen_changes(old, old) == []


def test_a_second_launcher_changes_nothing_of_a_live_run(tmp_path: Path) -> None:
    with claim(config(tmp_path), resume=False) as directory:
        before = directory.config_file.read_bytes()
        with pytest.raises(LaunchError, match="is in use by another launcher"):
            taken(config(tmp_path, run__steps=9), resume=True)
        assert directory.config_file.read_bytes() == before
    taken(config(tmp_path, run__steps=9), resume=True)


def test_other_data_is_refused_before_the_settings_are_saved(tmp_path: Path) -> None:
    directory = taken(config(tmp_path), resume=False)
    with closing(Journal(directory.journal)) as journal:
        journal.snapshot(b"{}", 0.0, {"sources": json.dumps({"train": "of other rows"})})
    before = directory.config_file.read_bytes()
    with pytest.raises(JournalError, match=r"sources\.train=.* holds other rows"):
        taken(config(tmp_path, run__steps=9), resume=True)
    assert directory.config_file.read_bytes() == before


def test_fewer_steps_than_were_trained_are_refused(tmp_path: Path) -> None:
    directory = taken(config(tmp_path, run__steps=5), resume=False)
    directory.metrics.write_text("".join(json.dumps({"kind": "step", "step": n}) + "\n" for n in range(1, 6)))
    with pytest.raises(ConfigError, match=r"run\.steps=3 must be at least 5, .* give --run\.steps=5 or more"):
        taken(config(tmp_path, run__steps=3), resume=True)
    assert directory.config().run.steps == 5
    taken(config(tmp_path, run__steps=5), resume=True)


def test_a_new_run_without_its_data_takes_no_name(tmp_path: Path) -> None:
    with pytest.raises(SourceError, match="nowhere"):
        taken(config(tmp_path, sources__train={"type": "jsonl", "path": "nowhere.jsonl"}), resume=False)
    assert list(tmp_path.iterdir()) == []


def test_settings_that_do_not_fit_the_sources_take_no_name(tmp_path: Path) -> None:
    with pytest.raises(Problem, match=r"evaluation\.num_tasks=100000 is more than sources\.heldout has \(60\)"):
        taken(config(tmp_path, evaluation__num_tasks=100000), resume=False)
    assert list(tmp_path.iterdir()) == []


def test_a_start_that_fails_before_its_journal_begins_takes_no_name(tmp_path: Path) -> None:
    with pytest.raises(ZeroDivisionError), claim(config(tmp_path), resume=False) as directory:
        raise ZeroDivisionError
    with pytest.raises(ZeroDivisionError), claim(config(tmp_path), resume=False):
        Journal(directory.journal).close()
        raise ZeroDivisionError
    with pytest.raises(LaunchError, match="already holds a run"):
        taken(config(tmp_path), resume=False)


def test_the_ready_file_lives_as_long_as_the_claim(tmp_path: Path) -> None:
    with claim(config(tmp_path), resume=False) as directory:
        assert is_held(directory)
        write_ready(directory.ready_file, "http://127.0.0.1:1")
    assert not is_held(directory) and not directory.ready_file.exists()
    write_ready(directory.ready_file, "http://127.0.0.1:1")  # its process was killed
    with claim(config(tmp_path), resume=True):
        assert not directory.ready_file.exists()
    assert not is_held(RunDirectory(tmp_path / "none"))


def test_a_directory_that_cannot_be_written_is_named(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    with pytest.raises(LaunchError, match=r"cannot be written .*--run.directory"):
        taken(config(tmp_path / "file"), resume=False)


def test_a_damaged_journal_is_refused_unless_somebody_accepts_what_is_lost(tmp_path: Path) -> None:
    directory = taken(config(tmp_path), resume=False)
    with closing(Journal(directory.journal)) as journal:
        journal.snapshot(b"{}", 0.0, {"sources": "{}"})
        journal.append([(1.0, b"a"), (2.0, b"b")])
    path = directory.journal / "journal.sqlite"
    path.write_bytes(path.read_bytes().replace(b"b", b"c"))
    with pytest.raises(JournalError, match=r"would be lost; .*--accept-damage"):
        taken(config(tmp_path), resume=True)
    with claim(config(tmp_path), resume=True, accept_damage=True):
        pass
