"""The trainer of a policy: pull a batch, take a step, publish the next version, acknowledge.

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
| checkpoint thread   | checkpoints        | a copy of the training state      | `run.checkpoint_every`                |
| mirror thread       | `weights.url`      | its version to be visible         | the publisher thread                  |
| heartbeat thread    | signs of life      | `dataflow.heartbeat_s`            | time; its failure ends the main loop  |
| weights server      | bytes for readers  | requests (a process of its own)   | nodes; it ends with the trainer       |
| main thread, at end | final weights      | the run to be over                | the last evaluation round             |

What it says to the dataflow service, and how long it waits for one that is away, is `feed.session`: any other trainer
does the same. A stop signal ends every wait.

Several policies may share the process (`together`): then each has a main thread of its own.

Of several ranks, each holds a part of the model (`parallel`). Rank 0 is as above and tells the others each batch; they
do the same steps and checkpoints with it, and end with it.
`kill -9` at any point: a new process loads the newest checkpoint, is served the batches after it again, and publishes
equal versions, which changes nothing (other content under a known version is counted and the old one kept).
"""

from __future__ import annotations

import contextlib
import logging
import math
import threading
import time
from dataclasses import dataclass, field
from pathlib import Path

import pyarrow as pa

from astraflow.config.load import config_from_json, resolved_json
from astraflow.errors import TrainingError
from astraflow.models.checkpoints import latest_checkpoint
from astraflow.observe.process import settle_memory, stop_signals
from astraflow.training.feed.publisher import announced
from astraflow.training.feed.session import Interrupted, TrainerSession
from astraflow.training.learner import Learner
from astraflow.training.multi.bases import Bases
from astraflow.training.multi.policies import train_all
from astraflow.training.parallel.ranks import ALONE, RankPlace, Ranks, joined
from astraflow.training.step import StepInterrupted
from astraflow.types import BatchHeader
from astraflow.weights.server import ServerProcess, start_server

END, WAIT = b"", b"wait"  # what rank 0 tells the others beside batches

log = logging.getLogger(__name__)


@dataclass(frozen=True)
class Together:
    """What the policies of one process share."""

    stop: threading.Event
    ranks: Ranks = ALONE  # of several policies always this
    bases: Bases | None = None  # None: one policy alone
    turn: threading.Lock = field(default_factory=threading.Lock)  # whoever computes has it
    servers: list[ServerProcess] = field(default_factory=list)  # of weights: one, once it is started

    def stop_server(self) -> None:
        """End it, if it was started."""
        for server in self.servers:
            server.stop()


def run_trainer(
    dataflow: str, policy: str, run_dir: Path, *, threads: int = 0, token: str | None = None,
    place: RankPlace | None = None,
) -> int:  # fmt: skip
    """Train `policy` (several with commas between them) of the run served at `dataflow` until its last step; 0 when the
    run is over.

    SIGTERM or Ctrl-C: a checkpoint of the last version is written, then it ends, also with 0.

    Args: run_dir: where weights and checkpoints lie; a checkpoint found there is continued. threads: 0: as the run
    file says. place: which of several ranks this is; all of them see the same `run_dir`. None: the only one.
    Raises: AstraFlowError: what went wrong, also when a newer trainer of a policy took over (WireError, status 409).
    """
    policies = policy.split(",")
    with contextlib.ExitStack() as stack:
        stop = stack.enter_context(stop_signals())
        ranks = ALONE if place is None else stack.enter_context(joined(place))
        stack.enter_context(ranks.watched())
        together = Together(stop, ranks, Bases() if len(policies) > 1 else None)
        stack.callback(together.stop_server)
        if not ranks.leads:
            _follow(policy, run_dir, threads, stop, ranks)
        elif len(policies) == 1:
            _train(dataflow, policy, run_dir, threads, token, together)
        else:
            train_all(policies, lambda each: _train(dataflow, each, run_dir, threads, token, together), stop)
    return 0


def _train(dataflow: str, policy: str, run_dir: Path, threads: int, token: str | None, together: Together) -> None:
    """One policy, from its newest checkpoint to its last step."""
    stop, ranks = together.stop, together.ranks
    with contextlib.ExitStack() as stack:
        try:
            session = stack.enter_context(TrainerSession(dataflow, policy, token=token, stop=stop))
            config, run = session.config, session.run
            if run.finished and latest_checkpoint(run_dir / "checkpoints" / policy, config.steps_of(policy)):
                log.info("run %s is over", run.run)
                ranks.tell(END)
                return
            ranks.tell(resolved_json(config).encode())
            with together.turn:
                # Before the warm start: with version 0, nodes must not wait for it.
                if not together.servers:
                    weights = config.weights
                    together.servers.append(start_server(run_dir / "weights", weights.host, weights.port, token))
                server = together.servers[0]
                learner = Learner(config, policy, run_dir, threads, stop.is_set, ranks, together.bases)
            stack.callback(learner.close)
            there = announced(server, policy, config.weights, dataflow)
            session.mirror(learner.store)
            session.resume(learner.version, (learner.store.url, there))
        except StepInterrupted:
            return
        except Interrupted:
            ranks.tell(END)
            return
        settle_memory()
        Trainer(session, learner, server, together).loop()
        session.wait_until_finished()


