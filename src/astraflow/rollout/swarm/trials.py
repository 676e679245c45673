"""Trials at a door: a workflow plays one task against the policies of now, is captured as any, and never committed."""

from __future__ import annotations

import asyncio
import itertools
import time
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field

from msgspec.structs import replace
from starlette.requests import Request
from starlette.responses import Response
from starlette.routing import Route

from astraflow.config.schema import RunConfig
from astraflow.contracts import Engine
from astraflow.errors import EpisodeError, WireError
from astraflow.rollout.gateway.core import Gateway
from astraflow.rollout.gateway.endpoint import Chat
from astraflow.rollout.loop import in_thread
from astraflow.rollout.runner import build_episode
from astraflow.rollout.swarm.door import base_url_of
from astraflow.types import EpisodeLease, Outcome, Sampling, Task, Trajectory
from astraflow.wire.app import HttpError, json_reply, path_id, read_json
from astraflow.wire.swarm.messages import PlayLease
from astraflow.wire.swarm.outcome import outcome_of, plain_text
from astraflow.wire.swarm.trials import Span, Trial, TrialBranch, TrialEnd, TrialRequest

_MOST = 16  # open at once


@dataclass(frozen=True, kw_only=True)
class TrialOptions:
    """What a door needs to know of its run."""

    source: str  # where rows come from if none is named
    timeout_s: float
    sampling: Mapping[str, Sampling]  # policy -> as in training
    chats: Mapping[str, Chat]  # policy -> what turns its tokens into text
    row: Callable[[str, int], Task]  # asks the dataflow service; blocks


def trial_options(config: RunConfig, chats: Mapping[str, Chat], row: Callable[[str, int], Task]) -> TrialOptions:
    """As the run file says."""
    sampling = {
        name: Sampling(temperature=s.temperature, top_p=s.top_p, top_k=s.top_k, min_p=s.min_p, max_tokens=s.max_tokens)
        for name, s in ((name, policy.sampling) for name, policy in config.policies.items())
    }
    source = config.evaluation.source if config.evaluation is not None else config.train_sources[0]
    return TrialOptions(source=source, timeout_s=config.workflow.timeout_s, sampling=sampling, chats=chats, row=row)


@dataclass
class _Open:
    key: str
    task: Task
    began: float  # monotonic
    end: asyncio.TimerHandle = field(repr=False)


class Trials:
    """All methods run on the node's loop."""

    def __init__(self, gateway: Gateway, engines: Mapping[str, Engine], options: TrialOptions) -> None:
        self._gateway, self._engines, self._options = gateway, engines, options
        self._open: dict[str, _Open] = {}
        self._numbers = itertools.count(1)

    def routes(self) -> list[Route]:
        return [
            Route("/trials", self.begin, methods=["POST"]),
            Route("/trials/{trial_id}/finish", self.finish, methods=["POST"]),
        ]

    async def begin(self, request: Request) -> Response:
        body, options = await read_json(request, TrialRequest), self._options
        if len(self._open) >= _MOST:
            raise HttpError(409, f"trials={len(self._open)} is the most at once; finish one", "SwarmError")
        if unborn := sorted(name for name, engine in self._engines.items() if engine.version < 0):
            said = f"policy={unborn[0]} has no weights yet; ask again once its trainer has published some"
            raise HttpError(503, said, "SwarmError")
        try:
            task = await in_thread(lambda: options.row(body.source or options.source, body.row), "row")
        except WireError as error:
            raise HttpError(error.status or 503, str(error), "SwarmError") from error
        sampling = dict(options.sampling)
        if body.temperature is not None:
            sampling = {name: replace(s, temperature=body.temperature) for name, s in sampling.items()}
        trial_id = f"trial-{next(self._numbers)}"
        lease = EpisodeLease(
            episode_id=trial_id, group_id=trial_id, attempt=1, task=task, purpose="eval", timeout_s=options.timeout_s,
            min_versions={}, sampling=sampling,
        )  # fmt: skip
        end = asyncio.get_running_loop().call_later(options.timeout_s, self._expire, trial_id)
        opened = self._open[trial_id] = _Open(self._gateway.open_episode(lease), task, time.monotonic(), end)
        return json_reply(
            PlayLease(
                episode_id=trial_id, attempt=1, task=task, purpose="eval", timeout_s=options.timeout_s,
                base_url=base_url_of(request), api_key=opened.key, policies=list(sampling),
            )
        )  # fmt: skip

    async def finish(self, request: Request) -> Response:
        body = await read_json(request, TrialEnd)
        trial_id = path_id(request, "trial_id")
        opened = self._open.get(trial_id)
        if opened is None:
            raise HttpError(404, f"trial={trial_id} is over or was never begun; begin another", "SwarmError")
        outcome, error = _ending(body)
        del self._open[trial_id]
        opened.end.cancel()
        capture = self._gateway.close_episode(opened.key)
        episode = build_episode(capture, "trial", outcome, error, time.monotonic() - opened.began)
        branches = episode.trajectories or build_episode(capture, "trial", Outcome(), None, 0.0).trajectories
        return json_reply(
            Trial(
                error=episode.error, branches=[self._branch(t) for t in branches],
                metrics=episode.metrics, wall_s=round(episode.wall_s, 3),
                num_calls={name: len(calls) for name, calls in capture.calls.items()},
            )
        )  # fmt: skip

    def _expire(self, trial_id: str) -> None:
        self._gateway.close_episode(self._open.pop(trial_id).key)

    def _branch(self, trajectory: Trajectory) -> TrialBranch:
        chat = self._options.chats[trajectory.policy]
        spans = [
            Span(sampled, chat.decode(ids, skip_special_tokens=False), ids, versions)
            for sampled, ids, versions in spans_of(trajectory)
        ]
        t = trajectory
        return TrialBranch(
            policy=t.policy, branch=t.branch, parent_branch=t.parent_branch, fork_at=t.fork_at, reward=t.reward,
            rewards_per_call=t.rewards_per_call, spans=spans,
        )  # fmt: skip


def spans_of(trajectory: Trajectory) -> Iterator[tuple[bool, list[int], tuple[int, int] | None]]:
    """Runs of tokens that were sampled, or not: (sampled, ids, oldest and newest version)."""
    mask, ids, versions = (x.tolist() for x in (trajectory.loss_mask, trajectory.token_ids, trajectory.versions))
    for sampled, places in itertools.groupby(range(len(ids)), mask.__getitem__):
        run = list(places)
        own = [versions[i] for i in run]
        yield sampled, [ids[i] for i in run], (min(own), max(own)) if sampled else None


def _ending(body: TrialEnd) -> tuple[Outcome | None, str | None]:
    if (body.outcome is None) == (body.error is None):
        raise HttpError(422, "outcome=missing must be given, or error; send one of them", "SwarmError")
    try:
        return (None if body.outcome is None else outcome_of(body.outcome)), body.error and plain_text(body.error)
    except EpisodeError as problem:
        return None, str(problem)
