"""The dataflow service over HTTP: every request of `wire.messages`, and nothing that decides.

```
 request ─► check the body ─► command ─► shell (journal, machine) ─► reply
              rows of episodes go to a segment first; rows of a batch come from there
```
"""

from __future__ import annotations

import asyncio
import logging
import signal
import socket
from collections.abc import AsyncIterator, Callable, Mapping
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import msgspec
import uvloop
from starlette.applications import Starlette
from starlette.requests import Request
from starlette.responses import Response, StreamingResponse
from starlette.routing import Route

from astraflow.config.schema import RunConfig
from astraflow.contracts import Source
from astraflow.dataflow.endpoints.asking import check_alive, check_run, deadline_in, drop_damaged, refusals, wait_for
from astraflow.dataflow.endpoints.consumers import ConsumerEndpoints
from astraflow.dataflow.endpoints.refused import Refused
from astraflow.dataflow.endpoints.relays import Relays
from astraflow.dataflow.endpoints.stages import StageEndpoints
from astraflow.dataflow.endpoints.urls import check_base, check_stores
from astraflow.dataflow.machine import commands as c
from astraflow.dataflow.machine.queues import batch_id
from astraflow.dataflow.machine.records import Batch, PolicyState
from astraflow.dataflow.shell import Shell
from astraflow.dataflow.storage.batches import batch_rows, rows_table
from astraflow.dataflow.storage.commits.rows import Known, episode_commits, row_facts
from astraflow.dataflow.storage.segments import DamagedRows
from astraflow.dataflow.storage.shared import share_batch, worth_sharing
from astraflow.dataflow.views.status import journal_status, prometheus_text, status
from astraflow.observe.metrics import CONTENT_TYPE
from astraflow.observe.process import settle_memory
from astraflow.types import BatchHeader, Task
from astraflow.wire import messages as m
from astraflow.wire.app import (
    HttpError,
    StreamReply,
    bind,
    check_bind,
    create_app,
    json_reply,
    path_id,
    read_json,
    read_stream_body,
    serve,
    shares_files,
)
from astraflow.wire.codec import TRAJECTORY_SCHEMA, fitted, read_stream, stream_pieces, write_stream
from astraflow.wire.local import Body

log = logging.getLogger("astraflow.dataflow")
_WRONG = "weights_wrong"  # counted by a node
_MOST_RANKS = 1024  # data-parallel ones: their shares are made in the event loop


