from __future__ import annotations

import os
from pathlib import Path

import msgspec
import pytest

from astraflow.cli.run import open_run
from astraflow.config.load import resolved_json
from astraflow.errors import ConfigError, ModelError
from astraflow.launch.rundir import RunDirectory, read_ready, tail, write_ready
from astraflow.models.checkpoints import STATE, StateFile


def test_the_ready_file_speaks_for_one_process_only(tmp_path: Path) -> None:
    path = tmp_path / "dataflow" / "ready.json"
    assert read_ready(path, os.getpid()) is None
    write_ready(path, "http://127.0.0.1:1")
    assert read_ready(path, os.getpid()) == "http://127.0.0.1:1"
    assert read_ready(path, os.getpid() + 1) is None


def test_newest_checkpoint_is_the_whole_one_of_the_highest_step(tmp_path: Path) -> None:
    directory = RunDirectory(tmp_path)
    assert directory.newest_checkpoint("actor.v1") is None
    for name in ("step-000002", "step-000010", "step-000003.partial"):
        place = directory.checkpoints / "actor.v1" / name
        (place / STATE).mkdir(parents=True)
        (place / "model.safetensors").write_bytes(b"abc")
        head = StateFile(
            version=1, step=1, skipped=0, skipped_in_a_row=0, audit_versions=[], files={"model.safetensors": 3}
        )
        (place / STATE / "state.json").write_bytes(msgspec.json.encode(head))
    newest = directory.newest_checkpoint("actor.v1")
    assert newest is not None and newest.name == "step-000010"
    (newest / "model.safetensors").write_bytes(b"ab")
    newest = directory.newest_checkpoint("actor.v1")
    assert newest is not None and newest.name == "step-000002"


@pytest.mark.parametrize("rest", [{"version": 1, "step": 1}, {}])
def test_a_checkpoint_of_another_format_is_not_passed_over(tmp_path: Path, rest: dict[str, int]) -> None:
    directory = RunDirectory(tmp_path)
    state = directory.checkpoints / "actor" / "step-000002" / STATE
    state.mkdir(parents=True)
    (state / "state.json").write_bytes(msgspec.json.encode({"format": 2, **rest}))
    with pytest.raises(ModelError, match=r"checkpoint\.format=2 must be 1; use the AstraFlow version that wrote"):
        directory.newest_checkpoint("actor")


def test_settings_that_this_version_does_not_know_name_whose_they_are(tmp_path: Path) -> None:
    directory = RunDirectory(tmp_path)
    directory.config_file.write_text(
        resolved_json(open_run("quickstart", [])).replace('"steps":', '"new": 1, "steps":')
    )
    with pytest.raises(ConfigError, match=r"run\.new=1 is not a setting(.*\n)*.*go on with the version that wrote it"):
        directory.config()


def test_tail_gives_the_last_lines(tmp_path: Path) -> None:
    path = tmp_path / "a.log"
    assert tail(path) == ""
    path.write_text("\n".join(str(i) for i in range(100)) + "\n\n")
    assert tail(path, num_lines=3) == "97\n98\n99"


def test_tail_begins_with_this_start_and_says_a_sentence_once(tmp_path: Path) -> None:
    path = tmp_path / "a.log"
    path.write_text("of an earlier start\n")
    start = path.stat().st_size
    assert tail(path, start) == ""
    with path.open("a") as log:
        log.write(
            "12:00 node | joined\n12:01 ERROR node | the leases ended: x=1 is wrong; fix\nerror: x=1 is wrong; fix\n"
        )
    assert tail(path, start) == "12:00 node | joined\nerror: x=1 is wrong; fix"
