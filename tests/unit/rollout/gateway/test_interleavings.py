"""Whatever order calls, streams, hang-ups, retries, weight swaps and closes come in: what was sampled is captured, or
counted as dropped, on the prompt that the engine saw; each sample at most once; nothing is left running."""

from __future__ import annotations

import asyncio
from collections import Counter
from typing import Any

from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from astraflow.engines.scripted import ScriptedEngine
from astraflow.errors import GatewayError
from astraflow.rollout.gateway.calls.retries import Retry
from astraflow.rollout.gateway.core import Gateway
from astraflow.rollout.gateway.dialect import ChatRequest
from astraflow.rollout.gateway.endpoint import PolicyEndpoint
from astraflow.rollout.gateway.tools import HermesParser
from astraflow.types import Sampling

CALL = '<tool_call>{"name": "f", "arguments": {"x": 1}}</tool_call>'
TEXTS = ["a", "hello there", "oneENDtwo", CALL, f"so {CALL}{CALL}", "<tool_call>no", "E", ""]
OPTIONS = [{}, {"stop": "END"}, {"n": 2}, {"n": 3, "stop": ["END", "lo"]}, {"max_tokens": 2}, {"tools": True},
           {"tools": True, "parallel_tool_calls": False}]  # fmt: skip

BEGIN = st.tuples(
    st.just("begin"), st.integers(0, 1), st.sampled_from(["u", "v"]), st.sampled_from(OPTIONS), st.booleans(),
    st.sampled_from([None, Retry(), Retry("", 1), Retry("k"), Retry("k", 1)]),
)  # fmt: skip
OPERATIONS = st.one_of(
    BEGIN,
    BEGIN,
    st.tuples(st.just("step"), st.integers(1, 9)),
    st.tuples(st.just("step"), st.integers(1, 40)),
    st.tuples(st.just("hang up"), st.integers(0, 20)),
    st.tuples(st.just("swap")),
    st.tuples(st.just("turn")),
    st.tuples(st.just("close"), st.integers(0, 1)),
)


class Play:
    """Two episodes, their agents, and a count of what each request said."""

    def __init__(self, fakes: Any) -> None:
        self.fakes, self.chat = fakes, fakes.FakeChat()
        self.replies: dict[bytes, list[list[int]]] = {}
        self.engine = ScriptedEngine(self._script, held=True)
        self.gateway = Gateway({"actor": PolicyEndpoint(self.engine, self.chat, HermesParser())})
        leases = [fakes.lease(episode_id=f"e/{n}", sampling={"actor": Sampling(max_tokens=60)}) for n in range(2)]
        self.keys = [self.gateway.open_episode(lease) for lease in leases]
        self.agents: list[asyncio.Task[Any]] = []
        self.captured: list[Any] = []
        self.version = 0

    def _script(self, prompt: Any, number: int) -> list[int]:
        reply = [*self.chat.encode(TEXTS[number % len(TEXTS)]), self.fakes.EOS]
        self.replies.setdefault(prompt.tobytes(), []).append(reply)
        return reply

    async def agent(self, key: str, request: ChatRequest, stream: bool, retry: Retry | None) -> Any:
        try:
            if not stream:
                return await self.gateway.chat(key, request, retry)
            events = [event async for event in self.gateway.stream(key, request, retry)]
            return events[-1].completion
        except GatewayError as error:
            return error

    async def do(self, name: str, *arguments: Any) -> None:
        if name == "begin":
            episode, text, options, stream, retry = arguments
            options = dict(options)
            if options.get("tools"):
                options["tools"] = [self.fakes.tool("f", x="integer")]
            request = ChatRequest(model="actor", messages=[{"role": "user", "content": text}], **options)
            self.agents.append(asyncio.ensure_future(self.agent(self.keys[episode], request, stream, retry)))
        elif name == "step":
            self.engine.step(arguments[0])
        elif name == "hang up" and self.agents:
            self.agents[arguments[0] % len(self.agents)].cancel()
        elif name == "swap":
            self.engine.load_weights(self.version, {})
            self.version += 1
        elif name == "close" and self.keys[arguments[0]]:
            await self.close(arguments[0])
        for _ in range(3 if name == "turn" else 1):
            await asyncio.sleep(0)

    async def close(self, episode: int) -> None:
        key = self.keys[episode]
        try:
            self.captured += self.gateway.close_episode(key).calls["actor"]
        except GatewayError as error:
            assert error.status == 410

    async def finish(self) -> None:
        """Everything that still waits is answered; then all is counted."""
        self.engine.release()
        outcomes = await asyncio.wait_for(asyncio.gather(*self.agents, return_exceptions=True), 10)
        for episode in range(2):
            await self.close(episode)
        for _ in range(5):
            await asyncio.sleep(0)
        for outcome in outcomes:
            assert not isinstance(outcome, Exception) or isinstance(outcome, GatewayError), outcome
        self._check([o for o in outcomes if not isinstance(o, BaseException)])

    def _check(self, completions: list[Any]) -> None:
        stats, engine = self.gateway.stats(), self.engine.stats()
        kept = sum(len(call.generation.token_ids) for call in self.captured)
        assert stats["gateway/sampled_tokens"] == kept
        assert engine["sampled_tokens"] == kept + stats["gateway/dropped_tokens"]
        assert (engine["running"], stats["gateway/open_episodes"]) == (0, 0)
        seen = {prompt: list(replies) for prompt, replies in self.replies.items()}
        for call in sorted(self.captured, key=lambda call: -len(call.generation.token_ids)):
            ids = call.generation.token_ids.tolist()
            own = next(r for r in seen[call.prompt_ids.tobytes()] if r[: len(ids)] == ids)  # each reply at most once
            seen[call.prompt_ids.tobytes()].remove(own)
            assert len(ids) == len(call.generation.versions) == len(call.generation.logprobs)
            assert (call.generation.versions[1:] >= call.generation.versions[:-1]).all()
        told = Counter({c.id: len(c.choices) for c in completions})
        assert sum(told.values()) <= len(self.captured)


@settings(suppress_health_check=[HealthCheck.function_scoped_fixture], max_examples=150, deadline=None)
@given(operations=st.lists(OPERATIONS, max_size=30))
def test_every_token_is_accounted_for(fakes: Any, operations: list[Any]) -> None:
    async def play() -> None:
        played = Play(fakes)
        for operation in operations:
            await played.do(*operation)
        await played.finish()

    asyncio.run(play())
