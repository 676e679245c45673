"""`astraflow try WORKFLOW --url`: a trial is played and captured as any episode, and never committed."""

from __future__ import annotations

import pytest
from typer.testing import CliRunner

from astraflow.cli.app import app
from astraflow.errors import AstraFlowError, EpisodeError, LaunchError, WireError
from swarm_door import DoorBench

WORKFLOW = """
async def solve(task, llm, wanted="2", fail=False):
    first = {"role": "user", "content": task["question"]}
    reply = await llm["actor"].chat([first])
    await llm["actor"].chat([first, reply.message, {"role": "user", "content": "sure?"}])
    await llm["actor"].chat([{"role": "user", "content": "other"}])
    if fail:
        raise KeyError("boom")
    return {"actor": float(reply.content == wanted)}
"""


@pytest.fixture
def bench():
    with DoorBench() as opened:
        yield opened


@pytest.fixture
def workflow(tmp_path, request):
    path = tmp_path / f"trial_{abs(hash(request.node.name))}.py"
    path.write_text(WORKFLOW)
    return f"{path}:solve"


def tried(*words):
    done = CliRunner().invoke(app, ["try", *words])
    return done.output, done.exception


def test_the_conversation_the_tokens_and_the_reward_are_shown_and_nothing_is_kept(bench, workflow):
    output, error = tried(workflow, "--task", "3", "--url", bench.url, "--ids")
    assert error is None, output
    assert 'task train/3  {"question": "1+1=?"}' in output
    assert "given> 1+1=?" in output and "actor> 2<eos>" in output and "given> sure?" in output
    assert "(2 tokens, version 0) [5, 2]" in output
    assert "-- actor: another continuation" in output or output.count("given>") == 3
    assert 'calls {"actor": 3, "critic": 0}' in output
    assert 'reward {"actor": 1.0}' in output
    assert not bench.episodes and not bench.returned
    bench.wait_for(lambda: bench.swarm.runner.num_in_play == 0)


def test_options_of_the_workflow_are_given_as_for_a_worker(bench, workflow):
    output, error = tried(workflow, "--url", bench.url, "--workflow.wanted='3'")
    assert error is None, output
    assert 'reward {"actor": 0.0}' in output


def test_of_a_failed_trial_one_sees_what_there_was(bench, workflow):
    output, error = tried(workflow, "--url", bench.url, "--workflow.fail=true")
    assert isinstance(error, EpisodeError) and "workflow: KeyError: 'boom'" in str(error)
    assert "actor> 2<eos>" in output


def test_a_row_that_is_not_there_and_a_workflow_that_is_not_there_are_said(bench, workflow):
    _, error = tried(workflow, "--task", "10", "--url", bench.url)
    assert isinstance(error, WireError) and "row=10 is none" in str(error)
    _, error = tried(workflow.replace("solve", "no_such"), "--url", bench.url)
    assert isinstance(error, AstraFlowError) and "no_such" in str(error)


def test_a_model_is_not_tried_at_a_door(bench, workflow):
    _, error = tried(workflow, "What?", "--url", bench.url)
    assert isinstance(error, LaunchError)
