"""The door of a node: the swarm protocol and the gateway on one port, so that a client needs one address and opens all
connections itself.

`/swarm/...` needs the run's token where there is one; everything else is the gateway's and needs an episode's key.
"""

from __future__ import annotations

import asyncio
import math
from collections import Counter
from collections.abc import Callable, Sequence
from contextlib import suppress
from dataclasses import dataclass

import msgspec
from starlette.applications import Starlette
from starlette.exceptions import HTTPException
from starlette.requests import Request
from starlette.responses import Response
from starlette.routing import Mount, Route
from starlette.types import ASGIApp, Receive, Scope, Send

from astraflow.errors import EpisodeError, GatewayError
from astraflow.rollout.gateway.contexts import policy_of
from astraflow.rollout.gateway.core import Gateway
from astraflow.rollout.gateway.dialects.http import unless_gone
from astraflow.rollout.swarm.pool import Held, SwarmPool
from astraflow.types import Outcome, error_kind
from astraflow.wire.app import HttpError, create_app, json_reply, path_id, read_json
from astraflow.wire.messages import Failure, Ok
from astraflow.wire.swarm import messages as m
from astraflow.wire.swarm.outcome import outcome_of, plain_text

MAX_BODY_BYTES = 8 << 20
_LONGEST_HEARTBEAT_S = 5.0


class SignsOfLife:
    """Stands before an app and remembers when the key of which open episode was used last."""

    def __init__(self, gateway: Gateway) -> None:
        self._gateway = gateway
        self._app: ASGIApp | None = None
        self._running: Counter[str] = Counter()
        self._last: dict[str, float] = {}

    def before(self, app: ASGIApp) -> ASGIApp:
        """`app`, watched."""
        self._app = app
        return self

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        assert self._app is not None
        key = _key(scope) if scope["type"] == "http" else ""
        try:
            if key:
                self._gateway.check_key(key)
        except GatewayError:
            key = ""
        if not key:
            await self._app(scope, receive, send)
            return
        self._running[key] += 1
        try:
            await self._app(scope, receive, send)
        finally:
            self._running[key] -= 1
            if not self._running[key]:
                del self._running[key]
            with suppress(GatewayError):
                self._gateway.check_key(key)
                self._last[key] = asyncio.get_running_loop().time()

    def last(self, key: str) -> float:
        """Monotonic time of the last use; +inf while it is used, -inf when it never was."""
        return math.inf if key in self._running else self._last.get(key, -math.inf)

    def forget(self, key: str) -> None:
        """The episode is over."""
        self._last.pop(key, None)


@dataclass(frozen=True, kw_only=True)
class DoorFacts:
    """What a door says and does beside handing out episodes."""

    policies: list[str]  # that episodes may call
    waiting: Callable[[], dict[str, int]]  # source -> episodes that no client has asked for, for people
    more: Sequence[Route] = ()  # below /swarm


def create_door(
    pool: SwarmPool, gateway_app: ASGIApp, signs: SignsOfLife, facts: DoorFacts, token: str | None
) -> ASGIApp:
    """The app of a door."""
    routes = [*_Endpoints(pool, facts).routes(), *facts.more]
    swarm = create_app(routes, token=token, max_body_bytes=MAX_BODY_BYTES, bare=True)
    swarm.add_exception_handler(HTTPException, _no_route)
    return signs.before(Starlette(routes=[Mount("/swarm", swarm), Mount("/", gateway_app)]))


