"""A small trainer that keeps every rule, or breaks the one that is named: python trainer.py URL DIR [FAULT]."""

from __future__ import annotations

import json
import sys
import threading
import time
import uuid
from pathlib import Path
from typing import Any

from participant import Participant

from astraflow.errors import WireError
from astraflow.testing.faults.fake_trainer import publish
from astraflow.types import BatchHeader
from astraflow.wire import messages as m
from astraflow.wire.client import HttpClient
from astraflow.wire.codec import read_stream

POLICY = "actor"


class Trainer(Participant):
    def __init__(self, url: str, place: Path, fault: str) -> None:
        super().__init__(url, fault)
        self.url, self.place = url, place
        self.id = "always" if fault == "same_trainer_id" else uuid.uuid4().hex[:8]
        self.saved, self.weights = place / "checkpoint.json", place / "weights"
        self.version = json.loads(self.saved.read_text()) if self.saved.exists() else 0
        if fault == "resumes_at_0":
            self.version = 0
        if fault == "starts_at_1" and not self.saved.exists():
            self.version = 1

    def post(self, path: str, body: Any, repeat: bool = True) -> Any:
        return self.patiently(
            lambda: self.http.json("POST", f"/policies/{POLICY}/{path}", body, dict[str, Any]), repeat
        )

    def resume(self) -> None:
        run = self.patiently(lambda: self.http.json("GET", "/run", None, m.RunReply))
        self.steps, self.every = run.config["run"]["steps"], run.config["run"]["checkpoint_every"]
        run_id = "other" if self.fault == "wrong_run" else run.run_id
        if self.fault != "publishes_late":
            publish(self.weights, POLICY, self.version)
        if self.fault == "never_resumes":
            return
        urls = (f"file://{self.weights.absolute() / POLICY}",)
        while True:
            body = m.Resume(trainer_id=self.id, version=self.version, urls=urls, run_id=run_id)
            if self.post("resume", body, self.fault != "new_id_after_loss") is not None:
                return
            self.id = uuid.uuid4().hex[:8]

    def beat(self) -> None:
        http = HttpClient(self.url, self.token, give_up_s=5.0)
        while True:
            time.sleep(0.2)
            body = m.TrainerHeartbeat(trainer_id=self.id)
            try:
                http.json("POST", f"/policies/{POLICY}/heartbeat", body, m.Ok)
            except WireError as error:
                if error.status in (401, 409, 410) and self.fault not in ("fights_back",):
                    return

    def batch(self) -> BatchHeader | None:
        ahead = 1 if self.fault == "asks_ahead" and self.version else 0
        body = m.BatchRequest(
            trainer_id=self.id, version=self.version + ahead, wait_s=0.0 if self.fault == "busy" else 0.5,
            ranks=2 if self.fault == "forgets_a_share" else 1,
        )  # fmt: skip
        path = f"/policies/{POLICY}/batches"
        repeat = self.fault != "skips_a_lost_batch"
        got = self.patiently(lambda: self.http.get_bytes("POST", path, body, wait_s=1.0), repeat)
        if got is None:
            self.version += 1
            return None
        return None if got[0] == 204 else read_stream(got[1], BatchHeader)[0]

    def step(self, header: BatchHeader) -> None:
        if header.replay and self.fault == "dies_on_replay":
            raise SystemExit(1)
        self.publish(header.step)
        version = header.step + (1 if self.fault == "acks_another" else 0)
        path = f"batches/{POLICY}/{version}/ack"
        body = m.Ack(trainer_id=self.id, version=version)
        for _ in range(2 if self.fault == "acks_twice" else 1):
            self.post(path, body, self.fault != "forgets_a_lost_ack")
        self.version = header.step
        if self.fault != "no_checkpoint" and (self.version % self.every == 0 or self.version == self.steps):
            self.checkpoint()

    def checkpoint(self) -> None:
        self.saved.write_text(json.dumps(self.version))
        version = self.version + (1 if self.fault == "covers_ahead" else 0)
        self.post("checkpoints", m.Checkpoint(trainer_id=self.id, version=version))

    def publish(self, version: int) -> None:
        if self.fault == "publishes_rarely" and version % 5:
            return
        publish(self.weights, POLICY, version)
        if self.fault == "changes_versions":
            manifest = self.weights / POLICY / str(version) / "manifest.json"
            manifest.write_text(json.dumps(json.loads(manifest.read_text()) | {"more": time.time()}))

    def live(self) -> None:
        self.resume()
        if self.fault != "no_heartbeat":
            threading.Thread(target=self.beat, daemon=True).start()
        while self.version < self.steps or self.fault == "ignores_410":
            try:
                header = self.batch()
                if header is not None:
                    self.step(header)
            except WireError as error:
                if error.status == 410 and self.fault == "ignores_410":
                    time.sleep(0.05)
                elif error.status == 410:
                    break
                elif self.fault == "fights_back" and "replaced" in str(error):
                    self.resume()
                else:
                    raise


if __name__ == "__main__":
    Trainer(sys.argv[1], Path(sys.argv[2]), sys.argv[3] if len(sys.argv) > 3 else "").live()
