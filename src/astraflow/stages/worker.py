"""The worker of a stage: lease rows, let the stage add its columns, hand them in, again.

```
 lease (long poll) ─► stage.run(rows) ─► columns ─► the rows that came meanwhile ...   ─► leave: the run is over
   └► next lease ...    │ raises: entry by entry; those that fail are reported and offered again
 signs of life go out in the background while the stage works
```

One lease is ahead: it is asked for as soon as the one before is answered, so that the stage does not wait for rows.
A service that restarts, or whose disk is full, is waited for: every request is idempotent. SIGTERM: rows that are held
are given back. `kill -9`: they are offered again after `stages.*.lease_s`.
"""

from __future__ import annotations

import contextlib
import json
import logging
import threading
import time
import uuid
from collections.abc import Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor

import msgspec
import pyarrow as pa

from astraflow.config.load import config_from_json
from astraflow.config.stages import TASK_COLUMN, Kind
from astraflow.contracts import Stage
from astraflow.dataflow.client import DataflowClient
from astraflow.errors import Problem, SchemaError, WireError
from astraflow.observe.process import settle_memory, stop_signals
from astraflow.stages.context import StageRun, build_stage
from astraflow.wire import messages as m
from astraflow.wire.codec import ADDED_TYPES, added_schema, fitted
from astraflow.wire.patience import FIRST_ANSWER_S, RETRY_S, Stopped, ask_patiently

POLL_S = 2.0
_BROKEN_LEASES = 2  # then the code of the stage is wrong for good; its rows have attempts left for a mended one
Entries = Sequence[m.StageLease]
log = logging.getLogger(__name__)


def run_stage(dataflow: str, name: str, *, threads: int = 0, token: str | None = None) -> None:
    """Work for stage `name` of the run served at `dataflow`, until the run is over or SIGTERM comes.

    Raises: AstraFlowError: no such stage, options that it refuses, a service that does not answer or refuses us.
    """
    with contextlib.ExitStack() as stack:
        stop = stack.enter_context(stop_signals())
        client = DataflowClient(dataflow, token, give_up_s=RETRY_S)
        stack.callback(client.close)
        try:
            reply = ask_patiently(client.run, stop, FIRST_ANSWER_S)
            config = config_from_json(msgspec.json.encode(reply.config))
            run = StageRun(config, name, threads=threads, token=token, stop=stop)
            stack.callback(run.close)
            stage = build_stage(run)
            stack.callback(stage.close)
            settle_memory()
            if not reply.finished:
                Worker(client, run, stage).work(DataflowClient(dataflow, token, give_up_s=RETRY_S))
        except Stopped:  # while it waited
            return