class _Endpoints:
    """One method per request."""

    def __init__(self, pool: SwarmPool, facts: DoorFacts) -> None:
        self._pool, self._facts = pool, facts
        self._heartbeat_s = min(_LONGEST_HEARTBEAT_S, pool.dead_after_s / 4)

    def routes(self) -> list[Route]:
        return [
            Route("/leases", self.leases, methods=["POST"]),
            Route("/heartbeat", self.heartbeat, methods=["POST"]),
            Route("/episodes/{episode_id:path}/finish", self.finish, methods=["POST"]),
            Route("/episodes/{episode_id:path}/fail", self.fail, methods=["POST"]),
            Route("/episodes/{episode_id:path}/abort", self.abort, methods=["POST"]),
            Route("/status", self.status),
            Route("/openapi.json", self.openapi),
        ]

    async def leases(self, request: Request) -> Response:
        body = await read_json(request, m.PlaysRequest)
        self._pool.refuse_when_over(body.client)
        client = self._pool.records.clients[body.client]
        self._pool.records.introduce(client, body.name, body.version, body.code)
        try:
            held = await unless_gone(request, self._pool.ask(body))
        except asyncio.CancelledError:  # by the server, which stops
            said = "door=stopping gives nothing any more; ask again when it is back"
            return json_reply(Failure(said, "SwarmError"), 503)
        base_url = base_url_of(request)
        leases = [_lease(each, base_url) for each in held]
        return json_reply(
            m.PlaysReply(leases=leases, heartbeat_s=self._heartbeat_s, dead_after_s=self._pool.dead_after_s)
        )

    async def heartbeat(self, request: Request) -> Response:
        body = await read_json(request, m.Playing)
        self._pool.refuse_when_over(body.client)
        client = self._pool.records.clients[body.client]
        self._pool.records.introduce(client, body.name, body.version, body.code)
        return json_reply(m.PlayingReply(self._pool.alive(body.client, body.playing), self._heartbeat_s))

    async def finish(self, request: Request) -> Response:
        body = await read_json(request, m.Finish)
        episode_id = path_id(request, "episode_id")
        if (reply := self._again(episode_id, body)) is not None:
            return json_reply(reply)
        held = self._mine(episode_id, body)
        outcome = _outcome(body, list(held.player.lease.sampling))
        return json_reply(self._pool.end(held, outcome, None, said=body, code=body.code))

    async def fail(self, request: Request) -> Response:
        body = await read_json(request, m.Fail)
        episode_id = path_id(request, "episode_id")
        if (reply := self._again(episode_id, body)) is not None:
            return json_reply(reply)
        held = self._mine(episode_id, body)
        error = plain_text(body.error)
        error = error if error_kind(error) != "other" else plain_text(f"workflow: {error}")
        return json_reply(self._pool.end(held, None, error, said=body, code=body.code))

    async def abort(self, request: Request) -> Response:
        body = await read_json(request, m.Abort)
        episode_id = path_id(request, "episode_id")
        over = self._pool.records.over(episode_id, body.attempt)
        if over is None or (over.client, over.ending) != (body.client, "aborted"):
            held = self._mine(episode_id, body)
            self._pool.give_back(held, lost=False, why="its client gave it back", ending="aborted")
        return json_reply(Ok())

    async def status(self, request: Request) -> Response:
        pool = self._pool
        now = asyncio.get_running_loop().time()
        return json_reply(
            m.SwarmStatus(
                clients=pool.records.status(now, pool.playing()), playing=pool.num_playing,
                waiting=self._facts.waiting(), asked=pool.asked, endings=dict(pool.records.endings),
                codes=dict(pool.records.codes), policies=self._facts.policies,
            )
        )  # fmt: skip

    async def openapi(self, request: Request) -> Response:
        from astraflow.wire.describe.swarm import swarm_document  # hardly ever asked for

        return json_reply(swarm_document())

    def _mine(self, episode_id: str, body: m.Finish | m.Fail | m.Abort) -> Held:
        self._pool.refuse_when_over(body.client)
        return self._pool.mine(episode_id, body.attempt, body.client)

    def _again(self, episode_id: str, body: m.Finish | m.Fail) -> m.FinishReply | None:
        """The reply to a request that was answered before; None: it is a new one."""
        over = self._pool.records.over(episode_id, body.attempt)
        if over is None or over.reply is None or over.said != body:
            return None
        return msgspec.structs.replace(over.reply, result="duplicate")


def _outcome(body: m.Finish, policies: list[str]) -> Outcome:
    """What the client says of its episode. Raises: HttpError: 422; the episode goes on."""
    unset = msgspec.UNSET
    reward, rewards, per_call = body.reward, body.rewards, body.rewards_per_call
    if reward is unset and not (rewards or per_call):  # unset, or empty
        raise _malformed(
            "reward=missing must be given; send reward, rewards or rewards_per_call, or reward: null for unscored"
        )
    if reward is not unset and rewards is not unset:
        raise _malformed("rewards=given must not come beside reward; send one of them")
    try:
        outcome = outcome_of(
            Outcome(
                reward=rewards if rewards is not unset else None if reward is unset else reward,
                rewards_per_call={} if per_call is unset else per_call, metrics=body.metrics,
            )
        )  # fmt: skip
    except EpisodeError as error:
        raise _malformed(str(error)) from error
    named = {policy_of(name) for name in (outcome.reward if isinstance(outcome.reward, dict) else ())}
    named |= {*(outcome.rewards_per_call if isinstance(outcome.rewards_per_call, dict) else ())}
    if unknown := sorted(named - {*policies}):
        raise _malformed(f"policy={unknown[0]!r} is not in this episode; known: {', '.join(sorted(policies))}")
    if isinstance(outcome.rewards_per_call, list) and len(policies) > 1:
        raise _malformed("rewards_per_call=[...] must name a policy; send {policy: [...]}")
    return outcome


def _malformed(message: str) -> HttpError:
    return HttpError(422, message, "SwarmError")


def _lease(held: Held, base_url: str) -> m.PlayLease:
    lease = held.player.lease
    return m.PlayLease(
        episode_id=lease.episode_id, attempt=lease.attempt, task=lease.task, purpose=lease.purpose,
        timeout_s=held.player.timeout_s, base_url=base_url, api_key=held.player.key, policies=list(lease.sampling),
    )  # fmt: skip


def base_url_of(request: Request) -> str:
    """By the address that the client used, so that it holds behind a forwarded port and a TLS proxy."""
    told = request.headers.get("x-forwarded-proto", "")
    scheme = told if told in ("http", "https") else request.url.scheme
    return f"{scheme}://{request.headers.get('host') or request.url.netloc}/v1"


def _key(scope: Scope) -> str:
    """The key of an episode that a request brings, in the header of OpenAI's clients or of Anthropic's; "": none."""
    headers = dict(scope["headers"])
    scheme, _, key = headers.get(b"authorization", b"").partition(b" ")
    given: bytes = key if scheme.lower() == b"bearer" else headers.get(b"x-api-key", b"")
    return given.decode("latin-1").strip()


def _no_route(request: Request, error: Exception) -> Response:
    assert isinstance(error, HTTPException)
    said = f"path={request.method} {request.url.path[:200]} {error.detail}; see docs/protocol.md"
    return json_reply(Failure(said, "SwarmError"), error.status_code)
