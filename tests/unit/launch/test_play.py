"""Episodes without a run: whatever becomes of the worker, `play` ends."""

from __future__ import annotations

import pytest

from astraflow.config.schema import RunConfig
from astraflow.dataflow.machine.plan import plan_of
from astraflow.dataflow.shell import open_sources
from astraflow.errors import Problem
from astraflow.launch.play import PlayOptions, leases_of, play
from astraflow.types import Task

DIES = """
import os

async def solve(task, llm):
    if task["dies"]:
        os._exit(3)
    return 1.0
"""


def test_the_rest_is_played_after_a_worker_died(tmp_path, monkeypatch):
    (tmp_path / "dying_agent.py").write_text(DIES)
    monkeypatch.syspath_prepend(tmp_path)
    config = RunConfig.model_validate(
        {
            "run": {"name": "p", "steps": 1},
            "sources": {"train": {"type": "sums"}},
            "workflow": {"type": "dying_agent:solve"},
            "policies": {"actor": {"model": "tiny-char", "engine": {"type": "scripted", "script": ["."]}}},
        }
    )
    tasks = [Task("train", row, 0, {"dies": row == 0}) for row in range(3)]
    episodes = play(config, {}, tasks, PlayOptions(concurrency=1))
    kinds = [(e.error or "").partition(":")[0] for e in episodes]
    assert kinds[0] == "worker_killed" and "worker_killed" not in kinds[1:] and len(kinds) == 3


def test_a_workflow_that_cannot_be_built_is_said_before_an_engine_starts(monkeypatch):
    monkeypatch.setattr("astraflow.launch.play.start_policy", lambda *_, **__: pytest.fail("an engine was started"))
    config = RunConfig.model_validate(
        {
            "run": {"name": "p", "steps": 1},
            "sources": {"train": {"type": "sums"}},
            "workflow": {"type": "single_turn", "reward": "no_such_reward"},
            "policies": {"actor": {"model": "tiny-char", "engine": {"type": "scripted", "script": ["."]}}},
        }
    )
    with pytest.raises(Problem, match=r"workflow\.reward\.type=no_such_reward is not a known name"):
        play(config, {}, [Task("train", 0, 0, {"question": "1+1"})], PlayOptions())


def test_eval_samples_as_a_round_of_the_run():
    config = RunConfig.model_validate(
        {
            "run": {"name": "p", "steps": 1},
            "sources": {"train": {"type": "sums"}},
            "workflow": {"type": "single_turn", "reward": "sums"},
            "policies": {"actor": {"model": "tiny-char", "sampling": {"top_p": 0.5, "top_k": 7, "max_tokens": 9}}},
            "evaluation": {"source": "train", "temperature": 0.8},
        }
    )
    (lease,) = leases_of(config, [Task("train", 0, 0, {})], PlayOptions(temperature=0.8))
    assert lease.sampling["actor"] == plan_of(config, open_sources(config)).policies["actor"].sampling["eval"]
