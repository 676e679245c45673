"""Plays many episodes at once on one loop: the worker's end of the channel."""

from __future__ import annotations

import asyncio
import contextvars
import functools
import inspect
import itertools
import logging
import threading
import traceback
from typing import Any, NamedTuple

from astraflow.errors import AstraFlowError, ConfigError, EpisodeError, WireError
from astraflow.observe.process import settle_memory
from astraflow.rollout.loop import start_in_thread
from astraflow.rollout.worker.channel import (
    Answer,
    Ask,
    Cancel,
    Channel,
    Done,
    Drop,
    Hello,
    Loaded,
    Message,
    Pulse,
    Ready,
    Start,
)
from astraflow.rollout.worker.client import LLM, BlockingLLM, Policies
from astraflow.rollout.worker.code import Code
from astraflow.rollout.worker.output import Budget
from astraflow.types import Outcome
from astraflow.wire.swarm.outcome import outcome_of, plain_text
from astraflow.workflows.load import PlayFunction, build_workflow

log = logging.getLogger("astraflow.worker")
MAX_TRACEBACKS = 100  # distinct failures logged in full by one worker
_TRACE_CHARS = 6000  # of a workflow that cannot be built


class _Component(NamedTuple):
    type: str
    options: dict[str, Any]


class Worker:
    """The worker's end of the channel. `finished` is set when the node is gone."""

    def __init__(self) -> None:
        self.finished = asyncio.Event()
        self.channel = Channel(self._on_message, self.finished.set)
        self._loop = asyncio.get_running_loop()
        self._hello: Hello | None = None
        self._play: PlayFunction | None = None
        self._code = Code()
        self._num_told = 0  # of its files
        self._blocking = False
        self._episodes: dict[int, asyncio.Task[None]] = {}
        self._calls: dict[int, asyncio.Future[tuple[int, bytes]]] = {}
        self._next_call = itertools.count()
        self._logged: set[str] = set()

    def _on_message(self, message: Message) -> None:
        match message:
            case Answer():
                waiting = self._calls.pop(message.call, None)
                if waiting is not None and not waiting.done():
                    waiting.set_result((message.status, message.body))
            case Start():
                self._episodes[message.slot] = self._loop.create_task(self._episode(message))
            case Cancel():
                if (task := self._episodes.get(message.slot)) is not None:
                    task.cancel()
            case Hello():
                self._begin(message)
            case _:
                raise AssertionError(f"a worker is never sent {type(message).__name__}")

    def _begin(self, hello: Hello) -> None:
        ready = Ready(None)
        self._code = Code(hello.files)
        self._code.begin()
        try:
            self._play = build_workflow(_Component(hello.workflow, hello.options), hello.policies)
            self._blocking = not _is_coroutine_function(self._play)
        except AstraFlowError as error:
            ready = Ready(plain_text(error), error.exit_code == ConfigError.exit_code, trace=_trace(error))
        except (Exception, SystemExit) as error:
            what = f"{type(error).__name__}: {plain_text(error)}"
            ready = Ready(f"workflow.type={hello.workflow!r} could not be built ({what})", trace=_trace(error))
        self._hello = hello
        settle_memory()
        self._tell_files()
        ready.code = self._code.version
        self.channel.send(ready)
        self._pulse(hello.pulse_s)

    def _tell_files(self) -> None:
        files = list(self._code.files.values())
        if len(files) > self._num_told:
            self.channel.send(Loaded(files[self._num_told :]))
            self._num_told = len(files)

    def _pulse(self, every_s: float) -> None:
        self.channel.send(Pulse())
        self._loop.call_later(every_s, self._pulse, every_s)

    async def _episode(self, start: Start) -> None:
        assert self._hello is not None
        outcome: Outcome | None = None
        error: str | None = None
        threads: list[threading.Thread] = []
        task = asyncio.current_task()
        assert task is not None
        budget = Budget(self._hello.max_output_bytes, lambda: self._loop.call_soon_threadsafe(task.cancel))
        try:
            async with asyncio.timeout(start.timeout_s) as limit:
                with budget:
                    outcome = outcome_of(await self._run(start, threads))
        except TimeoutError as failure:
            if limit.expired():
                error = f"timeout: the episode ran longer than {start.timeout_s:.3g} s"
            else:
                error = self._describe(failure)
        except asyncio.CancelledError:
            error = "cancelled: the episode was stopped"
        except EpisodeError as failure:
            error = plain_text(failure)
        except BaseException as failure:  # user code that leaves ends its episode, not its neighbours
            error = self._describe(failure)
        if budget.over:  # whatever it made of that
            outcome, error = None, budget.error
        del self._episodes[start.slot]
        left_running = any(t.is_alive() for t in threads)
        self._tell_files()
        code = self._code.version
        try:
            self.channel.send(Done(start.slot, outcome, error, left_running, code))
        except WireError as failure:  # the node must hear that the episode is over, whatever is in its outcome
            self.channel.send(Done(start.slot, None, self._describe(failure), left_running, code))

    async def _run(self, start: Start, threads: list[threading.Thread]) -> object:
        assert self._hello is not None and self._play is not None

        async def ask(body: bytes) -> tuple[int, bytes]:
            if start.slot not in self._episodes:
                raise EpisodeError("gateway: the episode is over; its calls are no longer served")
            call = next(self._next_call)
            future: asyncio.Future[tuple[int, bytes]] = self._loop.create_future()
            self._calls[call] = future
            self.channel.send(Ask(start.slot, call, body))
            try:
                return await future
            except asyncio.CancelledError:
                if self._calls.pop(call, None) is not None:  # None: the answer came in the same turn of the loop
                    self.channel.send(Drop(start.slot, call))
                raise

        url = self._hello.base_url
        llm = Policies({policy: LLM(policy, ask, url, start.key) for policy in self._hello.policies})
        if not self._blocking:
            return await self._play(start.task, llm)
        blocking = Policies({policy: BlockingLLM(client, self._loop) for policy, client in llm.items()})
        play, task, context = self._play, start.task, contextvars.copy_context()
        thread, future = start_in_thread(lambda: context.run(play, task, blocking), f"episode-{start.slot}")
        threads.append(thread)
        result = await future
        threads.clear()
        return result

    def _describe(self, failure: BaseException) -> str:
        """The episode's error; the traceback of each distinct failure is logged once."""
        place = failure.__traceback__
        while place is not None and place.tb_next is not None:
            place = place.tb_next
        where = f"{place.tb_frame.f_code.co_filename}:{place.tb_lineno}" if place is not None else ""
        mark = f"{type(failure).__name__} {where}"
        if mark not in self._logged and len(self._logged) < MAX_TRACEBACKS:
            self._logged.add(mark)
            log.error("workflow failed (later failures of this kind are counted only)", exc_info=failure)
        hint = "; is there an `await` missing?" if "'coroutine' object" in str(failure) else ""
        return plain_text(f"workflow: {type(failure).__name__}: {plain_text(failure)}{hint}")


def _trace(failure: BaseException) -> str:
    text = "".join(traceback.format_exception(failure))
    return plain_text(text if len(text) <= _TRACE_CHARS else "..." + text[-_TRACE_CHARS:], _TRACE_CHARS + 3)


def _is_coroutine_function(play: PlayFunction) -> bool:
    target = play.func if isinstance(play, functools.partial) else play  # a partial carries a function's options
    return inspect.iscoroutinefunction(target) or inspect.iscoroutinefunction(type(target).__call__)
