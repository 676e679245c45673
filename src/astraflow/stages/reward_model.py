"""A reward from a judge: any service that answers like OpenAI's chat completions."""

from __future__ import annotations

import json
import logging
import math
import re
import string
import time
from collections import Counter
from collections.abc import Mapping
from concurrent.futures import ThreadPoolExecutor
from typing import TYPE_CHECKING, Any, ClassVar, NamedTuple

import numpy as np
import pyarrow as pa
import urllib3

from astraflow.config.env import secret_from_env
from astraflow.config.stages import Kind
from astraflow.errors import Problem
from astraflow.stages.context import StageRun
from astraflow.wire.codec import list_lengths

if TYPE_CHECKING:
    from astraflow.models.chat import ChatTokenizer

log = logging.getLogger(__name__)
_PAUSE_S = 0.5
_SHOWN_CHARS = 200
_MOST_BYTES = 1 << 20  # of an answer


class Unscored(Exception):
    """The judge gave no reward; `kind` is what it is counted under."""

    def __init__(self, kind: str, text: str) -> None:
        self.kind = kind
        super().__init__(text)


class Conversation(NamedTuple):
    """What the judge is shown of one episode."""

    prompt: str  # what the policy was given before it first spoke
    completion: str  # everything after that


class RewardModel:
    """Adds the reward of each episode: the number that `pattern` finds in the judge's answer to `prompt`.

    The judge sees the branch that ends with the episode's last call. What it cannot score (no answer in time, no
    number) is unscored and takes no part in any baseline; it is never 0.
    """

    needs: ClassVar[tuple[str, ...]] = (
        "episode_id", "policy", "branch", "parent_branch", "fork_at", "token_ids", "loss_mask", "call_index", "task"
    )  # fmt: skip
    adds: ClassVar[Mapping[str, Kind]] = {"reward": "reward"}

    def __init__(
        self,
        *,
        run: StageRun,
        url: str,
        model: str,
        prompt: str,
        pattern: str = r"(-?\d+(?:\.\d+)?)",
        key_env: str = "",
        timeout_s: float = 30.0,
        retries: int = 2,
        concurrency: int = 16,
        max_tokens: int = 256,
        scale: float = 1.0,
    ) -> None:
        """`url`: up to and with /v1. `prompt`: a template; `{prompt}` and `{completion}` of the episode and the fields
        of its task are filled in. `pattern`: a regular expression with one group; its last match counts. `key_env`:
        the variable that holds the key; empty: the service needs none. `timeout_s`: of one call. `scale`: a factor.
        """
        where = f"stages.{run.name}"
        self._pattern = _compiled(pattern, where)
        self._fields = _fields(prompt, where)
        if not url.startswith(("http://", "https://")):
            raise Problem(f"{where}.url", url, "must start with http:// or https://", "give the base URL up to /v1")
        _check_least(where, timeout_s=(timeout_s, 0.001), retries=(retries, 0), concurrency=(concurrency, 1))
        key = secret_from_env(key_env) if key_env else None
        if key_env and not key:
            raise Problem(f"{where}.key_env", key_env, "is not set", "export the variable on the worker's host")
        self._run, self._template, self._where = run, prompt, where
        self._url, self._timeout_s, self._retries, self._scale = url.rstrip("/"), timeout_s, retries, scale
        self._body = {"model": model, "max_tokens": max_tokens, "temperature": 0}
        self._headers = {"content-type": "application/json"} | ({"authorization": f"Bearer {key}"} if key else {})
        self._pool = urllib3.PoolManager(maxsize=concurrency, retries=False)
        self._threads = ThreadPoolExecutor(concurrency, "judge")
        self._tokenizers: dict[str, ChatTokenizer] = {}
        self._failures: Counter[str] = Counter()

    def run(self, rows: pa.Table) -> pa.Table:
        """The reward of each episode at the row of its last call; null elsewhere."""
        last = _last_calls(rows)
        questions = self._questions(rows, last)
        rewards: list[float | None] = [None] * rows.num_rows
        for row, reward in zip(last, self._threads.map(self._judge, questions), strict=True):
            rewards[row] = reward
        scored = self._run.stats.get("scored", 0.0) + sum(r is not None for r in rewards)
        self._run.stats |= {"scored": scored, **{f"unscored/{k}": float(n) for k, n in self._failures.items()}}
        return pa.table({"reward": pa.array(rewards, pa.float32())})

    def close(self) -> None:
        """End waiting calls and drop connections."""
        self._threads.shutdown(wait=False, cancel_futures=True)
        self._pool.clear()

    def _questions(self, rows: pa.Table, numbers: list[int]) -> list[str]:
        """What the judge is asked about these rows.

        Raises: Problem: the prompt names a field that the task does not have.
        """
        from astraflow.models.scoring.packing import rows_to_score

        paths, policies = rows_to_score(rows), rows.column("policy").to_pylist()
        tasks, texts = rows.column("task").to_pylist(), []
        for row in numbers:
            own = slice(int(paths.starts[row]), int(paths.starts[row + 1]))
            shown = self._conversation(policies[row], paths.token_ids[own], paths.trained[own])
            fields: dict[str, Any] = {**(json.loads(tasks[row]) or {}), **shown._asdict()}
            missing = [name for name in self._fields if name not in fields]
            if missing:
                fix = f"known: {', '.join(fields)}"
                raise Problem(f"{self._where}.prompt", missing[0], "is no field of the task", fix)
            texts.append(self._template.format_map(fields))
        return texts

    def _conversation(self, policy: str, token_ids: np.ndarray, sampled: np.ndarray) -> Conversation:
        if policy not in self._tokenizers:
            self._tokenizers[policy] = self._run.tokenizer(policy)
        tokenizer, first = self._tokenizers[policy], int(np.argmax(sampled))
        return Conversation(tokenizer.decode(token_ids[:first]), tokenizer.decode(token_ids[first:]))

    def _judge(self, question: str) -> float | None:
        try:
            return self._number(self._answer(question))
        except Unscored as error:
            self._failures[error.kind] += 1
            if self._failures[error.kind] == 1:
                log.warning("judge of stage %s, first %s: %s", self._run.name, error.kind, error)
            return None

    def _number(self, answer: str) -> float:
        found = self._pattern.findall(answer)
        try:
            number = float(found[-1]) * self._scale if found else math.nan
        except ValueError:
            number = math.nan
        if not math.isfinite(number):
            raise Unscored("no_number", f"no number in {answer[:_SHOWN_CHARS]!r}")
        return number

    def _answer(self, question: str) -> str:
        body = json.dumps({**self._body, "messages": [{"role": "user", "content": question}]}).encode()
        for attempt in range(self._retries + 1):
            try:
                return self._ask(body)
            except Unscored as error:
                if error.kind == "refused" or attempt == self._retries or self._run.stop.wait(_PAUSE_S * 2**attempt):
                    raise
        raise AssertionError("unreachable")

    def _ask(self, body: bytes) -> str:
        """Raises: Unscored: timeout, unreachable, busy, refused, no_text."""
        url, deadline = f"{self._url}/chat/completions", time.monotonic() + self._timeout_s
        try:
            response = self._pool.request(
                "POST", url, body=body, headers=self._headers, timeout=self._timeout_s, preload_content=False
            )
            data = b""
            for piece in response.stream(1 << 16):
                data += piece
                if time.monotonic() > deadline or len(data) > _MOST_BYTES:
                    response.close()
                    raise Unscored("timeout", f"{url} was not done in {self._timeout_s:g} s and {_MOST_BYTES} bytes")
        except urllib3.exceptions.NewConnectionError as error:
            raise Unscored("unreachable", str(error)) from error
        except urllib3.exceptions.TimeoutError as error:
            raise Unscored("timeout", f"{url} gave no answer in {self._timeout_s:g} s") from error
        except urllib3.exceptions.HTTPError as error:
            raise Unscored("unreachable", f"{url}: {error}") from error
        if response.status >= 400:
            kind = "busy" if response.status == 429 or response.status >= 500 else "refused"
            raise Unscored(kind, f"{url} answered {response.status}: {data[:_SHOWN_CHARS]!r}")
        try:
            text = json.loads(data)["choices"][0]["message"]["content"]
        except (ValueError, LookupError, TypeError) as error:
            raise Unscored("no_text", f"{url} answered {data[:_SHOWN_CHARS]!r}") from error
        if not isinstance(text, str):
            raise Unscored("no_text", f"{url} answered with {type(text).__name__} for the content")
        return text


