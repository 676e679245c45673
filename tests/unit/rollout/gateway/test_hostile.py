"""What careless and hostile agents send is answered in the form of their dialect, never by a bare fault."""

from __future__ import annotations

import asyncio
import json
from collections.abc import AsyncIterator
from contextlib import aclosing
from pathlib import Path
from typing import Any

import pytest

from astraflow.errors import AstraFlowError, GatewayError
from astraflow.rollout.gateway.app import create_app
from astraflow.rollout.gateway.dialects import http
from astraflow.rollout.gateway.tools import HermesReader
from astraflow.wire.app import bind, serve

PATHS = ("chat/completions", "completions", "responses", "messages", "messages/count_tokens")
DEEP = "[" * 50_000 + "]" * 50_000
MESSAGES = [{"role": "user", "content": "hi"}]


@pytest.fixture
async def url(world: Any) -> AsyncIterator[str]:
    stop = asyncio.Event()
    ready: asyncio.Future[str] = asyncio.get_running_loop().create_future()
    sock = bind("127.0.0.1", 0, "gateway.port")
    server = asyncio.create_task(serve(create_app(world.gateway), sock, ready.set_result, stop, grace_s=1))
    yield await ready
    stop.set()
    await server


async def post(url: str, path: str, key: str, body: str, **headers: str) -> tuple[int, dict[str, Any]]:
    """Status and error object."""
    host, port = url.removeprefix("http://").split(":")
    reader, writer = await asyncio.open_connection(host, int(port))
    told = {"host": host, "connection": "close", "authorization": f"Bearer {key}", **headers}
    head = "".join(f"{name}: {value}\r\n" for name, value in told.items())
    writer.write(f"POST /v1/{path} HTTP/1.1\r\n{head}content-length: {len(body)}\r\n\r\n{body}".encode())
    text = (await reader.read()).decode()
    writer.close()
    await writer.wait_closed()
    return int(text.split()[1]), json.loads(text.partition("\r\n\r\n")[2])


def check_shape(path: str, reply: dict[str, Any]) -> None:
    """OpenAI's error object, or Anthropic's."""
    assert reply.get("type") == ("error" if path.startswith("messages") else None)
    assert reply["error"]["message"] and reply["error"]["type"]


@pytest.mark.parametrize("path", PATHS)
async def test_a_pickle_is_malformed_and_not_run(world: Any, url: str, path: str, tmp_path: Path) -> None:
    status, reply = await post(url, path, world.key, f"cos\nmkdir\n(S'{tmp_path}/pwned'\ntR.")
    assert status == 400 and not list(tmp_path.iterdir())
    check_shape(path, reply)


@pytest.mark.parametrize("path", PATHS)
async def test_json_that_is_nested_too_deeply_is_malformed(world: Any, url: str, path: str) -> None:
    status, reply = await post(url, path, world.key, f'{{"model": "actor", "unknown": {DEEP}}}')
    assert status == 400
    check_shape(path, reply)


@pytest.mark.parametrize("path", PATHS)
async def test_a_body_beyond_all_measure_is_refused(
    world: Any, url: str, path: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(http, "MAX_BODY_BYTES", 1000)
    status, reply = await post(url, path, world.key, json.dumps({"model": "actor", "pad": "x" * 2000}))
    assert status == 413
    check_shape(path, reply)


@pytest.mark.parametrize("path", PATHS)
async def test_a_fault_of_ours_has_the_form_of_the_dialect(
    world: Any, url: str, path: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    def broken(*_: Any) -> None:
        raise ZeroDivisionError

    monkeypatch.setattr(world.gateway, "_capture", broken)
    body = {"model": "actor", "max_tokens": 9, "messages": MESSAGES, "input": "hi"}
    if path == "completions":
        body["prompt"] = "hi"
    status, reply = await post(url, path, world.key, json.dumps(body))
    assert status == 500 and "ZeroDivisionError" in reply["error"]["message"]
    check_shape(path, reply)


@pytest.mark.parametrize(
    "schema", ['{"$schema": 5}', '{"$schema": ["a"]}', '{"not": ' * 400 + "{}" + "}" * 400], ids=["5", "[]", "deep"]
)
async def test_a_schema_that_makes_its_checker_stumble(world: Any, url: str, schema: str) -> None:
    tool = f'{{"type": "function", "function": {{"name": "f", "parameters": {schema}}}}}'
    body = f'{{"model": "actor", "messages": {json.dumps(MESSAGES)}, "tools": [{tool}]}}'
    status, reply = await post(url, "chat/completions", world.key, body)
    assert status == 400 and reply["error"]["param"] == "tools[0].function.parameters"


async def test_a_count_of_retries_that_is_no_number_is_none(world: Any, url: str) -> None:
    world.engine.say("a", "b")
    body = json.dumps({"model": "actor", "messages": MESSAGES})
    for count in ("9" * 5000, "-1"):
        status, _ = await post(url, "chat/completions", world.key, body, **{"x-stainless-retry-count": count})
        assert status == 200
    assert len(world.close()) == 2


async def test_arguments_that_are_nested_too_deeply_stand_for_themselves(world: Any) -> None:
    world.engine.say("yes")
    call = {"id": "1", "type": "function", "function": {"name": "f", "arguments": f'{{"x": {DEEP}}}'}}
    history = [{"role": "assistant", "content": "", "tool_calls": [call]}, *MESSAGES]
    with pytest.raises(GatewayError, match="tokens are too many"):  # read, rendered and counted
        await world.ask(history)


async def test_a_parser_that_raises_at_the_end_does_not_keep_an_episode_open(
    stage: Any, fakes: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    scene = stage("some words")
    async with aclosing(scene.stream(tools=[fakes.tool("f")])) as events:
        await anext(events)
        await scene.turn()
        scene.engine.step(4)
        await scene.turn()
        await anext(events)

        def broken(_: Any) -> None:
            raise ZeroDivisionError

        monkeypatch.setattr(HermesReader, "end", broken)
        assert scene.close() == []
        assert scene.engine.stats()["running"] == 0
        with pytest.raises(AstraFlowError, match="ZeroDivisionError"):
            async for _ in events:
                pass
