"""Episodes of a run file whose policies say what a test says."""

from __future__ import annotations

from pathlib import Path

import pytest

from astraflow.errors import AstraFlowError, EpisodeError, Problem
from astraflow.testing.episodes import RunFile, calls

RUN = """
[run]
name = "mine"
steps = 2
[sources]
train = { type = "calculator" }
[workflow]
type = "WORKFLOW"
group_size = 2
OPTIONS
[policies.actor]
model = "tiny-char"
batch = { groups = 2 }
"""
AGENT = """
async def plays(task, llm, *, bonus=0.0):
    reply = await llm["actor"].chat([{"role": "user", "content": task["text"]}])
    again = await llm["actor"].chat([reply.message, {"role": "user", "content": "sure?"}])
    return float(reply.content == again.content) + bonus

def blocks(task, llm):
    reply = llm["actor"].chat([{"role": "user", "content": task["text"]}])
    return {"actor": float(reply.tool_calls[0].arguments["expr"] == "1+1")}

async def asks_another(task, llm):
    await llm["judge"].chat([])
"""


@pytest.fixture
def run_file(tmp_path: Path):
    def made(workflow: str, options: str = "") -> RunFile:
        file = tmp_path / f"agent_{tmp_path.name}.py"  # a module's name is taken once
        file.write_text(AGENT)
        path = tmp_path / "run.toml"
        text = RUN.replace("WORKFLOW", workflow.replace("agent:", f"{file}:"))
        path.write_text(text.replace("OPTIONS", options))
        return RunFile(path)

    return made


def test_policies_say_what_they_are_given_and_what_they_heard_is_kept(run_file) -> None:
    run = run_file("agent:plays", "bonus = 0.5")
    task = run.task("train", 0)
    played = run.play(task, actor=["7", "7"])
    assert played.reward == 1.5 and run.play(task, actor=["7", "8"]).reward == 0.5
    assert [len(messages) for messages in played.heard["actor"]] == [1, 2]
    assert played.heard["actor"][1][0]["content"] == "7"
    assert run.play(task, actor=lambda messages: messages[-1]["content"]).reward == 0.5
    assert run.num_rows == {"train": 240}


def test_a_tool_is_called_and_a_plain_function_blocks(run_file) -> None:
    run = run_file("agent:blocks")
    assert run.play(run.task("train", 0), actor=[calls("calc", expr="1+1")]).reward == {"actor": 1.0}


def test_the_built_in_workflow_plays_in_its_environment(run_file) -> None:
    run = run_file("tool_use", 'environment = "calculator"')
    task = run.task("train", 0)
    right = [calls("calc", expr=task["text"].rstrip("?")), f"{task['answer']}."]
    assert run.play(task, actor=right).outcome.metrics["success"] == 1.0


def test_more_calls_than_replies_and_unknown_policies_are_said(run_file) -> None:
    run = run_file("agent:plays")
    task = run.task("train", 0)
    with pytest.raises(Problem, match="calls of actor=2 are more than its 1 replies"):
        run.play(task, actor=["7"])
    with pytest.raises(Problem, match="policy=actr is not in the run file; give one of: actor"):
        run.play(task, actr=["7"])
    with pytest.raises(EpisodeError, match=r"declare \[policies.judge\]"):
        run_file("agent:asks_another").play(task)


def test_a_run_file_with_a_mistake_is_refused(run_file) -> None:
    with pytest.raises(AstraFlowError, match=r"workflow\.bonsu"):
        run_file("agent:plays", "bonsu = 1")
