"""What is asked of a sandbox, and what it says."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Annotated, Any, Literal

import msgspec

from astraflow.config.sections.structs import struct_of

Isolation = Literal["bubblewrap", "weak"]
OutcomeName = Literal["passed", "failed", "timeout", "error"]


class Settings(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """Limits of one job, and how it is isolated. A user's settings: docs/workloads.md."""

    isolation: Isolation = "bubblewrap"
    slots: Annotated[int, msgspec.Meta(ge=0, le=1024)] = 0  # jobs at once in one process; 0: one for each core
    python: str = ""  # interpreter inside the boxes; "": this one where other users may read it, else /usr/bin/python3
    cpu_s: Annotated[int, msgspec.Meta(ge=1)] = 6  # of one process of the code, in one job or case
    wall_s: Annotated[float, msgspec.Meta(gt=0)] = 10.0  # of one job
    memory_bytes: Annotated[int, msgspec.Meta(ge=64 << 20)] = 512 << 20  # of each process, and of all of a box
    processes: Annotated[int, msgspec.Meta(ge=1, le=4096)] = 16  # and threads
    output_bytes: Annotated[int, msgspec.Meta(ge=1024, le=64 << 20)] = 1 << 20  # of one answer, output or file
    disk_bytes: Annotated[int, msgspec.Meta(ge=1 << 20)] = 16 << 20  # of /tmp, the one place to write


class Job(msgspec.Struct, frozen=True, kw_only=True):
    """Code and how to judge it: by tests that call what it defines, or by cases of a whole program."""

    code: str
    entries: tuple[str, ...] = ()  # names that the code defines and tests use
    setup: str = ""  # runs where the tests run: imports, functions that the tests need; never the code's
    given: str = ""  # the same, but it may use the entries
    tests: tuple[str, ...] = ()  # each is Python that raises unless the code is right
    cases: tuple[tuple[str, str], ...] = ()  # (standard input, expected standard output)
    stop: bool = True  # at the first failure
    trusted: bool = True  # False: a model wrote the tests; the box in which they ran is thrown away


class Verdict(msgspec.Struct, frozen=True, kw_only=True):
    """What became of a job. "error": the sandbox failed, not the code; it is no grade."""

    outcome: OutcomeName
    num_passed: int = 0
    num_tests: int = 0
    why: str = ""  # of the first failure
    wall_s: float = 0.0
    isolation: Isolation = "bubblewrap"


class Health(msgspec.Struct, kw_only=True):
    """Counts since the start of a supervisor, and its last 1,000 jobs."""

    jobs: int = 0
    passed: int = 0
    failed: int = 0
    timeout: int = 0
    error: int = 0
    kills: int = 0  # boxes that had to be ended
    memory_kills: int = 0
    retries: int = 0
    drivers: int = 0  # started
    boxes: int = 0  # alive now
    waiting: int = 0  # jobs
    p50_ms: float = 0.0
    p99_ms: float = 0.0


class Ask(msgspec.Struct, frozen=True):
    """To the supervisor."""

    number: int
    job: Job


class Told(msgspec.Struct, frozen=True, omit_defaults=True):
    """From the supervisor: a verdict or its health."""

    number: int = -1
    verdict: Verdict | None = None
    health: Health | None = None


def settings_of(options: Mapping[str, Any], where: str) -> Settings:
    """Settings from a run file. Raises: Problem: an unknown key, a wrong type, a value out of range."""
    return struct_of(Settings, options, where, "a sandbox")