def _last_calls(rows: pa.Table) -> list[int]:
    """Of each episode and policy, the row that holds its last call."""
    lengths = list_lengths(rows.column("call_index"))
    newest: dict[tuple[str, str], tuple[int, int]] = {}
    names = zip(rows.column("episode_id").to_pylist(), rows.column("policy").to_pylist(), strict=True)
    calls = rows.column("call_index")
    for row, name in enumerate(names):
        last = int(max(calls[row].values.to_numpy(), default=-1)) if lengths[row] else -1
        if last >= 0 and last >= newest.get(name, (-1, -1))[0]:
            newest[name] = (last, row)
    return sorted(row for _, row in newest.values())


def _compiled(pattern: str, where: str) -> re.Pattern[str]:
    try:
        compiled = re.compile(pattern)
    except re.error as error:
        raise Problem(f"{where}.pattern", pattern, f"is no regular expression ({error})", "correct it") from error
    if compiled.groups != 1:
        raise Problem(f"{where}.pattern", pattern, "must have exactly one group", "put the number in parentheses")
    return compiled


def _check_least(where: str, **options: tuple[float, float]) -> None:
    for name, (value, least) in options.items():
        if value < least:
            raise Problem(f"{where}.{name}", value, f"must be >= {least:g}", "leave it out for the default")


def _fields(prompt: str, where: str) -> list[str]:
    """Names that the template fills in."""
    try:
        names = [name for _, name, _, _ in string.Formatter().parse(prompt) if name is not None]
    except ValueError as error:
        raise Problem(f"{where}.prompt", prompt, f"is not a template ({error})", "write a brace as {{ or }}") from error
    if "completion" not in names:
        raise Problem(f"{where}.prompt", prompt, "does not show the {completion}", "say where it belongs")
    return [re.split(r"[.\[]", name)[0] for name in names]
