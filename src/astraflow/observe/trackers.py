"""Experiment trackers behind extras: the rows of metrics.jsonl, sent on. JSON lines are always written as well.

    dataflow service ─► metrics.jsonl ─► TrackerFeed (a thread of the launcher) ─► each tracker of `observe.trackers`

| name        | extra       | where it goes                                  |
|-------------|-------------|------------------------------------------------|
| wandb       | wandb       | the project named `astraflow`, as logged in    |
| tensorboard | tensorboard | `<run_dir>/tensorboard`                        |
| trackio     | trackio     | the local project named `astraflow`            |
| mlflow      | mlflow      | the experiment `astraflow` of the tracking URI |

A resumed run goes on in the same place, but for MLflow, where it is one more run of the same name.
"""

from __future__ import annotations

import importlib
import json
import logging
import threading
import uuid
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import Future
from dataclasses import dataclass
from pathlib import Path
from types import TracebackType
from typing import Any, Protocol

from astraflow.errors import Problem
from astraflow.observe.jsonl import JsonlTail, write_whole
from astraflow.observe.redact import redact
from astraflow.observe.summary import Row, metric

logger = logging.getLogger(__name__)
PROJECT = "astraflow"
EVERY_S = 1.0  # between two looks at metrics.jsonl
OPEN_S, CLOSE_S = 120.0, 60.0  # a service that does not answer


@dataclass(frozen=True)
class Tracked:
    """The run as a tracker knows it."""

    directory: Path
    name: str
    run_id: str  # the same in a resumed run
    settings: Mapping[str, Any]  # the resolved run file; `open_tracker` masks secrets


class Tracker(Protocol):
    """Somewhere else to look at a run. Failing to reach it never stops training: the caller logs and goes on."""

    def log(self, step: int, metrics: Mapping[str, float]) -> None:
        """Metrics of one step."""

    def close(self) -> None:
        """Flush what is left."""


class _Wandb:
    def __init__(self, module: Any, run: Tracked) -> None:
        self._run = module.init(
            project=PROJECT, name=run.name, config=dict(run.settings), dir=str(run.directory), resume="allow",
            id=run.run_id,
        )  # fmt: skip
        self._run.define_metric("*", step_metric="step")  # its own step may not go back, as an evaluation row does

    def log(self, step: int, metrics: Mapping[str, float]) -> None:
        self._run.log({**metrics, "step": step})

    def close(self) -> None:
        self._run.finish()


class _Tensorboard:
    def __init__(self, module: Any, run: Tracked) -> None:
        self._writer = module.Writer(str(run.directory / "tensorboard"))

    def log(self, step: int, metrics: Mapping[str, float]) -> None:
        for name, value in metrics.items():
            self._writer.add_scalar(name, float(value), step)

    def close(self) -> None:
        self._writer.close()


class _Trackio:
    def __init__(self, module: Any, run: Tracked) -> None:
        name = f"{run.name}-{run.run_id[:8]}"  # what it knows a run by
        self._run = module.init(project=PROJECT, name=name, config=dict(run.settings), resume="allow")

    def log(self, step: int, metrics: Mapping[str, float]) -> None:
        self._run.log(dict(metrics), step=step)

    def close(self) -> None:
        self._run.finish()


class _Mlflow:
    def __init__(self, module: Any, run: Tracked) -> None:
        self._module = module
        module.set_experiment(PROJECT)
        module.start_run(run_name=run.name)
        module.log_dict(dict(run.settings), "run.resolved.json")

    def log(self, step: int, metrics: Mapping[str, float]) -> None:
        # MLflow allows no '@' in a name, as in eval/avg@8.
        self._module.log_metrics({name.replace("@", "_at_"): value for name, value in metrics.items()}, step=step)

    def close(self) -> None:
        self._module.end_run()


TRACKERS: Mapping[str, tuple[str, Callable[[Any, Tracked], Tracker]]] = {
    "wandb": ("wandb", _Wandb),
    "tensorboard": ("tensorboard.summary", _Tensorboard),
    "trackio": ("trackio", _Trackio),
    "mlflow": ("mlflow", _Mlflow),
}
"""Name -> (module to import, adapter)."""


