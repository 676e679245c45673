"""A readable tokenizer with several chat templates, and an engine that says what it is told."""

from __future__ import annotations

import asyncio
import json
from collections.abc import AsyncGenerator, Callable, Sequence
from concurrent.futures import Future
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest

from astraflow.engines.scripted import ScriptedEngine
from astraflow.rollout.gateway.calls.events import Event
from astraflow.rollout.gateway.core import Gateway
from astraflow.rollout.gateway.dialect import ChatRequest
from astraflow.rollout.gateway.endpoint import PolicyEndpoint
from astraflow.rollout.gateway.tools import HermesParser
from astraflow.types import EpisodeLease, Generation, Sampling, Task

SPECIALS = ["<s>", "</s>", "<|user|>", "<|assistant|>", "<|tool|>", "<|system|>"]
WORDS = ["hello", "he", "llo", "<tool_call>", "</tool_call>"]
VOCABULARY = SPECIALS + WORDS + [chr(i) for i in range(32, 127)] + ["\n"]
IDS = {text: i for i, text in enumerate(VOCABULARY)}
EOS = IDS["</s>"]


class FakeChat:
    """Greedy longest match over VOCABULARY. Turns: `<|role|>text</s>\\n`; `style` changes the template."""

    def __init__(self, style: str = "plain") -> None:
        # plain | thinking: removed from earlier turns | folded: tool messages joined | trimmed | counted: in the head
        self.style = style
        self.eos_ids, self.vocab_size = (EOS,), len(VOCABULARY)
        self.encoded: list[str] = []

    def render(self, messages: Sequence[dict[str, Any]], tools: Any, *, add_generation_prompt: bool) -> str:
        last_user = max((i for i, m in enumerate(messages) if m["role"] == "user"), default=-1)
        text = "<s>" + (str(len(messages)) if self.style == "counted" else "")
        text += f"<|system|>{json.dumps(tools)}</s>\n" if tools else ""
        for i, m in enumerate(messages):
            content = m["content"]
            if self.style == "thinking" and m["role"] == "assistant" and i < last_user:
                content = content.split("</think>")[-1]
            if self.style == "trimmed":
                content = content.strip()
            for call in m.get("tool_calls", ()):
                call = {k: call["function"][k] for k in ("name", "arguments")}
                content += f"<tool_call>{json.dumps(call)}</tool_call>"
            if self.style == "folded" and m["role"] == "tool" and i and messages[i - 1]["role"] == "tool":
                text = text.removesuffix("</s>\n") + f"|{content}</s>\n"
            else:
                text += f"<|{m['role']}|>{content}</s>\n"
        return text + ("<|assistant|>" if add_generation_prompt else "")

    def encode(self, text: str) -> list[int]:
        self.encoded.append(text)
        ids, at = [], 0
        while at < len(text):
            word = max((w for w in VOCABULARY if text.startswith(w, at)), key=len)
            ids.append(IDS[word])
            at += len(word)
        return ids

    def decode(self, ids: Any, skip_special_tokens: bool = True) -> str:
        words = [VOCABULARY[int(i)] for i in ids]
        return "".join(w for w in words if not (skip_special_tokens and w in SPECIALS))


class FakeEngine:
    """Answers from `script` (ids and finish reason), or holds requests until `release` when it is empty."""

    def __init__(self, chat: FakeChat, max_context: int = 1000) -> None:
        self.chat, self.max_context = chat, max_context
        self.script: list[tuple[list[int], str] | Exception] = []
        self.requests: list[tuple[str, list[int], Sampling]] = []
        self.held: dict[str, Future[Generation]] = {}
        self.cancelled: list[str] = []

    def say(self, *texts: str) -> None:
        """Each text ends by EOS."""
        self.script += [([*self.chat.encode(text), EOS], "stop") for text in texts]

    def cut(self, text: str) -> None:
        """A reply cut by length."""
        self.script.append((self.chat.encode(text), "length"))

    def say_pieces(self, *pieces: str) -> None:
        """One reply of exactly these tokens."""
        self.script.append(([*(IDS[p] for p in pieces), EOS], "stop"))

    def submit(
        self, request_id: str, prompt_ids: np.ndarray, sampling: Sampling, on_tokens: Any = None
    ) -> Future[Generation]:
        assert prompt_ids.dtype == np.int32
        self.requests.append((request_id, prompt_ids.tolist(), sampling))
        future: Future[Generation] = Future()
        if not self.script:
            self.held[request_id] = future
        elif isinstance(self.script[0], Exception):
            future.set_exception(self.script.pop(0))
        else:
            future.set_result(generation(*self.script.pop(0), marker=-float(len(self.requests))))
        return future

    def release(self, request_id: str, text: str) -> None:
        self.held.pop(request_id).set_result(generation([*self.chat.encode(text), EOS], "stop"))

    def cancel(self, request_id: str) -> None:
        self.cancelled.append(request_id)


