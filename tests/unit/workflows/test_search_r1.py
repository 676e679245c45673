"""The search agent that acts by tags."""

from __future__ import annotations

from types import SimpleNamespace

import pytest

from astraflow.errors import ConfigError, EpisodeError, Problem
from astraflow.types import Task
from astraflow.workflows.search_r1 import AGAIN, STOPS, SearchR1
from small_corpus import TASK, write_corpus

QUESTION = Task("t", 0, 0, TASK)


@pytest.fixture
def options(tmp_path, monkeypatch):
    monkeypatch.setenv("ASTRAFLOW_CACHE", str(tmp_path / "cache"))
    return {"index": {"corpus": str(write_corpus(tmp_path / "c.jsonl"))}, "topk": 1, "hit": "{title}: {text}"}


class Scripted:
    """Gives texts in order; an int: so many tokens of context; an error: raised."""

    def __init__(self, *replies, finish_reason="stop"):
        self.replies, self.asked, self.finish_reason = list(replies), [], finish_reason

    async def chat(self, messages, **options):
        self.asked.append(([dict(m) for m in messages], options))
        content, context = self.replies.pop(0) if isinstance(self.replies[0], tuple) else (self.replies.pop(0), 0)
        if isinstance(content, Exception):
            raise content
        message = {"role": "assistant", "content": content}
        usage = {"total_tokens": context, "completion_tokens": 10}
        return SimpleNamespace(
            message=message, content=content, tool_calls=[], finish_reason=self.finish_reason, usage=usage
        )


async def test_results_are_the_next_message_until_the_answer(options):
    actor = Scripted(
        "<think>Who?</think><search>film red harbor", "<search>ana cole born</search>", "<answer>3 May 1901"
    )
    outcome = await SearchR1(environment=options)(QUESTION, {"actor": actor})
    assert outcome.reward == 1.0 and outcome.rewards_per_call == [0, 0, 1.0]
    assert outcome.metrics["success"] == outcome.metrics["support_found"] == 1 and outcome.metrics["malformed"] == 0
    messages, asked = actor.asked[-1]
    assert asked == {"stop": STOPS}
    assert [m["role"] for m in messages] == ["user", "assistant", "user", "assistant", "user"]
    assert messages[2]["content"] == (
        "<information>\nRed Harbor: Red Harbor is a 1950 film directed by Ana Cole.\n</information>"
    )
    assert "<search>words</search>" in messages[0]["content"] and messages[0]["content"].endswith(TASK["question"])


@pytest.mark.parametrize(
    "text",
    ["I do not know.", "search: red", "<search>", "<answer>", "<search>a</search> and more", "<answer>x</answer> y"],
)
async def test_only_a_tag_at_the_end_is_an_action(options, text):
    actor = Scripted(text, "<answer>1901-05-03")
    outcome = await SearchR1(environment=options)(QUESTION, {"actor": actor})
    if text in ("<search>", "<answer>"):  # of nothing
        assert outcome.metrics["malformed"] == 0
    else:
        assert outcome.metrics["malformed"] == 1 and actor.asked[-1][0][-1]["content"] == AGAIN


async def test_the_last_tag_counts_and_a_cut_reply_does_nothing(options):
    outcome = await SearchR1(environment=options)(QUESTION, {"a": Scripted("<search>x <answer>1901-05-03")})
    assert outcome.reward == 1.0 and outcome.metrics["searches"] == 0
    cut = Scripted("<answer>1901-05-03", finish_reason="length")
    outcome = await SearchR1(environment=options, max_turns=1)(QUESTION, {"a": cut})
    assert outcome.reward == 0.0 and outcome.metrics["malformed"] == 1 and outcome.metrics["truncated"] == 1


@pytest.mark.parametrize(
    ("limits", "turns"), [({"max_turns": 2}, 2), ({"max_context_tokens": 100}, 3), ({"max_sampled_tokens": 30}, 3)]
)
async def test_a_spent_budget_ends_the_episode(options, limits, turns):
    actor = Scripted(*((f"<search>harbor {i}", 40 * (i + 1)) for i in range(9)))
    outcome = await SearchR1(environment={**options, "for_support": 0.5}, **limits)(QUESTION, {"actor": actor})
    assert outcome.metrics["turns"] == turns == len(actor.asked)
    assert outcome.metrics["truncated"] == 1 and outcome.metrics["success"] == 0
    assert outcome.reward == 0.25  # of what it found


async def test_a_full_context_ends_it_too_but_not_before_the_first_reply(options):
    full = EpisodeError("overlong: messages=9 tokens are too many")
    outcome = await SearchR1(environment=options)(QUESTION, {"a": Scripted("<search>harbor", full)})
    assert outcome.metrics["truncated"] == 1
    with pytest.raises(EpisodeError, match="overlong"):
        await SearchR1(environment=options)(QUESTION, {"a": Scripted(full)})


def test_settings_are_checked(options):
    for name in ("max_turns", "max_sampled_tokens", "max_context_tokens"):
        with pytest.raises(Problem, match=rf"workflow\.{name}=-1"):
            SearchR1(environment=options, **{name: -1})
    with pytest.raises(ConfigError, match="topkk"):
        SearchR1(environment={"topkk": 3})
