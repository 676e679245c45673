"""What people type by mistake, and places that this user cannot read: one sentence, no traceback."""

from __future__ import annotations

import errno
import os
import subprocess
import sys
from io import BytesIO, TextIOWrapper
from pathlib import Path
from typing import Any

import pytest

from astraflow.cli.app import main
from astraflow.cli.run import open_run
from astraflow.config.env import cache_dir, user_path
from astraflow.config.schema import RunConfig
from astraflow.errors import LaunchError, Problem
from astraflow.launch.rundir import RunDirectory
from astraflow.launch.supervisor import Supervisor
from astraflow.observe.console import RunDisplay
from astraflow.wire.app import bind


def said(words: list[str], capsys: pytest.CaptureFixture[str], code: int) -> str:
    assert main(words) == code
    err = capsys.readouterr().err
    assert "Traceback" not in err
    return err


def test_a_directory_is_answered_with_the_run_file_in_it(capsys, tmp_path):
    assert f"recipe={tmp_path} is a directory; give a run file" in said(["run", str(tmp_path)], capsys, 2)
    (tmp_path / "mine.toml").write_text("")
    assert f"is a directory; give a file in it, such as {tmp_path / 'mine.toml'}" in said(
        ["validate", str(tmp_path)], capsys, 2
    )
    (tmp_path / "run.resolved.json").write_text("")
    assert str(tmp_path / "run.resolved.json") in said(["run", str(tmp_path)], capsys, 2)


@pytest.mark.parametrize("recipe", ["", "~nobody-of-this-name/run.toml"])
def test_what_is_no_file_is_no_recipe(recipe, capsys):
    assert f"recipe={recipe} is neither a file nor a shipped recipe" in said(["validate", recipe], capsys, 2)


def test_a_name_that_the_system_refuses_is_one_sentence(capsys):
    assert "cannot be used (File name too long); give a shorter name" in said(["validate", "x" * 300], capsys, 1)


def test_a_file_that_this_user_may_not_read_is_one_sentence(capsys, monkeypatch):
    def stat(self: Path, **_: object) -> os.stat_result:
        raise PermissionError(13, "Permission denied", str(self))

    monkeypatch.setattr(Path, "stat", stat)
    assert "file=locked/run.toml cannot be used (Permission denied); let this user" in said(
        ["run", "locked/run.toml"], capsys, 1
    )


def test_without_a_home_directory_the_place_of_models_must_be_named(monkeypatch, tmp_path):
    monkeypatch.setattr(os.path, "expanduser", lambda path: path)  # neither HOME nor an entry of this user
    monkeypatch.delenv("ASTRAFLOW_CACHE", raising=False)
    monkeypatch.delenv("XDG_CACHE_HOME", raising=False)
    with pytest.raises(Problem, match=r"ASTRAFLOW_CACHE= must say where models are kept.*no home"):
        cache_dir()
    monkeypatch.setenv("ASTRAFLOW_CACHE", str(tmp_path))
    assert cache_dir() == tmp_path
    assert user_path("~/x") == Path("~/x")


@pytest.mark.parametrize(
    ("host", "reason"),
    [
        ("no.such.host.invalid", "the host must be an address of this machine"),
        ("192.0.2.1", "the host must be an address of this machine"),  # of documentation: nobody's
        ("x" * 70, "the host must be an address of this machine"),
        ("a..b", "the host must be an address of this machine"),
    ],
)
def test_a_host_that_is_not_this_machine_is_said_to_be_none(host, reason):
    with pytest.raises(LaunchError, match=rf"dataflow=.*:0 cannot be bound .*; {reason}"):
        bind(host, 0, "dataflow")


def test_a_process_that_cannot_be_started_names_the_limits(tmp_path):
    def popen(*_: object, **__: object) -> None:
        raise BlockingIOError(errno.EAGAIN, "Resource temporarily unavailable")

    directory = RunDirectory(tmp_path)
    directory.logs.mkdir()
    supervisor = Supervisor(open_run("quickstart", []), directory, 1, RunDisplay("run", 1), popen=popen)
    with pytest.raises(LaunchError, match=r"process=dataflow cannot be started \(Resource temp.*; raise the limits"):
        supervisor.run()


def test_a_terminal_without_unicode_shows_what_it_can(monkeypatch):
    shown = BytesIO()
    monkeypatch.setattr(sys, "stdout", TextIOWrapper(shown, encoding="ascii"))
    assert main(["--version"]) == 0
    sys.stdout.write("\u2588|\n")  # as the live panel does
    sys.stdout.flush()
    assert shown.getvalue().endswith(b"?|\n")


def test_a_process_that_ends_says_why_where_its_user_looks(tmp_path, monkeypatch):
    directory, said = RunDirectory(tmp_path), []
    directory.logs.mkdir()
    display = RunDisplay("run", 1)
    monkeypatch.setattr(display, "note", said.append)
    full = f"import sys; sys.stderr.write('begins{chr(92)}nerror: checkpoint=x cannot be written'); sys.exit(1)"

    def popen(_: list[str], **options: Any) -> subprocess.Popen[bytes]:
        return subprocess.Popen([sys.executable, "-c", full], **options)

    with pytest.raises(LaunchError, match="dataflow refused to start"):
        Supervisor(open_run("quickstart", []), directory, 1, display, popen=popen).run()
    assert said == ["dataflow ended with exit code 1: checkpoint=x cannot be written"]


def test_a_run_without_nodes_says_how_one_joins(tmp_path, monkeypatch):
    said: list[str] = []
    display = RunDisplay("run", 1)
    monkeypatch.setattr(display, "note", said.append)
    supervisor = Supervisor(open_run("quickstart", ["--rollout.nodes=0"]), RunDirectory(tmp_path), 1, display)
    supervisor._answered("http://127.0.0.1:9")
    supervisor._clear_away()
    assert said == ["rollout.nodes=[] starts no node; one joins by: astraflow node --dataflow http://127.0.0.1:9"]


def test_a_full_disk_at_the_end_does_not_hide_why_the_run_ended(capsys, monkeypatch, tmp_path):
    class Ended:
        def __init__(self, config: RunConfig, directory: RunDirectory, *_: object, **__: object) -> None:
            directory.metrics.touch()

        def run(self) -> bool:
            raise LaunchError("run", "quickstart", "failed: dataflow died 6 times", "see the logs")

    def full(*_: object) -> None:
        raise OSError(errno.ENOSPC, "No space left on device")

    monkeypatch.setattr("astraflow.launch.supervisor.Supervisor", Ended)
    monkeypatch.setattr("astraflow.launch.report.write_report", full)
    err = said(["run", "quickstart", f"--run.directory={tmp_path}"], capsys, 1)
    assert "report=" in err and "cannot be written (No space left on device); make room, then: astraflow report" in err
    assert "error: run=quickstart failed: dataflow died 6 times; see the logs" in err
