"""The shell around the machine: journal, segments, clock, waiting requests, metrics.jsonl.

| who waits                  | for                        | unblocked by                            |
|----------------------------|----------------------------|-----------------------------------------|
| POST /leases (topic leases)| an admissible episode      | ack, drop, lost lease, eval round       |
| POST /policies/p/batches   | a full batch (topic p)     | commit that completes the last group    |
| every command              | one SQLite transaction     | `_flush`, once per turn of the loop     |

Commands of one turn are journaled in one transaction, then applied in order, then answered; histories of tasks are
written a little later. When the journal cannot be written nothing is applied, so the state never runs ahead of the
disk. A command that raises is void and ends the service: see `dataflow.rebuild`.
"""

from __future__ import annotations

import asyncio
import logging
import time
import uuid
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import ExitStack, closing
from pathlib import Path
from typing import Any

import msgspec

from astraflow.config import rooms
from astraflow.config.load import config_from_json, resolved_json
from astraflow.config.schema import RunConfig
from astraflow.contracts import Source
from astraflow.dataflow.compaction import Compaction
from astraflow.dataflow.journal.history import History
from astraflow.dataflow.journal.log import Journal
from astraflow.dataflow.journal.recovery import Logged
from astraflow.dataflow.machine import commands as c
from astraflow.dataflow.machine.accounts import failed_by
from astraflow.dataflow.machine.readers.consumers import topic as consumer_topic
from astraflow.dataflow.machine.readers.stages import topic as stage_topic
from astraflow.dataflow.rebuild import encode, fault_of, rebuild, void
from astraflow.dataflow.state import Applied, Machine
from astraflow.dataflow.storage.identity import refuse_other_data, refuse_other_run
from astraflow.dataflow.storage.segments import ReadRowsDamaged, Segments, segment_name
from astraflow.dataflow.storage.tokens import TokenReader
from astraflow.dataflow.views.life import Found, moments_of
from astraflow.dataflow.views.lines import line_of
from astraflow.dataflow.views.nodes import PoolRates
from astraflow.dataflow.views.rows import MetricsFile
from astraflow.errors import DataflowError, JournalError
from astraflow.wire.app import HttpError
from astraflow.wire.local import Inbox

log = logging.getLogger("astraflow.dataflow")
_QUIET = ("dropped", "episodes_dropped")  # events too frequent for the log
_HISTORY_S = 0.25  # histories are written so late, for all commands since
_EVENTS_KEPT = 1000  # per listener; a slow one misses events, nobody waits for it
_AWAY_S = 1  # a service that is started again is not back earlier


def answer_of(refusal: c.Refusal) -> HttpError:
    """What whoever sent the command is told."""
    return HttpError(refusal.status, str(refusal), refusal.kind, reason=refusal.reason)


def away() -> HttpError:
    """The answer to whoever asks a service that stops: an empty one would be asked again at once, of a closed port."""
    return HttpError(
        503, "dataflow=stopping answers nobody who waits; ask again after a pause", "Unreachable", pause_s=_AWAY_S
    )


def open_sources(config: RunConfig) -> dict[str, Source]:
    """The training sources and that of [evaluation].

    Raises: SourceError: data that is missing or malformed.
    """
    names = config.train_sources + ([config.evaluation.source] if config.evaluation is not None else [])
    return {
        name: rooms.build("sources", config.sources[name].type, config.sources[name].options, f"sources.{name}")
        for name in dict.fromkeys(names)
    }


