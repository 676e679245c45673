"""What starting a server of any kind needs: settings that are looked at, its environment, its options."""

from __future__ import annotations

import json
import re
import subprocess
import sys
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import TypeVar

import msgspec

from astraflow.config.env import child_environment
from astraflow.errors import EngineError

R = TypeVar("R")
Argument = str | int | float | bool | list[str] | dict[str, object]
Said = tuple[str, str, str]
"""(pattern in a log, in lower case; what it means; what to do)."""
_LOOK_S = 60.0


class _Config(msgspec.Struct):
    vocab_size: int | None = None
    text_config: _TextConfig | None = None


class _TextConfig(msgspec.Struct):
    vocab_size: int | None = None


def check_arguments(args: Mapping[str, Argument], ours: frozenset[str]) -> None:
    """Raises: EngineError: an argument that the engine sets itself."""
    for name in args:
        if name.replace("-", "_") in ours:
            raise EngineError(
                f"engine.args.{name}", args[name], "is set by the engine itself",
                "leave it out; see docs/engines.md for the settings that there are instead",
            )  # fmt: skip


def vocab_size(directory: Path) -> int:
    """Of a model directory. Raises: EngineError: its config does not say it."""
    try:
        config = msgspec.json.decode((directory / "config.json").read_bytes(), type=_Config)
    except (OSError, msgspec.DecodeError) as error:
        raise EngineError("model", str(directory), f"has no config ({error})", "give a model directory") from error
    nested = config.text_config.vocab_size if config.text_config is not None else None
    size = config.vocab_size or nested
    if size is None:
        raise EngineError("config.json vocab_size", None, "is missing", "give a model directory with it")
    return size


def look_into(python: str, script: str, kind: type[R], what: str) -> R:
    """The JSON that `script` prints in the environment of an interpreter; `what`: whose environment it should be.

    Raises: EngineError: it is no Python that runs.
    """
    try:
        done = subprocess.run(
            [python, "-c", script], capture_output=True, timeout=_LOOK_S, env=environment(python, 1, {}), check=False
        )
        return msgspec.json.decode(done.stdout, type=kind)
    except (OSError, subprocess.TimeoutExpired, msgspec.DecodeError) as error:
        raise EngineError(
            "engine.python", python, f"is no Python that runs ({error})",
            f"give the interpreter of {what}'s environment",
        ) from error  # fmt: skip


def environment(python: str, threads: int, variables: Mapping[str, str]) -> dict[str, str]:
    """Of a server: without the run's token, and without the module paths of another interpreter."""
    env = child_environment(None, {"OMP_NUM_THREADS": str(threads), "PYTHONUNBUFFERED": "1", **variables})
    if python != sys.executable:
        for name in ("PYTHONPATH", "PYTHONHOME"):
            env.pop(name, None)
    return env


def options(arguments: Mapping[str, Argument], *, negated: bool) -> list[str]:
    """As a command line: `_` becomes `-`. `negated`: what is false is said as `--no-NAME`, else it is left out."""
    found: list[str] = []
    for name, value in arguments.items():
        found += _option(name.replace("_", "-"), value, negated)
    return found


def explained(lines: str, table: Iterable[Said]) -> tuple[str, str] | None:
    """(rule, fix) for lines of a log; None: nothing is known of them."""
    lowered = lines.lower()
    return next(((rule, fix) for pattern, rule, fix in table if re.search(pattern, lowered)), None)


def _option(name: str, value: Argument, negated: bool) -> Sequence[str]:
    if value is True:
        return [f"--{name}"]
    if value is False:
        return [f"--no-{name}"] if negated else []
    if isinstance(value, list):
        return [f"--{name}", *map(str, value)]
    return [f"--{name}", json.dumps(value) if isinstance(value, dict) else str(value)]
