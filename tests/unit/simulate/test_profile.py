"""Profiles: what they refuse, and what is read from the directory of a run."""

from __future__ import annotations

import json
import re
import tomllib
from pathlib import Path
from typing import Any

import msgspec
import numpy as np
import pytest

from astraflow.cli.app import main
from astraflow.config.load import resolved_json
from astraflow.config.schema import RunConfig
from astraflow.errors import AstraFlowError, ConfigError
from astraflow.simulate.fit import fitted, measured
from astraflow.simulate.profile import EngineCost, Network, Serving, VersionCost, merged, profile_of, read_raw
from astraflow.simulate.world import simulate
from simulated import config_of, profile

CALLS = {"calls": [{"policy": "actor", "tokens": 5}]}


@pytest.mark.parametrize(
    ("over", "says"),
    [
        ({"engine": {"step": 1}}, "unknown field `step`"),
        ({"engine": {"step_s": -1}}, ">= 0"),
        ({"episode": {"calls": []}}, "length >= 1"),
        ({"episode": {"calls": [{"policy": "critic", "tokens": 5}]}}, "episode.calls.policy='critic' is not a policy"),
        ({"policies": {"critic": {}}}, "policies='critic' is not a policy of the run file; use one of actor"),
        ({"policies": {"actor": {"kept": 0}}}, "kept=0 lets no group through"),
        ({"episode": {"calls": [{"policy": "actor", "tokens": 5, "chance": 0}]}}, "no call of 'actor'"),
    ],
)
def test_what_a_profile_cannot_be(over: dict[str, Any], says: str) -> None:
    with pytest.raises(ConfigError, match=says.replace("(", r"\(")):
        profile_of(merged({"episode": CALLS}, over), config_of(), "costs.toml")


def test_costs_of_one_policy_are_above_those_of_all() -> None:
    config = config_of(policies=["a", "b"])
    found = profile(config, {"policies": {"b": {"engine": {"row_s": 2.0}}}})
    assert (found.cost("a").engine.row_s, found.cost("b").engine.row_s) == (0.0, 2.0)
    assert found.cost("b").engine.step_s == found.cost("a").engine.step_s > 0


@pytest.mark.parametrize(("name", "text"), [("a.toml", "[engine"), ("a.json", "{"), ("none.toml", None)])
def test_a_file_that_is_no_profile(tmp_path: Path, name: str, text: str | None) -> None:
    if text is not None:
        (tmp_path / name).write_text(text)
    with pytest.raises(ConfigError, match=r"cannot be read|no valid TOML or JSON"):
        read_raw(tmp_path / name)


