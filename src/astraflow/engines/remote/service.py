"""One service that answers as OpenAI's chat completions do: asked, asked again, and waited for with a limit."""

from __future__ import annotations

import asyncio
import logging
import math
import random
import time
from collections.abc import Mapping
from dataclasses import dataclass
from email.utils import parsedate_to_datetime
from typing import Any

import msgspec

from astraflow.engines.remote.verdicts import Verdict
from astraflow.errors import EngineError
from astraflow.observe.redact import redact_text
from astraflow.wire.streams.web import Lost, Refused, Web

log = logging.getLogger(__name__)
_PATH = "/chat/completions"
_PAUSE_S, _MAX_PAUSE_S = 0.5, 30.0
_AGAIN = frozenset({408, 409, 425, 429, 500, 502, 503, 504, 520, 522, 524, 529})
_SHOWN = 300


class BadKey(EngineError):
    """The service does not know the key."""


@dataclass(frozen=True, kw_only=True)
class Patience:
    """Of one verdict."""

    deadline_s: float  # all of it: waiting for a place, tries, pauses
    timeout_s: float  # one try
    retries: int
    concurrency: int  # tries at once


class _Function(msgspec.Struct):
    name: str
    arguments: str = ""


class _Call(msgspec.Struct):
    function: _Function


class _Part(msgspec.Struct):
    text: str = ""


class _Message(msgspec.Struct):
    content: str | list[_Part] | None = None
    tool_calls: list[_Call] | None = None


class _Choice(msgspec.Struct):
    message: _Message
    finish_reason: str | None = None


class _Usage(msgspec.Struct):
    total_tokens: int | None = None
    prompt_tokens: int = 0
    completion_tokens: int = 0


class _Completion(msgspec.Struct):
    choices: list[_Choice]
    usage: _Usage | None = None


class _Again(Exception):
    """It may go better next time. `after_s`: not before, None: the service does not say."""

    def __init__(self, why: str, after_s: float | None = None) -> None:
        self.after_s = after_s
        super().__init__(why)


class Service:
    """Lives on one event loop."""

    def __init__(self, url: str, key: str | None, patience: Patience) -> None:
        """`url`: up to and with /v1."""
        self._web, self._key, self._patience = Web(url, key), key, patience
        self._places = asyncio.Semaphore(patience.concurrency)
        self._not_before = 0.0  # monotonic: the service has asked everybody to wait until then
        self._jitter = random.Random(0)
        self.num_retries = 0

    async def ask(self, body: Mapping[str, Any]) -> Verdict:
        """Raises: EngineError: it will not, or did not within the deadline. BadKey."""
        patience = self._patience
        end, tries, why = time.monotonic() + patience.deadline_s, 0, "no place was free"
        try:
            async with asyncio.timeout(patience.deadline_s):
                while True:
                    try:
                        return await self._once(body)
                    except _Again as again:
                        tries, why = tries + 1, str(again)
                        if tries > patience.retries:
                            raise self._error(why, f"after {tries} tries", "see engine.retries") from None
                        await self._pause(tries, again.after_s, end, why)
        except TimeoutError:
            said = f"no verdict within engine.deadline_s={patience.deadline_s:g}"
            raise self._error(f"{said}, of {tries} failed tries the last: {why}", "", "raise it") from None

    async def _once(self, body: Mapping[str, Any]) -> Verdict:
        async with self._places:
            if (wait_s := self._not_before - time.monotonic()) > 0:
                await asyncio.sleep(wait_s)
            try:
                answer = await self._web.ask("POST", _PATH, body, within_s=self._patience.timeout_s)
            except Lost as error:
                raise _Again(error.rule) from None
            except Refused as error:
                self._refused(error)
        return _verdict(answer, body)

    def _refused(self, error: Refused) -> None:
        """Raises: _Again, EngineError, BadKey."""
        if error.status == 401:
            raise BadKey(
                "engine.key", "***", f"is not known to {self._web.url} ({self._shown(error.rule)})",
                "correct the variable of engine.key_env, or the file of engine.key_file",
            )  # fmt: skip
        if error.status in _AGAIN and "insufficient_quota" not in error.rule:
            raise _Again(error.rule, _seconds(error.retry_after))
        raise self._error(error.rule, "", "correct the request, engine.extra or engine.omit")

    async def _pause(self, tries: int, after_s: float | None, end: float, why: str) -> None:
        """Raises: EngineError: it would be longer than the deadline."""
        pause_s = min(_MAX_PAUSE_S, _PAUSE_S * 2 ** (tries - 1)) * self._jitter.uniform(0.5, 1.0)
        if after_s is not None:
            pause_s = after_s
            self._not_before = max(self._not_before, time.monotonic() + after_s)
        if time.monotonic() + pause_s > end:
            raise self._error(why, f"and waiting {pause_s:.1f} s is beyond engine.deadline_s", "raise it")
        self.num_retries += 1
        log.info("%s: %s; again in %.1f s", self._web.url, self._shown(why), pause_s)
        await asyncio.sleep(pause_s)

    def _error(self, why: str, rest: str, fix: str) -> EngineError:
        said = f"{self._shown(why)} {rest}".strip()
        return EngineError("remote", self._web.url, f"gave no verdict: {said}", fix)

    def _shown(self, text: str) -> str:
        """Services repeat keys, or parts of them."""
        return redact_text(text, (self._key or "",))[:_SHOWN]


def _verdict(answer: bytes, body: Mapping[str, Any]) -> Verdict:
    """Raises: _Again: it is no completion. EngineError: it is one that says nothing."""
    try:
        completion = msgspec.json.decode(answer, type=_Completion)
    except (msgspec.DecodeError, RecursionError) as error:
        raise _Again(f"sent no completion ({error}): {answer[:80].decode(errors='replace')}") from None
    if not completion.choices:
        raise _Again("sent a completion without choices")
    choice = completion.choices[0]
    content = choice.message.content or ""
    text = content if isinstance(content, str) else "".join(part.text for part in content)
    calls = [(call.function.name, call.function.arguments) for call in choice.message.tool_calls or []]
    if choice.finish_reason == "content_filter":
        raise EngineError("remote", "content_filter", "the service will not answer this", "ask for something else")
    finish = "length" if choice.finish_reason == "length" else "stop"
    if finish == "length" and not text and not calls:
        raise EngineError("remote", "length", "its limit of tokens went by before it said a word", "raise max_tokens")
    usage = completion.usage
    if usage is None:  # about four characters are one
        tokens = (len(msgspec.json.encode(body)) + len(text)) // 4 + 1
    else:
        tokens = usage.total_tokens or usage.prompt_tokens + usage.completion_tokens
    return Verdict(text, calls, finish, tokens)


def _seconds(retry_after: str) -> float | None:
    """Of the header: a number of seconds, or a date. None: none that can be read."""
    try:
        seconds = float(retry_after)
        return None if math.isnan(seconds) else max(0.0, seconds)
    except ValueError:
        log.debug("no number of seconds: %s", retry_after)
    try:
        return max(0.0, parsedate_to_datetime(retry_after).timestamp() - time.time())
    except (ValueError, OverflowError):
        return None
