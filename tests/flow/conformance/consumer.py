"""A small consumer that keeps every rule, or breaks the one that is named: python consumer.py URL NAME DIR [FAULT]."""

from __future__ import annotations

import os
import sys
import time
from pathlib import Path

from participant import Participant

from astraflow.wire import messages as m
from astraflow.wire.codec import read_stream


class Reader(Participant):
    def __init__(self, url: str, name: str, place: Path, fault: str) -> None:
        super().__init__(url, fault)
        self.path, self.memory = f"/consumers/{name}", place / "position"
        self.policy = "other" if fault == "wrong_policy" else os.environ["ASTRAFLOW_POLICY"]

    def read(self) -> m.ConsumerHeader:
        wait_s = 0.0 if self.fault == "busy" else 0.3
        body = m.ConsumerRequest(policy=self.policy, n=2, wait_s=wait_s)
        got = self.patiently(
            lambda: self.http.get_bytes("POST", f"{self.path}/batches", body, wait_s=1.0),
            repeat=self.fault != "ends_when_a_read_is_lost",
        )
        return read_stream(got[1], m.ConsumerHeader)[0] if got is not None else sys.exit(1)

    def ack(self, position: int) -> None:
        self.memory.write_text(str(position))
        body = m.ConsumerAck(policy=self.policy, position=position)
        repeat = self.fault != "forgets_a_lost_ack"
        self.patiently(lambda: self.http.json("POST", f"{self.path}/ack", body, m.Ok), repeat)

    def live(self) -> None:
        if self.fault == "acks_from_memory" and self.memory.exists():
            self.ack(int(self.memory.read_text()))
        while True:
            header = self.read()
            over = header.finished and self.fault != "ignores_finished"
            if header.group_ids and self.fault == "leaves_the_last":
                self.ack(header.next - 1)
                time.sleep(0.05)
            elif header.group_ids:
                self.ack(header.next + (self.fault == "acks_ahead"))
            if over:
                return
            if header.finished:
                time.sleep(0.05)


if __name__ == "__main__":
    Reader(sys.argv[1], sys.argv[2], Path(sys.argv[3]), sys.argv[4] if len(sys.argv) > 4 else "").live()
