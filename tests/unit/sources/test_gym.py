"""reasoning-gym: deterministic rows, splits that never meet, its own scorers in processes that may not do harm."""

from __future__ import annotations

import asyncio
import importlib.util
import inspect
import json
import os
import random
import subprocess
import sys
from pathlib import Path
from types import SimpleNamespace

import pytest

from astraflow.dataflow.operators.source.curriculum import Curriculum
from astraflow.errors import Problem, SourceError
from astraflow.processes.pool import ProcessPool
from astraflow.processes.records import Settings
from astraflow.rewards import gym as rewards
from astraflow.rewards.gym import ReasoningGym
from astraflow.sources.gym import source as sources
from astraflow.sources.gym.guard import check
from astraflow.sources.gym.source import HOST, ReasoningGymSource
from astraflow.types import SourceView, Task
from recorded import recorded

needs_gym = pytest.mark.skipif(
    importlib.util.find_spec("reasoning_gym") is None,
    reason="reasoning-gym is not here: pip install 'astraflow[reasoning-gym]'",
)
LUCKY = 2  # of the 100 rows of EASY that a random policy answers
QUICK = ("ab", "complex_arithmetic", "gcd", "word_sorting", "rotten_oranges", "tower_of_hanoi", "caesar_cipher",
         "calendar_arithmetic", "maze", "time_intervals", "knights_knaves", "base_conversion", "sudoku")  # fmt: skip
EASY = ("chain_sum", "leg_counting", "number_sequence", "simple_equations", "countdown")


@pytest.fixture(scope="module")
def host():
    """The process of all sources of this file: its start takes two seconds."""
    pool = ProcessPool("gym", HOST, settings=Settings(processes=1, deadline_s=120.0))
    yield SimpleNamespace(submit=pool.submit, close=lambda: None)
    pool.close()


@pytest.fixture(scope="module", autouse=True)
def _one_host(host):
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(sources, "ProcessPool", lambda *_, **__: host)
        yield


@pytest.fixture(scope="module")
def made():
    return ReasoningGymSource(datasets=EASY, size=100)


@pytest.fixture(scope="module")
def careful(tmp_path_factory):
    """A reward whose process works in an empty directory, which is given too."""
    place, here = tmp_path_factory.mktemp("careful"), Path.cwd()
    rewards._shared.cache_clear()
    reward = ReasoningGym(processes=1, deadline_s=30.0)
    os.chdir(place)
    try:
        assert reward.pool.submit("names").result()
    finally:
        os.chdir(here)
    yield reward, place
    reward.pool.close()
    rewards._shared.cache_clear()


def rows_of(source):
    return [source.row(i) for i in range(len(source))]


async def graded(reward, completion, row):
    said = reward(completion, Task("train", 0, 0, row))
    return await said if inspect.isawaitable(said) else said


@needs_gym
def test_generators_take_turns_and_rows_are_all_there(made):
    rows = rows_of(made)
    assert [row["dataset"] for row in rows[:6]] == [*EASY, EASY[0]]
    assert all(row["question"].strip() and row["answer"] for row in rows)
    assert "level" not in rows[0]
    assert made.row(37) == rows[37] and json.dumps(rows)


@needs_gym
def test_rows_do_not_depend_on_the_process_its_hashes_or_the_order_of_asking():
    names = ("chain_sum", "isomorphic_strings", "polynomial_multiplication", "ransom_note")  # three draw from sets
    script = (
        "import hashlib, sys; from astraflow.sources.gym.source import ReasoningGymSource\n"
        f"s = ReasoningGymSource(datasets={names!r}, size=40, levels=[0, 1])\n"
        "rows = {i: s.row(i) for i in (range(40) if sys.argv[1] == '0' else reversed(range(40)))}\n"
        "print(s.fingerprint(), hashlib.sha256(str(sorted(rows.items())).encode()).hexdigest())"
    )
    said = {
        subprocess.run([sys.executable, "-c", script, seed], env={**os.environ, "PYTHONHASHSEED": seed}, check=True,
                       capture_output=True, text=True).stdout
        for seed in ("0", "1")
    }  # fmt: skip
    assert len(said) == 1


@needs_gym
def test_no_question_is_both_trained_and_held_out():
    options = {"datasets": ["chain_sum"], "config": {"chain_sum": {"max_terms": 2, "max_digits": 1}}, "size": 200}
    train, heldout = (
        {row["question"] for row in rows_of(ReasoningGymSource(**options, split=split))}
        for split in ("train", "heldout")
    )
    assert not train & heldout
    assert len(train) > 80 and len(heldout) > 10


