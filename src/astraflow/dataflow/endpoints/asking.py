"""What requests of all kinds share: refusals of the machine as HTTP errors, and waits with a deadline."""

from __future__ import annotations

import asyncio
from collections.abc import Iterator
from contextlib import contextmanager

from astraflow.dataflow.machine.commands import DropDamaged, Refusal
from astraflow.dataflow.shell import Shell, answer_of, away
from astraflow.dataflow.storage.segments import DamagedRows
from astraflow.wire.app import HttpError

LONGEST_WAIT_S = 60.0


@contextmanager
def refusals() -> Iterator[None]:
    """A refusal of the machine becomes the answer."""
    try:
        yield
    except Refusal as refusal:
        raise answer_of(refusal) from refusal


def deadline_in(wait_s: float) -> float:
    """The loop's time at which a request that may wait `wait_s` must be answered."""
    return asyncio.get_running_loop().time() + min(max(wait_s, 0.0), LONGEST_WAIT_S)


async def wait_for(shell: Shell, topic: str, deadline: float) -> bool:
    """Until something happened to `topic`. False: the time of the request is over.

    Raises: HttpError: 503: the service stops.
    """
    left = deadline - asyncio.get_running_loop().time()
    if left > 0 and not shell.stopping:
        await shell.wait(topic, left)
    if shell.stopping:
        raise away()
    return left > 0


async def drop_damaged(shell: Shell, found: DamagedRows) -> None:
    """Rows that were asked for are damaged: the groups that need them are dropped, then the request goes on."""
    await shell.submit(DropDamaged([found.put.key], f"{found.value}: {found.rule}"))


def check_there(shell: Shell) -> None:
    """Raises: HttpError: the service ends, and its state says nothing any more."""
    if shell.crash is not None:
        raise away()


def check_alive(shell: Shell) -> None:
    """Raises: HttpError: the run has failed, and why; or as `check_there`."""
    check_there(shell)
    failure = shell.machine.state.failure
    if failure is not None:
        raise HttpError(409, str(failure), failure.kind)


def check_run(shell: Shell, run_id: str) -> None:
    """Raises: HttpError: the sender belongs to another run."""
    if run_id != shell.run_id:
        raise HttpError(
            409, f"run_id={run_id} is not this run ({shell.run_id}); start the process for this run again",
            "DataflowError", reason="other_run",
        )  # fmt: skip
