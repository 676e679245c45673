"""The trainer of one policy: pull a batch, take a step, publish the next version, acknowledge.

```
            ┌────────────────────────────────── one step ──────────────────────────────────┐
  batch ──► pack ─► forward/backward ─► AdamW ─► copy ─┬─► write v+1 ─► visible ─┬─► ack ─► (checkpoint)
  of v+1                                               └─► audit of the logprobs ┘
```
| who                 | produces           | waits for                         | is unblocked by                       |
|---------------------|--------------------|-----------------------------------|---------------------------------------|
| main thread         | steps, checkpoints | a full batch (long polls, logged) | the commit that completes the batch   |
| main thread         | acknowledgements   | its version to be visible         | the publisher thread                  |
| publisher thread    | weight versions    | a copy of the weights             | the end of a step                     |
| heartbeat thread    | signs of life      | `dataflow.heartbeat_s`            | time; its failure ends the main loop  |
| weights server      | bytes for readers  | requests (a process of its own)   | nodes; it ends with the trainer       |
| main thread, at end | final weights      | the run to be over                | the last evaluation round             |

A dataflow service that restarts, or whose disk is full, is waited for up to `DATAFLOW_GONE_S`, `FIRST_ANSWER_S` at the
start: every request is idempotent and sent again. The log says what is waited for, and a stop signal ends the wait.
`kill -9` at any point: a new process loads the newest checkpoint, is served the batches after it again, and publishes
equal versions, which changes nothing (other content under a known version is counted and the old one kept).
"""

from __future__ import annotations

import contextlib
import logging
import math
import signal
import socket
import threading
import time
import uuid
from collections.abc import Callable, Iterator
from pathlib import Path
from types import FrameType
from typing import TypeVar
from urllib.parse import urlsplit

import msgspec
import pyarrow as pa

from astraflow.config.load import config_from_json
from astraflow.dataflow.client import DataflowClient
from astraflow.errors import ConfigError, TrainingError, Unreachable, WireError
from astraflow.models.checkpoints import latest_checkpoint
from astraflow.observe.memory import settle_memory
from astraflow.training.learner import Learner
from astraflow.training.step import StepInterrupted
from astraflow.types import BatchHeader
from astraflow.weights.server import ServerProcess, start_server
from astraflow.wire.messages import Resume

DATAFLOW_GONE_S = 120.0
FIRST_ANSWER_S = 30.0
LEAVING_S = 20.0  # the same at the end of the run, when it may have left before us
POLL_S = 2.0
TELL_EVERY_S = 30.0
RETRY_S = 2.0  # one try of an unreachable service, after which the wait is logged and a stop signal is seen
GONE = 410  # HTTP: the run is over
NO_ROOM = 507  # HTTP: the disk of the service is full

T = TypeVar("T")

Connect = Callable[[float], DataflowClient]  # give_up_s -> client

log = logging.getLogger(__name__)


def run_trainer(dataflow: str, policy: str, run_dir: Path, *, threads: int = 0, token: str | None = None) -> int:
    """Train `policy` of the run served at `dataflow` until its last step; 0 when the run is over.

    SIGTERM or Ctrl-C: a checkpoint of the last version is written, then it ends, also with 0.

    Args: run_dir: where weights and checkpoints lie; a checkpoint found there is continued. threads: 0: as the run
    file says.
    Raises: AstraFlowError: what went wrong, also when a newer trainer of the policy took over (WireError, status 409).
    """

    def connect(give_up_s: float) -> DataflowClient:
        return DataflowClient(dataflow, token, give_up_s=give_up_s)

    with contextlib.ExitStack() as stack:
        stop = stack.enter_context(_stop_signals())
        client = connect(RETRY_S)
        stack.callback(client.close)
        try:
            run = _patient(client.run, stop, FIRST_ANSWER_S)
        except StepInterrupted:
            return 0
        config = config_from_json(msgspec.json.encode(run.config))
        if policy not in config.policies:
            known = ", ".join(config.policies)
            raise ConfigError(run.run, [f"policy={policy!r} is not in the run; use one of {known}"])
        if run.finished and latest_checkpoint(run_dir / "checkpoints" / policy, config.run.steps):
            log.info("run %s is over", run.run)
            return 0
        try:
            learner = Learner(config, policy, run_dir, threads, stop.is_set)
        except StepInterrupted:
            return 0
        stack.callback(learner.close)
        server = start_server(run_dir / "weights", config.weights.host, config.weights.port, token)
        stack.callback(server.stop)
        urls = (learner.store.url, _outward(server.policy_url(policy), dataflow))
        trainer = Trainer(connect, learner, server, stop)
        try:
            trainer.resume(run.run_id, urls)
        except StepInterrupted:
            return 0
        settle_memory()
        with trainer.heartbeats():
            trainer.loop()
            trainer.serve_until_finished()
    return 0


