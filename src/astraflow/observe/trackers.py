"""Experiment trackers behind extras: the rows of metrics.jsonl, sent on. JSON lines are always written as well.

| name        | extra       | where it goes                                  |
|-------------|-------------|------------------------------------------------|
| wandb       | wandb       | the project named `astraflow`, as logged in    |
| tensorboard | tensorboard | `<run_dir>/tensorboard`                        |
| trackio     | trackio     | the local project named `astraflow`            |
| mlflow      | mlflow      | the experiment `astraflow` of the tracking URI |
"""

from __future__ import annotations

import importlib
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any, Protocol

from astraflow.errors import Problem
from astraflow.observe.redact import redact

PROJECT = "astraflow"


class Tracker(Protocol):
    """Somewhere else to look at a run. Failing to reach it never stops training: the caller logs and goes on."""

    def log(self, step: int, metrics: Mapping[str, float]) -> None:
        """Metrics of one step."""

    def close(self) -> None:
        """Flush what is left."""


class _Wandb:
    def __init__(self, module: Any, run_dir: Path, run: str, settings: dict[str, Any]) -> None:
        self._run = module.init(project=PROJECT, name=run, config=settings, dir=str(run_dir), resume="allow", id=run)

    def log(self, step: int, metrics: Mapping[str, float]) -> None:
        self._run.log(dict(metrics), step=step)

    def close(self) -> None:
        self._run.finish()


class _Tensorboard:
    def __init__(self, module: Any, run_dir: Path, run: str, settings: dict[str, Any]) -> None:
        self._writer = module.Writer(str(run_dir / "tensorboard"))

    def log(self, step: int, metrics: Mapping[str, float]) -> None:
        for name, value in metrics.items():
            self._writer.add_scalar(name, float(value), step)

    def close(self) -> None:
        self._writer.close()


class _Trackio:
    def __init__(self, module: Any, run_dir: Path, run: str, settings: dict[str, Any]) -> None:
        self._run = module.init(project=PROJECT, name=run, config=settings, resume="allow")

    def log(self, step: int, metrics: Mapping[str, float]) -> None:
        self._run.log(dict(metrics), step=step)

    def close(self) -> None:
        self._run.finish()


class _Mlflow:
    def __init__(self, module: Any, run_dir: Path, run: str, settings: dict[str, Any]) -> None:
        self._module = module
        module.set_experiment(PROJECT)
        module.start_run(run_name=run)
        module.log_dict(settings, "run.resolved.json")

    def log(self, step: int, metrics: Mapping[str, float]) -> None:
        # MLflow allows no '@' in a name, as in eval/avg@8.
        self._module.log_metrics({name.replace("@", "_at_"): value for name, value in metrics.items()}, step=step)

    def close(self) -> None:
        self._module.end_run()


TRACKERS: Mapping[str, tuple[str, Callable[[Any, Path, str, dict[str, Any]], Tracker]]] = {
    "wandb": ("wandb", _Wandb),
    "tensorboard": ("tensorboard.summary", _Tensorboard),
    "trackio": ("trackio", _Trackio),
    "mlflow": ("mlflow", _Mlflow),
}
"""Name -> (module to import, adapter)."""


def open_tracker(name: str, run_dir: Path, run: str, settings: Mapping[str, Any]) -> Tracker:
    """The tracker `name` for `run`; `settings` is the resolved run file, secrets are masked here.

    Raises: Problem: unknown name, or its package is not installed.
    """
    if name not in TRACKERS:
        raise Problem("tracker", name, "is not known", f"known: {', '.join(TRACKERS)}")
    module_name, adapter = TRACKERS[name]
    try:
        module = importlib.import_module(module_name)
    except ImportError as error:
        raise Problem("tracker", name, f"cannot be used ({error})", f"pip install 'astraflow[{name}]'") from error
    return adapter(module, run_dir, run, redact(dict(settings)))