def run_directory(path: Path, config: RunConfig, *, steps: int = 12) -> Path:
    """A finished run: decode steps of 10 ms and 0.2 ms a row, prompts of 0.1 ms a token, training of 1 ms a token and
    0.1 s, two calls of 5 tokens an episode, 8 episodes and 2 seconds a step."""
    (path / "dataflow" / "history").mkdir(parents=True)
    (path / "run.resolved.json").write_text(resolved_json(config))
    random, engine, rows = np.random.default_rng(0), np.zeros(3), []
    moments: list[Any] = [[0, 3.0, "train/0/0", "admitted", {"policies": ["actor"], "purpose": "train"}]]
    for step in range(1, steps + 1):
        engine += [random.integers(8, 16), 80, random.integers(100, 200)]
        busy_s = float(engine @ [0.010, 0.0002, 0.0001]) + 0.02 * step
        rows.append({
            "kind": "step", "policy": "actor", "step": step, "time_s": 3.0 + 2 * step, "perf/wait_s": 1.82,
            "perf/busy_s": 0.18, "perf/forward_backward_s": 0.08, "tokens/sampled": 80.0, "tokens/per_episode": 10.0,
            "staleness/mean": 1.0, "groups/trained": 4.0 * step, "groups/dropped/zero_variance": 1.0 * step,
            "groups/dropped/stale": 7.0, "nodes/busy_s": busy_s, "nodes/swap_s": 0.02 * step, "nodes/swaps": step,
            "nodes/decode_steps": float(engine[0]), "nodes/sampled_tokens": float(engine[1]),
            "nodes/prefill_tokens": float(engine[2]), "nodes/requests": 16.0 * step, "nodes/calls": 16.0 * step,
            "nodes/episodes_done": 8.0 * step, "nodes/loop_cpu_s": 0.0016 * step, "nodes/idle_fraction": 0.75,
        })  # fmt: skip
        facts = {"episodes": [0, 1], "tokens": [10, 10], "reward": {"actor": [1.0, 0.0]}}
        moments.append([step, 3.0 + 2 * step, f"train/0/{step}", "committed", facts])
    (path / "metrics.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    (path / "dataflow" / "history" / "000001.jsonl").write_text("".join(json.dumps(m) + "\n" for m in moments))
    return path


def test_a_run_gives_its_costs(tmp_path: Path) -> None:
    config = config_of(steps=12)
    found = fitted(run_directory(tmp_path, config))
    cost = found.cost("actor")
    assert (found.episode.rounds, found.serving.start_s) == (2.0, 3.0)
    assert found.episode.calls[0].tokens == pytest.approx(5.0) and found.episode.calls[0].spread == 0.0
    assert cost.engine.row_s / cost.engine.step_s == pytest.approx(0.02)
    assert cost.engine.prefill_token_s / cost.engine.step_s == pytest.approx(0.01)
    assert cost.engine.gather_s == 0.02
    assert cost.trainer.token_s * 80 == pytest.approx(0.08) and cost.trainer.step_s == pytest.approx(0.1)
    assert cost.kept == pytest.approx(4 / 5)
    assert found.serving.call_s == pytest.approx(1e-4)


def test_the_run_that_was_fitted_is_simulated_as_it_was(tmp_path: Path) -> None:
    config = config_of(steps=12, batch={"max_staleness": 0})
    path = run_directory(tmp_path, config)
    real, found = measured(path), simulate(config, fitted(path))
    assert real["policies"]["actor"]["step_s"] == pytest.approx(2.0)
    assert found.policies["actor"].step_s == pytest.approx(2.0, rel=0.05)
    assert found.policies["actor"].busy_s == pytest.approx(0.18, rel=0.02)


def test_too_short_a_run_is_said(tmp_path: Path) -> None:
    with pytest.raises(AstraFlowError, match="fewer than three steps of actor"):
        fitted(run_directory(tmp_path / "short", config_of(), steps=2))
    with pytest.raises(AstraFlowError, match="holds no run"):
        fitted(tmp_path / "none")


def test_the_command_takes_a_profile_and_changes_it(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    costs = tmp_path / "costs.toml"
    costs.write_text('[engine]\nstep_s = 0.01\n[[episode.calls]]\npolicy = "actor"\ntokens = 5\n')
    words = ["simulate", "quickstart", "--profile", str(costs), "--steps", "4"]
    assert main(words) == 0
    assert "s per step" in capsys.readouterr().out
    assert main([*words, "--json", "--nodes", "2", "--cost", "engine.step_s=0.02"]) == 0
    said = json.loads(capsys.readouterr().out)
    assert said["profile"]["policies"]["actor"]["engine"]["step_s"] == 0.02
    assert said["prediction"]["policies"]["actor"]["steps"] == 4
    again = tmp_path / "said.json"
    again.write_text(json.dumps(said))
    assert main(["simulate", "quickstart", "--profile", str(again), "--steps", "4", "--nodes", "2", "--json"]) == 0
    assert json.loads(capsys.readouterr().out) == said


@pytest.mark.parametrize(
    ("words", "code", "says"),
    [
        ([], 2, "profile is missing; give --from RUN_DIR or --profile FILE"),
        (["--profile", "none.toml"], 2, "cannot be read"),
        (["--from", "nowhere"], 1, "holds no run"),
        (["--profile", "none.toml", "--cost", "x"], 2, "cannot be read"),
        (["--cores", "two"], 2, "--cores"),
    ],
)
def test_what_the_command_cannot_do(words: list[str], code: int, says: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["simulate", "quickstart", *words]) == code
    assert says in capsys.readouterr().err


def test_the_profile_of_the_docs_is_one() -> None:
    page = (Path(__file__).parents[3] / "docs" / "scaling.md").read_text()
    (text,) = re.findall(r"^```ini\n(.*?)^```", page, re.MULTILINE | re.DOTALL)
    raw = tomllib.loads(text)
    config = config_of(policies=["actor", "verifier"])
    raw["episode"]["calls"].append({"policy": "verifier", "tokens": 1})
    costs = profile_of(raw, config, "docs/scaling.md")
    assert costs.cost("verifier").engine.step_s == 0.006 and costs.cost("actor").engine.step_s == 0.012
    documented = {key for table in (raw["engine"], raw["network"], raw["serving"], raw["weights"]) for key in table}
    records = (EngineCost, Network, Serving, VersionCost)
    assert documented == {name for record in records for name in record.__struct_fields__}


def test_a_profile_is_read_back_as_it_was_written() -> None:
    config = config_of()
    costs = profile(config)
    assert profile_of(msgspec.to_builtins(costs), config, "again") == costs
