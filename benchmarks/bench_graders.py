"""How many answers of mathematics are graded in a second, and does math-verify alone agree?

Replies with a box, half of them with another row's answer, graded by the reward `math` with nothing kept from before,
and by math-verify alone on the whole reply (in one process, without its alarms); the middle one of five passes. Golds
of GSM8K (test) and SVAMP, and the table of answer forms, where the right verdicts are known.
"""

from __future__ import annotations

import argparse
import asyncio
import inspect
import json
import logging
import statistics
import time
from pathlib import Path
from typing import Any, NamedTuple

import math_verify

from astraflow.rewards.math.forms import same
from astraflow.rewards.math.grader import Math
from astraflow.sources.gsm8k import Gsm8kSource
from astraflow.sources.svamp import SvampSource
from astraflow.types import Task
from benchmarks.harness import Check, Result

TABLE = Path(__file__).parents[1] / "tests" / "support" / "answer_forms.jsonl"
PROCESSES, PASSES = 2, 5


class Pair(NamedTuple):
    """One answer to be graded."""

    gold: str
    answer: str
    right: bool

    @property
    def reply(self) -> str:
        return f"Let me think. First 3 and then 5, so the answer is $\\boxed{{{self.answer}}}$."


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rows", type=int, default=0, help="of each set; 0: all")
    limit = parser.parse_args().rows
    logging.getLogger("math_verify").setLevel(logging.ERROR)
    result = Result("graders", {"rows": limit, "processes": PROCESSES})
    sets = {"gsm8k": _golds(Gsm8kSource(split="test")), "svamp": _golds(SvampSource(split="all")), "forms": _forms()}
    for name, pairs in sets.items():
        result.rows.append(asyncio.run(_compared(name, pairs[:limit] if limit else pairs)))
    numbers, forms = result.rows[:2], result.rows[2]
    for row in numbers:
        result.checks.append(Check.at_least(f"{row['what']}: times math-verify alone", row["times"], 10))
        result.checks.append(Check.at_least(f"{row['what']}: agreement", row["agreement"], 1.0))
    result.checks.append(Check.at_least("forms: right by the table", forms["right"], 1.0))
    result.checks.append(Check.at_least("forms: agreement", forms["agreement"], 0.95))
    result.show()
    result.write()


def _golds(source: Gsm8kSource | SvampSource) -> list[Pair]:
    answers = [source.row(number)["answer"] for number in range(len(source))]
    told = [gold if place % 2 == 0 else answers[place - 1] for place, gold in enumerate(answers)]
    return [Pair(gold, answer, float(gold) == float(answer)) for gold, answer in zip(answers, told, strict=True)]


def _forms() -> list[Pair]:
    rows = [json.loads(line) for line in TABLE.read_text().splitlines()]
    return [Pair(row["gold"], row["answer"], row["right"]) for row in rows]


async def _compared(name: str, pairs: list[Pair]) -> dict[str, Any]:
    await _ours(_reward(), [Pair("x+1", f"{place}+x", place == 1) for place in range(32)])  # processes have started
    for pair in pairs[:32]:
        _alone(pair)  # it is warm, too
    ours_all_s, alone_all_s = [], []
    for _ in range(PASSES):
        reward = _reward()
        began = time.perf_counter()
        ours = await _ours(reward, pairs)
        ours_all_s.append(time.perf_counter() - began)
        began = time.perf_counter()
        alone = [_alone(pair) for pair in pairs]
        alone_all_s.append(time.perf_counter() - began)
    ours_s, alone_s, num = statistics.median(ours_all_s), statistics.median(alone_all_s), len(pairs)
    return {
        "what": name, "answers": num, "ours_per_s": num / ours_s, "alone_per_s": num / alone_s,
        "times": alone_s / ours_s, "as_written": sum(same(p.gold, p.answer) is not None for p in pairs) / num,
        "right": sum(o == p.right for o, p in zip(ours, pairs, strict=True)) / num,
        "alone_right": sum(a == p.right for a, p in zip(alone, pairs, strict=True)) / num,
        "agreement": sum(o == a for o, a in zip(ours, alone, strict=True)) / num,
    }  # fmt: skip


def _reward() -> Math:
    """One that has kept no verdict; its processes are those of all."""
    return Math(processes=PROCESSES, deadline_s=60.0)


async def _ours(reward: Math, pairs: list[Pair]) -> list[bool]:
    async def grade(pair: Pair) -> bool:
        said = reward(pair.reply, Task("bench", 0, 0, {"answer": pair.gold}))
        outcome = await said if inspect.isawaitable(said) else said
        assert outcome is not None and outcome.reward is not None
        return outcome.reward == 1.0

    return list(await asyncio.gather(*map(grade, pairs)))


def _alone(pair: Pair) -> bool:
    gold = math_verify.parse(f"\\boxed{{{pair.gold}}}", parsing_timeout=None)
    return bool(math_verify.verify(gold, math_verify.parse(pair.reply, parsing_timeout=None), timeout_seconds=None))


if __name__ == "__main__":
    main()
