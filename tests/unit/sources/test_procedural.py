"""The procedural sources: splits that never meet, rows that never change."""

from __future__ import annotations

import msgspec
import pytest

from astraflow.contracts import Environment
from astraflow.environments import calculator as environment
from astraflow.errors import SourceError
from astraflow.sources.calculator import TOOLS, CalculatorSource
from astraflow.sources.demos.played import PlayedSource
from astraflow.sources.seeds import SeedsSource
from astraflow.sources.sums import SumsSource
from astraflow.types import Step


def rows(source):
    return [source.row(i) for i in range(len(source))]


def demo_texts(row):
    call = row["messages"][1]["tool_calls"][0]["function"]
    return row["messages"][0]["content"], msgspec.json.decode(call["arguments"])["expr"] + "?"


def test_heldout_problems_are_in_no_train_row_and_no_demonstration():
    heldout = {r["text"] for r in rows(CalculatorSource(split="heldout", seed=3))}
    train = {r["text"] for seed in (0, 1) for r in rows(CalculatorSource(size=600, seed=seed))}
    demos = {t for r in rows(CalculatorSource(demos=True, size=3000, split="all")) for t in demo_texts(r)}
    assert len(heldout) == 60
    assert len(train) == 240
    assert not heldout & (train | demos)


def test_all_problems_are_there_once():
    texts = [r["text"] for r in rows(CalculatorSource(split="all"))]
    assert len(texts) == len(set(texts)) == 300


def test_operators_part_the_problems_of_each_split():
    for split in ("train", "heldout", "all"):
        parts = [rows(CalculatorSource(split=split, ops=op)) for op in "+-*"]
        assert all({row["op"] for row in part} == {op} for op, part in zip("+-*", parts, strict=True))
        texts = {row["text"] for part in parts for row in part}
        assert texts == {row["text"] for row in rows(CalculatorSource(split=split))}
    assert rows(CalculatorSource(ops="*-")) == rows(CalculatorSource(ops="-*"))
    assert CalculatorSource(ops="*-").fingerprint() == CalculatorSource(ops="-*").fingerprint()
    assert len({CalculatorSource(ops=ops, size=9).fingerprint() for ops in ("+", "-", "+-", "+-*")}) == 4


def test_demonstrations_of_some_operators_call_no_others():
    texts = {text for row in rows(CalculatorSource(demos=True, ops="+", size=300)) for text in demo_texts(row)}
    assert {text[1] for text in texts} == {"+"}


def test_answers_are_right():
    for row in rows(CalculatorSource(split="all")):
        a, b = row["a"], row["b"]
        value = {"+": a + b, "-": a - b, "*": a * b}[row["op"]]
        assert row["answer"] == str(value)
        assert row["text"] == f"{a}{row['op']}{b}?"


def test_rows_depend_on_seed_and_index_alone():
    one, two, other = CalculatorSource(size=500), CalculatorSource(size=500), CalculatorSource(size=500, seed=1)
    assert two.row(321) == one.row(321)
    assert rows(one) == rows(two) != rows(other)
    assert one.fingerprint() == two.fingerprint() != other.fingerprint()


@pytest.mark.parametrize(("options", "share"), [({}, 0.2), ({"right": 0.3}, 0.3), ({"right": 1.0}, 1.0)])
def test_demonstrations_answer_what_the_tool_said_but_few_call_for_their_own_problem(options, share):
    called_right = 0
    demos = rows(CalculatorSource(demos=True, size=4000, **options))
    for row in demos:
        question, called = demo_texts(row)
        _, call, tool, answer = row["messages"]
        assert [m["role"] for m in row["messages"]] == ["user", "assistant", "tool", "assistant"]
        assert tool["content"] == f"<{environment.evaluate(called)}>"
        assert tool["tool_call_id"] == call["tool_calls"][0]["id"]
        assert answer["content"] == tool["content"].strip("<>") + "."
        called_right += question == called
    assert called_right / len(demos) == pytest.approx(share, abs=0.02)
    with pytest.raises(SourceError, match="must be a share"):
        CalculatorSource(demos=True, right=1.1)


def test_source_and_environment_offer_the_same_tool():
    assert TOOLS == environment.TOOLS


def test_sums_split_is_disjoint_and_covers_everything():
    train, heldout = rows(SumsSource(largest=12)), rows(SumsSource(largest=12, split="heldout"))
    pairs = {(r["a"], r["b"]) for r in train}, {(r["a"], r["b"]) for r in heldout}
    assert not pairs[0] & pairs[1]
    assert len(pairs[0] | pairs[1]) == 13 * 13
    assert all(r["question"] == f"What is {r['a']}+{r['b']}?" and r["answer"] == str(r["a"] + r["b"]) for r in train)


