"""Every file of examples/ takes the place of one of our processes in a real run of three steps."""

from __future__ import annotations

import json
import os
import re
import signal
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from astraflow.config.env import child_environment
from astraflow.testing.forked import popen
from astraflow.testing.runs import astraflow_command, wait_until

ROOT = Path(__file__).parents[2]
EXAMPLES = ROOT / "examples"
PEERS = [os.environ.get("ASTRAFLOW_PEERS_PYTHON", ""), str(ROOT / ".venv-peers" / "bin" / "python"), sys.executable]


class HandMadeRun:
    """The services of digits.toml, started one by one as a user would."""

    def __init__(self, place: Path, *words: str) -> None:
        self.directory, self._place = place / "run", place
        self._processes: dict[str, subprocess.Popen[bytes]] = {}
        ready = place / "ready.json"
        self._start(
            "dataflow", "dataflow", "digits.toml", f"--run-dir={self.directory}", f"--ready-file={ready}",
            "--run.steps=3", "--run.checkpoint_every=2", *words,
        )  # fmt: skip
        wait_until(lambda: ready.exists() or not self.alive("dataflow"), "an answer of the service", 300)
        assert ready.exists(), self.log("dataflow")
        self.url = json.loads(ready.read_text())["url"]

    def _start(self, name: str, *words: str) -> None:
        self.run(name, *astraflow_command(*words))

    def node(self) -> None:
        self._start("node", "node", "--dataflow", self.url, "--concurrency", "16")

    def trainer(self) -> None:
        self._start("trainer", "trainer", "--dataflow", self.url, "--policy", "actor", f"--run-dir={self.directory}")

    def run(self, name: str, *command: str) -> None:
        start = popen if command[0] == sys.executable else subprocess.Popen
        with (self._place / f"{name}.log").open("ab") as log:
            environment = child_environment(None, {"PYTHONPATH": str(ROOT / "src")})
            self._processes[name] = start(
                command, cwd=EXAMPLES, env=environment, stdout=log, stderr=subprocess.STDOUT, stdin=subprocess.DEVNULL
            )

    def alive(self, name: str) -> bool:
        return self._processes[name].poll() is None

    def log(self, name: str) -> str:
        return (self._place / f"{name}.log").read_text(errors="replace")

    def wait(self, *names: str) -> None:
        """Each of them ends by itself, with 0."""
        for name in names:
            wait_until(lambda: not self.alive(name), f"the end of {name}", 300)  # noqa: B023
            assert self._processes[name].returncode == 0, "\n".join(map(self.log, self._processes))

    def end(self) -> None:
        for process in self._processes.values():
            if process.poll() is None:
                process.send_signal(signal.SIGTERM)
        for process in self._processes.values():
            try:
                process.wait(60)
            except subprocess.TimeoutExpired:
                process.kill()
                process.wait()

    def steps(self) -> list[dict[str, float]]:
        rows = [json.loads(line) for line in (self.directory / "metrics.jsonl").read_text().splitlines()]
        return [row for row in rows if row["kind"] == "step"]


@pytest.fixture
def place(tmp_path: Path) -> Iterator[Path]:
    yield tmp_path
    assert not list(EXAMPLES.glob("runs")), "examples write into the run directory that they are given"


def ended(run: HandMadeRun) -> None:
    """Three steps, on rewards that are not all the same."""
    assert [row["step"] for row in run.steps()] == [1, 2, 3], run.log("dataflow")
    assert all(row["reward/max"] > 0 and row["reward/std"] > 0 for row in run.steps())


@pytest.mark.flow
@pytest.mark.slow
def test_a_trainer_in_plain_torch(place: Path) -> None:
    run = HandMadeRun(place)
    try:
        run.node()
        run.run("example", sys.executable, "plain_torch_trainer.py", run.url, "actor", str(run.directory))
        run.wait("example", "node")
    finally:
        run.end()
    ended(run)
    assert all("loss" in row and row["grad_norm"] > 0 for row in run.steps())
    saved = sorted(path.name for path in (run.directory / "checkpoints" / "actor").iterdir())
    assert saved == ["step-000002", "step-000003"]


@pytest.mark.flow
@pytest.mark.slow
def test_trl_driven_by_the_dataflow(place: Path) -> None:
    python = next((p for p in PEERS if p and has_trl(p)), None)
    if python is None:
        pytest.skip("NOT TESTED: no environment with trl; run `make bench-peers`, or set ASTRAFLOW_PEERS_PYTHON")
    run = HandMadeRun(place)
    try:
        run.node()
        run.run("example", python, "trl_trainer.py", run.url, "actor", str(run.directory))
        run.wait("example", "node")
    finally:
        run.end()
    ended(run)
    assert all("loss" in row for row in run.steps())
    clipped = re.findall(r"'clip_ratio/region_mean': '([0-9.e-]+)'", run.log("example"))
    assert len(clipped) == 3 and float(clipped[0]) == 0.0, "logprobs of the engine and of TRL differ at the first step"
    assert (run.directory / "checkpoints" / "actor-trl" / "checkpoint-2").is_dir()


@pytest.mark.flow
@pytest.mark.slow
def test_a_rollout_service_of_ones_own(place: Path) -> None:
    run = HandMadeRun(place)
    try:
        run.trainer()
        run.run("example", sys.executable, "custom_rollout.py", run.url)
        run.wait("example", "trainer")
    finally:
        run.end()
    ended(run)
    assert all(row["logprob_gap/p99"] < 1e-4 for row in run.steps()), "its logprobs are not those of its weights"


@pytest.mark.flow
@pytest.mark.slow
def test_a_stage_of_ones_own(place: Path) -> None:
    run = HandMadeRun(place, "--stages.digits.type=custom_stage:Digits", "--stages.digits.workers=0")
    try:
        run.trainer()
        run.node()
        run.run("example", sys.executable, "custom_stage.py", run.url, "digits")
        run.wait("trainer", "node", "example")
    finally:
        run.end()
    ended(run)


def has_trl(python: str) -> bool:
    needed = ("trl", "datasets", "msgspec", "uvicorn")
    code = f"import importlib.util as u, sys; sys.exit(not all(map(u.find_spec, {needed})))"
    try:
        return subprocess.run([python, "-c", code], timeout=60, check=False).returncode == 0
    except OSError:
        return False


def test_the_page_shows_the_example_as_it_is() -> None:
    assert (EXAMPLES / "plain_torch_trainer.py").read_text() in (ROOT / "docs" / "own-trainer.md").read_text()