class Trainer:
    """The loop between a `Learner` and the dataflow service."""

    def __init__(self, connect: Connect, learner: Learner, server: ServerProcess, stop: threading.Event) -> None:
        self._connect, self._learner, self._server, self._stop = connect, learner, server, stop
        self._client = connect(RETRY_S)
        self._config, self._policy = learner.config, learner.policy
        self._id = f"{self._policy}-{uuid.uuid4().hex[:12]}"
        self._failure: BaseException | None = None  # of the heartbeat thread
        self._saved = -1  # version of the last checkpoint of this process
        self._stats = {"version": float(learner.version), "steps": 0.0, "wait_s": 0.0, "busy_s": 0.0, "tokens": 0.0}

    def resume(self, run_id: str, urls: tuple[str, ...]) -> None:
        """Announce this trainer, its version and its weight stores; an older trainer of the policy is replaced."""
        resume = Resume(trainer_id=self._id, version=self._learner.version, run_id=run_id, urls=urls)
        reply = _patient(lambda: self._client.resume(self._policy, resume), self._stop)
        log.info("trains from version %d; %d batches come again", self._learner.version, reply.replayed_batches)

    def loop(self) -> None:
        """All steps of the run (or those before a stop signal), and a checkpoint of the last one."""
        with contextlib.suppress(StepInterrupted):
            self._steps()
        if self._saved != self._learner.version:
            self._checkpoint()

    def _steps(self) -> None:
        learner, run = self._learner, self._config.run
        while learner.version < run.steps and not self._stop.is_set():
            begin = time.perf_counter()
            batch = self._next_batch()
            if batch is None:
                break
            header, table = batch
            waited = time.perf_counter() - begin
            metrics = learner.train(table)
            if self._server.ensure():
                log.warning("the weights server had died and was started again at %s", self._server.url)
            self._acknowledge(header, metrics, waited, time.perf_counter() - begin)
            if learner.version % run.checkpoint_every == 0:
                self._checkpoint()

    def serve_until_finished(self) -> None:
        """Keep the last versions within reach until evaluation is done, too; then the run is over."""
        try:
            while not _patient(self._client.run, self._stop, LEAVING_S).finished and not self._stop.wait(1.0):
                self._check_heartbeats()
        except StepInterrupted:
            return
        except Unreachable:
            log.info("the dataflow service is gone; the run is over for %s", self._policy)

    @contextlib.contextmanager
    def heartbeats(self) -> Iterator[None]:
        """Beat in a thread of its own, with a client of its own, while the block runs."""
        ended = threading.Event()
        client = self._connect(DATAFLOW_GONE_S)
        thread = threading.Thread(
            target=self._beat, args=(client, ended), name=f"heartbeat-{self._policy}", daemon=True
        )
        thread.start()
        try:
            yield
        finally:
            ended.set()
            client.close()
            thread.join(LEAVING_S)

    def _beat(self, client: DataflowClient, ended: threading.Event) -> None:
        try:
            while not ended.wait(self._config.dataflow.heartbeat_s):
                client.trainer_heartbeat(self._policy, self._id, dict(self._stats))
        except BaseException as error:  # handed to the main thread, which raises it
            if not ended.is_set() and not _is_over(error):
                self._failure = error

    def _next_batch(self) -> tuple[BatchHeader, pa.Table] | None:
        """The batch after our version; None: the run is over, or a stop signal came."""
        begin = told = time.monotonic()
        while not self._stop.is_set():
            self._check_heartbeats()
            try:
                batch = _patient(
                    lambda: self._client.batch(self._policy, self._id, self._learner.version, wait_s=POLL_S), self._stop
                )
            except WireError as error:
                if _is_over(error):
                    return None
                raise
            if batch is not None:
                return batch
            now = time.monotonic()
            if now - told >= TELL_EVERY_S:
                told = now
                log.info(
                    "waits for batch %s/%d since %.0f s: fewer than %d groups are complete", self._policy,
                    self._learner.version + 1, now - begin, self._learner.section.batch.groups,
                )  # fmt: skip
        return None

    def _acknowledge(self, header: BatchHeader, metrics: dict[str, float], waited: float, wall: float) -> None:
        if header.step != self._learner.version:
            raise TrainingError(
                "batch.step", header.step, f"must be {self._learner.version}", "restart the trainer of this policy"
            )
        metrics |= {"perf/wait_s": waited, "perf/busy_s": wall - waited, "perf/idle_fraction": waited / wall}
        metrics["perf/loop_tokens_per_s"] = metrics["tokens"] / wall
        finite = {name: value for name, value in metrics.items() if math.isfinite(value)}  # JSON has no NaN
        _patient(lambda: self._client.ack(header, self._id, finite), self._stop)
        self._stats["version"] = float(header.step)
        self._stats["steps"] += 1
        self._stats["wait_s"] += waited
        self._stats["busy_s"] += wall - waited
        self._stats["tokens"] += metrics["tokens"]
        log.info(
            "step %d: reward %.3f, loss %.4f, entropy %.3f, gap p99 %.1e, waited %.2f s of %.2f s", header.step,
            header.metrics.get("reward/mean", math.nan), metrics.get("loss", math.nan),
            metrics.get("policy/entropy", math.nan), metrics.get("logprob_gap/p99", math.nan), waited, wall,
        )  # fmt: skip

    def _checkpoint(self) -> None:
        self._learner.save()
        version = self._saved = self._learner.version
        try:
            _patient(lambda: self._client.checkpoint(self._policy, self._id, version), self._stop)
        except StepInterrupted:  # the next checkpoint covers the same batches
            log.info("ends without telling the dataflow service of checkpoint %d", version)
        except WireError as error:
            if not _is_over(error):
                raise

    def _check_heartbeats(self) -> None:
        if self._failure is not None:
            raise self._failure


