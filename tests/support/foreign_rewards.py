"""Reward functions in the forms in which users of other systems write them; none knows AstraFlow."""

import asyncio
import re


def trl_box(prompts, completions, answer, **kwargs):
    """As in TRL's documentation: conversations in, a list out, columns of the data set by name."""
    found = [re.search(r"\\boxed\{(.*?)\}", completion[0]["content"]) for completion in completions]
    assert [prompt[-1]["role"] for prompt in prompts] == ["user"]
    return [1.0 if match and match[1] == wanted else 0.0 for match, wanted in zip(found, answer, strict=True)]


def trl_plain(completions):
    """Without columns, without `**kwargs`, on texts; not for every completion."""
    return [len(c) / 10 if c else None for c in completions]


async def trl_waits(completions, **kwargs):
    await asyncio.sleep(0)
    return [0.5 for _ in completions]


def trl_of_ids(completions, completion_ids, **kwargs):
    return [float(len(ids)) for ids in completion_ids]


def verl_score(data_source, solution_str, ground_truth, extra_info=None):
    if data_source != "openai/gsm8k":
        raise NotImplementedError(data_source)
    right = solution_str.split("####")[-1].strip() == ground_truth
    return {"score": 1.0 if right else (extra_info or {}).get("floor", 0.0), "acc": right, "pred": "text"}


def verifiers_exact(completion, answer, state):
    assert state["answer"] == answer
    return float(completion[-1]["content"] == answer)


def two_of_them(completions, **kwargs):
    return [0.0, 1.0]


def trl_digits(completions, **kwargs):
    """How much of each completion is digits."""
    texts = [completion[0]["content"] for completion in completions]
    return [sum(c.isdigit() for c in text) / max(1, len(text)) for text in texts]
