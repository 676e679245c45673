"""What does one call through the gateway cost? The engine answers at once, so what is left is ours.

| way     | client                                             | server                                     |
|---------|----------------------------------------------------|--------------------------------------------|
| direct  | none: the gateway's own function                   | same process                               |
| channel | the light client of built-in workflows (`tool_use`) | node process, a worker process plays       |
| urllib3 | a plain HTTP client in another process             | the gateway's HTTP app on uvicorn          |
| openai  | AsyncOpenAI in another process                     | the same                                   |

Each episode is the two-turn calculator conversation with its tool schema: two calls, the second of which continues the
stored context. `--concurrency` episodes run at once (1: the latency of a lone call).

    python -m benchmarks.bench_gateway [--episodes 2000] [--concurrency 1,64]
"""

from __future__ import annotations

import argparse
import asyncio
import json
import sys
import tempfile
import time
from collections.abc import Awaitable, Callable, Coroutine, Sequence
from concurrent.futures import Future
from pathlib import Path
from typing import Any, cast

import numpy as np
import psutil

from astraflow.contracts import Engine, TokenSink
from astraflow.environments.calculator import TOOLS
from astraflow.errors import EngineError
from astraflow.models.chat import ChatTokenizer
from astraflow.models.registry import model_directory
from astraflow.rollout.gateway.app import create_app
from astraflow.rollout.gateway.core import Gateway
from astraflow.rollout.gateway.endpoint import PolicyEndpoint
from astraflow.rollout.gateway.tools import parser_for
from astraflow.rollout.loop import run_loop
from astraflow.rollout.pool import WorkerPool
from astraflow.rollout.runner import Runner, RunnerOptions
from astraflow.rollout.worker.channel import Hello
from astraflow.types import Episode, EpisodeLease, Generation, Sampling, Task
from astraflow.wire.app import bind, serve
from benchmarks.harness import Check, Result

CALLS = 2  # of one episode
USER = {"role": "user", "content": "3*4?"}


class InstantEngine:
    """Answers `[3*4]` to a problem and `12.` to a tool result, at once."""

    version, max_context = 0, 512

    def __init__(self, chat: ChatTokenizer) -> None:
        eos = chat.eos_ids[0]
        self.ended: Future[EngineError] = Future()
        self._call, self._final = (self._generation([*chat.encode(text), eos]) for text in ("[3*4]", "12."))
        self._question = chat.encode("?")[0]

    def submit(
        self,
        request_id: str,
        prompt_ids: Sequence[int] | np.ndarray,
        sampling: Sampling,
        on_tokens: TokenSink | None = None,
    ) -> Future[Generation]:
        """A future that is done."""
        future: Future[Generation] = Future()
        future.set_result(self._call if prompt_ids[-1] == self._question else self._final)
        return future

    def cancel(self, request_id: str) -> None:
        """Nothing ever runs."""

    @staticmethod
    def _generation(ids: list[int]) -> Generation:
        length = len(ids)
        return Generation(
            np.array(ids, np.int32), np.full(length, -0.5, np.float32), np.zeros(length, np.int32), "stop"
        )


def make_gateway(cache: Path) -> tuple[Gateway, InstantEngine]:
    """A gateway that serves the tiny model's template and an instant engine."""
    chat = ChatTokenizer(model_directory("tiny-char", cache, 0))
    engine = InstantEngine(chat)
    return Gateway(
        {"actor": PolicyEndpoint(cast(Engine, engine), chat, parser_for("auto", chat, "tool_parser"))}
    ), engine


def lease(number: int) -> EpisodeLease:
    """An episode of the calculator task."""
    task = Task("train", number, 0, {"text": USER["content"], "answer": "12"})
    return EpisodeLease(
        episode_id=f"{task.group_id}/0", group_id=task.group_id, attempt=1, task=task, timeout_s=600.0,
        min_versions={"actor": 0}, sampling={"actor": Sampling(max_tokens=7)},
    )  # fmt: skip


Ask = Callable[[list[dict[str, Any]]], Awaitable[dict[str, Any]]]
"""Sends the messages of one call, gives the assistant's message."""


