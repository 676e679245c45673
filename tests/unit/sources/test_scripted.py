"""Demonstrations by a script: what is said is the script's, what is told is the workflow's."""

from __future__ import annotations

import pytest

from astraflow.errors import SourceError
from astraflow.sources.demos.scripted import ScriptedSource
from small_corpus import write_corpus

SUMS = {"type": "sums", "largest": 9}


async def two_turns(task, llm):
    messages = [{"role": "user", "content": task["question"]}]
    first = await llm["actor"].chat(messages, max_tokens=3)
    messages += [first.message, {"role": "user", "content": f"{first}!"}]
    second = await llm["actor"].chat(messages)
    messages.append("never shown")
    return float(second.content == task["answer"])


def shown(**options):
    replies = ["{a} and {b}", "{answer}"]
    return ScriptedSource(**{"tasks": SUMS, "workflow": f"{__name__}:two_turns", "replies": replies, **options})


def texts(source, index):
    return [message["content"] for message in source.row(index)["messages"]]


def test_the_workflow_tells_and_the_script_replies():
    source = shown()
    assert len(source) == 80 and source.row(0) == source.row(0)
    assert source.row(0)["messages"] == [
        {"role": "user", "content": "What is 7+4?"},
        {"role": "assistant", "content": "7 and 4"},
        {"role": "user", "content": "7 and 4!"},
        {"role": "assistant", "content": "11"},
    ]


def test_a_share_of_the_last_replies_is_right():
    replies = ["{question}", "{question}"]
    talks = [texts(shown(replies=replies, right=0.5), index) for index in range(80)]
    assert all(talk[1] == talk[0] for talk in talks)
    assert 25 < sum(talk[3] == talk[0] for talk in talks) < 55


async def test_rows_may_be_asked_for_from_a_loop():
    assert texts(shown(), 0)[-1] == "11"


def test_what_decides_the_rows_decides_the_fingerprint():
    options = ({}, {"right": 0.5}, {"replies": ["", ""]}, {"tasks": {**SUMS, "largest": 8}}, {"seed": 1})
    assert len({shown(**each).fingerprint() for each in options}) == len(options)


def test_a_search_is_shown_as_search_r1_plays_it(tmp_path, monkeypatch):
    monkeypatch.setenv("ASTRAFLOW_CACHE", str(tmp_path))
    questions = tmp_path / "questions.jsonl"
    questions.write_text('{"question": "Red Harbor?", "answers": ["Ana Cole"]}\n')
    environment = {"index": {"corpus": str(write_corpus(tmp_path / "c.jsonl"))}, "topk": 1, "hit": "{text}"}
    source = shown(
        tasks={"type": "jsonl", "path": str(questions)},
        workflow={"type": "search_r1", "environment": {**environment, "prompt": "{question}"}},
        replies=["<search>{question}</search>", "<answer>{answers[0]}</answer>"],
    )
    assert texts(source, 0) == [
        "Red Harbor?", "<search>Red Harbor?</search>",
        "<information>\nRed Harbor is a 1950 film directed by Ana Cole.\n</information>", "<answer>Ana Cole</answer>",
    ]  # fmt: skip


@pytest.mark.parametrize(
    ("options", "words"),
    [
        ({"replies": []}, "must be a list of texts"),
        ({"replies": "{answer}"}, "must be a list of texts"),
        ({"right": 1.5}, "right=1.5 must be a share"),
        ({"replies": ["{answer}"]}, "replies=1 are too few"),
        ({"replies": ["{answer}", "", ""]}, "replies=3 are 1 too many"),
        ({"replies": ["{answr}", ""]}, r"answr.*a task has question, answer"),
        ({"replies": ["{", ""]}, "cannot be filled"),
    ],
)
def test_what_cannot_be_shown_is_refused(options, words):
    with pytest.raises(SourceError, match=words):
        shown(**options).row(0)
