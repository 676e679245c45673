"""Weight relays: who serves weights beside the trainers. Kept in memory only, as relays say it again all the time."""

from __future__ import annotations

import asyncio
from dataclasses import dataclass

from starlette.requests import Request
from starlette.responses import Response
from starlette.routing import Route

from astraflow.dataflow.endpoints.asking import check_run, check_there
from astraflow.dataflow.endpoints.urls import check_base
from astraflow.dataflow.shell import Shell
from astraflow.types import WeightVersion
from astraflow.wire import messages as m
from astraflow.wire.app import HttpError, json_reply, path_id, read_json

_MOST_RELAYS = 1024
_LONGEST_WAIT_S = 20.0
_LOOK_S = 0.02


@dataclass(frozen=True)
class Heard:
    """A relay that lives."""

    relay: m.Relay
    until: float  # of the shell's clock


class Relays:
    """`versions` is what nodes and relays are told: the trainers' stores, then those of live relays.

    An object store outlives its trainer: it is told of however long that is silent. A relay is not told of while what
    it has may be of another past: a new trainer goes on from a checkpoint, perhaps without the versions after it."""

    def __init__(self, shell: Shell) -> None:
        self._shell = shell
        self._heard: dict[str, Heard] = {}

    def routes(self) -> list[Route]:
        """The routes of all of them."""
        return [Route("/relays/{relay_id}", self.beat, methods=["POST"])]

    async def beat(self, request: Request) -> Response:
        """Relay -> RelayReply."""
        body, relay_id = await read_json(request, m.Relay), path_id(request, "relay_id")
        check_there(self._shell)
        check_run(self._shell, body.run_id)
        check_base(body.url)
        live = self.live()
        if relay_id not in live and len(live) >= _MOST_RELAYS:
            raise HttpError(422, f"relays={len(live)} are as many as one service tells of; end one")
        self._heard = live | {relay_id: Heard(body, self._shell.now() + self._shell.config.dataflow.dead_after_s)}
        await self._news(body)
        return json_reply(
            m.RelayReply(
                self._shell.config.dataflow.heartbeat_s, self.versions(but=relay_id), self._shell.machine.finished,
                {name: policy.trainer_id or "" for name, policy in self._shell.machine.state.policies.items()},
            )
        )  # fmt: skip

    async def _news(self, relay: m.Relay) -> None:
        """Until there is a version that the relay does not know, or the run is over, or its time is."""
        deadline = self._shell.now() + min(relay.wait_s, _LONGEST_WAIT_S)
        while self._shell.now() < deadline and not self._shell.machine.finished:
            if {name: v.version for name, v in self._shell.machine.leases.versions().items()} != relay.known:
                return
            await asyncio.sleep(_LOOK_S)

    def live(self) -> dict[str, Heard]:
        """Relays that were heard in time."""
        now = self._shell.now()
        return {relay_id: heard for relay_id, heard in self._heard.items() if heard.until > now}

    def versions(self, but: str = "") -> dict[str, WeightVersion]:
        """The newest version of every policy, and all stores that have it or will fetch it."""
        relays = [heard.relay for relay_id, heard in self.live().items() if relay_id != but]
        told = {}
        for name, newest in self._shell.machine.leases.versions().items():
            trainer = self._shell.machine.live.trainers.get(name)
            later = trainer.stores.items() if trainer is not None else ()
            there = [url for url, version in later if version >= newest.version]
            theirs = self._shell.machine.state.policies[name].trainer_id or ""
            sure = [relay.url.rstrip("/") for relay in relays if relay.holds.get(name, theirs) == theirs]
            urls = (*newest.urls, *there, *(f"{base}/weights/{name}" for base in sure))
            told[name] = WeightVersion(name, newest.version, urls)
        return told
