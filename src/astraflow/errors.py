"""One tree of errors, named by the boundary that was crossed.

Every message reads `<thing>=<value got> <rule broken>; <how to fix, naming the setting>`; `Problem` builds that
sentence and keeps its parts as attributes, so callers and tests never parse text.
"""

from __future__ import annotations

import os
import sysconfig
import traceback
from collections.abc import Iterable
from pathlib import Path

_OTHERS = (*map(sysconfig.get_path, ("stdlib", "purelib", "platlib")), str(Path(__file__).parent))  # folders


class AstraFlowError(Exception):
    """Base of every error that AstraFlow raises on purpose. `exit_code` is what the CLI exits with."""

    exit_code = 1


class Problem(AstraFlowError):
    """One broken rule: the thing, the value got, the rule, and the fix. Raised as itself: a setting cannot work, so a
    process that dies of it is not started again."""

    exit_code = 2

    def __init__(self, thing: str, value: object, rule: str, fix: str) -> None:
        self.thing, self.value, self.rule, self.fix = thing, value, rule, fix
        super().__init__(f"{thing}={_short(value)} {rule}; {fix}")


class Fault(Problem):
    """A broken rule at work: what was asked for may well succeed another time."""

    exit_code = 1


class ConfigError(AstraFlowError):
    """All problems of one run file at once."""

    exit_code = 2

    def __init__(self, origin: str, problems: Iterable[str]) -> None:
        self.origin, self.problems = origin, list(problems)
        count = len(self.problems)
        head = f"{origin}: {count} problem{'s' if count != 1 else ''}"
        super().__init__("\n".join([head, *(f"  - {p}" for p in self.problems)]))


class SourceError(Problem):
    """A task source is missing, empty or malformed (names file, row and key)."""


class ModelError(Problem):
    """A model or tokenizer cannot be found, loaded or used."""


class WireError(AstraFlowError):
    """A request to another service failed. `status` is the HTTP status, or None when no answer came."""

    def __init__(self, message: str, status: int | None = None) -> None:
        self.status = status
        super().__init__(message)


class Unauthorized(WireError):
    """The bearer token is missing or wrong."""


class Unreachable(WireError):
    """No answer within the retry budget; names the URL and what was waited for. Status 503: it answered that it is
    away for a moment, and `pause_s` is how long it asked to wait before the next try (0: unsaid)."""

    def __init__(self, message: str, status: int | None = None, pause_s: float = 0.0) -> None:
        self.pause_s = pause_s
        super().__init__(message, status)


class ProtocolMismatch(WireError):
    """Two services of different protocol versions met."""


class SchemaError(Fault):
    """Columns that do not have the promised names, dtypes or lengths (never cast silently)."""


class DataflowError(Fault):
    """The dataflow service refused an operation."""


class NothingToTrainOn(Fault):
    """Every group was filtered out for longer than the limit."""


class JournalError(Fault):
    """The journal cannot be written or read (full disk, corrupt file, other run)."""


class WeightError(Fault):
    """A weight version is missing, torn, or does not match its checksum."""


class EngineError(Fault):
    """An engine could not serve a request."""


class GatewayError(Fault):
    """An agent sent a request that the gateway cannot serve. `status` is the HTTP status given to the agent, `code`
    OpenAI's error code (`context_length_exceeded`, ...)."""

    def __init__(
        self, thing: str, value: object, rule: str, fix: str, status: int = 400, code: str | None = None
    ) -> None:
        self.status, self.code = status, code
        super().__init__(thing, value, rule, fix)


class EpisodeError(AstraFlowError):
    """What went wrong inside one episode; becomes the episode's `error`, never a zero reward."""


class TrainingError(Fault):
    """The trainer cannot go on (non-finite loss, broken batch, missing checkpoint)."""


class LaunchError(Fault):
    """A process of the run could not be started or kept alive."""


def _short(value: object, limit: int = 200) -> str:
    text = value if isinstance(value, str) else repr(value)
    return text if len(text) <= limit else text[: limit - 3] + "..."


def place_of(error: BaseException) -> str:
    """` (file.py:12)`: the innermost line of it that is the user's, not ours nor a library's; empty: there is none."""
    others = ("<", *(f"{folder}{os.sep}" for folder in _OTHERS))
    frames = [f for f in traceback.extract_tb(error.__traceback__) if not f.filename.startswith(others)]
    return f" ({Path(frames[-1].filename).name}:{frames[-1].lineno})" if frames else ""
