"""The batches of one policy as a torch `IterableDataset`, for a trainer that was not written for AstraFlow.

```
 session ─► next batch ─► tensors ─► (yield) ─► your step ─► session.publish ─► done ─► acknowledged
               ▲  in a thread                                                    │
               └───────────────── pulls the next one while you log, evaluate, save
```
The next batch is pulled from the moment its predecessor is acknowledged, never before: only then the service knows
which groups are fresh enough for it. At most one batch waits.
"""

from __future__ import annotations

import queue
import threading
from collections.abc import Iterator, Mapping
from dataclasses import dataclass

import pyarrow as pa
from torch.utils.data import IterableDataset, get_worker_info

from astraflow.errors import TrainingError
from astraflow.training.feed.session import TrainerSession
from astraflow.training.feed.tensors import Layout, Microbatch, microbatches
from astraflow.types import BatchHeader


@dataclass(frozen=True, slots=True)
class TensorBatch:
    """One step's batch, or this rank's share of it."""

    header: BatchHeader
    microbatches: list[Microbatch]
    table: pa.Table  # the rows as they came: episode ids, rewards, metrics of stages

    @property
    def step(self) -> int:
        """The step it is for, and the version to publish after it."""
        return self.header.step

    @property
    def num_tokens(self) -> int:
        """Sampled tokens of the whole batch, over all ranks: what a mean per token divides by."""
        return self.header.num_sampled_tokens

    @property
    def num_sequences(self) -> int:
        """Trajectories of the whole batch, over all ranks."""
        return self.header.num_rows


class PolicyBatches(IterableDataset[TensorBatch]):
    """Use it as it is, or in `DataLoader(batches, batch_size=None, num_workers=0)`. Ends when the run is over.

    Args: session: resumed already. layout, tokens_per_microbatch: see `feed.tensors.microbatches`.
    """

    def __init__(
        self, session: TrainerSession, *, layout: Layout = "packed", tokens_per_microbatch: int = 8192
    ) -> None:
        self._session, self._layout, self._budget = session, layout, tokens_per_microbatch
        self._given: TensorBatch | None = None  # not done yet
        self._pulled: queue.SimpleQueue[TensorBatch | BaseException | None] = queue.SimpleQueue()
        self._pulling = False

    def __iter__(self) -> Iterator[TensorBatch]:
        if get_worker_info() is not None:
            raise TrainingError(
                "num_workers", "> 0", "would take every batch in another process", "use num_workers=0; it pulls ahead"
            )
        self._given = None  # an iteration that was broken off: its batch comes again
        while True:
            if self._given is not None:
                raise TrainingError(
                    "batch", self._given.header.batch_id, "is not done", "call done(batch) before you ask for the next"
                )
            if not self._pulling:
                self._pull()
            found = self._pulled.get()
            self._pulling = False
            if isinstance(found, BaseException):
                raise found
            if found is None:
                return
            self._given = found
            yield found

    def done(self, batch: TensorBatch, metrics: Mapping[str, float] | None = None) -> None:
        """The step of `batch` is taken and its version is published: acknowledge it, and start to pull the next.

        Raises: as `TrainerSession.acknowledge`.
        """
        self._session.acknowledge(batch.header, metrics)
        self._given = None
        self._pull()

    def _pull(self) -> None:
        self._pulling = True
        threading.Thread(target=self._fetch, name="next batch", daemon=True).start()

    def _fetch(self) -> None:
        try:
            batch = self._session.next_batch()
            if batch is None:
                self._pulled.put(None)
            else:
                header, table = batch
                self._pulled.put(TensorBatch(header, microbatches(table, self._budget, self._layout), table))
        except BaseException as error:  # raised where the next batch is asked for
            self._pulled.put(error)