class _Endpoints:
    """One method per request."""

    def __init__(self, shell: Shell, refused: Refused) -> None:
        self._shell, self._machine, self._refused = shell, shell.machine, refused
        self._relays = Relays(shell)

    def routes(self) -> list[Route]:
        return [  # tried one after the other: what is asked most often comes first
            Route("/episodes", self.commit, methods=["POST"]),
            Route("/leases", self.lease, methods=["POST"]),
            Route("/policies/{policy}/batches", self.batch, methods=["POST"]),
            Route("/policies/{policy}/batches/{batch_id:path}/ack", self.ack, methods=["POST"]),
            Route("/run", self.run),
            Route("/nodes", self.join, methods=["POST"]),
            Route("/nodes/{node_id}/heartbeat", self.heartbeat, methods=["POST"]),
            Route("/nodes/{node_id}/returns", self.returns, methods=["POST"]),
            Route("/nodes/{node_id}", self.drain, methods=["DELETE"]),
            Route("/policies/{policy}/resume", self.resume, methods=["POST"]),
            Route("/policies/{policy}/heartbeat", self.trainer_heartbeat, methods=["POST"]),
            Route("/policies/{policy}/checkpoints", self.checkpoint, methods=["POST"]),
            *StageEndpoints(self._shell).routes(),
            *ConsumerEndpoints(self._shell).routes(),
            *self._relays.routes(),
            Route("/sources/{source}/rows/{row:int}", self.row),
            Route("/status", self.status),
            Route("/metrics", self.prometheus),
            Route("/events", self.events),
            Route("/openapi.json", self.openapi),
        ]

    async def run(self, request: Request) -> Response:
        config = self._shell.config
        finished = self._machine.finished
        return json_reply(m.RunReply(config.run.name, self._shell.run_id, config.model_dump(mode="json"), finished))

    async def join(self, request: Request) -> Response:
        body = await read_json(request, m.Join)
        check_run(self._shell, body.run_id)
        await self._shell.submit(c.JoinNode(body))
        return json_reply(m.JoinReply(self._shell.config.dataflow.heartbeat_s, self._relays.versions()))

    async def heartbeat(self, request: Request) -> Response:
        node_id = request.path_params["node_id"]
        body = await read_json(request, m.Heartbeat)
        for offer in body.offers.values():
            check_base(offer.url)
        leases = self._machine.leases
        with refusals():
            cancelled = leases.unwanted(node_id, body.playing)
        seen = self._machine.live.hear_node(node_id, self._shell.now())
        if body.stats.get(_WRONG, 0.0) > seen.stats.get(_WRONG, 0.0):
            log.warning("node %s computes with other weights than it says (%s); see its log", node_id, body.versions)
        seen.stats, seen.versions, seen.notes, seen.offers = body.stats, body.versions, body.notes, body.offers
        offers = self._machine.live.offers(node_id, body.lacks)
        return json_reply(m.HeartbeatReply(self._relays.versions(), cancelled, self._machine.finished, offers))

    async def drain(self, request: Request) -> Response:
        await self._shell.submit(c.DrainNode(path_id(request, "node_id")))
        return json_reply(m.Ok())

    async def returns(self, request: Request) -> Response:
        body = await read_json(request, m.Returned)
        await self._shell.submit(c.ReturnEpisodes(path_id(request, "node_id"), body.leases))
        return json_reply(m.Ok())

    async def lease(self, request: Request) -> Response:
        body = await read_json(request, m.LeaseRequest)
        leases = self._machine.leases
        deadline = deadline_in(body.wait_s)
        given: list[Any] = []
        while True:
            check_alive(self._shell)
            with refusals():
                node = leases.node(body.node_id)
            self._machine.live.hear_node(body.node_id, self._shell.now())
            again = node.last_request == body.request_id
            if body.n > 0 and (again or leases.available):
                given = await self._shell.submit(c.LeaseEpisodes(body.node_id, body.request_id, body.n))
                check_alive(self._shell)  # the command itself may have ended the run: nobody would wake this request
                if not given and not again and leases.available and not self._machine.finished:
                    continue  # one command looks at so many rows and no more: go on where it stopped
            if given or self._machine.finished or not await wait_for(self._shell, "leases", deadline):
                break
        return json_reply(m.LeaseReply(given, self._relays.versions(), self._machine.finished))

    async def commit(self, request: Request) -> Response:
        with await read_stream_body(request) as body:
            header, sent = read_stream(body.view, m.EpisodesHeader)
            table = fitted(sent, TRAJECTORY_SCHEMA)
            leases, most = self._machine.leases, self._shell.config.dataflow.max_episode_tokens
            known = Known(leases.newest(), self._machine.state.groups, most, self._machine.context.plan.version_in)
            facts = row_facts(header, table, known)
            kept = body if table is sent else Body(memoryview(write_stream(header, table)))
            put = self._shell.segments.store(kept) if table.num_rows else None  # no await until it is submitted
        commands: list[c.Command] = [c.CommitEpisodes(header.node_id, put, episode_commits(header, facts, put))]
        more = header.next
        if more is not None and self._gives_more(header.node_id, more):
            commands.append(c.LeaseEpisodes(header.node_id, more.request_id, more.n))
        results, *given = await self._shell.submit_all(commands)
        if isinstance(results, Exception):
            raise results
        reply = m.EpisodesReply(results)
        if more is not None:
            # Whoever cannot be served hears why when it asks for nothing else.
            reply.leases = [lease for leases in given if not isinstance(leases, Exception) for lease in leases]
            reply.versions, reply.finished = self._relays.versions(), self._machine.finished
        return json_reply(reply)

    def _gives_more(self, node_id: str, more: m.NextLeases) -> bool:
        node = self._machine.state.nodes.get(node_id)
        if more.n <= 0 or node is None or self._machine.state.failure is not None:
            return False
        return node.last_request == more.request_id or self._machine.leases.available

    async def resume(self, request: Request) -> Response:
        body = await read_json(request, m.Resume)
        check_run(self._shell, body.run_id)
        check_stores(body.urls)
        return json_reply(await self._shell.submit(c.ResumePolicy(request.path_params["policy"], body)))

    async def trainer_heartbeat(self, request: Request) -> Response:
        body = await read_json(request, m.TrainerHeartbeat)
        check_stores(body.stores)
        name, _ = self._trainer(request, body.trainer_id)
        seen = self._machine.live.hear_trainer(name, self._shell.now())
        seen.stats, seen.stores = body.stats, body.stores
        return json_reply(m.Ok())

    async def batch(self, request: Request) -> Response:
        body = await read_json(request, m.BatchRequest)
        if not 0 <= body.rank < body.ranks <= _MOST_RANKS:
            raise HttpError(
                422, f"rank={body.rank} must be >= 0 and below ranks={body.ranks}, at most {_MOST_RANKS}; number ranks "
                "from 0"
            )  # fmt: skip
        deadline = deadline_in(body.wait_s)
        while True:
            check_alive(self._shell)
            name, policy = self._trainer(request, body.trainer_id)
            self._machine.live.hear_trainer(name, self._shell.now())
            early = body.rank > 0 and body.version == policy.latest + 1  # rank 0 has not acknowledged yet
            over = body.version >= self._machine.context.plan.policies[name].steps
            if over or (not early and self._machine.queues.ready(name, body.version)):
                grant = await self._shell.submit(c.TakeBatch(name, body.trainer_id, body.version))
                if grant is not None and grant.step in policy.batches:
                    try:
                        return self._batch_reply(request, name, policy.batches[grant.step], body)
                    except DamagedRows as error:
                        await drop_damaged(self._shell, error)
                        continue
            if not await wait_for(self._shell, name, deadline):
                return Response(status_code=204)

    def _batch_reply(self, request: Request, name: str, batch: Batch, asked: m.BatchRequest) -> Response:
        header = BatchHeader(
            batch_id=batch_id(name, batch.step),
            policy=name,
            step=batch.step,
            num_groups=len(batch.groups),
            num_episodes=sum(len(g.entries) for g in batch.groups),
            replay=batch.acked,
            metrics=batch.metrics,
            rank=asked.rank,
            ranks=asked.ranks,
            num_rows=int(batch.metrics["batch/trajectories"]),
            num_sampled_tokens=int(batch.metrics["tokens/sampled"]),
        )
        branches = self._shell.config.policies[name].batch.branches
        rows = batch_rows(batch, self._machine.state.puts, asked.rank, asked.ranks, branches)
        if shares_files(request) and worth_sharing(rows):
            return json_reply(share_batch(header, rows, self._shell.segments))
        return StreamReply(stream_pieces(header, rows_table(rows, self._shell.segments.read)))

    async def ack(self, request: Request) -> Response:
        body = await read_json(request, m.Ack)
        path = request.path_params
        await self._shell.submit(c.AckBatch(path["policy"], path["batch_id"], body))
        return json_reply(m.Ok())

    async def checkpoint(self, request: Request) -> Response:
        body = await read_json(request, m.Checkpoint)
        await self._shell.submit(c.CoverBatches(request.path_params["policy"], body))
        return json_reply(m.Ok())

    async def row(self, request: Request) -> Response:
        source, row = request.path_params["source"], request.path_params["row"]
        rows = self._shell.sources.get(source)
        if rows is None:
            known = ", ".join(sorted(self._shell.sources))
            raise HttpError(404, f"source={source} names no source of the run; known: {known}")
        if row >= len(rows):
            raise HttpError(404, f"row={row} must be below {len(rows)}; {source} has no more rows")
        return json_reply(Task(source, row, 0, self._machine.context.fields(source, row)))

    async def status(self, request: Request) -> Response:
        shell = self._shell
        head = {
            "run": shell.config.run.name,
            "run_id": shell.run_id,
            "metrics_rows_waiting": shell.metrics.num_waiting,
            "refused": dict(self._refused.counts),
            "journal": journal_status(shell.journal, shell.compaction),
        }
        return json_reply({**head, **status(self._machine, shell.now())})

    async def prometheus(self, request: Request) -> Response:
        return Response(prometheus_text(self._machine, self._refused.counts), media_type=CONTENT_TYPE)

    async def openapi(self, request: Request) -> Response:
        from astraflow.wire.describe.operations import dataflow_document  # hardly ever asked for

        return json_reply(dataflow_document())

    async def events(self, request: Request) -> Response:
        return StreamingResponse(self._event_stream(), media_type="text/event-stream")

    async def _event_stream(self) -> AsyncIterator[bytes]:
        queue = self._shell.listen()
        try:
            yield b": connected\n\n"
            while not self._shell.stopping:
                try:
                    event = await asyncio.wait_for(queue.get(), self._shell.config.dataflow.heartbeat_s)
                except TimeoutError:
                    yield b": alive\n\n"
                    continue
                yield b"event: " + event.kind.encode() + b"\ndata: " + msgspec.json.encode(event.fields) + b"\n\n"
        finally:
            self._shell.unlisten(queue)

    def _trainer(self, request: Request, trainer_id: str) -> tuple[str, PolicyState]:
        name = request.path_params["policy"]
        with refusals():
            return name, self._machine.queues.current(name, trainer_id)


