"""Reward functions that were written for TRL, verl or verifiers, as they are."""

from __future__ import annotations

import inspect
import math
from collections.abc import Callable, Mapping, Sequence
from typing import Any, Literal

from astraflow.config.rooms import resolve
from astraflow.errors import Problem
from astraflow.types import Message, Outcome, Task

STYLES = ("trl", "verl", "verifiers")


class Function:
    """The sum of `weights` times what the functions say; those that say None are left out, all None is unscored.

    | style     | is called as                                                          | gives                      |
    |-----------|-----------------------------------------------------------------------|----------------------------|
    | trl       | `fn(prompts=[p], completions=[c], **columns)`, a list for each column | a list of one              |
    | verl      | `fn(data_source, solution_str, ground_truth, extra_info)`             | a number, a dict: `score`  |
    | verifiers | `fn(prompt, completion, answer, state, task, info)`, those it names   | a number                   |

    Prompts and completions are messages, or texts with `form = "text"`. What a coroutine function gives is awaited.
    """

    def __init__(
        self, *, style: Literal["trl", "verl", "verifiers"], function: str | Sequence[str],
        weights: Sequence[float] = (), form: Literal["chat", "text"] = "chat", prompt: str = "question",
        answer: str = "answer", options: Mapping[str, Any] | None = None,
    ) -> None:  # fmt: skip
        """`function`: `module:name` or `file.py:name`, or several. `prompt`, `answer`: fields of the task to use where
        it has no `prompt`, or no `ground_truth` (verl). `options`: further arguments of every call.

        Raises: Problem: not to be imported, or it needs what only its own framework has.
        """
        if style not in STYLES or form not in ("chat", "text"):
            raise Problem("workflow.reward.style", f"{style}, form={form}", "is not known", f"use {', '.join(STYLES)}")
        names = [function] if isinstance(function, str) else list(function)
        self._weights = list(weights) or [1.0] * len(names)
        if len(self._weights) != len(names):
            raise Problem("workflow.reward.weights", list(weights), f"must be {len(names)} numbers", "one per function")
        where = "workflow.reward.function"
        if len(set(names)) != len(names):
            raise Problem(where, names, "names one function twice", "leave one out, or raise its weight")
        short = [name.rpartition(":")[2] for name in names]
        shown = [
            last if short.count(last) == 1 else name.replace(":", ".") for name, last in zip(names, short, strict=True)
        ]
        self._functions = {key: resolve("rewards", name, where) for key, name in zip(shown, names, strict=True)}
        self._style, self._form, self._prompt, self._answer = style, form, prompt, answer
        self._options = dict(options or {})
        self._call = {"trl": self._as_trl, "verl": self._as_verl, "verifiers": self._as_verifiers}[style]
        for name, of in self._functions.items():
            _check(name, of, style, self._options)

    async def __call__(self, completion: str, task: Task) -> Outcome:
        total, scored = 0.0, False
        metrics: dict[str, float] = {}
        for (name, of), weight in zip(self._functions.items(), self._weights, strict=True):
            said = self._call(of, completion, task)
            reward, more = _number(name, await said if inspect.isawaitable(said) else said)
            metrics |= more
            if reward is not None:
                total, scored = total + weight * reward, True
                metrics[f"reward_{name}"] = reward
        return Outcome(reward=total if scored else None, metrics=metrics)

    def _asked(self, task: Task) -> str | list[Message]:
        given = task.get("prompt", task.get(self._prompt, ""))
        if self._form == "text":
            return given if isinstance(given, str) else str(given[-1]["content"])
        return [{"role": "user", "content": given}] if isinstance(given, str) else list(given)

    def _replied(self, completion: str) -> str | list[Message]:
        return completion if self._form == "text" else [{"role": "assistant", "content": completion}]

    def _as_trl(self, of: Callable[..., Any], completion: str, task: Task) -> Any:
        columns = {name: [value] for name, value in task.fields.items() if name != "prompt"}
        given = {**columns, **self._options, "prompts": [self._asked(task)], "completions": [self._replied(completion)]}
        return of(**_accepted(of, given))

    def _as_verl(self, of: Callable[..., Any], completion: str, task: Task) -> Any:
        judged = task.get("reward_model")
        truth = judged.get("ground_truth") if isinstance(judged, Mapping) else task.get("ground_truth")
        return of(
            data_source=task.get("data_source", task.source), solution_str=completion,
            ground_truth=task.get(self._answer) if truth is None else truth, extra_info=task.get("extra_info"),
            **self._options,
        )  # fmt: skip

    def _as_verifiers(self, of: Callable[..., Any], completion: str, task: Task) -> Any:
        prompt, said = self._asked(task), self._replied(completion)
        info = task.get("info", {})
        state = {"prompt": prompt, "completion": said, "answer": task.get(self._answer, ""), "info": info}
        return of(**_accepted(of, {**self._options, **state, "state": state, "task": task.source}))


def _accepted(of: Callable[..., Any], given: dict[str, Any]) -> dict[str, Any]:
    parameters = inspect.signature(of).parameters.values()
    if any(p.kind is p.VAR_KEYWORD for p in parameters):
        return given
    return {name: value for name, value in given.items() if any(p.name == name for p in parameters)}


def _check(name: str, of: Callable[..., Any], style: str, options: Mapping[str, Any]) -> None:
    """Only the names that are sure to be there, or that every framework of the style passes, can be told now."""
    foreign = {"completion_ids", "prompt_ids", "trainer_state", "parser", "reward_tensor"}
    needed = {p.name for p in inspect.signature(of).parameters.values() if p.default is p.empty}
    if missing := sorted(needed & foreign):
        what = "needs " + ", ".join(missing)
        raise Problem(
            "workflow.reward.function", name, f"{what}, which is not at hand here", "wrap it in one that does not"
        )
    if style == "verl":
        try:
            inspect.signature(of).bind(data_source="", solution_str="", ground_truth="", extra_info=None, **options)
        except TypeError as error:
            fix = "it is called with data_source, solution_str, ground_truth, extra_info"
            raise Problem("workflow.reward.function", name, f"has another signature ({error})", fix) from error


def _number(name: str, said: Any) -> tuple[float | None, dict[str, float]]:
    """The reward, and further numbers that came with it."""
    if isinstance(said, Mapping):  # verl
        if "score" not in said:
            raise ValueError(f"{name} returned a dict without `score`: {', '.join(map(str, said))}")
        rest = {k: _plain(v) for k, v in said.items() if k != "score"}
        more = {k: float(v) for k, v in rest.items() if isinstance(v, int | float) and math.isfinite(v)}
        return _number(name, said["score"])[0], more
    said = _plain(said)
    if isinstance(said, list | tuple):  # TRL
        if len(said) != 1:
            raise ValueError(f"{name} returned {len(said)} rewards for one completion")
        said = _plain(said[0])
    if isinstance(said, str | bytes):
        raise TypeError(f"{name} returned the text {said!r:.60} for a reward")
    if said is None or math.isnan(float(said)):
        return None, {}
    return float(said), {}


def _plain(value: Any) -> Any:
    """Numbers and arrays of NumPy and torch as those of Python."""
    return value.tolist() if hasattr(value, "tolist") else value
