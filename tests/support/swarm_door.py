"""The swarm side of a node with the scripted engine, in a thread; leases come from a list, not from a service."""

from __future__ import annotations

import asyncio
import threading
from collections.abc import Callable, Sequence
from typing import Any

import msgspec

from astraflow.engines.scripted import ScriptedEngine
from astraflow.errors import WireError
from astraflow.rollout.gateway.core import Gateway
from astraflow.rollout.gateway.endpoint import PolicyEndpoint
from astraflow.rollout.gateway.tools import BracketParser
from astraflow.rollout.swarm.part import Swarm, SwarmOptions
from astraflow.rollout.swarm.trials import TrialOptions
from astraflow.types import Episode, EpisodeLease, Sampling, Task
from astraflow.wire.app import bind

LIMIT_S = 20.0
_SYMBOLS = "0123456789+-*/=? abcdefghijklmnopqrstuvwxyz"
EOS = 2


class Letters:
    """One id per character; messages one after the other, EOS after an assistant's."""

    eos_ids = (EOS,)

    def render(self, messages: Sequence[Any], tools: Any, *, add_generation_prompt: bool) -> str:
        return "".join(m["content"] + ("<eos>" if m["role"] == "assistant" else "") for m in messages)

    def encode(self, text: str) -> list[int]:
        return [i for part in text.split("<eos>") for i in [*(3 + _SYMBOLS.index(c) for c in part), EOS]][:-1]

    def decode(self, ids: Any, skip_special_tokens: bool = True) -> str:
        return "".join("<eos>" if i < 3 else _SYMBOLS[i - 3] for i in map(int, ids) if i > 2 or not skip_special_tokens)


def two(prompt: Any, number: int) -> list[int]:
    """Every answer is "2"."""
    return [*Letters().encode("2"), EOS]


def lease(number: int, *, source: str = "train", attempt: int = 1, timeout_s: float = 20.0) -> EpisodeLease:
    """Of one task each; two policies."""
    return EpisodeLease(
        episode_id=f"{source}/0/{number}/0", group_id=f"{source}/0/{number}", attempt=attempt,
        task=Task(source, number, 0, {"question": "1+1=?"}), timeout_s=timeout_s, min_versions={},
        sampling={"actor": Sampling(max_tokens=8), "critic": Sampling(max_tokens=8)},
    )  # fmt: skip


def _row(source: str, number: int) -> Task:
    if source != "train" or number >= 10:
        raise WireError(f"source={source} row={number} is none", 404)
    return lease(number).task


class DoorBench:
    """`leases` are handed out as clients ask; what goes back is offered again as the next attempt."""

    def __init__(
        self, leases: Sequence[EpisodeLease] = (), *, dead_after_s: float = 20.0, token: str | None = None,
        version: int = 0,
    ) -> None:  # fmt: skip
        self.pending = list(leases)
        self.episodes: list[Episode] = []
        self.returned: list[tuple[str, int, bool]] = []
        self.url = ""
        self._known = {each.episode_id: each for each in leases}
        self._dead_after_s, self._token, self._version = dead_after_s, token, version
        self._port = 0
        self._start()

    def call(self, function: Callable[[], Any]) -> Any:
        """Run a function on the door's loop."""

        async def run() -> Any:
            return function()

        return asyncio.run_coroutine_threadsafe(run(), self._loop).result(LIMIT_S)

    def wait_for(self, condition: Callable[[], bool]) -> None:
        """Until it holds, looked at on the door's loop."""

        async def wait() -> None:
            async with asyncio.timeout(LIMIT_S):
                while not condition():
                    await asyncio.sleep(0.01)

        asyncio.run_coroutine_threadsafe(wait(), self._loop).result(LIMIT_S + 1)

    def restart(self) -> None:
        """As a node that was killed and started again: nothing is known any more, all leases are offered again."""
        held = self.call(self.swarm.runner.playing)
        self.close()
        self.pending += [msgspec.structs.replace(self._known[e], attempt=a + 1) for e, a in held]
        self._start()

    def say_over(self) -> None:
        """The run is over."""
        asyncio.run_coroutine_threadsafe(self.swarm.tell_over(), self._loop).result(LIMIT_S)

    def close(self) -> None:
        if self._thread.is_alive():
            self._loop.call_soon_threadsafe(self._stop.set)
            self._thread.join(LIMIT_S)

    def __enter__(self):
        return self

    def __exit__(self, *error: object) -> None:
        self.close()

    def _start(self) -> None:
        started = threading.Event()
        self._thread = threading.Thread(target=lambda: asyncio.run(self._main(started)), name="door", daemon=True)
        self._thread.start()
        assert started.wait(LIMIT_S)

    async def _main(self, started: threading.Event) -> None:
        self._loop, self._stop = asyncio.get_running_loop(), asyncio.Event()
        engines = {name: ScriptedEngine(two) for name in ("actor", "critic")}
        for engine in engines.values():
            engine.load_weights(self._version, {})
        gateway = Gateway({n: PolicyEndpoint(e, Letters(), BracketParser()) for n, e in engines.items()})
        options = SwarmOptions(
            node_id="n", dead_after_s=self._dead_after_s, max_episodes=100, max_episode_tokens=1000, token=self._token,
            trials=TrialOptions(
                source="train", timeout_s=20.0, sampling=lease(0).sampling, chats=dict.fromkeys(engines, Letters()),
                row=_row,
            ),
        )  # fmt: skip
        self.swarm = Swarm(options, gateway, engines, self.episodes.append, lambda policy: -1)
        sock = bind("127.0.0.1", self._port, "test")
        self._port = sock.getsockname()[1]
        url: asyncio.Future[str] = self._loop.create_future()
        tasks = [
            asyncio.create_task(part)
            for part in (
                self.swarm.serve(sock, url.set_result), self.swarm.watch(), self.swarm.send_back(self._take_back),
                self._lease(),
            )
        ]  # fmt: skip
        self.url = await url
        started.set()
        stop = asyncio.create_task(self._stop.wait())
        await asyncio.wait([stop, *tasks], return_when=asyncio.FIRST_COMPLETED)
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)
        for engine in engines.values():
            engine.close()

    async def _lease(self) -> None:
        while True:
            await self.swarm.asked()
            count = self.swarm.wanted
            given, self.pending = self.pending[:count], self.pending[count:]
            self.swarm.runner.accept(given)
            if not given:
                await asyncio.sleep(0.01)

    async def _take_back(self, returns: Sequence[tuple[str, int, bool]]) -> None:
        self.returned += returns
        again = [msgspec.structs.replace(self._known[e], attempt=a + 1) for e, a, _ in returns]
        self.pending = again + self.pending
