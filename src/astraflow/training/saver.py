"""Checkpoints off the trainer's step: a copy is taken, a thread of its own writes it.

```
 step v ─► copy of moments and weights ─► [thread] parts of all ranks ─► files of the model ─► rename ─► newest = v
            the next step goes on at once; only a whole checkpoint behind does it wait
```
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Mapping
from dataclasses import replace
from datetime import timedelta
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

from astraflow.models.checkpoints import STATE, version_of, whole_checkpoints
from astraflow.training.checkpoint import TrainingState, named_tensors, save_checkpoint
from astraflow.training.parallel.ranks import TIMEOUT_S, Ranks
from astraflow.weights.publisher import Backlog

log = logging.getLogger(__name__)


class Saver:
    """The checkpoints of one policy below `root`. With several ranks: made, and called, on all of them."""

    def __init__(self, root: Path, ranks: Ranks, keep: int) -> None:
        """`keep`: newest checkpoints that stay; 0: all."""
        self._root, self._ranks, self._keep = root, ranks, keep
        self._backlog = Backlog("checkpoint")
        self._group: Any = None  # of the thread alone: it must not mix its messages with those of steps
        if ranks.many:
            self._group = dist.new_group(backend="gloo", timeout=timedelta(seconds=TIMEOUT_S))
        self.covered = -1  # what batches are needed from, should the newest checkpoint turn out damaged: the one before

    def submit(self, state: TrainingState, write_model: Callable[[Path], None]) -> None:
        """Write a checkpoint soon; waits for the one before.

        Args: state: its tensors are copied. write_model: see `save_checkpoint`; called in the thread of rank 0.
        Raises: TrainingError: the one before could not be written.
        """
        self.flush()
        copied = replace(
            state, optimizer=_copy(state.optimizer), master=state.master and _copy(state.master),
            critic=state.critic and _copy(state.critic),
        )  # fmt: skip
        self._backlog.add(lambda: self._write(copied, write_model))

    def flush(self) -> None:
        """All that was given is on disk. Raises: TrainingError: it could not be written."""
        self._backlog.flush()

    def close(self) -> None:
        """Finish what was given, whatever becomes of it, and end the thread."""
        self._backlog.close()

    def _write(self, state: TrainingState, write_model: Callable[[Path], None]) -> None:
        if not self._ranks.many:
            path = save_checkpoint(self._root, state, write_model, keep=self._keep)
        elif self._ranks.leads:
            path = save_checkpoint(
                self._root, state, write_model, write_tensors=lambda folder: self._write_parts(folder, state),
                keep=self._keep,
            )  # fmt: skip
        else:
            self._write_parts(self._root / f".tmp-step-{state.version:06d}" / STATE, state)
            return
        whole = whole_checkpoints(self._root)
        if self._keep == 1 or len(whole) > 1:
            self.covered = version_of(whole[-1 if self._keep == 1 else -2])
        log.info("checkpoint of version %d at %s", state.version, path)

    def _write_parts(self, folder: Path, state: TrainingState) -> None:
        from astraflow.training.parallel.parts import write_parts

        dist.barrier(self._group)  # rank 0 has made the directory
        write_parts(folder, {n: t for kind in named_tensors(state).values() for n, t in kind.items()}, self._group)


def _copy(tensors: Mapping[str, torch.Tensor]) -> dict[str, torch.Tensor]:
    return {name: tensor.detach().to("cpu", copy=True) for name, tensor in tensors.items()}
