"""Which checkpoints of a policy are whole; loads neither torch nor a model, so that the launcher can ask too.

`training_state/state.json` is written last and names every other file with its size: a directory without it, or with
a file of another size, is damaged and passed over.
"""

from __future__ import annotations

import logging
from pathlib import Path

import msgspec

from astraflow.errors import ModelError

STATE = "training_state"
FORMAT = 1
"""Of `training_state`. What a file without this number holds is 1."""

log = logging.getLogger(__name__)


class StateFile(msgspec.Struct, kw_only=True):
    """`state.json`."""

    version: int  # the weight version that this checkpoint is
    step: int
    skipped: int
    skipped_in_a_row: int
    audit_versions: list[int]
    files: dict[str, int]  # relative path -> bytes, of everything else in the directory
    loss_scale: float = 65536.0  # of float16 arithmetic
    good_updates: int = 0  # since it last changed
    format: int = FORMAT


class _Format(msgspec.Struct):
    format: int = 1


def read_head(path: Path) -> StateFile:
    """`state.json` of a checkpoint.

    Raises: ModelError: of another format, which is no damage: nobody may pass over it. OSError, msgspec.DecodeError.
    """
    content = (path / STATE / "state.json").read_bytes()
    if (found := msgspec.json.decode(content, type=_Format).format) != FORMAT:
        fix = f"use the AstraFlow version that wrote {path}"
        raise ModelError("checkpoint.format", found, f"must be {FORMAT}", fix)
    return msgspec.json.decode(content, type=StateFile)


def whole_checkpoints(root: Path) -> list[Path]:
    """Oldest first. Raises: ModelError: one is of another format."""
    return [path for path in _checkpoints(root) if _damage(path) is None]


def latest_checkpoint(root: Path, at_least: int = 0) -> Path | None:
    """The newest whole checkpoint below `root` of version `at_least` or newer, or None; logs damaged newer ones.

    Raises: ModelError: the newest is of another format.
    """
    for path in reversed(_checkpoints(root)):
        if version_of(path) < at_least:
            return None
        damage = _damage(path)
        if damage is None:
            return path
        log.warning("checkpoint=%s is damaged (%s) and passed over; restore or delete it", path, damage)
    return None


def _checkpoints(root: Path) -> list[Path]:
    return sorted((path for path in root.glob("step-*") if version_of(path) >= 0), key=version_of)


def version_of(path: Path) -> int:
    """The version that a checkpoint is named after; -1: it is none."""
    number = path.name.removeprefix("step-")
    return int(number) if number.isascii() and number.isdigit() else -1


def _damage(path: Path) -> str | None:
    """What is wrong with a checkpoint; None: it is whole."""
    try:
        head = read_head(path)
        for name, size in head.files.items():
            if (found := (path / name).stat().st_size) != size:
                return f"{name} has {found} of {size} bytes"
    except FileNotFoundError as error:
        return f"{Path(error.filename).relative_to(path)} is missing"
    except (OSError, msgspec.DecodeError) as error:
        return str(error)
    return None
