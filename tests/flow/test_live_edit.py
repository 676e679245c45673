"""A workflow is edited in the middle of a run, once to something broken: no episode is lost, rewards respond."""

from __future__ import annotations

import json
import subprocess
import threading
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from astraflow.dataflow.journal.history import read_lives
from astraflow.launch.rundir import RunDirectory
from astraflow.observe.jsonl import read_jsonl
from astraflow.testing.runs import astraflow_command, wait_until

pytestmark = pytest.mark.flow
STEPS = 40
WORKFLOW = """
import asyncio


async def solve(task, llm):
    await llm["actor"].chat([{{"role": "user", "content": "1+1?"}}], max_tokens=4)
    await asyncio.sleep(0.2)
    return {reward}
"""
RECIPE = """
[run]
name = "live-edit"
steps = {steps}

[sources]
train = {{ type = "calculator" }}

[workflow]
type = "{workflow}"
group_size = 4
timeout_s = 30

[policies.actor]
model = "tiny-char"
operators = ["keep_all"]
batch = {{ groups = 2, max_staleness = 1 }}

[rollout]
{rollout}

[dataflow]
heartbeat_s = 0.5
"""
ROLLOUT = {
    "node": "nodes = [{ concurrency = 16, watch = true }]",
    "worker": "nodes = [{ concurrency = 16, workers = 0 }]\nswarm = {}",
}


class Editor(threading.Thread):
    """Breaks the workflow at step 3, mends it with another reward once that was refused."""

    def __init__(self, file: Path, directory: RunDirectory, worker_log: Path | None) -> None:
        super().__init__(name="editor", daemon=True)
        self._file, self._directory, self._worker_log = file, directory, worker_log
        self._process: subprocess.Popen[bytes] | None = None
        self.problem: BaseException | None = None
        self.start()

    def run(self) -> None:
        try:
            self._edit()
        except BaseException as error:
            self.problem = error

    def _edit(self) -> None:
        log = self._worker_log or self._directory.log("node-node")
        if self._worker_log is not None:
            door = self._directory.door_file("node-node")
            wait_until(door.exists, "the door", 300)
            words = ("worker", "--url", json.loads(door.read_text())["url"], "--workflow", f"{self._file}:solve")
            with self._worker_log.open("wb") as out:
                self._process = subprocess.Popen(astraflow_command(*words, "--watch"), stdout=out, stderr=out)
        wait_until(lambda: _step(self._directory) >= 3, "step 3", 300)
        self._file.write_text("def broken(:\n")
        wait_until(lambda: "SyntaxError" in log.read_text(), "the broken edit in the log", 300)
        self._file.write_text(WORKFLOW.format(reward=1.0))

    def end(self) -> int:
        """Exit code of the worker."""
        self.join(60.0)
        return self._process.wait(20) if self._process is not None else 0


def _step(directory: RunDirectory) -> int:
    rows = read_jsonl(directory.metrics) if directory.metrics.exists() else []
    return max((int(row["step"]) for row in rows if row["kind"] == "step"), default=0)


@pytest.mark.parametrize("player", ["node", "worker"])
def test_an_edit_reaches_the_reward_and_no_episode_is_lost(
    tmp_path: Path, run: Callable[..., Any], player: str
) -> None:
    file = tmp_path / f"edited_{player}_workflow.py"
    file.write_text(WORKFLOW.format(reward=0.0))
    recipe = tmp_path / "recipe.toml"
    workflow = f"{file}:solve" if player == "node" else "swarm"
    recipe.write_text(RECIPE.format(steps=STEPS, workflow=workflow, rollout=ROLLOUT[player]))
    directory = RunDirectory(tmp_path / "run")
    editor = Editor(file, directory, tmp_path / "worker.log" if player == "worker" else None)
    ended = run(tmp_path, str(recipe))
    assert (ended.code, editor.problem, editor.end()) == (0, None, 0), ended.words()

    rewards = [row["reward/mean"] for row in ended.steps()]
    assert rewards[:3] == [0.0] * 3 and rewards[-1] == 1.0
    moments = [m for life in read_lives(directory.journal / "history").values() for m in life]
    assert not [
        m for m in moments if m.what in ("failed", "refused") or (m.what == "lost" and m.fields["why"] != "over")
    ]
    by_code: dict[str, set[float]] = {}
    for moment in (m for m in moments if m.what == "committed"):
        by_code.setdefault(moment.fields["code"], set()).update(moment.fields["reward"]["actor"])
    assert sorted(by_code.values(), key=min) == [{0.0}, {1.0}]
    account = ended.summary()["accounting"]
    assert account["admitted"] == account["trained"] + sum(account["dropped"].values()) + account["in_flight"]
    assert set(account["dropped"]) <= {"finished"}