@pytest.mark.parametrize(
    ("make", "words"),
    [
        (lambda: CalculatorSource(split="test"), ["split", "test", "heldout"]),
        (lambda: CalculatorSource(size=-1), ["size", "-1"]),
        (lambda: CalculatorSource(ops="/"), ["ops", "/", "+-*"]),
        (lambda: CalculatorSource(ops="++"), ["ops", "++", "each once"]),
        (lambda: CalculatorSource(ops=""), ["ops", "+-*"]),
        (lambda: SumsSource(largest=1), ["largest", "2..999"]),
        (lambda: CalculatorSource().row(240), ["row", "240", "0..239"]),
        (lambda: SumsSource().row(-1), ["row", "-1"]),
    ],
)
def test_wrong_options_say_what_is_right(make, words):
    with pytest.raises(SourceError) as error:
        make()
    assert all(word in str(error.value) for word in words)


def test_seeds_are_numbers_with_what_every_task_has() -> None:
    source = SeedsSource(size=3, first=100, fields={"level": 2})
    assert [source.row(i) for i in range(len(source))] == [{"level": 2, "seed": 100 + i} for i in range(3)]
    assert source.fingerprint() != SeedsSource(size=3, first=101, fields={"level": 2}).fingerprint()
    with pytest.raises(SourceError, match="size=0 must be >= 1"):
        SeedsSource(size=0)
    with pytest.raises(SourceError, match="first=-1 must be >= 0"):
        SeedsSource(first=-1)


class Doors(Environment):
    """Two doors; behind `b` it ends."""

    def reset(self, task):
        return "a or b?"

    def step(self, action):
        return Step("a again", done=action.text == "b")


def test_played_episodes_end_where_the_environment_does_and_never_change():
    source = PlayedSource(environment=f"{__name__}:Doors", actions={"a": 0.8, "b": 0.2}, size=20, longest=4)
    talks = [[m["content"] for m in source.row(i)["messages"]] for i in range(len(source))]
    assert talks == [[m["content"] for m in source.row(i)["messages"]] for i in range(len(source))]
    assert all(talk[0] == "a or b?" and set(talk[2::2]) <= {"a again"} for talk in talks)
    assert all(talk[-1] == "b" or len(talk) == 8 for talk in talks) and not any("b" in talk[:-1] for talk in talks)
    assert {talk[-1] for talk in talks} == {"a", "b"}
    other = PlayedSource(environment=f"{__name__}:Doors", actions={"a": 0.8, "b": 0.2}, size=20, longest=4, seed=1)
    assert source.fingerprint() != other.fingerprint()


class Named(Doors):
    def reset(self, task):
        return f"a or b, {task['who']}?"


def test_played_episodes_are_those_of_the_rows_of_a_source():
    tasks = {"type": "seeds", "size": 2, "fields": {"who": "you"}}
    source = PlayedSource(environment=f"{__name__}:Named", actions={"b": 1.0}, size=3, tasks=tasks)
    assert [row["messages"][0]["content"] for row in rows(source)] == ["a or b, you?"] * 3
    other = PlayedSource(environment=f"{__name__}:Named", actions={"b": 1.0}, size=3, tasks={**tasks, "first": 7})
    assert source.fingerprint() != other.fingerprint()


class Handles(Doors):
    tools = [  # noqa: RUF012
        {"type": "function", "function": {"name": "open", "parameters": {"properties": {"door": {"type": "string"}}}}}
    ]

    def step(self, action):
        return Step("locked", done=action.arguments == {"door": "b"})


def test_played_episodes_call_the_tool_where_there_is_one():
    source = PlayedSource(environment=f"{__name__}:Handles", actions={"a": 0.5, "b": 0.5}, size=20)
    row = next(r for r in rows(source) if len(r["messages"]) == 4)
    assert row["tools"] == Handles.tools
    assert [m["role"] for m in row["messages"]] == ["user", "assistant", "tool", "assistant"]
    calls = [m["tool_calls"][0]["function"] for m in row["messages"][1::2]]
    assert calls == [{"name": "open", "arguments": '{"door":"a"}'}, {"name": "open", "arguments": '{"door":"b"}'}]
    assert row["messages"][2] == {"role": "tool", "tool_call_id": "call", "content": "locked"}


@pytest.mark.parametrize(
    ("options", "words"),
    [
        ({"actions": {}}, "must be words with weights"),
        ({"actions": {"a": 1.0}, "longest": 0}, "longest=0 must be >= 1"),
        ({"actions": {"a": 1.0}, "environment": "world_samples:Waits"}, "waits for somebody else"),
    ],
)
def test_episodes_that_cannot_be_played_are_refused(options, words):
    with pytest.raises(SourceError, match=words):
        PlayedSource(**{"environment": f"{__name__}:Doors", **options})
