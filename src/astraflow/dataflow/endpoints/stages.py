"""Requests of the workers of stages.

```
 lease:   machine says which entries ─► their columns out of the segments ─► Arrow
 columns: Arrow ─► door (row by row) ─► segment ─► machine: entries done, groups go on
```
"""

from __future__ import annotations

from starlette.requests import Request
from starlette.responses import Response
from starlette.routing import Route

from astraflow.config.stages import TASK_COLUMN, StagePlan
from astraflow.dataflow.endpoints.asking import check_alive, deadline_in, drop_damaged, refusals, wait_for
from astraflow.dataflow.machine import commands as c
from astraflow.dataflow.machine.readers.stages import topic
from astraflow.dataflow.machine.records import StagedEntry
from astraflow.dataflow.shell import Shell
from astraflow.dataflow.storage.columns import staged_rows, token_counts
from astraflow.dataflow.storage.door import Refused, check_columns
from astraflow.dataflow.storage.segments import DamagedRows
from astraflow.wire import messages as m
from astraflow.wire.app import StreamReply, json_reply, path_id, read_json, read_stream_body
from astraflow.wire.codec import added_schema, fitted, read_stream, stream_pieces, write_stream
from astraflow.wire.local import Body


class StageEndpoints:
    """One method per request."""

    def __init__(self, shell: Shell) -> None:
        self._shell, self._machine = shell, shell.machine

    def routes(self) -> list[Route]:
        """The routes of all of them."""
        return [
            Route("/stages/{stage}/leases", self.lease, methods=["POST"]),
            Route("/stages/{stage}/columns", self.columns, methods=["POST"]),
            Route("/stages/{stage}/workers/{worker_id}", self.leave, methods=["DELETE"]),
        ]

    async def lease(self, request: Request) -> Response:
        """StageRequest -> Arrow(StageRows)."""
        body = await read_json(request, m.StageRequest)
        plan = self._plan(request)
        stage, worker = self._machine.state.stages[plan.name], body.worker_id
        deadline = deadline_in(body.wait_s)
        given: list[tuple[str, int]] = []
        while True:
            check_alive(self._shell)
            seen = self._machine.live.hear_worker(plan.name, worker, self._shell.now())
            seen.stats = body.stats or seen.stats
            known = stage.workers.get(worker)
            again = known is not None and known.last_lease == body.request_id
            if body.n > 0 and (stage.pending or again):
                given = await self._shell.submit(c.LeaseRows(plan.name, worker, body.request_id, body.n))
            if given or body.n <= 0 or self._machine.finished:
                break
            if not await wait_for(self._shell, topic(plan.name), deadline):
                break
        while True:
            try:
                return self._rows(request, plan, worker, given)
            except DamagedRows as error:
                await drop_damaged(self._shell, error)

    def _rows(self, request: Request, plan: StagePlan, worker: str, given: list[tuple[str, int]]) -> Response:
        found = [(e, a, entry) for e, a in given if (entry := self._machine.stages.held(plan.name, worker, e, a))]
        needs = [name for name in plan.needs if name != TASK_COLUMN]
        entries = [entry for *_, entry in found]
        rows = staged_rows(entries, needs, self._machine.state.puts, self._shell.segments.read)
        found = [found[i] for i in rows.order]
        header = m.StageRows(
            leases=[self._lease(plan, *x) for x in found],
            row_ids=[f"{e}:{i}" for e, _, entry in found for i in range(len(entry.part.rows))],
            lease_s=plan.lease_s,
            versions=self._machine.leases.versions(),
            finished=self._machine.finished,
        )
        return StreamReply(stream_pieces(header, rows.table))

    def _lease(self, plan: StagePlan, entry_id: str, attempt: int, entry: StagedEntry) -> m.StageLease:
        fields = None
        if TASK_COLUMN in plan.needs:
            source, _, row, _ = entry_id.removeprefix(f"{entry.part.policy}/").rsplit("/", 3)
            fields = self._machine.context.fields(source, int(row))
        return m.StageLease(entry_id=entry_id, attempt=attempt, num_rows=len(entry.part.rows), fields=fields)

    async def columns(self, request: Request) -> Response:
        """Arrow(ColumnsHeader) -> ColumnsReply."""
        with await read_stream_body(request) as body:
            while True:
                try:
                    return json_reply(m.ColumnsReply(await self._keep(self._plan(request), body)))
                except DamagedRows as error:
                    await drop_damaged(self._shell, error)

    async def _keep(self, plan: StagePlan, body: Body) -> dict[str, str]:
        header, sent = read_stream(body.view, m.ColumnsHeader)
        table = fitted(sent, added_schema(plan.adds))
        shell, machine = self._shell, self._machine
        machine.live.hear_worker(plan.name, header.worker_id, shell.now())
        checked = check_columns(
            plan,
            header,
            table,
            lambda entry_id, attempt: machine.stages.held(plan.name, header.worker_id, entry_id, attempt),
            lambda entries: token_counts(entries, machine.state.puts, shell.segments.read),
        )
        if isinstance(checked, Refused):
            leases = [*header.leases, *((e, a) for e, a, _ in header.failed)]
            bad = [c.EntryColumns(e, a, [], None, checked.problem) for e, a in dict(leases).items()]
            await shell.submit(c.AddColumns(plan.name, header.worker_id, header.request_id, None, bad))
            raise checked.error
        good = any(not x.problem for x in checked)
        kept = body if table is sent else Body(memoryview(write_stream(header, table)))
        put = shell.segments.store(kept) if good else None  # no await until it is submitted
        command = c.AddColumns(plan.name, header.worker_id, header.request_id, put, checked)
        results: dict[str, str] = await shell.submit(command)
        return results

    async def leave(self, request: Request) -> Response:
        """-> Ok."""
        plan = self._plan(request)
        await self._shell.submit(c.LeaveStage(plan.name, path_id(request, "worker_id")))
        return json_reply(m.Ok())

    def _plan(self, request: Request) -> StagePlan:
        with refusals():
            return self._machine.stages.plan(request.path_params["stage"])
