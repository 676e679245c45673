"""A runner on real worker processes, with the scripted engine: what tests of workflows, limits and edits play on."""

from __future__ import annotations

import asyncio
from contextlib import asynccontextmanager

from rollout_scripts import EOS, SYMBOLS, ids, right_calls

from astraflow.engines.scripted import ScriptedEngine
from astraflow.rollout.gateway.core import Gateway
from astraflow.rollout.gateway.endpoint import PolicyEndpoint
from astraflow.rollout.gateway.tools import BracketParser
from astraflow.rollout.pool import PoolLimits, WorkerPool
from astraflow.rollout.runner import Runner, RunnerOptions
from astraflow.rollout.worker.channel import Hello
from astraflow.types import EpisodeLease, Sampling, Task

LIMITS = PoolLimits(pulse_s=0.05, stall_s=0.6, grace_s=0.3, max_left_running=2)


class CharChat:
    """One id per character; messages one after the other, EOS after an assistant's."""

    eos_ids = (EOS,)

    def render(self, messages, tools, *, add_generation_prompt):
        return "".join(m["content"] + ("<eos>" if m["role"] == "assistant" else "") for m in messages)

    def encode(self, text):
        return [i for part in text.split("<eos>") for i in [*ids(part), EOS]][:-1]

    def decode(self, token_ids, skip_special_tokens=True):
        return "".join(SYMBOLS[i] for i in token_ids if not (skip_special_tokens and i < 3))


def lease(kind, number=0, *, timeout_s=20.0, attempt=1, version=0):
    return EpisodeLease(
        episode_id=f"train/0/{number}/0", group_id=f"train/0/{number}", attempt=attempt,
        task=Task("train", number, 0, {"kind": kind, "text": "1+1?"}), timeout_s=timeout_s,
        min_versions={"actor": version}, sampling={"actor": Sampling(max_tokens=16)},
    )  # fmt: skip


class Bench:
    """A runner on worker processes; episodes land in `episodes` in the order in which they end."""

    def __init__(
        self,
        workflow,
        engine,
        max_tokens=None,
        *,
        workers=1,
        limits=LIMITS,
        watch=False,
        call_timeout_s=0.0,
        step_timeout_s=0.0,
        **hello,
    ):
        self.engine = engine
        self.gateway = Gateway({"actor": PolicyEndpoint(engine, CharChat(), BracketParser())}, call_timeout_s)
        type_name = workflow if ":" in workflow else f"rollout_scripts:{workflow}"
        told = Hello(type_name, {}, ["actor"], "http://127.0.0.1:1/v1", limits.pulse_s, **hello)
        self.pool = WorkerPool(workers, told, lambda: self.runner.start_waiting(), limits, watch=watch)
        self.episodes = []
        self.ended = asyncio.Event()
        self.runner = Runner(
            RunnerOptions("n", 100, max_tokens=max_tokens, step_timeout_s=step_timeout_s),
            self.gateway,
            {"actor": engine},
            self.pool,
            self._add,
        )

    def _add(self, episode):
        self.episodes.append(episode)
        self.ended.set()

    async def play(self, *leases, count=None):
        """The episodes of these leases, by task row."""
        self.runner.accept(leases)
        async with asyncio.timeout(60):
            while len(self.episodes) < (len(leases) if count is None else count):
                self.ended.clear()
                await self.ended.wait()
        return [e for _, e in sorted((e.task.row, e) for e in self.episodes)]


@asynccontextmanager
async def bench(workflow="play_by_kind", *, held=False, max_context=4096, version=0, max_tokens=None, **options):
    engine = ScriptedEngine(right_calls, held=held, max_context=max_context)
    if version >= 0:
        engine.load_weights(version, {})
    made = Bench(workflow, engine, max_tokens, **options)
    await made.pool.start()
    loops = [asyncio.create_task(c) for c in (made.pool.watch(), made.runner.keep_deadlines(LIMITS.pulse_s))]
    try:
        yield made
    finally:
        for loop in loops:
            loop.cancel()
        await made.pool.close()