def _follow(policy: str, run_dir: Path, threads: int, stop: threading.Event, ranks: Ranks) -> None:
    """What a rank above 0 does: the steps of rank 0."""
    if (config := ranks.tell()) == END:
        return
    with contextlib.suppress(StepInterrupted), contextlib.ExitStack() as stack:
        learner = Learner(config_from_json(config), policy, run_dir, threads, stop.is_set, ranks)
        stack.callback(learner.close)
        settle_memory()
        with contextlib.suppress(StepInterrupted):
            while (told := ranks.tell()) != END:
                if told == WAIT:
                    continue
                learner.train(pa.ipc.open_stream(told).read_all())
                if learner.version % learner.config.run.checkpoint_every == 0:
                    learner.save()
        learner.save()
        learner.finish_saving()


class Trainer:
    """The loop between a `Learner` and the dataflow service."""

    def __init__(
        self, session: TrainerSession, learner: Learner, server: ServerProcess, together: Together
    ) -> None:  # fmt: skip
        self._session, self._learner, self._server = session, learner, server
        self._stop, self._ranks, self._turn = together.stop, together.ranks, together.turn
        self._told = -1  # version of the last checkpoint that was announced
        session.stats |= {"version": float(learner.version), "steps": 0.0, "wait_s": 0.0, "busy_s": 0.0, "tokens": 0.0}

    def loop(self) -> None:
        """All steps of the run (or those before a stop signal), and a checkpoint of the last one."""
        try:
            self._steps()
        except StepInterrupted:  # all ranks left the step together
            pass
        except Interrupted:
            self._ranks.tell(END)
        else:
            self._ranks.tell(END)
        self._learner.save()
        self._learner.finish_saving()
        self._announce_checkpoint()

    def _steps(self) -> None:
        learner, run = self._learner, self._learner.config.run
        steps = learner.config.steps_of(learner.policy)
        while learner.version < steps and not self._stop.is_set():
            begin = time.perf_counter()
            batch = self._session.next_batch(lambda: self._tell(WAIT))
            if batch is None:
                break
            header, table = batch
            waited = time.perf_counter() - begin
            if self._ranks.many:
                self._tell(_as_bytes(table))
            asked = time.perf_counter()
            with self._turn:
                turned = time.perf_counter() - asked
                metrics = learner.train(table)
                if self._server.ensure():
                    log.warning("the weights server had died and was started again at %s", self._server.url)
            self._acknowledge(header, metrics, waited + turned, time.perf_counter() - begin)
            self._announce_checkpoint()
            if learner.version % run.checkpoint_every == 0:
                learner.save()

    def _tell(self, content: bytes) -> None:
        self._ranks.tell(content)

    def _acknowledge(self, header: BatchHeader, metrics: dict[str, float], waited: float, wall: float) -> None:
        if header.step != self._learner.version:
            raise TrainingError(
                "batch.step", header.step, f"must be {self._learner.version}", "restart the trainer of this policy"
            )
        metrics |= {"perf/wait_s": waited, "perf/busy_s": wall - waited, "perf/idle_fraction": waited / wall}
        metrics |= {f"weights/{name}": value for name, value in self._session.mirror_stats.items()}
        metrics["perf/loop_tokens_per_s"] = metrics["tokens"] / wall
        self._session.acknowledge(header, metrics)
        stats = self._session.stats
        stats["version"] = float(header.step)
        stats["steps"] += 1
        stats["wait_s"] += waited
        stats["busy_s"] += wall - waited
        stats["tokens"] += metrics["tokens"]
        log.info(
            "step %d: reward %.3f, loss %.4f, entropy %.3f, gap p99 %.1e, waited %.2f s of %.2f s", header.step,
            header.metrics.get("reward/mean", math.nan), metrics.get("loss", math.nan),
            metrics.get("policy/entropy", math.nan), metrics.get("logprob_gap/p99", math.nan), waited, wall,
        )  # fmt: skip

    def _announce_checkpoint(self) -> None:
        """Tell the dataflow service which batches will not be asked for again: those up to the checkpoint before the
        newest, which is taken should the newest turn out damaged."""
        if (covered := self._learner.covered()) > self._told:
            self._session.checkpoint(covered)
            self._told = covered


def _as_bytes(table: pa.Table) -> bytes:
    sink = pa.BufferOutputStream()
    with pa.ipc.new_stream(sink, table.schema) as stream:
        stream.write_table(table)
    content: bytes = sink.getvalue().to_pybytes()
    return content