def create_dataflow_app(
    config: RunConfig,
    run_dir: Path,
    token: str | None,
    sources: Mapping[str, Source] | None = None,
    *,
    accept_damage: bool = False,
) -> Starlette:
    """The app of one run; recovers from `run_dir` at once. `app.state.shell.crashed` is set when a part of it dies.

    Raises: JournalError, SourceError: as `Shell`.
    """
    shell, refused = Shell(config, run_dir, sources, accept_damage=accept_damage), Refused()

    @asynccontextmanager
    async def lifespan(app: Starlette) -> AsyncIterator[None]:
        ticks = asyncio.create_task(shell.tick_forever(), name="tick")
        ticks.add_done_callback(lambda t: None if t.cancelled() else shell.end("tick", t.exception() or StoppedEarly()))
        try:
            yield
        finally:
            ticks.cancel()
            await asyncio.wait({ticks})
            shell.close()

    limit = config.dataflow.max_body_bytes
    app = create_app(
        _Endpoints(shell, refused).routes(), token=token, lifespan=lifespan, max_body_bytes=limit, inbox=shell.inbox,
        on_refused=refused.hear,
    )  # fmt: skip
    app.state.shell = shell
    return app


class StoppedEarly(RuntimeError):
    """A background task returned although the service goes on."""


