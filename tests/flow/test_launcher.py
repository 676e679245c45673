"""The launcher with real processes: kills, Ctrl-C, resume, and what it says when something cannot work."""

from __future__ import annotations

import json
import os
import signal
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest

from astraflow.testing.runs import LaunchedRun, wait_until

pytestmark = pytest.mark.flow

SMALL = [
    "--workflow.group_size=4",
    "--policies.actor.batch.groups=2",
    "--policies.actor.operators=['keep_all']",
    "--policies.actor.warm_start.steps=2",
    "--policies.actor.warm_start.batch=8",
    "--evaluation.num_tasks=2",
    "--evaluation.every=1000",
    "--dataflow.dead_after_s=3",
]
ENOUGH = "--run.steps=100000"


@contextmanager
def started(place: Path, *words: str, recipe: str = "quickstart", name: str = "run") -> Iterator[LaunchedRun]:
    run = LaunchedRun.start(place, recipe, *words, *SMALL, name=name)
    try:
        yield run
    finally:
        run.end()


def processes(run: LaunchedRun) -> set[int]:
    return {pid for role in ("dataflow", "trainer", "node") for pid in run.pids(role)}  # type: ignore[arg-type]


@pytest.mark.faults
def test_every_process_is_replaced_when_it_is_killed(tmp_path: Path) -> None:
    with started(tmp_path, "--run.steps=40", "--run.checkpoint_every=5", recipe="quickstart") as run:
        run.wait_for_step(2)
        for role in ("node", "trainer", "dataflow"):
            pid = run.kill(role)  # type: ignore[arg-type]
            wait_until(lambda role=role, pid=pid: bool(set(run.pids(role)) - {pid}), f"another {role}", 300)  # type: ignore[misc]
        assert run.wait(300) == 0, run.words()
    words = run.output.read_text()
    for process in ("node-node0", "trainer-actor", "dataflow"):
        assert f"{process} ended with signal 9" in words and f"{process} starts again (start 2)" in words
    account = run.summary()["accounting"]
    assert account["admitted"] == account["trained"] + sum(account["dropped"].values()) + account["in_flight"]
    assert account["trained"] == 80
    assert (run.directory / "checkpoints" / "actor" / "step-000040" / "config.json").exists()


def test_ctrl_c_ends_cleanly_with_a_checkpoint_and_resume_goes_on(tmp_path: Path) -> None:
    words = ["--run.steps=30", "--rollout.nodes.0.delay_s=0.1"]  # slow enough to be interrupted
    with started(tmp_path, *words) as run:
        run.wait_for_step(3)
        run.interrupt()
        assert run.wait(120) == 130, run.words()
        assert len(run.metrics()) < 30
        reached = run.metrics()[-1]["step"]
        assert "--resume" in run.output.read_text()
    (newest,) = sorted((run.directory / "checkpoints" / "actor").glob(f"step-{reached:06d}"))
    assert (newest / "model.safetensors").exists()

    with started(tmp_path, "--resume", *words) as again:
        assert again.wait(300) == 0, again.words()
    steps = [row["step"] for row in again.metrics() if row["kind"] == "step"]
    assert steps == list(range(1, 31))  # each step once, over both lives


def test_nothing_outlives_a_killed_launcher(tmp_path: Path) -> None:
    with started(tmp_path, ENOUGH) as run:
        run.wait_for_step(1)
        pids = processes(run)
        assert len(pids) == 3
        run.popen.send_signal(signal.SIGKILL)
        run.popen.wait()
        wait_until(lambda: not any(_alive(pid) for pid in pids), "the end of all children", 60)


BROKEN_IN_A_WORKER = """
import sys

if 'astraflow.cli' not in sys.modules:
    raise OSError('no such tool server')

def solve(task, llm):
    return 0.0
"""


def test_a_run_that_cannot_work_says_which_process_died_of_what(
    tmp_path: Path, run: Callable[..., Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("PYTHONPATH", str(tmp_path))
    monkeypatch.syspath_prepend(str(tmp_path))
    (tmp_path / "broken.py").write_text(BROKEN_IN_A_WORKER)
    text = (Path(__file__).parents[2] / "recipes" / "quickstart.toml").read_text()
    recipe = tmp_path / "broken.toml"
    recipe.write_text(
        text.replace('type = "tool_use"\nenvironment = "calculator"\nmax_turns = 2', 'type = "broken:solve"')
    )
    ended = run(tmp_path, str(recipe), "--run.steps=2", *SMALL)
    assert ended.code == 1
    assert "node-node0 died 6 times" in ended.output and "no such tool server" in ended.output
    assert "Traceback" not in ended.output.split("its last lines")[0]


def test_a_used_port_is_one_sentence(tmp_path: Path) -> None:
    import socket

    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        taken.listen()
        port = taken.getsockname()[1]
        with started(tmp_path, "--run.steps=2", f"--dataflow.port={port}") as run:
            assert run.wait(300) == 1
    words = run.output.read_text()
    assert f"dataflow.port=127.0.0.1:{port} cannot be bound" in words and "choose another port" in words


FAKE_TENSORBOARD = """
import json, pathlib

class Writer:
    def __init__(self, place):
        self.file = pathlib.Path(place + ".jsonl").open("a")

    def add_scalar(self, *args):
        self.file.write(json.dumps(args) + "\\n")

    def close(self):
        self.file.close()
"""


def test_trackers_get_the_rows_of_steps_and_rounds(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    package = tmp_path / "packages" / "tensorboard"
    package.mkdir(parents=True)
    (package / "__init__.py").write_text("")
    (package / "summary.py").write_text(FAKE_TENSORBOARD)
    monkeypatch.setenv("PYTHONPATH", str(package.parent))
    with started(tmp_path, "--run.steps=2", "--observe.trackers=['tensorboard']") as run:
        assert run.wait(300) == 0, run.words()
    sent = [json.loads(line) for line in (run.directory / "tensorboard.jsonl").read_text().splitlines()]
    for name, steps in (("reward/mean", [1, 2]), ("eval/success", [0, 2])):
        wanted = {row["step"]: row[name] for row in run.metrics() if name in row}
        assert {step: value for found, value, step in sent if found == name} == wanted and list(wanted) == steps


def test_the_same_start_twice_is_one_run(tmp_path: Path, run: Callable[..., Any]) -> None:
    words = ["quickstart", *SMALL, "--or-resume", "--policies.actor.optimizer.lr=0.25"]
    first = run(tmp_path, *words, "--run.steps=1")
    assert first.code == 0, first.words()
    rows, log = first.steps(), (first.directory / "logs" / "dataflow.log").read_text()
    again = run(tmp_path, *words, "--run.steps=1")
    assert again.code == 0, again.words()
    assert "is finished, all 1 steps are made" in again.output and "--run.name=run-2" in again.output
    assert again.steps() == rows
    assert (first.directory / "logs" / "dataflow.log").read_text() == log, "no process was started"
    more = run(tmp_path, *words, "--run.steps=2")
    assert more.code == 0, more.words()
    assert [row["step"] for row in more.steps()] == [1, 2]
    saved = json.loads((first.directory / "run.resolved.json").read_text())
    assert saved["policies"]["actor"]["optimizer"]["lr"] == 0.25


def _alive(pid: int) -> bool:
    try:
        os.kill(pid, 0)
    except ProcessLookupError:
        return False
    return "Z" not in Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0]