class Worker:
    """One worker of one stage."""

    def __init__(self, client: DataflowClient, run: StageRun, stage: Stage) -> None:
        self._client, self._run, self._stage = client, run, stage
        self._name, self._rows = run.name, run.config.stages[run.name].rows
        self._id = f"{run.name}-{uuid.uuid4().hex[:12]}"
        self._stats = {"rows": 0.0, "failed": 0.0, "refused": 0.0, "busy_s": 0.0, "wait_s": 0.0}
        self._lease_s = run.config.stages[run.name].lease_s
        self._broken: SchemaError | None = None  # what the stage did last to no avail
        self._num_broken = 0  # leases in a row of which nothing had the columns that the stage says it adds

    def work(self, pulse: DataflowClient) -> None:
        """Until the run is over or the stop signal comes. `pulse`: a client of its own for signs of life."""
        with self._signs_of_life(pulse):
            try:
                with ThreadPoolExecutor(1, f"lease-{self._name}") as ahead:  # a lease after we left would be lost
                    self._serve_all(ahead)
            finally:
                with contextlib.suppress(WireError):  # they are offered again after lease_s anyway
                    self._client.stage_leave(self._name, self._id)

    def stats(self) -> dict[str, float]:
        """What the worker and its stage counted."""
        return {**self._stats, **self._run.stats}

    def _serve_all(self, ahead: ThreadPoolExecutor) -> None:
        coming = ahead.submit(self._lease)
        while not self._run.stop.is_set():
            begin = time.monotonic()
            header, rows = coming.result()
            self._stats["wait_s"] += time.monotonic() - begin
            self._run.hear(header.versions)
            if header.finished and not header.leases:
                log.info("the run is over")
                return
            if self._run.stop.is_set():
                return
            coming = ahead.submit(self._lease)
            if header.leases:
                self._serve(header, rows)

    def _lease(self) -> tuple[m.StageRows, pa.Table]:
        request_id = uuid.uuid4().hex  # a request whose answer is lost is asked again, and gets the same rows
        return ask_patiently(
            lambda: self._client.stage_lease(
                self._name, self._id, self._rows, wait_s=POLL_S, request_id=request_id, stats=self.stats()
            ),
            self._run.stop,
        )

    def _serve(self, header: m.StageRows, rows: pa.Table) -> None:
        begin = time.monotonic()
        rows = _with_tasks(header.leases, rows) if TASK_COLUMN in self._stage.needs else rows
        self._broken = None
        good, columns, failed = self._columns(header.leases, rows)
        self._stats["busy_s"] += time.monotonic() - begin
        self._stats["rows"] += columns.num_rows if columns is not None else 0
        self._stats["failed"] += len(failed)
        if self._run.stop.is_set():
            return  # what it made after a stop may be cut short
        names = {lease.entry_id for lease in good}
        answer = m.ColumnsHeader(
            worker_id=self._id,
            request_id=uuid.uuid4().hex,
            leases=[(lease.entry_id, lease.attempt) for lease in good],
            row_ids=[row_id for row_id in header.row_ids if row_id.rpartition(":")[0] in names],
            failed=[(lease.entry_id, lease.attempt, text) for lease, text in failed],
        )
        self._hand_in(answer, columns if columns is not None else self._no_columns())
        self._num_broken = self._num_broken + 1 if self._broken is not None and not good else 0
        if self._broken is not None and self._num_broken >= _BROKEN_LEASES:
            raise Problem(self._broken.thing, self._broken.value, self._broken.rule, self._broken.fix) from self._broken

    def _columns(
        self, leases: Entries, rows: pa.Table
    ) -> tuple[list[m.StageLease], pa.Table | None, list[tuple[m.StageLease, str]]]:
        """Entries that worked with their columns, and those that did not with the reason."""
        try:
            columns = self._stage.run(rows)
            if isinstance(columns, pa.Table):
                columns = fitted(columns, added_schema(self._stage.adds))
            check_added(f"stages.{self._name}.run", columns, self._stage.adds, rows.num_rows)
            return list(leases), columns, []
        except Exception as error:
            self._broken = error if isinstance(error, SchemaError) else None
            log.warning("stage %s failed on %d rows: %s", self._name, rows.num_rows, error, exc_info=len(leases) == 1)
            if len(leases) == 1:
                return [], None, [(leases[0], f"{type(error).__name__}: {error}")]
        good, tables, failed, start = [], [], [], 0
        for lease in leases:  # one of them is the cause; the others need not suffer for it
            ok, columns, bad = self._columns([lease], rows.slice(start, lease.num_rows))
            start += lease.num_rows
            good += ok
            failed += bad
            tables += [columns] if columns is not None else []
        return good, pa.concat_tables(tables).combine_chunks() if tables else None, failed

    def _hand_in(self, header: m.ColumnsHeader, columns: pa.Table) -> None:
        try:
            results = ask_patiently(lambda: self._client.stage_columns(self._name, header, columns), self._run.stop)
        except WireError as error:
            if error.status != 422:
                raise
            self._stats["refused"] += len(header.leases)
            log.error("stage %s: %s", self._name, error)
            return
        refused = {entry_id: text for entry_id, text in results.items() if text != "accepted"}
        self._stats["refused"] += len(refused)
        for text in list(refused.values())[:3]:
            log.warning("stage %s: %s", self._name, text)

    def _no_columns(self) -> pa.Table:
        return added_schema(self._stage.adds).empty_table()

    @contextlib.contextmanager
    def _signs_of_life(self, client: DataflowClient) -> Iterator[None]:
        ended = threading.Event()

        def beat() -> None:
            while not ended.wait(self._lease_s / 4):
                try:
                    client.stage_lease(self._name, self._id, 0, stats=self.stats())
                except WireError as error:  # the main thread asks the same service, and says what is wrong
                    log.debug("sign of life: %s", error)

        thread = threading.Thread(target=beat, name=f"pulse-{self._name}", daemon=True)
        thread.start()
        try:
            yield
        finally:
            ended.set()
            client.close()
            thread.join(RETRY_S)


def check_added(thing: str, columns: object, adds: Mapping[str, Kind], num_rows: int) -> None:
    """What `Stage.run` gave for `num_rows` rows is a table with the columns of `Stage.adds`.

    Raises: SchemaError: it is not. The values are checked by the dataflow service.
    """
    promised = ", ".join(f"{name}: {ADDED_TYPES[kind]}" for name, kind in adds.items())
    if not isinstance(columns, pa.Table):
        raise SchemaError(thing, type(columns).__name__, "must be a pyarrow.Table", f"return one with {promised}")
    if sorted(columns.column_names) != sorted(adds):
        raise SchemaError(thing, columns.column_names, f"must have the columns {list(adds)}", "change run, or adds")
    for name, kind in adds.items():
        if (got := columns.schema.field(name).type) != ADDED_TYPES[kind]:
            raise SchemaError(
                f"{thing} {name}", str(got), f"must be {ADDED_TYPES[kind]}", "it is never cast; convert it"
            )
    if columns.num_rows != num_rows:
        raise SchemaError(
            thing,
            f"{columns.num_rows} rows",
            f"must be {num_rows}",
            "return one for each that was given, in their order",
        )


def _with_tasks(leases: Entries, rows: pa.Table) -> pa.Table:
    """The rows with the fields of their task as JSON text."""
    texts = [json.dumps(lease.fields) for lease in leases for _ in range(lease.num_rows)]
    return rows.append_column(TASK_COLUMN, pa.array(texts, pa.string()))