async def converse(ask: Ask) -> None:
    """The two calls of an episode."""
    messages: list[dict[str, Any]] = [USER]
    first = await ask(messages)
    call = first["tool_calls"][0]
    told = {"role": "tool", "tool_call_id": call["id"], "content": "<12>"}
    last = await ask([*messages, first, told])
    if last["content"] != "12.":
        raise SystemExit(f"the scripted answer did not arrive: {last}")


async def all_of(episodes: int, concurrency: int, play: Callable[[int], Awaitable[None]]) -> float:
    """Play `episodes`, `concurrency` at once; seconds."""
    numbers = iter(range(episodes))

    async def lane() -> None:
        for number in numbers:
            await play(number)

    start = time.perf_counter()
    await asyncio.gather(*(lane() for _ in range(concurrency)))
    return time.perf_counter() - start


async def direct(cache: Path, episodes: int, concurrency: int) -> float:
    """The gateway's function for JSON, called in its own process."""
    gateway, _ = make_gateway(cache)

    async def play(number: int) -> None:
        key = gateway.open_episode(lease(number))

        async def ask(messages: list[dict[str, Any]]) -> dict[str, Any]:
            body = json.dumps({"model": "actor", "messages": messages, "tools": TOOLS}).encode()
            _, answer = await gateway.answer(key, body)
            return dict(json.loads(answer)["choices"][0]["message"])

        await converse(ask)
        gateway.close_episode(key)

    return await all_of(episodes, concurrency, play)


async def channel(cache: Path, episodes: int, concurrency: int) -> float:
    """`tool_use` in a worker process, as in a real run; opening and closing episodes are part of it."""
    gateway, engine = make_gateway(cache)
    waiting: dict[str, asyncio.Future[Episode]] = {}
    ready = asyncio.Event()
    options = {"environment": "calculator", "max_turns": CALLS}
    pool = WorkerPool(1, Hello("tool_use", options, ["actor"], "", 0.5), ready.set)

    def finished(episode: Episode) -> None:
        waiting.pop(episode.episode_id).set_result(episode)

    runner = Runner(RunnerOptions("bench", concurrency), gateway, {"actor": engine}, pool, finished)  # type: ignore[dict-item]
    await pool.start()

    async def play(number: int) -> None:
        given = lease(number)
        waiting[given.episode_id] = asyncio.get_running_loop().create_future()
        arrives = waiting[given.episode_id]
        runner.accept([given])
        episode = await arrives
        if episode.error or episode.trajectories[0].reward != 1.0:
            raise SystemExit(f"an episode failed: {episode}")

    await all_of(min(200, episodes), concurrency, play)  # warm
    took = await all_of(episodes, concurrency, lambda number: play(number + episodes))
    await pool.close()
    return took


async def over_http(cache: Path, episodes: int, concurrency: int, client: str) -> float:
    """A client process against the HTTP app in this one."""
    gateway, _ = make_gateway(cache)
    keys = [gateway.open_episode(lease(number)) for number in range(episodes)]
    stop, ready = asyncio.Event(), asyncio.get_running_loop().create_future()
    server = asyncio.create_task(serve(create_app(gateway), bind("127.0.0.1", 0, "port"), ready.set_result, stop))
    url = await ready
    process = await asyncio.create_subprocess_exec(
        sys.executable, "-m", "benchmarks.bench_gateway", "--client", client, "--concurrency", str(concurrency),
        stdin=asyncio.subprocess.PIPE, stdout=asyncio.subprocess.PIPE,
    )  # fmt: skip
    out, _ = await process.communicate(json.dumps({"url": url, "keys": keys}).encode())
    stop.set()
    await server
    return float(out)


def urllib3_asker(url: str) -> Callable[[str], Ask]:
    """Blocking requests on threads of the default executor."""
    import urllib3

    pool = urllib3.PoolManager(maxsize=64)

    def send(key: str, messages: list[dict[str, Any]]) -> dict[str, Any]:
        body = json.dumps({"model": "actor", "messages": messages, "tools": TOOLS}).encode()
        headers = {"authorization": f"Bearer {key}", "content-type": "application/json"}
        reply = pool.request("POST", f"{url}/v1/chat/completions", body=body, headers=headers)
        return dict(reply.json()["choices"][0]["message"])

    def bound(key: str) -> Ask:
        return lambda messages: asyncio.to_thread(send, key, messages)

    return bound