@needs_gym
def test_demonstrations_are_of_train_questions_and_partly_right():
    options = {"datasets": ["chain_sum"], "levels": [0], "size": 200}
    demos = [row["messages"] for row in rows_of(ReasoningGymSource(**options, demos=True, right=0.5))]
    answers = {row["question"]: row["answer"] for row in rows_of(ReasoningGymSource(**options))}
    assert [[message["role"] for message in demo] for demo in demos[:2]] == [["user", "assistant"]] * 2
    right = sum(answers[demo[0]["content"]] == demo[1]["content"] for demo in demos)
    assert 80 < right < 150


@needs_gym
def test_questions_may_be_made_from_what_an_entry_says(made):
    row = made.row(0)
    assert row["num_terms"] >= 2 and row["expression"] in row["question"]
    short = ReasoningGymSource(datasets=["chain_sum"], size=4, question="{expression}=").row(0)
    assert short == {**row, "question": f"{row['expression']}="}


@needs_gym
def test_levels_are_pools_of_the_curriculum():
    source = ReasoningGymSource(datasets=["chain_sum"], levels=[0, 2, 5], size=30)
    rows = rows_of(source)
    assert [row["level"] for row in rows[:4]] == [0, 2, 5, 0]
    longest = [max(len(row["question"]) for row in rows if row["level"] == level) for level in (0, 2, 5)]
    assert longest == sorted(longest)
    operator = Curriculum(by="level", levels=[0, 2, 5], keep=0.0)
    admitted = [operator.admit(Task("train", i, 0, row), SourceView(0, 0, 0)) for i, row in enumerate(rows[:6])]
    assert admitted == [1.0, 0.0, 0.0, 1.0, 0.0, 0.0]


@needs_gym
@pytest.mark.parametrize(
    ("options", "words"),
    [
        ({"datasets": ["chain_sun"]}, ["datasets", "chain_sun", "did you mean 'chain_sum'"]),
        ({"datasets": []}, ["datasets", "one or more"]),
        ({"datasets": ["chain_sum", "chain_sum"]}, ["datasets", "each once"]),
        ({"datasets": ["chain_sum"], "config": {"chain_sum": {"terms": 2}}}, ["chain_sum", "terms"]),
        ({"datasets": ["chain_sum"], "config": {"chain_sum": {"min_terms": 9, "max_terms": 2}}}, ["max_terms"]),
        (
            {"datasets": ["chain_sum"], "config": {"leg_counting": {}}},
            ["config", "leg_counting", "none of the datasets"],
        ),
        ({"datasets": ["acre"], "levels": [0]}, ["acre", "no levels"]),
        ({"datasets": ["chain_sum"], "levels": [-1]}, ["levels", "-1"]),
        ({"datasets": ["chain_sum"], "size": 0}, ["size", "0"]),
        ({"datasets": ["chain_sum"], "right": 2.0}, ["right", "2.0"]),
        ({"datasets": ["chain_sum"], "question": "{terms}"}, ["question", "terms", "num_terms"]),
        ({"datasets": ["chain_sum"], "split": "test"}, ["split", "test"]),
    ],
)
def test_what_is_wrong_is_named_before_anything_starts(options, words):
    with pytest.raises(SourceError) as error:
        ReasoningGymSource(**options).row(0)
    assert all(word in str(error.value) for word in words), str(error.value)


def test_a_missing_package_is_named_with_its_fix(monkeypatch):
    monkeypatch.setattr(sources, "find_spec", lambda name: None)
    monkeypatch.setattr(rewards, "find_spec", lambda name: None)
    with pytest.raises(SourceError, match=r"pip install 'astraflow\[reasoning-gym\]'"):
        ReasoningGymSource(datasets=["chain_sum"])
    with pytest.raises(Problem, match=r"pip install 'astraflow\[reasoning-gym\]'"):
        ReasoningGym()


@needs_gym
async def test_the_oracle_gets_1_and_the_null_policy_0(made):
    reward = ReasoningGym()
    for row in rows_of(made):
        assert (await graded(reward, row["answer"], row)).reward == 1.0
        assert (await graded(reward, "", row)).reward == 0.0
        score = await reward._scored(row["generator"], row["number"], row["answer"])
        assert score.reward == 1.0  # of its own scorer, too: the entry that the reward made again is the same
    wrong = [(await graded(reward, "-123456", row)).reward for row in rows_of(made)]
    assert max(wrong) < 0.5
    rng = random.Random("random policy")
    lucky = [(await graded(reward, str(rng.randrange(-9, 19)), row)).metrics["success"] for row in rows_of(made)]
    assert sum(lucky) == LUCKY
    recorded("`reasoning_gym`, five generators", "100", oracle=1.0, null=0.0, random=sum(lucky) / 100)


