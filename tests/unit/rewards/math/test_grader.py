r"""The reward `math`: forms, then algebra in processes that are killed; what cannot be decided is never 0."""

from __future__ import annotations

import asyncio
import importlib.util
import inspect
import json
import random
import threading
from concurrent.futures import Future
from pathlib import Path

import psutil
import pytest

from astraflow.errors import Problem
from astraflow.processes.records import CallFailed
from astraflow.rewards.math import grader
from astraflow.rewards.math.grader import Math
from astraflow.sources.gsm8k import Gsm8kSource
from astraflow.sources.svamp import SvampSource
from astraflow.types import Outcome, Task
from hashed import said_by_each
from recorded import recorded

TABLE = Path(__file__).parents[3] / "support" / "answer_forms.jsonl"
FORMS = [json.loads(line) for line in TABLE.read_text().splitlines()]
needs_algebra = pytest.mark.skipif(
    importlib.util.find_spec("math_verify") is None, reason="math-verify is not here: pip install 'astraflow[math]'"
)


def task(answer):
    return Task("train", 0, 0, {"question": "?", "answer": answer})


async def graded(reward, completion, answer):
    said = reward(completion, task(answer))
    return await said if inspect.isawaitable(said) else said


def boxed(answer):
    return f"So the answer is $\\boxed{{{answer}}}$."


@pytest.fixture
def math():
    made = []

    def math_(**options):
        grader._shared.cache_clear()  # a pool of its own
        made.append(Math(**options))
        return made[-1]

    yield math_
    grader._shared.cache_clear()
    for reward in made:
        if reward.pool is not None:
            reward.pool.close()


@needs_algebra
async def test_the_table_of_answer_forms(math):
    reward = math(processes=1, deadline_s=60.0)
    outcomes = [await graded(reward, boxed(row["answer"]), row["gold"]) for row in FORMS]
    wrong = [row for row, o in zip(FORMS, outcomes, strict=True) if o.reward != float(row["right"])]
    assert wrong == []
    share = sum(o.metrics["verified"] for o in outcomes) / len(outcomes)
    assert 0.2 < share < 0.6


HOSTILE = {
    "a tower of powers": "9^{9^{9^9}}",
    "a power that fills memory": "2^{10^{10}}",
    "a factorial": "(10^8)!",
    "factorials of factorials": "((10!)!)!",
    "nested parentheses": "(" * 300 + "1" + ")" * 300,
    "parentheses that stay open": "(" * 400,
    "a binomial": "\\binom{10^9}{10^8}",
    "a polynomial of a million terms": "(a+b+c+d+e)^{40}",
}


@needs_algebra
async def test_what_hangs_is_unscored_and_the_next_answer_is_graded(math):
    of_others = set(psutil.Process().children(recursive=True))  # pools that files share end with this process
    reward = math(processes=2, deadline_s=1.0)
    outcomes = await asyncio.gather(*(graded(reward, boxed(h), "x+1") for h in HOSTILE.values() for _ in range(12)))
    assert {(o.reward, o.metrics.get("unscored_deadline")) for o in outcomes} == {(None, 1.0)}
    assert reward.pool.health().kills == len(HOSTILE)  # equal answers are tried once
    assert (await graded(reward, boxed("1+x"), "x+1")).reward == 1.0
    reward.pool.close()
    assert set(psutil.Process().children(recursive=True)) <= of_others


@needs_algebra
@pytest.mark.parametrize(
    "answer",
    ["__import__('os').system('touch pwned')", "\\text{__import__('os').system('touch pwned')}",
     "exec(\"open('pwned','w')\")", "().__class__.__bases__[0].__subclasses__()", "٤٢", "1e999999999", "9" * 900,
     "\\sqrt{" * 100 + "2" + "}" * 100, "1" * 1_000_000, "\\boxed{" * 1000, "%" * 500, "=" * 300, "4\x002",
     "\u202e42", "\\frac{0}{0}", "\\frac{1}{0}", ",".join("1" * 400), "0." + "0" * 800 + "1", "\ud800"],
    ids=lambda answer: ascii(answer[:24]),
)  # fmt: skip
async def test_what_is_no_answer_is_wrong_or_unscored_and_runs_nothing(math, tmp_path, monkeypatch, answer):
    monkeypatch.chdir(tmp_path)
    reward = Math(deadline_s=30.0)  # the pool of all of these tests
    outcome = await graded(reward, boxed(answer), "42")
    assert outcome.reward == 0.0 or any(name.startswith("unscored_") for name in outcome.metrics)
    assert list(tmp_path.iterdir()) == []
    assert (await graded(reward, boxed("41+1"), "42")).reward == 1.0


