"""What is asked of a pool of processes, and what it says of itself."""

from __future__ import annotations

from typing import Annotated, Any, Literal

import msgspec

from astraflow.errors import AstraFlowError

Kind = Literal["deadline", "lost", "raised", "start", "closed"]
"""Why a call gave nothing: it took too long; its process ended; the target raised; no process could be started; the
pool was closed."""


class CallFailed(AstraFlowError):
    """A call of a process gave nothing; nothing is known of what it would have given."""

    def __init__(self, kind: Kind, text: str) -> None:
        self.kind = kind
        super().__init__(f"{kind}: {text}")


class Settings(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """Of one pool. Times do not count what a call waits for a process."""

    processes: Annotated[int, msgspec.Meta(ge=0, le=1024)] = 0  # at most; each starts when it is needed; 0: the cores
    deadline_s: Annotated[float, msgspec.Meta(gt=0)] = 5.0  # of one call, unless it says otherwise
    start_s: Annotated[float, msgspec.Meta(gt=0)] = 60.0  # to import and make the target
    seats: Annotated[int, msgspec.Meta(ge=1)] = 1  # that one process holds at a time
    recycle_after: Annotated[int, msgspec.Meta(ge=0)] = 0  # uses (a seat, or a call without one); 0: never
    memory_bytes: Annotated[int, msgspec.Meta(ge=0)] = 0  # address space of each process; 0: no limit


class Health(msgspec.Struct, kw_only=True):
    """Counts since the pool was made; times of the last 1,000 calls."""

    calls: int = 0  # that a process answered, also by raising
    raised: int = 0
    starts: int = 0
    kills: int = 0  # at a deadline
    lost: int = 0  # processes that ended by themselves
    recycled: int = 0
    alive: int = 0
    waiting: int = 0  # calls
    seats: int = 0  # taken
    p50_ms: float = 0.0
    p99_ms: float = 0.0


class Hello(msgspec.Struct, frozen=True):
    """To a process, first. `target`: `module:Object`, called with `options`; its public methods are what is called."""

    target: str
    options: dict[str, Any]
    memory_bytes: int


class Ask(msgspec.Struct, frozen=True):
    """To a process."""

    method: str
    arguments: tuple[Any, ...]


class Told(msgspec.Struct, frozen=True, omit_defaults=True):
    """From a process, one for Hello and one for each Ask. `error`: what was raised, or ""."""

    value: Any = None
    error: str = ""