def generation(ids: list[int], finish: str, marker: float = -1.0) -> Generation:
    size = len(ids)
    logprobs = np.full(size, marker, np.float32)
    return Generation(np.asarray(ids, np.int32), logprobs, np.full(size, 3, np.int32), finish)  # type: ignore[arg-type]


def lease(**changes: Any) -> EpisodeLease:
    fields: dict[str, Any] = {
        "episode_id": "train/0/7/0",
        "group_id": "train/0/7",
        "attempt": 1,
        "task": Task("train", 7, 0, {}),
        "timeout_s": 10.0,
        "min_versions": {},
        "sampling": {"actor": Sampling(max_tokens=64)},
    }
    return EpisodeLease(**(fields | changes))


def tool(name: str = "f", **properties: str) -> dict[str, Any]:
    schema = {"type": "object", "properties": {k: {"type": t} for k, t in properties.items()}}
    return {"type": "function", "function": {"name": name, "parameters": schema}}


class World:
    """A gateway with one policy 'actor' and one open episode."""

    def __init__(self, style: str = "plain", max_context: int = 1000, **lease_changes: Any) -> None:
        self.chat = FakeChat(style)
        self.engine = FakeEngine(self.chat, max_context)
        self.gateway = Gateway({"actor": PolicyEndpoint(self.engine, self.chat, HermesParser())})
        self.key = self.gateway.open_episode(lease(**lease_changes))

    async def ask(self, messages: list[dict[str, Any]], **options: Any) -> Any:
        options.setdefault("model", "actor")
        return await self.gateway.chat(self.key, ChatRequest(messages=messages, **options))

    def prompt_text(self, number: int = -1) -> str:
        """What the engine got, as text."""
        return self.chat.decode(self.engine.requests[number][1], skip_special_tokens=False)

    def close(self) -> list[Any]:
        return self.gateway.close_episode(self.key).calls["actor"]


class Stage:
    """A gateway over a scripted engine that is held: `step` gives tokens, `turn` lets the gateway hear of them."""

    def __init__(self, *texts: str, max_tokens: int = 400, **options: Any) -> None:
        self.chat = FakeChat()
        replies = [[*self.chat.encode(text), EOS] for text in texts]
        self.engine = ScriptedEngine(replies, held=True, **options)
        self.gateway = Gateway({"actor": PolicyEndpoint(self.engine, self.chat, HermesParser())})
        self.key = self.gateway.open_episode(lease(sampling={"actor": Sampling(max_tokens=max_tokens)}))

    def request(self, **options: Any) -> ChatRequest:
        return ChatRequest(**({"model": "actor", "messages": [{"role": "user", "content": "hi"}]} | options))

    def stream(self, **options: Any) -> AsyncGenerator[Event, None]:
        return self.gateway.stream(self.key, self.request(**options))

    async def turn(self) -> None:
        for _ in range(5):
            await asyncio.sleep(0)

    def close(self) -> list[Any]:
        return self.gateway.close_episode(self.key).calls["actor"]

    def stat(self, name: str) -> float:
        return self.gateway.stats()[f"gateway/{name}"]


@pytest.fixture(scope="session")
def stage() -> type[Stage]:
    return Stage


@pytest.fixture(scope="session")
def make_world() -> Callable[..., World]:
    return World


@pytest.fixture
def world() -> World:
    return World()


@pytest.fixture(scope="session")
def fakes() -> SimpleNamespace:
    return SimpleNamespace(
        FakeChat=FakeChat, FakeEngine=FakeEngine, lease=lease, tool=tool, generation=generation, EOS=EOS, IDS=IDS
    )
