"""A small worker of EchoStage that keeps every rule, or breaks the one that is named: python stage.py URL [FAULT]."""

from __future__ import annotations

import signal
import sys
import time
import uuid

import pyarrow as pa
from participant import Participant

from astraflow.wire import messages as m
from astraflow.wire.codec import read_stream, write_stream

STAGE = "echo"


class Worker(Participant):
    def __init__(self, url: str, fault: str) -> None:
        super().__init__(url, fault)
        self.id, self.stopping = f"w-{uuid.uuid4().hex[:8]}", False

    def lease(self) -> tuple[m.StageRows, pa.Table] | None:
        request_id = "always" if self.fault == "same_request_id" else uuid.uuid4().hex
        wait_s = 0.0 if self.fault == "busy" else 0.3
        body = m.StageRequest(worker_id=self.id, request_id=request_id, n=8, wait_s=wait_s)
        path = f"/stages/{STAGE}/leases"
        repeat = self.fault != "new_id_after_loss"
        got = self.patiently(lambda: self.http.get_bytes("POST", path, body, wait_s=1.0), repeat)
        return None if got is None else read_stream(got[1], m.StageRows)

    def hand_in(self, rows: m.StageRows, table: pa.Table) -> None:
        values = [[float(t) for t in ids] for ids in table.column("token_ids").to_pylist()]
        leases = [(x.entry_id, x.attempt) for x in rows.leases]
        ids = list(rows.row_ids)
        match self.fault:
            case "wrong_length":
                values[0] = values[0][:-1]
            case "drops_some":
                ids, leases, values = ids[1:], leases[1:], values[1:]
            case "reorders":
                ids = ids[::-1]
            case "foreign":
                leases = [("actor/train/0/77/0", 1), *leases]
        column = pa.array(values, pa.list_(pa.float64() if self.fault == "wrong_type" else pa.float32()))
        columns = {"echo": column}
        if self.fault == "extra_column":
            columns["more"] = column
        if not leases:
            return
        header = m.ColumnsHeader(worker_id=self.id, request_id=uuid.uuid4().hex, leases=leases, row_ids=ids)
        for _ in range(2 if self.fault == "twice" else 1):
            header.request_id = uuid.uuid4().hex
            self.post(memoryview(write_stream(header, pa.table(columns))))

    def post(self, body: memoryview) -> None:
        path, repeat = f"/stages/{STAGE}/columns", self.fault != "forgets_lost_columns"
        self.patiently(lambda: self.http.post_stream(path, [body], m.ColumnsReply), repeat)

    def live(self) -> None:
        while not self.stopping:
            got = self.lease()
            if got is None:
                continue
            header, table = got
            if header.leases:
                self.hand_in(header, table)
            elif header.finished and self.fault != "ignores_finished":
                break
            elif header.finished:
                time.sleep(0.05)
        if self.fault != "no_leave":
            self.patiently(lambda: self.http.json("DELETE", f"/stages/{STAGE}/workers/{self.id}", None, m.Ok))


if __name__ == "__main__":
    worker = Worker(sys.argv[1], sys.argv[2] if len(sys.argv) > 2 else "")
    signal.signal(signal.SIGTERM, lambda *_: setattr(worker, "stopping", True))
    worker.live()
