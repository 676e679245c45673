"""The directory of one run: who may use it, what lies where, what may change when it is resumed."""

from __future__ import annotations

import fcntl
import json
import os
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from astraflow.config.load import config_from_json, resolved_json
from astraflow.config.schema import RunConfig
from astraflow.dataflow.storage.identity import fixed_settings
from astraflow.errors import ConfigError, LaunchError


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
    def ready_file(self) -> Path:
        """Where the dataflow service says its URL once it answers."""
        return self.path / "dataflow" / "ready.json"

    def log(self, process: str) -> Path:
        return self.logs / f"{process}.log"

    def newest_checkpoint(self, policy: str) -> Path | None:
        """The checkpoint of the highest step of `policy`, or None."""
        found = sorted(p for p in (self.checkpoints / policy).glob("step-*") if p.is_dir() and p.name[5:].isdigit())
        return found[-1] if found else None

    def config(self) -> RunConfig:
        """The settings of the run as it was last started.

        Raises: LaunchError: there is no run here.
        """
        try:
            return config_from_json(self.config_file.read_bytes())
        except FileNotFoundError as error:
            raise LaunchError(
                "run directory", str(self.path), "holds no run", "give the directory of a run, such as runs/quickstart"
            ) from error


def prepare(config: RunConfig, *, resume: bool, path: Path | None = None) -> RunDirectory:
    """Make or take up the run directory and save the resolved settings in it.

    Raises: LaunchError: it holds a run and `resume` is false, or the other way round. ConfigError: a resumed run with
    settings that cannot change.
    """
    directory = RunDirectory((path or Path(config.run.directory) / config.run.name).resolve())
    exists = directory.config_file.exists()
    if exists and not resume:
        raise LaunchError(
            "run directory",
            str(directory.path),
            "already holds a run",
            f"go on with it by --resume, or give the new run another name: --run.name={config.run.name}-2",
        )
    if resume and not exists:
        raise LaunchError("run directory", str(directory.path), "holds no run to resume", "leave out --resume")
    if exists:
        problems = frozen_changes(directory.config(), config)
        if problems:
            raise ConfigError(f"{directory.path} cannot be resumed with these settings", problems)
    try:
        directory.logs.mkdir(parents=True, exist_ok=True)
        directory.ready_file.parent.mkdir(exist_ok=True)
        _write_whole(directory.config_file, resolved_json(config))
    except OSError as error:
        raise LaunchError(
            "run directory", str(directory.path), f"cannot be written ({error.strerror})", "change --run.directory"
        ) from error
    return directory


def frozen_changes(old: RunConfig, new: RunConfig) -> list[str]:
    """Settings that differ although the journal of a run needs them as they were, one sentence each."""
    before, after = fixed_settings(old), fixed_settings(new)
    return [
        f"{where}={_short(after.get(where))} must stay {_short(before.get(where))} in a resumed run; "
        "set it back, or start a new run"
        for where in dict.fromkeys([*before, *after])
        if before.get(where) != after.get(where)
    ]


@contextmanager
def held(directory: RunDirectory) -> Iterator[None]:
    """Only one launcher works on a run directory at a time.

    Raises: LaunchError: another one does.
    """
    file = os.open(directory.path / ".lock", os.O_RDWR | os.O_CREAT, 0o644)
    try:
        try:
            fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except OSError as error:
            raise LaunchError(
                "run directory", str(directory.path), "is in use by another launcher", "wait for it or stop it first"
            ) from error
        yield
    finally:
        os.close(file)


def write_ready(path: Path, url: str) -> None:
    """Say where a service answers; visible only when complete."""
    path.parent.mkdir(parents=True, exist_ok=True)
    _write_whole(path, json.dumps({"url": url, "pid": os.getpid()}))


def read_ready(path: Path, pid: int) -> str | None:
    """The URL that the process `pid` said, or None while it has not."""
    try:
        said = json.loads(path.read_text())
    except FileNotFoundError:
        return None
    return str(said["url"]) if said["pid"] == pid else None


def tail(path: Path, num_lines: int = 15, num_bytes: int = 16_384) -> str:
    """The last lines of a log; empty when there is none."""
    try:
        with path.open("rb") as file:
            file.seek(max(0, path.stat().st_size - num_bytes))
            text = file.read().decode("utf-8", "replace")
    except FileNotFoundError:
        return ""
    return "\n".join(text.rstrip().splitlines()[-num_lines:])


def _write_whole(path: Path, text: str) -> None:
    draft = path.with_name(f".{path.name}.{os.getpid()}")
    draft.write_text(text, encoding="utf-8")
    draft.replace(path)


def _short(value: Any) -> str:
    text = json.dumps(value)
    return text if len(text) <= 120 else text[:117] + "..."