@needs_gym
@pytest.mark.parametrize(
    ("extract", "completion", "answer"),
    [("whole", " 7 \n", "7"), ("boxed", "so \\boxed{7}", "7"), ("boxed", "7", ""),
     ("tags", "<answer>6</answer> no <answer> 7 </answer>", "7"), ("tags", "7", ""), ("tags", "<answer>" * 5, "")],
)  # fmt: skip
def test_where_the_answer_stands(extract, completion, answer):
    assert ReasoningGym(extract=extract)._answer_in(completion) == answer


@needs_gym
@pytest.mark.parametrize(
    ("name", "answer"),
    [
        (name, answer)
        for name in ("string_insertion", "spiral_matrix", "binary_matrix", "n_queens", "countdown", "puzzle24",
                     "polynomial_multiplication", "simple_integration")
        for answer in ("__import__('os').system('touch pwned')", "[open('pwned', 'w')]",
                       "exec(chr(111)+chr(112))", "().__class__.__bases__[0].__subclasses__()")
    ],
)  # fmt: skip
async def test_answers_are_never_run(careful, name, answer):
    reward, place = careful
    outcome = await reward._scored(json.dumps([name, None, {}, 0]), 0, answer)
    assert outcome.reward is None or outcome.reward < 0.2
    assert list(place.iterdir()) == []


def test_arithmetic_passes_the_guard_and_nothing_else():
    for text in ("3*x**2 + 2*x - 1", "(8 - 2) * 4.5", "sin(x)/2 + C", "exp(-x)", "abs(x) + log(x)"):
        check(text)
    for text in (
        "open(1)",
        "x.func",
        "(1).real",
        "a__b",
        "'x'",
        "x[0]",
        "lambda: 1",
        "chr(1)",
        "{}",
        "x;y",
        "e\u200bval",
    ):
        with pytest.raises(ValueError, match="no arithmetic"):
            check(text)


@needs_gym
async def test_a_scorer_that_hangs_is_unscored(monkeypatch):
    rewards._shared.cache_clear()
    reward = ReasoningGym(processes=1, deadline_s=2.0)
    try:
        outcome = await reward._scored(json.dumps(["puzzle24", None, {}, 0]), 0, "9**9**9**9")
        assert outcome.reward is None and outcome.metrics["unscored_deadline"] == 1.0
        assert (await reward._scored(json.dumps(["chain_sum", None, {}, 0]), 0, "x")).reward == 0.0
    finally:
        reward.pool.close()
        rewards._shared.cache_clear()


@needs_gym
def test_a_task_of_another_source_is_unscored():
    assert ReasoningGym()("7", Task("train", 0, 0, {"question": "?", "answer": "7"})) is None


@needs_gym
def test_generators_score_their_own_answers_1_and_others_less():
    """A sample: of all of them some take minutes."""
    source = ReasoningGymSource(datasets=QUICK, split="all", size=len(QUICK))
    for name, row in zip(QUICK, rows_of(source), strict=True):
        asked = [source._pool.submit("score", row["generator"], row["number"], text) for text in (row["answer"], "?")]
        right, wrong = (future.result() for future in asked)
        assert right == 1.0 > wrong, (name, right, wrong)


@needs_gym
def test_generators_that_make_all_their_entries_at_once_give_rows_too(careful):
    pool = careful[0].pool
    for name in ("acre", "gsm_symbolic", "list_functions", "word_ladder"):
        generator = json.dumps([name, None, {}, 1])
        rows = [pool.submit("rows", generator, "all", number, 1).result()[0] for number in (0, 1)]
        assert rows[0]["question"] != rows[1]["question"]
        assert [pool.submit("score", generator, row["number"], row["answer"]).result() for row in rows] == [1.0, 1.0]


@needs_gym
def test_the_process_of_a_source_ends_with_it(monkeypatch):
    monkeypatch.setattr(sources, "ProcessPool", ProcessPool)
    source = ReasoningGymSource(datasets=["chain_sum"], size=4)
    pool = source._pool
    assert pool.health().alive == 1
    del source
    assert pool.health().alive == 0 or pool._closed


@needs_gym
def test_rewards_from_threads_are_the_same(made):
    row = made.row(0)
    assert asyncio.run(graded(ReasoningGym(), row["answer"] + " ", row)).reward == 1.0
