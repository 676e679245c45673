"""Requests of further readers of what goes to training."""

from __future__ import annotations

from starlette.requests import Request
from starlette.responses import Response
from starlette.routing import Route

from astraflow.dataflow.endpoints.asking import check_there, deadline_in, drop_damaged, refusals, wait_for
from astraflow.dataflow.machine import commands as c
from astraflow.dataflow.machine.readers.consumers import topic
from astraflow.dataflow.machine.records import Batch
from astraflow.dataflow.shell import Shell
from astraflow.dataflow.storage.batches import batch_table
from astraflow.dataflow.storage.segments import DamagedRows
from astraflow.wire import messages as m
from astraflow.wire.app import StreamReply, json_reply, read_json
from astraflow.wire.codec import TRAINING_SCHEMA, stream_pieces

_MOST_GROUPS = 1024


class ConsumerEndpoints:
    """One method per request."""

    def __init__(self, shell: Shell) -> None:
        self._shell, self._machine = shell, shell.machine

    def routes(self) -> list[Route]:
        """The routes of all of them."""
        return [
            Route("/consumers/{consumer}/batches", self.batches, methods=["POST"]),
            Route("/consumers/{consumer}/ack", self.ack, methods=["POST"]),
        ]

    async def batches(self, request: Request) -> Response:
        """ConsumerRequest -> Arrow(ConsumerHeader). Reads, and changes nothing."""
        body = await read_json(request, m.ConsumerRequest)
        name, deadline = request.path_params["consumer"], deadline_in(body.wait_s)
        while True:
            check_there(self._shell)
            with refusals():
                consumer, log = self._machine.consumers.reader(name, body.policy)
            position = consumer.positions[body.policy]
            if position < log.end or self._machine.finished:
                break
            if not await wait_for(self._shell, topic(body.policy), deadline):
                break
        while True:
            try:
                return self._reply(body, name)
            except DamagedRows as error:
                await drop_damaged(self._shell, error)

    def _reply(self, body: m.ConsumerRequest, name: str) -> Response:
        consumer, log = self._machine.consumers.reader(name, body.policy)
        position = consumer.positions[body.policy]
        start = position - log.first
        groups = log.groups[start : start + max(1, min(body.n, _MOST_GROUPS))]
        header = m.ConsumerHeader(
            policy=body.policy,
            position=position,
            next=position + len(groups),
            group_ids=[g.group_id for g in groups],
            missed=consumer.missed.get(body.policy, 0),
            as_trained=not self._machine.queues.changes_batches(body.policy),
            finished=self._machine.finished and position + len(groups) == log.end,
        )
        table = TRAINING_SCHEMA.empty_table()
        if any(g.entries for g in groups):  # damaged ones have been taken out
            branches = self._shell.config.policies[body.policy].batch.branches
            puts, read = self._machine.state.puts, self._shell.segments.read
            table = batch_table(Batch(0, groups, {}), puts, read, branches=branches)
        return StreamReply(stream_pieces(header, table))

    async def ack(self, request: Request) -> Response:
        """ConsumerAck -> Ok."""
        body = await read_json(request, m.ConsumerAck)
        await self._shell.submit(c.AckRows(request.path_params["consumer"], body.policy, body.position))
        return json_reply(m.Ok())
