"""Whatever order calls, streams, hang-ups, retries, weight swaps and closes come in: what was sampled is captured, or
counted as dropped, on the prompt that the engine saw; each sample at most once; nothing is left running."""

from __future__ import annotations

import asyncio
from typing import Any

from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from astraflow.engines.scripted import ScriptedEngine
from astraflow.errors import GatewayError
from astraflow.rollout.gateway.calls.events import Finished, Started
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
        self.said: list[list[int]] = []
        self.engine = ScriptedEngine(self._script, held=True)
        self.gateway = Gateway({"actor": PolicyEndpoint(self.engine, self.chat, HermesParser())})
        leases = [fakes.lease(episode_id=f"e/{n}", sampling={"actor": Sampling(max_tokens=60)}) for n in range(2)]
        self.keys = [self.gateway.open_episode(lease) for lease in leases]
        self.agents: list[asyncio.Task[Any]] = []
        self.open = set(self.keys)
        self.captured: dict[str, Any] = {}  # by id of the request to the engine
        self.shown: set[str] = set()  # completions of which a stream gave a piece
        self.version = 0

    def _script(self, prompt: Any, number: int) -> list[int]:
        reply = [*self.chat.encode(TEXTS[number % len(TEXTS)]), self.fakes.EOS]
        self.said.append(reply)
        return reply

    async def agent(self, key: str, request: ChatRequest, stream: bool, retry: Retry | None) -> Any:
        try:
            if not stream:
                completion = await self.gateway.chat(key, request, retry)
            else:
                async for event in self.gateway.stream(key, request, retry):
                    if isinstance(event, Started):
                        run_id = event.id
                    elif isinstance(event, Finished):
                        completion = event.completion
                    else:
                        self.shown.add(run_id)
        except GatewayError as error:
            assert error.code == "idempotency_key_reused" or key not in self.open, error
            return error
        for choice in completion.choices:
            self._check_choice(request, choice)
        return completion

    def _check_choice(self, request: ChatRequest, choice: Any) -> None:
        """The words are those of the tokens, and no token comes after the end."""
        text = self.chat.decode(choice.token_ids)
        stops = [request.stop] if isinstance(request.stop, str) else request.stop or []
        assert all(text.find(stop) in (-1, len(text) - len(stop)) for stop in stops)
        if not request.tools:
            assert choice.message.content == next((text.removesuffix(s) for s in stops if text.endswith(s)), text)
        if request.parallel_tool_calls is False:
            assert text.count("</tool_call>") <= 1

    async def do(self, name: str, *arguments: Any) -> None:
        if name == "begin":
            episode, text, options, stream, retry = arguments
            options = dict(options)
            if options.get("tools"):
                options["tools"] = [self.fakes.tool("f", x="integer")]
            messages = [{"role": "user", "content": text}]
            request = ChatRequest(model="actor", messages=messages, return_token_ids=True, **options)
            self.agents.append(asyncio.ensure_future(self.agent(self.keys[episode], request, stream, retry)))
        elif name == "step":
            self.engine.step(arguments[0])
        elif name == "hang up" and self.agents:
            self.agents[arguments[0] % len(self.agents)].cancel()
        elif name == "swap":
            self.engine.load_weights(self.version, {})
            self.version += 1
        elif name == "close":
            await self.close(arguments[0])
        for _ in range(3 if name == "turn" else 1):
            await asyncio.sleep(0)

    async def close(self, episode: int) -> None:
        key = self.keys[episode]
        if key in self.open:
            self.open.remove(key)
            capture = self.gateway._episodes[key].captures["actor"]
            closed = self.gateway.close_episode(key)
            assert [call.index for call in closed.calls["actor"]] == list(range(len(capture.calls)))
            self.captured |= {f"e/{episode}/1/actor/{call.index}": call for call in capture.calls}

    async def finish(self, hang_up: bool) -> None:
        """All agents hang up, or are answered; then all is counted."""
        if hang_up:
            for agent in self.agents:
                agent.cancel()
            await self.turns()
            assert self.engine.stats()["running"] == 0
        self.engine.release()
        outcomes = await asyncio.wait_for(asyncio.gather(*self.agents, return_exceptions=True), 60)
        for episode in range(2):
            await self.close(episode)
        await self.turns()
        for outcome in outcomes:
            if isinstance(outcome, Exception) and not isinstance(outcome, GatewayError):
                raise outcome
        self._check([outcome for outcome in outcomes if not isinstance(outcome, BaseException)])

    async def turns(self) -> None:
        for _ in range(5):
            await asyncio.sleep(0)

    def _check(self, completions: list[Any]) -> None:
        stats, engine = self.gateway.stats(), self.engine.stats()
        kept = sum(len(call.generation.token_ids) for call in self.captured.values())
        assert stats["gateway/sampled_tokens"] == kept
        assert engine["sampled_tokens"] == kept + stats["gateway/dropped_tokens"]
        assert (engine["running"], stats["gateway/open_episodes"]) == (0, 0)
        seen = {request_id: prompt.tolist() for request_id, prompt, _ in self.engine.seen}
        assert len(seen) == len(self.engine.seen)
        replies = dict(zip(seen, self.said, strict=True))
        for request_id, call in self.captured.items():
            ids = call.generation.token_ids.tolist()
            assert call.prompt_ids.tolist() == seen[request_id]
            assert replies[request_id][: len(ids)] == ids
            assert len(ids) == len(call.generation.versions) == len(call.generation.logprobs)
            assert (call.generation.versions[1:] >= call.generation.versions[:-1]).all()
        for completion in completions:
            first = completion.id.removeprefix("chatcmpl-")
            head, _, index = first.rpartition("/")
            for choice in completion.choices:
                call = self.captured[f"{head}/{int(index) + choice.index}"]
                assert call.generation.token_ids.tolist() == choice.token_ids
                assert call.prompt_ids.tolist() == completion.prompt_token_ids
        cut = [i for i, call in self.captured.items() if call.generation.finish_reason == "cancelled"]
        assert not cut or self.shown - {completion.id for completion in completions}, "nobody has seen anything of it"


@settings(suppress_health_check=[HealthCheck.function_scoped_fixture], max_examples=150, deadline=None)
@given(operations=st.lists(OPERATIONS, max_size=30), hang_up=st.booleans())
def test_every_token_is_accounted_for(fakes: Any, operations: list[Any], hang_up: bool) -> None:
    async def play() -> None:
        played = Play(fakes)
        for operation in operations:
            await played.do(*operation)
        await played.finish(hang_up)

    asyncio.run(play())
