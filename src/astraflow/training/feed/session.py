"""A trainer's place in a run: what any trainer, ours or yours, does with the dataflow service. Torch-free.

```
 resume ─► next_batch ─► (your step) ─► publish ─► acknowledge ─┬─► next_batch ...  ─► None: the run is over
              ▲                                                 └─► checkpoint, now and then
              └── heartbeats go out in the background all the time
```
| call                        | answers when                           | what you did before               |
|-----------------------------|----------------------------------------|-----------------------------------|
| `publish(version, tensors)` | a copy is taken; readers wait for it   | loaded the model; took the step   |
| `resume(version)`           | you are the trainer of the policy      | published `version`               |
| `next_batch()`              | a batch is full, or the run is over    | acknowledged the batch before     |
| `acknowledge(header)`       | the step counts as trained, for good   | published `header.step`           |
| `checkpoint()`              | batches up to `version` may go         | wrote a checkpoint of `version`   |
| `wait_until_finished()`     | evaluation is over, too                | nodes still fetch the last one    |

A service that restarts, or whose disk is full, is waited for: every request is idempotent and sent again.
"""

from __future__ import annotations

import logging
import threading
import time
import uuid
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from types import TracebackType
from typing import Any, Self, TypeVar

import msgspec
import pyarrow as pa

from astraflow.config.env import token_from_env
from astraflow.config.load import config_from_json
from astraflow.dataflow.client import DataflowClient
from astraflow.errors import ConfigError, TrainingError, Unreachable, WireError
from astraflow.training.feed.publisher import Part, Versions, start_mirror
from astraflow.types import BatchHeader
from astraflow.weights.objects.mirror import Mirror
from astraflow.weights.store import FileStore, Pins
from astraflow.wire.messages import Resume
from astraflow.wire.patience import FIRST_ANSWER_S, GONE_S, RETRY_S, Stopped, ask_patiently

LEAVING_S = 20.0  # the patience at the end of the run, when the service may have left before us
MIRRORED_S = 60.0  # for the last version to come into the object store, after the end of the run
POLL_S = 2.0
TELL_EVERY_S = 30.0
GONE = 410  # HTTP: the run is over

T = TypeVar("T")
log = logging.getLogger(__name__)


class Interrupted(Exception):
    """The trainer was told to end while it waited."""


@dataclass(frozen=True)
class Share:
    """One of several data-parallel ranks. Rank 0 alone resumes, acknowledges and beats; then it tells the others its
    `trainer_id`, by any means, and they give it here."""

    rank: int = 0  # 0 <= rank < ranks
    ranks: int = 1
    trainer_id: str = ""  # of rank 0; empty: make one
    sharded: bool = False  # every rank holds a part of the model, and calls `publish`; False: rank 0 alone publishes


