"""The directory of one run: what lies where. `claim` says who may use it."""

from __future__ import annotations

import json
import os
from dataclasses import dataclass
from pathlib import Path

from astraflow.config.load import config_from_json
from astraflow.config.schema import RunConfig
from astraflow.errors import ConfigError, LaunchError
from astraflow.models.checkpoints import latest_checkpoint
from astraflow.observe.jsonl import write_whole


@dataclass(frozen=True)
class RunDirectory:
    """`runs/<name>/`; every path of it that more than one process uses."""

    path: Path

    @property
    def config_file(self) -> Path:
        return self.path / "run.resolved.json"

    @property
    def logs(self) -> Path:
        return self.path / "logs"

    @property
    def report(self) -> Path:
        return self.path / "report"

    @property
    def checkpoints(self) -> Path:
        return self.path / "checkpoints"

    @property
    def metrics(self) -> Path:
        return self.path / "metrics.jsonl"

    @property
    def journal(self) -> Path:
        """The directory of the journal."""
        return self.path / "dataflow"

    @property
    def ready_file(self) -> Path:
        """Where the dataflow service says its URL once it answers."""
        return self.journal / "ready.json"

    def door_file(self, process: str) -> Path:
        """Where a node says the URL of its swarm door once that answers."""
        return self.path / "doors" / f"{process}.json"

    def log(self, process: str) -> Path:
        return self.logs / f"{process}.log"

    def newest_checkpoint(self, policy: str) -> Path | None:
        """The whole checkpoint of the highest step of `policy`, or None; logs damaged newer ones."""
        return latest_checkpoint(self.checkpoints / policy)

    def config(self) -> RunConfig:
        """The settings of the run as it was last started.

        Raises: LaunchError: there is no run here. ConfigError: another AstraFlow wrote it, or somebody changed it.
        """
        try:
            return config_from_json(self.config_file.read_bytes(), str(self.config_file))
        except ConfigError as error:
            hint = f"{self.config_file.name} is written by AstraFlow; go on with the version that wrote it"
            *others, last = error.problems
            raise ConfigError(error.origin, [*others, f"{last} ({hint})"]) from None
        except FileNotFoundError as error:
            raise LaunchError(
                "run directory", str(self.path), "holds no run", "give the directory of a run, such as runs/quickstart"
            ) from error


def write_ready(path: Path, url: str) -> None:
    """Say where a service answers; visible only when complete."""
    path.parent.mkdir(parents=True, exist_ok=True)
    write_whole(path, json.dumps({"url": url, "pid": os.getpid()}))


def read_ready(path: Path, pid: int) -> str | None:
    """The URL that the process `pid` said, or None while it has not."""
    try:
        said = json.loads(path.read_text())
    except FileNotFoundError:
        return None
    return str(said["url"]) if said["pid"] == pid else None


def tail(path: Path, start: int = 0, num_lines: int = 15, num_bytes: int = 16_384) -> str:
    """The last lines of a log from byte `start` on; empty when there are none.

    A line whose sentence a later one says too is left out: a service logs its error, then ends with it.
    """
    try:
        with path.open("rb") as file:
            file.seek(max(start, path.stat().st_size - num_bytes))
            lines = file.read().decode("utf-8", "replace").rstrip().splitlines()
    except FileNotFoundError:
        return ""
    last = lines[-1].removeprefix("error: ") if lines else ""
    said = [line for line in lines[:-1] if not (last and last in line)]
    return "\n".join([*said, *lines[-1:]][-num_lines:])