def openai_asker(url: str) -> Callable[[str], Ask]:
    """AsyncOpenAI, one client per key as agents use it; the connections are shared."""
    from openai import AsyncOpenAI, DefaultAsyncHttpxClient

    shared = DefaultAsyncHttpxClient()

    def bound(key: str) -> Ask:
        client = AsyncOpenAI(base_url=f"{url}/v1", api_key=key, http_client=shared)

        async def ask(messages: list[dict[str, Any]]) -> dict[str, Any]:
            reply = await client.chat.completions.create(model="actor", messages=messages, tools=TOOLS)  # type: ignore[arg-type]
            return reply.choices[0].message.model_dump(exclude_none=True)

        return ask

    return bound


async def be_client(kind: str, concurrency: int) -> float:
    """The client process: reads url and keys from stdin; seconds."""
    given = json.loads(sys.stdin.read())
    ask_as = {"urllib3": urllib3_asker, "openai": openai_asker}[kind](given["url"])
    keys = given["keys"]
    warm = min(concurrency, len(keys) // 4)
    await all_of(warm, concurrency, lambda number: converse(ask_as(keys[number])))
    took = await all_of(len(keys) - warm, concurrency, lambda number: converse(ask_as(keys[warm + number])))
    return took * len(keys) / (len(keys) - warm)


def main() -> None:
    """Measure every way at every concurrency."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--episodes", type=int, default=2000)
    parser.add_argument("--concurrency", default="1,64")
    parser.add_argument("--client", choices=["urllib3", "openai"], help=argparse.SUPPRESS)
    args = parser.parse_args()
    if args.client:
        sys.stdout.write(f"{run_loop(be_client(args.client, int(args.concurrency)))}\n")
        return
    rows = measure(args.episodes, [int(word) for word in args.concurrency.split(",")])
    result = Result("gateway", vars(args), rows, checks(rows))
    result.show()
    result.write()


def measure(episodes: int, concurrencies: Sequence[int]) -> list[dict[str, Any]]:
    """One row per way and concurrency. `cpu_us_per_call`: of this process, the node (its clients are others)."""
    rows = []
    with tempfile.TemporaryDirectory(prefix="bench-gateway-") as place:
        cache = Path(place)
        ways: dict[str, Callable[[int, int], Coroutine[Any, Any, float]]] = {
            "direct": lambda n, c: direct(cache, n, c),
            "channel": lambda n, c: channel(cache, n, c),
            "urllib3": lambda n, c: over_http(cache, n, c, "urllib3"),
            "openai": lambda n, c: over_http(cache, n, c, "openai"),
        }
        model_directory("tiny-char", cache, 0)
        for way, play in ways.items():
            for concurrency in concurrencies:
                count = episodes if way in ("direct", "channel") else max(200, episodes // 4)
                before = sum(psutil.Process().cpu_times()[:2])
                took = run_loop(play(count, concurrency))
                cpu = sum(psutil.Process().cpu_times()[:2]) - before
                rows.append({
                    "way": way, "concurrency": concurrency, "calls": count * CALLS,
                    "us_per_call": round(took / (count * CALLS) * 1e6, 1),
                    "node_cpu_us_per_call": round(cpu / (count * CALLS) * 1e6, 1),
                })  # fmt: skip
    return rows


def checks(rows: list[dict[str, Any]]) -> list[Check]:
    """The light client must be worth having: cheaper than the SDK at the highest concurrency."""
    cost = {row["way"]: row["us_per_call"] for row in rows}  # the last row of a way has the highest concurrency
    return [
        Check.at_most("light client against AsyncOpenAI, time per call", cost["channel"] / cost["openai"], 0.5, "x")
    ]


if __name__ == "__main__":
    main()