def open_tracker(name: str, run: Tracked) -> Tracker:
    """The tracker `name` for `run`.

    Raises: Problem: unknown name, its package is not installed, or it does not open.
    """
    if name not in TRACKERS:
        raise Problem("tracker", name, "is not known", f"known: {', '.join(TRACKERS)}")
    module_name, adapter = TRACKERS[name]
    try:
        module = importlib.import_module(module_name)
    except ImportError as error:
        raise Problem("tracker", name, f"cannot be used ({error})", f"pip install 'astraflow[{name}]'") from error
    masked = Tracked(run.directory, run.name, run.run_id, redact(dict(run.settings)))
    try:
        return adapter(module, masked)
    except Exception as error:  # whatever its package raises without a login, a network or a place to write
        raise Problem(
            "tracker", name, f"cannot be opened ({error})", "see its own manual, or leave it out of observe.trackers"
        ) from error


class TrackerFeed:
    """Sends every new row of metrics.jsonl to trackers, from a thread of its own: a slow one delays nobody, and one
    that fails is left out with a warning. What was sent is kept in `<run_dir>/trackers.json`.
    """

    def __init__(self, names: Sequence[str], run_dir: Path, run: str, settings: Mapping[str, Any]) -> None:
        """Raises: Problem: a tracker cannot be opened."""
        self._kept = run_dir / "trackers.json"
        kept: dict[str, Any] = (
            json.loads(self._kept.read_text()) if self._kept.exists() else {"id": uuid.uuid4().hex, "bytes": 0}
        )
        self._run = Tracked(run_dir, run, kept["id"], settings)
        self._tail = JsonlTail(run_dir / "metrics.jsonl", kept["bytes"])
        self._several = len(settings.get("policies", {})) > 1
        self._trackers: dict[str, Tracker] = {}
        self._stop = threading.Event()
        opened: Future[None] = Future()
        self._thread = threading.Thread(target=self._work, args=(names, opened), name="trackers", daemon=True)
        self._thread.start()
        opened.result(OPEN_S)

    def __enter__(self) -> TrackerFeed:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._stop.set()
        self._thread.join(CLOSE_S)
        if self._thread.is_alive():
            logger.warning("trackers did not end within %g s; their last rows may be missing", CLOSE_S)

    def _work(self, names: Sequence[str], opened: Future[None]) -> None:
        try:
            self._trackers = {name: open_tracker(name, self._run) for name in names}
        except Problem as problem:
            opened.set_exception(problem)
            return
        opened.set_result(None)
        while not self._stop.wait(EVERY_S):
            self._send()
        self._send()
        for name, tracker in self._trackers.items():
            self._guarded(name, tracker.close)

    def _send(self) -> None:
        rows = self._tail.new_rows()
        for row in rows:
            metrics = numbers_of(row, prefixed=self._several)
            for name, tracker in list(self._trackers.items()):
                if not self._guarded(name, lambda: tracker.log(int(row["step"]), metrics)):  # noqa: B023
                    del self._trackers[name]
        if rows:
            try:
                write_whole(self._kept, json.dumps({"id": self._run.run_id, "bytes": self._tail.offset}))
            except OSError as error:  # a full disk: a run that goes on tells the trackers these rows again
                logger.warning("%s cannot be written (%s); make room on the disk", self._kept, error.strerror)

    def _guarded(self, name: str, call: Callable[[], None]) -> bool:
        try:
            call()
        except Exception as error:  # the run goes on, whatever a tracker raises
            logger.warning("tracker %s failed and is left out from now on (%s: %s)", name, type(error).__name__, error)
            return False
        return True


def numbers_of(row: Row, *, prefixed: bool) -> dict[str, float]:
    """The metrics of a row; those of a step with several policies under the policy's name."""
    head = f"{row['policy']}/" if prefixed and row.get("policy") else ""
    return {head + name: value for name in row if name != "step" and (value := metric(row, name)) is not None}
