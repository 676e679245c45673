"""A stage of one's own: plain Python, urllib, and pyarrow for the columns. It makes the reward out of the tokens.

    cd examples
    astraflow dataflow digits.toml --port 7700 --stages.digits.type=custom_stage:Digits --stages.digits.workers=0 &
    python custom_stage.py http://127.0.0.1:7700 digits

Start as many as you like: each takes what waits, so a fast one takes more. With a stage in Python there is less to do:
give the class a method `run`, and `astraflow stage` is the worker (docs/data-algorithms.md).
"""

import http.client
import json
import os
import signal
import sys
import threading
import time
import urllib.error
import urllib.request
import uuid

import pyarrow as pa

HEADERS = {"x-astraflow-protocol": "1"}
if os.environ.get("ASTRAFLOW_TOKEN"):
    HEADERS["authorization"] = "Bearer " + os.environ["ASTRAFLOW_TOKEN"]
GIVE_UP_S = 120.0
FIRST_DIGIT, LAST_DIGIT = 3, 12  # token ids of tiny-char


class Digits:
    """What the run file names: the columns that the stage reads, and those that it adds."""

    needs = ("token_ids", "loss_mask")
    adds = {"reward": "reward"}  # noqa: RUF012


def reward(token_ids, loss_mask):
    """Share of digits among the sampled tokens."""
    sampled = [token for token, was_sampled in zip(token_ids, loss_mask, strict=True) if was_sampled]
    return sum(FIRST_DIGIT <= token <= LAST_DIGIT for token in sampled) / max(1, len(sampled))


def fetch(url, method, path, body=None, wait_s=0.0):
    """One request; sent again while nobody answers, or the service stops or has a full disk: all are idempotent."""
    arrow = isinstance(body, bytes)
    headers = {**HEADERS, "content-type": "application/vnd.apache.arrow.stream" if arrow else "application/json"}
    data = body if arrow or body is None else json.dumps(body).encode()
    deadline = time.monotonic() + GIVE_UP_S
    while True:
        pause_s = 0.2
        try:
            request = urllib.request.Request(url + path, data, headers, method=method)
            with urllib.request.urlopen(request, timeout=30 + wait_s) as answer:
                return answer.read()
        except urllib.error.HTTPError as error:
            pause_s = float(error.headers.get("Retry-After", pause_s))
            if error.code not in (503, 507) or time.monotonic() > deadline:
                raise RuntimeError(error.code, json.loads(error.read())["error"]) from error
        except (OSError, http.client.HTTPException) as error:  # nobody there, or the answer was cut
            if time.monotonic() > deadline:
                raise RuntimeError(f"{url} did not answer for {GIVE_UP_S} s") from error
        threading.Event().wait(pause_s)


def lease(url, stage, worker_id):
    """What is leased, and its rows as dicts."""
    body = {"worker_id": worker_id, "request_id": uuid.uuid4().hex, "n": 64, "wait_s": 5.0}
    with pa.ipc.open_stream(fetch(url, "POST", f"/stages/{stage}/leases", body, wait_s=5.0)) as reader:
        table = reader.read_all()
    return json.loads(table.schema.metadata[b"astraflow.header"]), table.to_pylist()


def hand_in(url, stage, worker_id, header, rewards):
    """The added column, one row for each that was leased."""
    head = {
        "worker_id": worker_id, "request_id": uuid.uuid4().hex, "row_ids": header["row_ids"],
        "leases": [[x["entry_id"], x["attempt"]] for x in header["leases"]],
    }  # fmt: skip
    table = pa.table({"reward": pa.array(rewards, pa.float32())})
    table = table.replace_schema_metadata({"astraflow.header": json.dumps(head)})
    sink = pa.BufferOutputStream()
    with pa.ipc.new_stream(sink, table.schema) as writer:
        writer.write_table(table)
    fetch(url, "POST", f"/stages/{stage}/columns", sink.getvalue().to_pybytes())


def main(url, stage):
    worker_id, stop = f"custom-{uuid.uuid4().hex[:12]}", threading.Event()
    signal.signal(signal.SIGTERM, lambda *_: stop.set())
    while not stop.is_set():
        header, rows = lease(url, stage, worker_id)
        if header["leases"]:
            rewards = [reward(row["token_ids"], row["loss_mask"]) for row in rows]
            hand_in(url, stage, worker_id, header, rewards)
        elif header["finished"]:
            break
    fetch(url, "DELETE", f"/stages/{stage}/workers/{worker_id}")


if __name__ == "__main__":
    main(sys.argv[1].rstrip("/"), sys.argv[2])
