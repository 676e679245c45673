"""Taking a run directory: the lock first, then every reason to refuse, and only then a write.

A start that is refused changes nothing: the run that lives there is restarted from the settings in it.
"""

from __future__ import annotations

import fcntl
import json
import os
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import msgspec

from astraflow.config.load import resolved_json
from astraflow.config.schema import RunConfig
from astraflow.dataflow.journal.recovery import recover, refuse_loss
from astraflow.dataflow.machine.plan import plan_of
from astraflow.dataflow.shell import open_sources
from astraflow.dataflow.storage.identity import fixed_settings, refuse_other_data
from astraflow.errors import ConfigError, LaunchError
from astraflow.launch.rundir import RunDirectory
from astraflow.observe.jsonl import read_jsonl, write_whole
from astraflow.observe.summary import steps_of


@contextmanager
def claim(
    config: RunConfig, *, resume: bool, path: Path | None = None, accept_damage: bool = False
) -> Iterator[RunDirectory]:
    """Make or take up the run directory, save the resolved settings in it, and keep others out until the block ends.

    Raises: LaunchError: it holds a run and `resume` is false, or the other way round, or somebody else works on it.
    ConfigError: a resumed run with settings that cannot change. Problem: settings that do not fit the sources.
    SourceError, JournalError: data missing or different. ModelError: a checkpoint of another format.
    """
    directory = RunDirectory((path or Path(config.run.directory) / config.run.name).resolve())
    _refuse_wrong_start(directory, config, resume)  # before anything is made
    sources = open_sources(config)
    plan_of(config, sources)
    with _held(directory):
        _refuse_wrong_start(directory, config, resume)  # now nobody else can begin it
        if resume:
            _refuse_changes(directory, config)
            for name in config.trained:
                directory.newest_checkpoint(name)  # of another format: nobody starts
            if (directory.journal / "journal.sqlite").exists():
                fingerprints = {name: source.fingerprint() for name, source in sources.items()}
                found = recover(directory.journal)
                if not accept_damage:
                    refuse_loss(directory.journal, found)
                meta = found.snapshot.meta if found.snapshot is not None else {}
                refuse_other_data(msgspec.json.decode(meta.get("sources", "{}")), fingerprints)
        try:
            directory.logs.mkdir(exist_ok=True)
            directory.ready_file.parent.mkdir(exist_ok=True)
            directory.ready_file.unlink(missing_ok=True)  # of a service that was killed
            write_whole(directory.config_file, resolved_json(config))
        except OSError as error:
            raise _unwritable(directory, error) from error
        try:
            yield directory
        except BaseException:
            if not resume and not (directory.journal / "journal.sqlite").exists():
                directory.config_file.unlink()  # nothing began: the name is free again
            raise
        finally:
            directory.ready_file.unlink(missing_ok=True)


def is_held(directory: RunDirectory) -> bool:
    """Somebody works on the run now: only then does its `ready_file` speak of it."""
    try:
        file = os.open(directory.path / ".lock", os.O_RDONLY)
    except FileNotFoundError:
        return False
    try:
        fcntl.flock(file, fcntl.LOCK_SH | fcntl.LOCK_NB)
        return False
    except OSError:
        return True
    finally:
        os.close(file)


def frozen_changes(old: RunConfig, new: RunConfig) -> list[str]:
    """Settings that differ although the journal of a run needs them as they were, one sentence each."""
    before, after = fixed_settings(old), fixed_settings(new)
    return [
        f"{where}={_short(after.get(where))} must stay {_short(before.get(where))} in a resumed run; "
        "set it back, or start a new run"
        for where in dict.fromkeys([*before, *after])
        if before.get(where) != after.get(where)
    ]


def _refuse_wrong_start(directory: RunDirectory, config: RunConfig, resume: bool) -> None:
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


def _refuse_changes(directory: RunDirectory, config: RunConfig) -> None:
    problems = frozen_changes(directory.config(), config)
    trained = max((int(row.get("step", 0)) for row in steps_of(read_jsonl(directory.metrics))), default=0)
    if config.run.steps < trained:
        problems.append(
            f"run.steps={config.run.steps} must be at least {trained}, the newest version already trained; "
            f"give --run.steps={trained} or more, or start a new run"
        )
    if problems:
        raise ConfigError(f"{directory.path} cannot be resumed with these settings", problems)


@contextmanager
def _held(directory: RunDirectory) -> Iterator[None]:
    try:
        directory.path.mkdir(parents=True, exist_ok=True)
        file = os.open(directory.path / ".lock", os.O_RDWR | os.O_CREAT, 0o644)
    except OSError as error:
        raise _unwritable(directory, error) from error
    try:
        try:
            fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except OSError as error:
            raise LaunchError(
                "run directory", str(directory.path), "is in use by another launcher or dataflow service",
                "wait for it or stop it first",
            ) from error  # fmt: skip
        yield
    finally:
        os.close(file)


def _unwritable(directory: RunDirectory, error: OSError) -> LaunchError:
    return LaunchError(
        "run directory", str(directory.path), f"cannot be written ({error.strerror})", "change --run.directory"
    )


def _short(value: Any) -> str:
    text = json.dumps(value)
    return text if len(text) <= 120 else text[:117] + "..."