@needs_algebra
@pytest.mark.parametrize("kind", ["lost", "raised", "start"])
async def test_a_grader_that_fails_is_unscored_and_asked_again(math, monkeypatch, kind):
    reward = math(processes=1)
    asked = []

    def submit(*arguments):
        asked.append(arguments)
        future = Future()
        future.set_exception(CallFailed(kind, "on purpose"))
        return future

    monkeypatch.setattr(reward.pool, "submit", submit)
    for _ in range(2):
        outcome = await graded(reward, boxed("1+x"), "x+1")
        assert outcome.reward is None and outcome.metrics[f"unscored_{kind}"] == 1.0
    assert len(asked) == (1 if kind == "raised" else 2)


@needs_algebra
async def test_an_answer_that_cannot_be_read_is_wrong_but_a_gold_is_unscored(math):
    reward = math(processes=1, deadline_s=30.0)
    assert (await graded(reward, boxed("\\frac{"), "x+1")).reward == 0.0
    outcome = await graded(reward, boxed("x+1"), "\\frac{{")
    assert outcome.reward is None and outcome.metrics["unscored_gold"] == 1.0


@needs_algebra
def test_threads_and_loops_get_the_same_from_one_grader(math):
    reward, got = math(processes=1, deadline_s=30.0), []

    def grade():
        got.append(asyncio.run(graded(reward, boxed("(x+1)^2"), "x^2+2x+1")).reward)

    threads = [threading.Thread(target=grade) for _ in range(2)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    grade()
    assert got == [1.0, 1.0, 1.0]
    assert reward.pool.health().calls == 1


@pytest.mark.parametrize(
    ("completion", "boxed_only", "anywhere"),
    [("It is 42.", 0.0, 1.0), ("#### 42", 0.0, 1.0), ("The answer is 42 apples", 0.0, 1.0), ("no idea", 0.0, 0.0),
     ("\\boxed{41} no, 42", 0.0, 0.0), ("\\boxed{42", 0.0, 1.0), ("\\boxed{42} 43", 1.0, 1.0), ("", 0.0, 0.0)],
)  # fmt: skip
def test_where_an_answer_may_stand(completion, boxed_only, anywhere):
    assert Math(verify=False)(completion, task("42")).reward == boxed_only
    assert Math(verify=False, extract="anywhere")(completion, task("42")).reward == anywhere


def test_metrics_say_whether_there_was_an_answer():
    reward = Math(verify=False)
    assert reward("none", task("42")).metrics == {"success": 0.0, "answered": 0.0, "verified": 0.0}
    assert reward(boxed("42"), task(42)).metrics == {"success": 1.0, "answered": 1.0, "verified": 0.0}


@pytest.mark.parametrize("gold", [None, "", "  ", True])
def test_a_task_without_an_answer_is_unscored(gold):
    assert Math(verify=False)(boxed("42"), task(gold)) is None


def test_without_algebra_what_forms_do_not_decide_is_wrong():
    assert Math(verify=False)(boxed("1+x"), task("x+1")).reward == 0.0
    assert Math(verify=False)(boxed("x+1"), task("x+1")).reward == 1.0


def test_a_missing_package_and_wrong_settings_are_named_before_anything_starts(monkeypatch):
    monkeypatch.setattr(grader, "find_spec", lambda name: None)
    with pytest.raises(Problem, match=r"math-verify.*pip install 'astraflow\[math\]'"):
        Math()
    assert Math(verify=False).pool is None
    for options in ({"extract": "all"}, {"processes": 0}, {"deadline_s": 0}, {"max_chars": -1}):
        with pytest.raises(Problem, match=next(iter(options))):
            Math(verify=False, **options)


@pytest.mark.parametrize(
    ("tasks", "source", "lucky"),
    [("7,473 of GSM8K", Gsm8kSource(), 44), ("1,319 of GSM8K, test", Gsm8kSource(split="test"), 8),
     ("1,000 of SVAMP", SvampSource(split="all"), 9)],
)  # fmt: skip
def test_the_oracle_gets_1_the_null_policy_0_and_a_random_one_what_is_recorded(tasks, source, lucky):
    """Without algebra. `lucky`: how many answers a random number below 100 hits."""
    reward, rng, hits = Math(verify=False), random.Random("random policy"), 0.0
    for index in range(len(source)):
        row = Task("train", index, 0, source.row(index))
        assert reward(boxed(row["answer"]), row).reward == 1.0, row
        assert reward("", row).reward == 0.0
        assert reward("I do not know.", row).reward == 0.0
        hits += reward(boxed(rng.randrange(100)), row).reward
    assert hits == lucky
    recorded("`math`", tasks, oracle=1.0, null=0.0, random=hits / len(source))


def test_verdicts_do_not_depend_on_the_process_or_its_hashes():
    script = (
        "import json, sys; from astraflow.rewards.math.forms import same\n"
        f"rows = [json.loads(line) for line in open({str(TABLE)!r})]\n"
        "print([same(row['gold'], row['answer']) for row in rows])"
    )
    assert len(said_by_each(script)) == 1


def test_outcomes_are_told_at_once_where_forms_decide():
    assert isinstance(Math(verify=False)(boxed("1"), task("1")), Outcome)