class Shell:
    """One run's dataflow. Recovers from `<run_dir>/dataflow` when there is a journal.

    Raises: JournalError: in use, broken, of other data or settings. SourceError: data missing.
    """

    def __init__(
        self,
        config: RunConfig,
        run_dir: Path,
        sources: Mapping[str, Source] | None = None,
        *,
        accept_damage: bool = False,
    ) -> None:
        self.config = config
        self.sources = dict(sources) if sources is not None else open_sources(config)
        place, fsync = run_dir / "dataflow", config.dataflow.fsync
        with ExitStack() as opened:
            self.journal = opened.enter_context(closing(Journal(place, fsync=fsync, accept_damage=accept_damage)))
            self.metrics = opened.enter_context(closing(MetricsFile(run_dir / "metrics.jsonl", config)))
            self.history = opened.enter_context(closing(History(place / "history", self.journal.num_in_snapshot)))
            self.segments = opened.enter_context(closing(Segments(place / "segments", fsync=fsync)))
            self.inbox = Inbox(place / "inbox")
            self._dropped: set[int] = set()  # puts that a replayed command calls damaged
            self.machine, self._base = self._recover(accept_damage)
            self._cut = self.segments.keep_only(self.machine.state.puts.values(), accept_damage=accept_damage)
            opened.pop_all()
        self.damage = self.journal.recovered.damage
        needed, every = self.machine.state.segment_puts, config.dataflow.snapshot_every
        self.compaction = Compaction(self.journal, self.segments, every, needed.keys(), self.end)
        self._started = time.monotonic()
        self._behind: list[tuple[int, float, Iterator[Found]]] = []  # not yet told to the histories
        self._writing = False  # they will be written soon
        self._pending: list[tuple[c.Command, asyncio.Future[Any]]] = []
        topics = ["leases", *config.policies, *map(stage_topic, config.stages), *map(consumer_topic, config.policies)]
        self._topics = {topic: asyncio.Event() for topic in topics}
        self._listeners: set[asyncio.Queue[c.Event]] = set()
        self._rates = PoolRates()
        self.stopping = False
        self.crashed: asyncio.Event = asyncio.Event()
        self.crash: BaseException | None = None
        for damage in self.damage:
            self._tell(c.Event("alarm", {"journal": damage.file, "at": damage.position, "lost": damage.num_lost}))

    def now(self) -> float:
        """Run time in seconds: only while the service runs, never backwards, also over restarts."""
        return self._base + time.monotonic() - self._started

    async def submit(self, command: c.Command) -> Any:
        """Journal and apply a command, and give the machine's reply.

        Raises: HttpError: refused by the machine. JournalError: could not be written; not applied.
        """
        return await self._queue(command)

    async def submit_all(self, commands: Sequence[c.Command]) -> list[Any]:
        """Several in one transaction; of each the reply, or the error that `submit` raises."""
        return await asyncio.gather(*map(self._queue, commands), return_exceptions=True)

    def _queue(self, command: c.Command) -> asyncio.Future[Any]:
        future: asyncio.Future[Any] = asyncio.get_running_loop().create_future()
        if not self._pending:
            asyncio.get_running_loop().call_soon(self._flush)
        self._pending.append((command, future))
        return future

    async def wait(self, topic: str, timeout_s: float) -> None:
        """Until something happened to `topic`, or `timeout_s` is over."""
        try:
            await asyncio.wait_for(self._topics[topic].wait(), timeout_s)
        except TimeoutError:
            pass

    def listen(self) -> asyncio.Queue[c.Event]:
        """Events from now on; give it back with `unlisten`."""
        queue: asyncio.Queue[c.Event] = asyncio.Queue(_EVENTS_KEPT)
        self._listeners.add(queue)
        return queue

    def unlisten(self, queue: asyncio.Queue[c.Event]) -> None:
        """Stop listening."""
        self._listeners.discard(queue)

    async def tick_forever(self) -> None:
        """Expire what ran out of time; an error here ends the service."""
        section = self.config.dataflow
        stages = [stage.lease_s / 4 for stage in self.config.stages.values()]
        period = min(section.heartbeat_s, section.dead_after_s / 4, section.batch_lease_s / 4, 1.0, *stages)
        while True:
            await asyncio.sleep(period)
            await self.tick()

    async def tick(self) -> None:
        """Drop what the start found cut short, and expire what has run out of time by now."""
        try:
            if self._cut:
                files = ", ".join(map(segment_name, sorted({put.segment for put in self._cut})))
                await self.submit(c.DropDamaged([put.key for put in self._cut], f"{files}: cut short, or gone"))
                self._cut = []
            due = self.machine.due(self.now())
            if due is not None:
                await self.submit(due)
        except JournalError as error:
            log.error("%s", error)

    def end(self, name: str, error: BaseException) -> None:
        """A part of the service died: the process ends and names it."""
        if self.crash is None:
            log.critical("dataflow %s died: %s: %s", name, type(error).__name__, error)
            error.add_note(f"dataflow {name} died")
            self.crash = error
        self.crashed.set()
        self.stop()

    def stop(self) -> None:
        """Answer every waiting request now: ask again later."""
        self.stopping = True
        for topic in self._topics:
            self._wake(topic)

    def close(self) -> None:
        """Snapshot what is known and release the files."""
        self.compaction.close()
        try:
            self.write_histories()
            self.metrics.flush()
            if self.crash is None and not self.metrics.num_waiting:  # the log of the journal still has those rows
                self.journal.snapshot(self.machine.snapshot(), self.now())
        except (JournalError, DataflowError) as error:  # the log has it all
            log.error("%s", error)
        finally:
            self.segments.close()
            self.metrics.close()
            self.history.close()
            self.journal.close()

    def _recover(self, accept_damage: bool) -> tuple[Machine, float]:
        fingerprints = {name: source.fingerprint() for name, source in self.sources.items()}
        meta = self.journal.meta()
        if not meta:
            meta = {"run_id": uuid.uuid4().hex, "config": resolved_json(self.config), "sources": "{}"}
        old = config_from_json(meta["config"])
        refuse_other_run(old, self.config)
        known: dict[str, str] = msgspec.json.decode(meta["sources"])
        refuse_other_data(known, fingerprints)
        self.run_id = meta["run_id"]
        snapshot, self._tokens = self.journal.load()[0], TokenReader(self.segments.read)
        machine, now = rebuild(
            self.journal, lambda: Machine(old, self.sources, snapshot, self._tokens), self._hear_again,
            accept_damage=accept_damage,
        )  # fmt: skip
        self._refuse_other_verdicts(accept_damage)
        self.history.flush()
        if self.metrics.num_waiting:  # a snapshot would forget them
            raise JournalError(
                "metrics", str(self.metrics.path), "cannot be written", "make room on the disk, then start again"
            )
        if old != self.config:
            machine = Machine(self.config, self.sources, machine.snapshot(), self._tokens)
        machine.apply(c.Reopen(), now)
        sources = encode({**known, **fingerprints}).decode()
        meta = {**meta, "config": resolved_json(self.config), "sources": sources}
        self.journal.snapshot(machine.snapshot(), now, meta)
        self.journal.forget_recovered()
        return machine, now

    def _refuse_other_verdicts(self, accept_damage: bool) -> None:
        """The replay could not read what was read the first time. `_tell_of_damage` says when it was not either."""
        damaged = {found.put.key: found for found in self._tokens.damaged if found.put.key not in self._dropped}
        self._tokens.damaged.clear()
        if damaged and not accept_damage:
            raise ReadRowsDamaged(next(iter(damaged.values())), len(damaged))
        for found in damaged.values():
            log.error("%s", found)

    def _hear_again(self, logged: Logged, command: c.Command, applied: Applied, machine: Machine) -> None:
        if isinstance(command, c.DropDamaged):
            self._dropped.update(command.puts)
        self.history.add(logged.seq, logged.now, moments_of(command, applied, machine))
        for instruction in applied.instructions:
            if isinstance(instruction, c.MetricsRow):
                self.metrics.append(instruction)

    def _flush(self) -> None:
        pending, self._pending = self._pending, []
        if self.crash is not None:  # the state may be spoiled: nothing is applied to it any more
            return _fail(pending, away())
        try:
            now = self.now()
            self.segments.sync()
            self.journal.append([(now, encode(command)) for command, _ in pending])
            self._apply(pending, now)
        except JournalError as error:
            log.error("%s", error)
            puts = [x.put for x, _ in pending if isinstance(x, c.CommitEpisodes | c.AddColumns)]
            self.segments.undo(put for put in puts if put is not None)
            _fail(pending, error)
        except Exception as error:
            self.end("machine", error)
            _fail(pending, HttpError(500, f"dataflow=machine died ({error!r}); see its log"))
        self.segments.settle()

    def _apply(self, pending: list[tuple[c.Command, asyncio.Future[Any]]], now: float) -> None:
        topics: set[str] = set()
        first = self.journal.seq - len(pending) + 1
        for seq, (command, future) in enumerate(pending, first):
            try:
                applied = self.machine.apply(command, now)
            except c.Refusal as refusal:
                _fail([(command, future)], answer_of(refusal))
                continue
            except BaseException as error:  # whatever code of a user raises; Ctrl-C comes as a signal
                self._leave_out(seq, command, future, error)
                return _fail(pending, away())
            moments = moments_of(command, applied, self.machine)
            if not isinstance(command, c.CommitEpisodes):  # whose moments are many, and do not depend on the state
                moments = iter(list(moments))
            self._behind.append((seq, now, moments))
            self._perform(applied.instructions, topics)
            if not future.done():
                future.set_result(applied.reply)
        for topic in topics:
            self._wake(topic)
        self._tell_of_damage()
        self._snapshot_when_due(now)
        if self._behind:
            loop = asyncio.get_running_loop()
            loop.call_soon(self._look_back)  # after the answers
            if not self._writing:
                self._writing = True
                loop.call_later(_HISTORY_S, self._write_behind)

    def _leave_out(self, seq: int, command: c.Command, future: asyncio.Future[Any], error: BaseException) -> None:
        """The command raised and the state is spoiled: mark it as void, tell its sender, end."""
        mark = void(seq, command, error)
        fault = fault_of(mark)
        fault.__cause__ = error
        _fail([(command, future)], HttpError(500, str(fault), type(fault).__name__))
        try:
            self.journal.append([(self.now(), encode(mark))])
        except JournalError as full:  # the next start says what to do
            log.error("%s", full)
        self.end("machine", fault)

    def write_histories(self) -> None:
        """Write what was kept back so that nobody had to wait for it. A kill loses nothing: a replay writes it."""
        self._look_back()
        self.history.flush()

    def _look_back(self) -> None:
        """Say what was done while it is in the processor's cache: later that costs more."""
        for seq, now, moments in self._behind:
            self.history.add(seq, now, moments)
        self._behind.clear()

    def _write_behind(self) -> None:
        self._writing = False
        try:
            self.write_histories()
        except Exception as error:
            self.end("history", error)

    def _perform(self, instructions: list[c.Instruction], topics: set[str]) -> None:
        for instruction in instructions:
            match instruction:
                case c.Wake():
                    topics.add(instruction.topic)
                case c.Event():
                    self._tell(instruction)
                case c.DropSegment():
                    self.compaction.release(instruction.segment)
                case c.MetricsRow():
                    self.metrics.append(instruction, self._rates.read(self.machine.live))

    def _tell(self, event: c.Event) -> None:
        if event.kind not in _QUIET:
            log.info("%s", line_of(event), extra={"event": event.kind})
        for queue in self._listeners:
            if not queue.full():
                queue.put_nowait(event)

    def _tell_of_damage(self) -> None:
        """Groups were judged without their tokens: that is journaled, so that a replay knows it from damage since."""
        for found in self._tokens.damaged:
            drop = c.DropDamaged([found.put.key], f"{found.value}: {found.rule}")
            self._queue(drop).add_done_callback(asyncio.Future.exception)
        self._tokens.damaged.clear()

    def _snapshot_when_due(self, now: float) -> None:
        if not self.compaction.due:
            return
        self.write_histories()  # a replay would begin behind them
        self.metrics.flush()
        if self.metrics.num_waiting:  # a snapshot would forget them
            self.compaction.postpone()
            return
        try:
            state = self.machine.snapshot()
        except DataflowError as error:  # the log holds everything until the operator is mended
            self.compaction.postpone()
            if self.machine.state.failure is None:
                self._queue(c.FailRun(failed_by(error))).add_done_callback(asyncio.Future.exception)
            return
        self.compaction.begin(state, now)

    def _wake(self, topic: str) -> None:
        event, self._topics[topic] = self._topics[topic], asyncio.Event()
        event.set()


def _fail(pending: Iterable[tuple[c.Command, asyncio.Future[Any]]], error: Exception) -> None:
    for _, future in pending:
        if not future.done():
            future.set_exception(error)