class TrainerSession:
    """The trainer of one policy, as the dataflow service sees it. Use it as a context manager."""

    def __init__(
        self,
        dataflow: str,
        policy: str,
        *,
        weights: Path | None = None,
        token: str | None = None,
        stop: threading.Event | None = None,
        share: Share = Share(),  # frozen
    ) -> None:
        """Ask the service at URL `dataflow` which run it serves.

        Args: weights: directory for published versions, which a process of its own serves to nodes; None: you publish
        yourself, and give the URLs of your stores to `resume`. token: of the run; None: ASTRAFLOW_TOKEN. stop: once
        set, `next_batch` gives None and waits end with Interrupted. share: which of several ranks this is.
        Raises: ConfigError: no such policy. Unreachable: no answer within FIRST_ANSWER_S. Interrupted.
        """
        self._url, self._policy, self._token = dataflow, policy, token_from_env() if token is None else token
        self._stop = stop or threading.Event()
        self._client = DataflowClient(dataflow, self._token, give_up_s=RETRY_S)
        if not 0 <= share.rank < share.ranks or (share.rank and not share.trainer_id):
            raise TrainingError(
                "session.share", share, "must have 0 <= rank < ranks, and the trainer_id of rank 0", "ask rank 0 for it"
            )
        self._share = share
        self.trainer_id = share.trainer_id or f"{policy}-{uuid.uuid4().hex[:12]}"
        self.run = self.patient(self._client.run, FIRST_ANSWER_S)
        self.config = config_from_json(msgspec.json.encode(self.run.config))
        if policy not in self.config.trained:
            known = ", ".join(self.config.trained)
            what = "is only served" if policy in self.config.policies else "is not in the run"
            raise ConfigError(self.run.run, [f"policy={policy!r} {what}; use one of {known}"])
        self.version = -1  # newest that was acknowledged, or resumed at; -1: not resumed yet
        self.stats: dict[str, float] = {}  # finite ones go out with each heartbeat: gauges and counters of yours
        self.stores: dict[str, int] = {}  # URL -> newest version there, of stores that get it after it is announced
        self._held: BatchHeader | None = None  # taken and not acknowledged
        self._failure: BaseException | None = None  # of the heartbeat thread
        self._ended = threading.Event()
        self._beat_soon = threading.Event()
        self._beats: DataflowClient | None = None  # a client of its own: heartbeats never wait behind a batch
        self._beating: threading.Thread | None = None
        self._versions: Versions | None = None
        self._mirror: Mirror | None = None
        if weights is not None and self._leads:
            section, pins = self.config.weights, Pins(pools=self.config.pools_of(policy))
            self._versions = Versions(weights, policy, section, dataflow, self._token, sharded=share.sharded, pins=pins)
            self.mirror(self._versions.store)
        self._publisher: Versions | Part | None = self._versions
        if share.sharded and not self._leads:
            self._publisher = Part(None)

    def mirror(self, store: FileStore) -> None:
        """Copy the versions of `store` into `weights.url` too, if the run has one; nodes are told of it by heartbeats.

        With `weights` given to the session this is done already. Raises: ConfigError: a package is missing.
        """
        self._mirror = start_mirror(store, self.config.weights, self.run.run_id, self._mirrored)

    @property
    def mirror_stats(self) -> dict[str, float]:
        """How far the object store is; empty: the run has none."""
        return {} if self._mirror is None else self._mirror.stats

    def publish(self, version: int, tensors: Mapping[str, Any], files: Iterable[Path] = ()) -> None:
        """Make `version` visible to nodes, soon: encoding and writing are no part of your step, which may change the
        tensors at once. Waits only when two versions are still on their way. Publishing a version again, as after a
        crash, keeps what is there.

        Args: tensors: Hugging Face name -> torch tensor (tied weights count once); with `Share(sharded=True)` what this
        rank has of the model, as DTensors of FSDP2 or plain tensors, on every rank. files: config and tokenizer files,
        for nodes that do not have the model.
        Raises: TrainingError: the session has no `weights`. WeightError, of this version or one before: a full disk, a
        dtype that cannot be stored; with shards also what is wrong on another rank.
        """
        if not (self._leads or self._share.sharded):
            return
        if self._publisher is None:
            raise TrainingError("session.weights", None, "must be a directory", "give it, or publish yourself")
        self._publisher.publish(version, tensors, files)

    def resume(self, version: int = 0, urls: tuple[str, ...] = ()) -> None:
        """Become the trainer of the policy, at `version`: 0, or that of the checkpoint that was loaded.

        Batches after `version` that were trained before come again. An older trainer of the policy is replaced.
        Args: urls: your own weight stores that hold `version`; empty: what `publish` filled.
        Raises: WeightError: what was given to `publish` could not be published. WireError: refused: the version does
        not fit the run (409).
        """
        self._flush()
        self.version, self._held = version, None
        if not self._leads:
            return
        urls = urls or (self._versions.urls if self._versions is not None else ())
        resume = Resume(trainer_id=self.trainer_id, version=version, run_id=self.run.run_id, urls=urls)
        reply = self.patient(lambda: self._client.resume(self._policy, resume))
        self._announce(version)
        self._start_beating()
        log.info("trains from version %d; %d batches come again", version, reply.replayed_batches)

    def next_batch(self, waiting: Callable[[], None] = lambda: None) -> tuple[BatchHeader, pa.Table] | None:
        """The batch of step `version + 1` (columns: `wire.codec.TRAINING_SCHEMA`, then those of stages), or this rank's
        share of it; None: the run is over, or `stop`.

        Asked again before it is acknowledged, it gives the same batch. Args: waiting: called every few seconds as long
        as there is none.
        Raises: WireError: refused, as when a newer trainer took over (409).
        """
        begin = told = time.monotonic()
        rank, ranks = self._share.rank, self._share.ranks
        while not (self._stop.is_set() or self._ended.is_set()):
            self.check()
            try:
                batch = self.patient(
                    lambda: self._client.batch(
                        self._policy, self.trainer_id, self.version, wait_s=POLL_S, rank=rank, ranks=ranks
                    )
                )
            except WireError as error:
                if is_over(error):
                    return None
                raise
            if batch is not None:
                self._held = batch[0]
                return batch
            waiting()
            now = time.monotonic()
            if now - told >= TELL_EVERY_S:
                told = now
                log.info(
                    "waits for batch %s/%d since %.0f s: fewer than %d groups are complete", self._policy,
                    self.version + 1, now - begin, self.config.policies[self._policy].batch.groups,
                )  # fmt: skip
        return None

    def batches(self) -> Iterator[tuple[BatchHeader, pa.Table]]:
        """`next_batch` until the run is over; each must be acknowledged before the next is asked for."""
        while (batch := self.next_batch()) is not None:
            yield batch

    def acknowledge(self, header: BatchHeader, metrics: Mapping[str, float] | None = None) -> None:
        """The batch was trained and version `header.step` is published. `metrics`: of the step, slash names.

        Raises: TrainingError: not the batch that was taken last, or its version is not published. DataflowError: a
        metric that is no number; NaN is left out.
        """
        if self._held is None or header.batch_id != self._held.batch_id:
            held = self._held.batch_id if self._held is not None else "none"
            raise TrainingError("batch", header.batch_id, f"is not the one that was taken ({held})", "train that one")
        if self._versions is not None and not self._versions.has(header.step):
            raise TrainingError(
                f"{self._policy} version", header.step, "is not published", "publish it before you acknowledge its step"
            )
        if self._leads:
            self.patient(lambda: self._client.ack(header, self.trainer_id, metrics))
            self._announce(header.step)
        self.version, self._held = header.step, None

    def checkpoint(self, version: int | None = None) -> None:
        """A checkpoint of `version` (None: the newest) is on disk: batches up to it will never be asked for again.

        Waits until what was given to `publish` is visible. Raises: WeightError: it could not be published.
        """
        self._flush()
        if not self._leads:
            return
        saved = self.version if version is None else version
        try:
            self.patient(lambda: self._client.checkpoint(self._policy, self.trainer_id, saved))
        except Interrupted:  # the next checkpoint covers the same batches
            log.info("ends without telling the dataflow service of checkpoint %d", saved)
        except WireError as error:
            if not is_over(error):
                raise

    def wait_until_finished(self) -> None:
        """Stay until the last evaluation round is done, so that its nodes can fetch the last version, and until that is
        in the object store. Raises: WeightError: it could not be published."""
        self._flush()
        try:
            while not self.patient(self._client.run, LEAVING_S).finished and not self._stop.wait(1.0):
                self.check()
        except Interrupted:
            return
        except Unreachable:
            log.info("the dataflow service is gone; the run is over for %s", self._policy)
        if self._mirror is not None and not self._mirror.flush(MIRRORED_S, self._stop):
            log.warning("weights.url has %s up to version %d only", self._policy, self._mirror.version)

    def _flush(self) -> None:
        if self._publisher is not None:
            self._publisher.flush()

    def patient(self, call: Callable[[], T], gone_s: float = GONE_S) -> T:
        """The answer of a service that may be out of reach for a while; says in the log what is waited for.

        Raises: Interrupted: `stop` was set while it did not answer. WireError: refused, or no answer in `gone_s`.
        """
        try:
            return ask_patiently(call, self._stop, gone_s)
        except Stopped as error:
            log.info("stopped while it waited for the dataflow service")
            raise Interrupted from error

    def check(self) -> None:
        """Raise what the heartbeat thread died of, as when a newer trainer took over."""
        if self._failure is not None:
            raise self._failure

    def close(self) -> None:
        """End the heartbeats, the mirror and the weights server."""
        self._ended.set()
        self._beat_soon.set()
        if self._mirror is not None:
            self._mirror.close()
        if self._beats is not None and self._beating is not None:
            self._beats.close()
            self._beating.join(LEAVING_S)
        if self._publisher is not None:
            self._publisher.close()
        self._client.close()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, at: TracebackType | None) -> None:
        self.close()

    @property
    def _leads(self) -> bool:
        return self._share.rank == 0

    def _start_beating(self) -> None:
        if self._beats is None:
            self._beats = DataflowClient(self._url, self._token, give_up_s=GONE_S)
            name = f"heartbeat-{self._policy}"
            self._beating = threading.Thread(target=self._beat, args=(self._beats,), name=name, daemon=True)
            self._beating.start()

    def _beat(self, client: DataflowClient) -> None:
        try:
            while True:
                self._beat_soon.wait(self.config.dataflow.heartbeat_s)
                self._beat_soon.clear()
                if self._ended.is_set():
                    return
                client.trainer_heartbeat(self._policy, self.trainer_id, dict(self.stats), dict(self.stores))
        except BaseException as error:  # handed to the thread of the session, which raises it
            if not self._ended.is_set() and not is_over(error):
                self._failure = error

    def _announce(self, version: int) -> None:
        if self._mirror is not None:
            self._mirror.announce(version)

    def _mirrored(self, mirror: Mirror) -> None:
        """In the mirror's thread."""
        self.stats |= mirror.stats
        if mirror.url and mirror.version >= 0:
            self.stores[mirror.url] = mirror.version
            self._beat_soon.set()


def is_over(error: BaseException) -> bool:
    """The service said that the run is over for this policy."""
    return isinstance(error, WireError) and error.status == GONE
