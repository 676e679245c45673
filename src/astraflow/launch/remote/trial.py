"""`astraflow try WORKFLOW --url`: one episode against the policies of a door, which is never trained."""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from typing import Any

from astraflow.launch.remote.calls import Calls, Forwarded
from astraflow.rollout.loop import in_thread, run_loop
from astraflow.rollout.pool import PoolLimits, WorkerPool
from astraflow.rollout.worker.channel import Hello
from astraflow.types import Outcome, Task
from astraflow.wire.client import HttpClient
from astraflow.wire.swarm.messages import PlayLease
from astraflow.wire.swarm.trials import Trial, TrialBranch, TrialEnd, TrialRequest

_Ending = tuple[Outcome | None, str | None]


@dataclass(frozen=True, kw_only=True)
class TrialPlay:
    """What to play where."""

    url: str  # of the door
    workflow: str
    row: int
    options: Mapping[str, Any] = field(default_factory=dict)  # of the workflow
    source: str = ""
    temperature: float | None = None  # None: as in training
    token: str | None = None
    limits: PoolLimits = field(default_factory=PoolLimits)


def play_trial(trial: TrialPlay) -> tuple[Task, Trial]:
    """The task and what became of it. Blocks.

    Raises: Unreachable, Unauthorized, WireError: the door refuses. AstraFlowError: the workflow cannot be built.
    """
    return run_loop(_play(trial))


async def _play(trial: TrialPlay) -> tuple[Task, Trial]:
    with contextlib.closing(HttpClient(trial.url, trial.token)) as client:
        asked = TrialRequest(row=trial.row, source=trial.source, temperature=trial.temperature)
        lease = await in_thread(lambda: client.json("POST", "/swarm/trials", asked, PlayLease), "begin")
        try:
            outcome, error = await _in_worker(trial, lease)
        except BaseException:
            said = TrialEnd(error="workflow: it was not played")
            await in_thread(lambda: _finish(client, lease, said), "finish")
            raise
        said = TrialEnd(outcome=outcome, error=error)
        return lease.task, await in_thread(lambda: _finish(client, lease, said), "finish")


def _finish(client: HttpClient, lease: PlayLease, said: TrialEnd) -> Trial:
    return client.json("POST", f"/swarm/trials/{lease.episode_id}/finish", said, Trial)


async def _in_worker(trial: TrialPlay, lease: PlayLease) -> _Ending:
    url = f"{trial.url.rstrip('/')}/v1"
    hello = Hello(trial.workflow, dict(trial.options), lease.policies, url, trial.limits.pulse_s)
    pool = WorkerPool(1, hello, lambda: None, trial.limits)
    calls = Calls(trial.url)
    one = _One(calls, lease)
    try:
        await pool.start()
        pool.place(one)
        watch = asyncio.create_task(pool.watch())
        waits: list[asyncio.Future[Any]] = [watch, one.ending]
        await asyncio.wait(waits, return_when=asyncio.FIRST_COMPLETED)
        watch.cancel()
        if not one.ending.done():
            watch.result()
        return one.ending.result()
    finally:
        one.hang_up()
        calls.close()
        await pool.close()


class _One(Forwarded):
    """The trial as the pool sees it."""

    def __init__(self, calls: Calls, lease: PlayLease) -> None:
        super().__init__(calls, lease)
        self.ending: asyncio.Future[_Ending] = asyncio.get_running_loop().create_future()

    def ended(self, outcome: Outcome | None, error: str | None, code: str = "") -> str | None:
        if not self.ending.done():
            self.ending.set_result((None if error is not None else outcome or Outcome(), error))
        return error

    def given_back(self, *, lost: bool) -> None:
        self.ended(None, "worker_killed: it was given back")


def lines_of(trial: Trial, *, ids: bool = False) -> Iterator[str]:
    """What the policies saw and sampled, and the reward. `ids`: the token ids, too."""
    for branch in trial.branches:
        if branch.parent_branch >= 0:
            yield f"-- {branch.policy}: another continuation after {branch.fork_at} tokens of {_name(branch)}"
        for span in branch.spans:
            yield f"{branch.policy if span.sampled else 'given'}> {span.text}"
            versions = "" if span.versions is None else f", version {'-'.join(map(str, sorted({*span.versions})))}"
            yield f"    ({len(span.token_ids)} tokens{versions}){f' {span.token_ids}' if ids else ''}"


def rewards_of(trial: Trial) -> dict[str, float | None]:
    """Of each policy."""
    return {branch.policy: branch.reward for branch in trial.branches if branch.parent_branch < 0}


def _name(branch: TrialBranch) -> str:
    return "the first one" if branch.parent_branch == 0 else f"number {branch.parent_branch}"
