"""Runs in which environments fail, and in which a reward function of another system says what is learnt."""

from __future__ import annotations

from pathlib import Path

import pytest

from astraflow.testing.runs import LaunchedRun

pytestmark = [pytest.mark.flow, pytest.mark.timeout(300)]
SUPPORT = {"PYTHONPATH": str(Path(__file__).parents[1] / "support")}
RUN = """
[run]
name = "run"
steps = 3

[sources.train]
type = "calculator"

[workflow]
{workflow}
group_size = 4

[policies.actor]
model = "tiny-char"
batch = {{ groups = 4, max_staleness = 1 }}
operators = ["keep_all"]
sampling = {{ max_tokens = 4 }}
"""


def played(place: Path, workflow: str) -> LaunchedRun:
    recipe = place / "recipe.toml"
    recipe.write_text(RUN.format(workflow=workflow))
    run = LaunchedRun.start(place, str(recipe), environment=SUPPORT)
    try:
        assert run.wait(200) == 0, run.words()
    finally:
        run.end()
    return run


def test_episodes_of_failed_environments_are_played_again_and_counted(tmp_path: Path) -> None:
    workflow = """type = "tool_use"
environment = "world_faults:Flaky"
env_timeout_s = 1.0
pool = { processes = 2, seats = 2 }
max_turns = 2
max_attempts = 6"""
    run = played(tmp_path, workflow)
    summary = run.summary()
    account = summary["accounting"]
    assert account["admitted"] == account["trained"] + sum(account["dropped"].values()) + account["in_flight"]
    assert account["trained"] == 12 and set(account["dropped"]) <= {"stale"}, "each found an environment that worked"
    assert {"env_error"} <= set(summary["errors"]) <= {"env_error", "env_timeout"}, summary["errors"]
    assert "environment world_faults:Flaky: " in run.words(), "kills are in the log"


def test_a_reward_function_of_trl_drives_a_run(tmp_path: Path) -> None:
    workflow = """type = "single_turn"
prompt = "{text}"
reward = { type = "function", style = "trl", function = "foreign_rewards:trl_digits" }"""
    summary = played(tmp_path, workflow).summary()
    assert summary["accounting"]["trained"] == 12 and not summary["errors"]
    assert 0.0 < summary["reward"]["best"] < 1.0
