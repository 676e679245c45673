"""Evaluations that are really played, by scripted engines and by a service elsewhere."""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from astraflow.cli.app import main
from astraflow.cli.play import open_side
from astraflow.config.load import resolved_json
from astraflow.errors import ConfigError, EngineError, LaunchError
from astraflow.launch.evaluation import run as module
from astraflow.launch.evaluation.run import Evaluation, Side, evaluate, fingerprint, row_of
from astraflow.launch.play import PlayOptions, play_leases
from astraflow.models.registry import model_directory
from astraflow.types import Episode, Task, Trajectory
from fake_service import FakeService

AGENT = """
async def solve(task, llm):
    reply = await llm["actor"].chat([{"role": "user", "content": task["question"]}])
    if task["row"] == 2:
        raise RuntimeError("the environment is gone")
    return float(task["row"] == 0 or "yes" in (reply.content or ""))
"""


@pytest.fixture
def run_file(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    (tmp_path / "eval_agent.py").write_text(AGENT)
    monkeypatch.syspath_prepend(tmp_path)
    monkeypatch.chdir(tmp_path)
    for name, rows in (("held", 3), ("train", 2)):
        lines = [json.dumps({"question": f"{name} {row}", "row": row}) for row in range(rows)]
        (tmp_path / f"{name}.jsonl").write_text("\n".join(lines) + "\n")
    path = tmp_path / "small.toml"
    path.write_text("""
[run]
name = "small"
steps = 1
[sources.held]
type = "jsonl"
path = "held.jsonl"
[sources.train]
type = "jsonl"
path = "train.jsonl"
[workflow]
type = "eval_agent:solve"
[policies.actor]
model = "tiny-char"
sampling = { max_tokens = 4 }
engine = { type = "scripted", script = [[40, 41]] }
[evaluation]
source = "held"
""")
    return path


@pytest.fixture
def service() -> Iterator[FakeService]:
    made = FakeService()
    made.reply = lambda body: {"content": "yes"}
    yield made
    made.close()


def evaluation(run_file: Path, *names: str, sources: tuple[str, ...] = ("held",), samples: int = 2) -> Evaluation:
    sides = [open_side(name, str(run_file), "", [], "") for name in names or (str(run_file),)]
    return Evaluation(sides[0].config, sides, sources, 0, PlayOptions(samples, 1.0, 4))


def test_each_episode_is_kept_and_played_once(run_file: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    wanted = evaluation(run_file, sources=("held", "train"))
    results = evaluate(wanted, tmp_path / "e")
    assert [(s.source, s.num_tasks, s.num_unscored, s.avg.mean) for s in results.scores] == [
        ("held", 3, 2, 0.5), ("train", 2, 0, 0.5), ("(all)", 5, 2, 0.5)
    ]  # fmt: skip
    written = json.loads((tmp_path / "e" / "results.json").read_text())
    assert len(written["tasks"]) == 5 and written["settings"]["samples"] == 2
    file = tmp_path / "e" / "episodes.jsonl"
    lines = file.read_bytes().splitlines(keepends=True)
    assert len(lines) == 10
    file.write_bytes(b"".join(lines[:7]))  # killed after seven
    counted: list[int] = []

    def counting(config: Any, models: Any, leases: Any, options: Any, on_episode: Any) -> None:
        counted.append(len(leases))
        play_leases(config, models, leases, options, on_episode)

    monkeypatch.setattr(module, "play_leases", counting)
    assert evaluate(evaluation(run_file, sources=("held", "train")), tmp_path / "e").scores == results.scores
    assert counted == [3]
    evaluate(wanted, tmp_path / "e")
    assert counted == [3]
    with pytest.raises(ConfigError, match="samples=3 must stay 2"):
        evaluate(evaluation(run_file, sources=("held", "train"), samples=3), tmp_path / "e")
    (tmp_path / "held.jsonl").write_text('{"question": "other", "row": 0}\n')
    with pytest.raises(ConfigError, match=r"sources\.held\.tasks=1 must stay 3"):
        evaluate(evaluation(run_file, sources=("held", "train")), tmp_path / "e")


def test_a_model_beside_one_at_a_service(run_file: Path, service: FakeService, tmp_path: Path) -> None:
    there = f"big@{service.url}"
    results = evaluate(evaluation(run_file, str(run_file), there), tmp_path / "e")
    assert [(s.side, s.avg.mean) for s in results.scores] == [(str(run_file), 0.5), (there, 1.0)]
    (found,) = results.comparisons
    assert (found.difference, found.num_tasks, found.better, found.worse) == (0.5, 2, 1, 0)
    assert {body["model"] for body in service.seen} == {"big"}


def test_an_engine_that_ends_ends_the_evaluation_which_goes_on_later(
    run_file: Path, service: FakeService, tmp_path: Path
) -> None:
    service.key = "another"
    there = f"big@{service.url}"
    with pytest.raises(EngineError, match="key"):
        evaluate(evaluation(run_file, there), tmp_path / "e")
    service.key = None
    assert evaluate(evaluation(run_file, there), tmp_path / "e").scores[0].avg.mean == 1.0


def test_sides_must_differ_and_fit(run_file: Path, tmp_path: Path) -> None:
    wanted = evaluation(run_file)
    twice = Evaluation(wanted.config, [*wanted.sides, *wanted.sides], ["held"], 0, PlayOptions())
    with pytest.raises(LaunchError, match="is named twice"):
        evaluate(twice, tmp_path / "e")
    other = wanted.config.model_copy(update={"policies": {"judge": wanted.config.policies["actor"]}})
    stranger = Side("x", other, {"judge": wanted.sides[0].models["actor"]})
    with pytest.raises(LaunchError, match="other policies than actor"):
        evaluate(Evaluation(wanted.config, [*wanted.sides, stranger], ["held"], 0, PlayOptions()), tmp_path / "e")


def test_the_command(run_file: Path, capsys: pytest.CaptureFixture[str], service: FakeService) -> None:
    there = f"big@{service.url}"
    words = ["eval", str(run_file), "--model", "tiny-char", "--model", there, "--samples=2", "--temperature=0.5"]
    assert main(words) == 0
    out = capsys.readouterr().out
    assert "avg@2" in out and f"held: {there} less tiny-char: +0.500 [" in out and "unscored" in out
    (path,) = Path("evals").iterdir()
    assert path.name.startswith("small-") and (path / "results.json").is_file()
    size = (path / "episodes.jsonl").stat().st_size
    assert main([*words, "--json"]) == 0
    assert json.loads(capsys.readouterr().out)["settings"]["temperature"] == 0.5
    assert (path / "episodes.jsonl").stat().st_size == size and len(list(Path("evals").iterdir())) == 1
    assert main([*words, f"--out={path}", "--num-tasks=1"]) == 2
    assert "sources.held.tasks=1 must stay 3" in capsys.readouterr().err


def test_a_run_directory_brings_its_run_file(
    run_file: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    config = open_side(str(run_file), str(run_file), "", [], "").config
    (tmp_path / "r").mkdir()
    (tmp_path / "r" / "run.resolved.json").write_text(resolved_json(config))
    assert main(["eval", "r"]) == 1 and "has no whole checkpoint of actor" in capsys.readouterr().err
    made = model_directory("tiny-char", tmp_path / "cache", 3)
    monkeypatch.setattr("astraflow.launch.rundir.RunDirectory.newest_checkpoint", lambda self, name: made)
    assert main(["eval", "r", "--model=tiny-char"]) == 0
    assert "held: tiny-char less r: +0.000" in capsys.readouterr().out


def test_a_service_alone_knows_no_tasks(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["eval", "big@http://127.0.0.1:9/v1"]) == 1
    assert "says nothing of its tasks; name them with --recipe" in capsys.readouterr().err


def test_weights_are_known_by_what_is_in_them(tmp_path: Path) -> None:
    marks = [fingerprint(model_directory("tiny-char", tmp_path, seed)) for seed in (1, 2)]
    assert marks[0] != marks[1]
    assert fingerprint(model_directory("tiny-char", tmp_path / "again", 1)) == marks[0]


def test_what_only_served_policies_earn_does_not_count() -> None:
    def branch(policy: str, reward: float | None) -> Trajectory:
        ids, none = np.zeros(2, np.int32), np.zeros(2, np.float32)
        return Trajectory(
            policy=policy, branch=0, parent_branch=-1, fork_at=0, token_ids=ids, loss_mask=np.array([False, True]),
            behavior_logprobs=none, versions=ids, call_index=np.zeros(2, np.int16), reward=reward,
        )  # fmt: skip

    episode = Episode(
        episode_id="held/0/1/4", attempt=1, node_id="n", task=Task("held", 1, 0, {}),
        trajectories=[branch("actor", 0.25), branch("judge", 1.0)],
    )  # fmt: skip
    row = row_of(episode, "a", 4, {"actor"})
    assert (row.reward, row.success, row.sample, row.num_tokens) == (0.25, 0.0, 4, 1)
    assert row_of(episode, "a", 4, {"third"}).success is None
