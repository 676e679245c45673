"""Policies on nodes of their own: an actor and a verifier that learn together while neither node has both engines."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import urllib.request
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest

from astraflow.config.env import child_environment
from astraflow.observe.summary import law_holds
from astraflow.testing.runs import LaunchedRun, astraflow_command, wait_until

pytestmark = [pytest.mark.flow, pytest.mark.slow]
TEAMS = Path(__file__).parents[2] / "examples" / "teams"
ACTOR, VERIFIER = "local-float32@actors", "local-float32@verifiers"
NODES = """
[[rollout.nodes]]
name = "actors"
serves = ["actor"]
concurrency = 64

[[rollout.nodes]]
name = "verifiers"
serves = ["verifier"]
workers = {workers}
concurrency = 64
"""


@pytest.fixture
def run_file(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Callable[[int], str]:
    """The team of examples/teams/verifier.toml, on two nodes."""
    monkeypatch.chdir(TEAMS)
    monkeypatch.syspath_prepend(str(TEAMS))
    monkeypatch.setenv("PYTHONPATH", str(TEAMS))

    def write(workers: int) -> str:
        text, _, _ = (TEAMS / "verifier.toml").read_text().partition("[[rollout.nodes]]")
        path = tmp_path / "two-nodes.toml"
        path.write_text(text + NODES.format(workers=workers))
        return str(path)

    return write


def small(steps: int) -> list[str]:
    words = [f"--run.steps={steps}", "--dataflow.heartbeat_s=0.2", "--workflow.group_size=4"]
    for policy in ("actor", "verifier"):
        words += [f"--policies.{policy}.batch.groups=2", f"--policies.{policy}.operators=['keep_all']",
                  f"--policies.{policy}.warm_start.steps=8"]  # fmt: skip
    return words


def sampled(status: dict[str, Any]) -> dict[str, int]:
    """Engine and node -> tokens."""
    return {name: each["tokens"] for name, each in status["episodes"]["engines"].items()}


@pytest.mark.parametrize("workers", [0, 1])
def test_two_policies_on_two_nodes(workers: int, run_file: Callable[[int], str], tmp_path: Path, run: Any) -> None:
    """One node plays and the other one serves only; or each plays, and asks the other one."""
    ended = run(tmp_path, run_file(workers), *small(4), "--weights.check=true")
    assert ended.code == 0, ended.words()
    summary = ended.summary()
    assert law_holds(summary["accounting"]) and summary["versions"] == {"actor": 4, "verifier": 4}
    assert summary["staleness"]["max"] <= 2 and summary["logprob_gap"]["p99"] < 1e-3
    status = json.loads((ended.directory / "report" / "status.json").read_text())
    tokens = sampled(status)
    assert set(tokens) == {ACTOR, VERIFIER} and min(tokens.values()) > 0, "each by the engine that sampled it"
    rows = [json.loads(line) for line in (ended.directory / "metrics.jsonl").read_text().splitlines()]
    last = {key: row[key] for row in rows for key in row if key.startswith("nodes/")}
    assert last["nodes/far_tokens"] > 0 and last["nodes/weights_wrong"] == 0


@contextmanager
def a_node_by_hand(url: str, output: Path, *words: str) -> Iterator[subprocess.Popen[bytes]]:
    with output.open("ab") as out:
        node = subprocess.Popen(
            astraflow_command("node", "--dataflow", url, *words), stdin=subprocess.DEVNULL, stdout=out,
            stderr=subprocess.STDOUT, env=child_environment(None, {"PYTHONPATH": str(TEAMS)}),
        )  # fmt: skip
    try:
        yield node
    finally:
        node.kill()
        node.wait()


def test_an_engine_is_added_while_the_run_goes_on_and_takes_over(
    run_file: Callable[[int], str], tmp_path: Path
) -> None:
    run = LaunchedRun.start(tmp_path, run_file(0), *small(5000), environment={"PYTHONPATH": str(TEAMS)})
    try:
        run.wait_for_step(2)
        url = json.loads((run.directory / "dataflow" / "ready.json").read_text())["url"]

        def status() -> Any:
            with urllib.request.urlopen(f"{url}/status", timeout=60) as answer:
                return json.load(answer)

        def nodes() -> list[dict[str, Any]]:
            found: list[dict[str, Any]] = status()["nodes"]
            return found

        def tokens_of(engine: str) -> int:
            return sampled(status()).get(engine, 0)

        assert tokens_of(VERIFIER) > 0
        words = ("--serves", "verifier", "--workers", "0", "--name", "extra")
        with a_node_by_hand(url, tmp_path / "extra.out", *words):
            wait_until(lambda: tokens_of("local-float32@extra") > 0, "work for the added engine", 300)
            served = tokens_of("local-float32@extra")
            (first,) = (pid for pid in run.pids("node") if b"verifiers" in Path(f"/proc/{pid}/cmdline").read_bytes())
            os.kill(first, signal.SIGKILL)
            wait_until(lambda: tokens_of("local-float32@extra") > served, "the added engine has all the work", 300)
        wait_until(lambda: {each["name"] for each in nodes()} == {"actors", "verifiers"}, "the first is back", 300)
        served = tokens_of(VERIFIER)
        wait_until(lambda: tokens_of(VERIFIER) > served, "work for the first engine", 300)
        failed = {name: n for each in nodes() for name, n in each["stats"].items() if name.startswith("episodes_fail")}
        assert failed == {}, "no episode was lost with an engine"
    finally:
        run.end()