async def serve_dataflow(
    app: Starlette, host: str, port: int, on_ready: Callable[[str], None], stop: asyncio.Event
) -> None:
    """Serve an app of `create_dataflow_app` until `stop` is set or a part of it dies.

    Raises: what the part died of.
    """
    try:
        sock = bind(host, port, "dataflow.port")
    except BaseException:
        app.state.shell.close()
        raise
    await _serve_on(app, sock, on_ready, stop)


async def _serve_on(app: Starlette, sock: socket.socket, on_ready: Callable[[str], None], stop: asyncio.Event) -> None:
    shell: Shell = app.state.shell
    halt = asyncio.Event()
    server = asyncio.create_task(serve(app, sock, on_ready, halt, bulk=True), name="http server")
    waits = {asyncio.create_task(stop.wait(), name="stop"), asyncio.create_task(shell.crashed.wait(), name="crash")}
    await asyncio.wait({server, *waits}, return_when=asyncio.FIRST_COMPLETED)
    for task in waits:
        task.cancel()
    shell.stop()
    halt.set()
    await server
    if shell.crash is not None:
        raise shell.crash


def run_service(
    config: RunConfig,
    run_dir: Path,
    sock: socket.socket,
    *,
    token: str | None,
    on_ready: Callable[[str], None],
    accept_damage: bool = False,
) -> None:
    """The process of `astraflow dataflow`: serves on a socket from `wire.app.bind` until SIGTERM or SIGINT.

    Raises: JournalError, SourceError: it cannot start. Anything else: a part died, named in a note.
    """
    check_bind(sock.getsockname()[0], token, "dataflow.host")

    async def main() -> None:
        stop = asyncio.Event()
        for number in (signal.SIGTERM, signal.SIGINT):
            asyncio.get_running_loop().add_signal_handler(number, stop.set)
        app = create_dataflow_app(config, run_dir, token, accept_damage=accept_damage)
        settle_memory()
        await _serve_on(app, sock, on_ready, stop)

    with asyncio.Runner(loop_factory=uvloop.new_event_loop) as runner:
        runner.run(main())