@contextlib.contextmanager
def _stop_signals() -> Iterator[threading.Event]:
    """An event that SIGTERM and the first Ctrl-C set; a second one interrupts. Outside the main thread: never set."""
    stop = threading.Event()

    def on_signal(number: int, frame: FrameType | None) -> None:
        if stop.is_set():
            raise KeyboardInterrupt
        stop.set()

    if threading.current_thread() is not threading.main_thread():
        yield stop
        return
    before = {number: signal.signal(number, on_signal) for number in (signal.SIGTERM, signal.SIGINT)}
    try:
        yield stop
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)


def _patient(call: Callable[[], T], stop: threading.Event, gone_s: float = DATAFLOW_GONE_S) -> T:
    """The answer of a service that may be out of reach for a while; says in the log what is waited for.

    Raises: StepInterrupted: a stop signal came while it did not answer. WireError: refused, or no answer in `gone_s`.
    """
    begin, told = time.monotonic(), -math.inf
    while True:
        try:
            return call()
        except WireError as error:
            if not isinstance(error, Unreachable) and error.status != NO_ROOM:
                raise
            now = time.monotonic()
            if stop.is_set():
                log.info("stopped while it waited for the dataflow service")
                raise StepInterrupted from error
            if now - begin >= gone_s:
                raise Unreachable(f"{error}; given up after {now - begin:.0f} s", error.status) from error
            if now - told >= TELL_EVERY_S / 3:
                told = now
                log.warning("waits for the dataflow service, up to %.0f s more: %s", gone_s - (now - begin), error)
            stop.wait(0.1)


def _is_over(error: BaseException) -> bool:
    return isinstance(error, WireError) and error.status == GONE


def _outward(url: str, dataflow: str) -> str:
    """`url` as nodes can reach it: a server that listens on all addresses is named by the one that dataflow sees."""
    host = urlsplit(url).hostname or ""
    if host not in ("0.0.0.0", "::"):
        return url
    peer = urlsplit(dataflow)
    family = socket.AF_INET6 if host == "::" else socket.AF_INET
    with socket.socket(family, socket.SOCK_DGRAM) as probe:  # a datagram socket chooses a route, it sends nothing
        probe.connect((peer.hostname, peer.port or 80))
        own = probe.getsockname()[0]
    return url.replace("//[::]:", f"//[{own}]:").replace("//0.0.0.0:", f"//{own}:")
