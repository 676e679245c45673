"""A rollout service of one's own: plain Python, urllib, and pyarrow for the columns. Nothing of AstraFlow is imported.

    cd examples
    astraflow dataflow digits.toml --port 7700 &
    astraflow trainer --dataflow http://127.0.0.1:7700 --policy actor --run-dir runs/digits &
    python custom_rollout.py http://127.0.0.1:7700

It plays the task of digits.toml in its own way: the question is the prompt, transformers samples, the reward is the
share of digits. What it must keep to is docs/protocol.md, which `astraflow conform rollout` checks.
"""

import http.client
import json
import os
import signal
import sys
import tempfile
import threading
import time
import urllib.error
import urllib.request
import uuid
from pathlib import Path

import pyarrow as pa
import torch
from transformers import AutoModelForCausalLM, AutoTokenizer

HEADERS = {"x-astraflow-protocol": "1"}
if os.environ.get("ASTRAFLOW_TOKEN"):
    HEADERS["authorization"] = "Bearer " + os.environ["ASTRAFLOW_TOKEN"]
GIVE_UP_S = 120.0
TOKENS = {"token_ids": pa.int32(), "loss_mask": pa.bool_(), "behavior_logprobs": pa.float32(), "versions": pa.int32(),
          "call_index": pa.int16()}  # fmt: skip
COLUMNS = {
    "episode_id": pa.string(), "attempt": pa.int32(), "group_id": pa.string(), "source": pa.string(),
    "row": pa.int64(), "epoch": pa.int32(), "policy": pa.string(), "branch": pa.int32(), "parent_branch": pa.int32(),
    "fork_at": pa.int32(), **{name: pa.list_(kind) for name, kind in TOKENS.items()}, "reward": pa.float32(),
    "rewards_per_call": pa.list_(pa.float32()), "finish_reason": pa.string(), "truncated": pa.bool_(),
}  # fmt: skip
SCHEMA = pa.schema([pa.field(name, kind, nullable=name == "reward") for name, kind in COLUMNS.items()])


class Refused(Exception):
    """An answer of 400 or above."""


def ask(url, method, path, body=None, wait_s=0.0):
    """Ask for JSON; `body`: JSON too, or the bytes of an Arrow stream."""
    return json.loads(fetch(url, method, path, body, wait_s))


def fetch(url, method, path, body=None, wait_s=0.0):
    """One request; sent again while nobody answers, or the service stops or has a full disk: all are idempotent."""
    content_type = "application/vnd.apache.arrow.stream" if isinstance(body, bytes) else "application/json"
    data = body if isinstance(body, bytes | None) else json.dumps(body).encode()
    request = urllib.request.Request(url + path, data, {**HEADERS, "content-type": content_type}, method=method)
    deadline = time.monotonic() + GIVE_UP_S
    while True:
        pause_s = 0.2
        try:
            with urllib.request.urlopen(request, timeout=30 + wait_s) as answer:
                return answer.read()
        except urllib.error.HTTPError as error:
            pause_s = float(error.headers.get("Retry-After", pause_s))
            if error.code not in (503, 507) or time.monotonic() > deadline:
                raise Refused(error.code, json.loads(error.read())["error"]) from error
        except (OSError, http.client.HTTPException) as error:  # nobody there, or the answer was cut
            if time.monotonic() > deadline:
                raise Refused(None, f"{url} did not answer for {GIVE_UP_S} s") from error
        threading.Event().wait(pause_s)


class Policy:
    """The newest published weights, and how they sample."""

    def __init__(self):
        self.version, self.model, self.tokenizer = -1, None, None

    def follow(self, newest):
        """Load `newest` (a WeightVersion) if it is newer than what is loaded."""
        if newest["version"] <= self.version:
            return
        base = next(url for url in newest["urls"] if url.startswith("http"))
        with tempfile.TemporaryDirectory() as place:
            manifest = ask(f"{base}/{newest['version']}", "GET", "/manifest.json")
            for part in [*manifest["parts"], *manifest["files"]]:
                (Path(place) / part["name"]).write_bytes(
                    fetch(f"{base}/{newest['version']}", "GET", "/" + part["name"])
                )
            self.model = AutoModelForCausalLM.from_pretrained(place).eval()
            self.tokenizer = AutoTokenizer.from_pretrained(place)
        self.version = newest["version"]

    @torch.no_grad()
    def sample(self, prompt_ids, sampling):
        """Token ids and their logprobs, one by one, at the temperature that was asked for."""
        ids, logprobs = list(prompt_ids), []
        for _ in range(sampling["max_tokens"]):
            logits = self.model(input_ids=torch.tensor([ids])).logits[0, -1] / sampling["temperature"]
            token = torch.multinomial(logits.softmax(-1), 1).item()
            ids.append(token)
            logprobs.append(logits.log_softmax(-1)[token].item())
            if token == self.model.config.eos_token_id:
                break
        return ids[len(prompt_ids) :], logprobs


def play(lease, policy):
    """One row: what was given, what was sampled, and the reward."""
    task = lease["task"]
    question = [{"role": "user", "content": task["fields"]["question"]}]
    prompt = policy.tokenizer.apply_chat_template(question)["input_ids"]
    sampled, logprobs = policy.sample(prompt, lease["sampling"]["actor"])
    given, new = len(prompt), len(sampled)
    text = policy.tokenizer.decode(sampled, skip_special_tokens=True)
    return {
        "episode_id": lease["episode_id"], "attempt": lease["attempt"], "group_id": lease["group_id"],
        "source": task["source"], "row": task["row"], "epoch": task["epoch"], "policy": "actor", "branch": 0,
        "parent_branch": -1, "fork_at": 0, "token_ids": prompt + sampled, "loss_mask": [False] * given + [True] * new,
        "behavior_logprobs": [0.0] * given + logprobs, "versions": [-1] * given + [policy.version] * new,
        "call_index": [-1] * given + [0] * new, "reward": sum(c.isdigit() for c in text) / max(1, len(text)),
        "rewards_per_call": [], "finish_reason": "stop", "truncated": new == lease["sampling"]["actor"]["max_tokens"],
    }  # fmt: skip


def commit(url, node_id, row, wall_s):
    """Hand in one episode. A refused one is forgotten: somebody else plays it by now."""
    header = {"node_id": node_id, "episodes": [
        {"episode_id": row["episode_id"], "attempt": row["attempt"], "num_rows": 1, "wall_s": wall_s}
    ]}  # fmt: skip
    table = pa.Table.from_pylist([row], SCHEMA.with_metadata({"astraflow.header": json.dumps(header)}))
    sink = pa.BufferOutputStream()
    with pa.ipc.new_stream(sink, table.schema) as writer:
        writer.write_table(table)
    ask(url, "POST", "/episodes", sink.getvalue().to_pybytes())


class Node:
    """The place of this process in the pool: joined, and heard of every few seconds by a thread."""

    def __init__(self, url):
        self.url, self.run_id = url, ask(url, "GET", "/run")["run_id"]
        self.id = f"custom-{uuid.uuid4().hex[:12]}"
        self.playing, self.cancelled, self.lost, self.over, self.newest = [], set(), 0, threading.Event(), None
        self.every_s = self.join()
        threading.Thread(target=self.beat, daemon=True).start()

    def join(self):
        body = {"node_id": self.id, "name": "custom", "capacity": 4, "run_id": self.run_id}
        reply = ask(self.url, "POST", "/nodes", body)
        self.newest = reply["versions"]["actor"]
        return reply["heartbeat_s"]

    def beat(self):
        while not self.over.wait(self.every_s):
            try:
                reply = ask(self.url, "POST", f"/nodes/{self.id}/heartbeat", {"playing": self.playing})
            except Refused as refused:
                self.refused(refused)
                continue
            self.newest = reply["versions"]["actor"]
            self.cancelled |= {tuple(entry) for entry in reply["cancelled"]}
            if reply["finished"]:
                self.over.set()

    def refused(self, refused):
        """404: the service forgot us, so what we play is lost: join again."""
        if refused.args[0] != 404:
            self.over.set()
            raise refused
        self.lost += 1
        self.join()


def main(url):
    node, policy = Node(url), Policy()
    signal.signal(signal.SIGTERM, lambda *_: node.over.set())
    while not node.over.is_set():
        lives = node.lost
        body = {"node_id": node.id, "request_id": uuid.uuid4().hex, "n": 4, "wait_s": 5.0}
        try:
            reply = ask(url, "POST", "/leases", body, wait_s=5.0)  # repeated as it is: the same leases come again
        except Refused as refused:
            node.refused(refused)
            continue
        if reply["finished"]:
            break
        node.playing = [(lease["episode_id"], lease["attempt"]) for lease in reply["leases"]]
        for lease in reply["leases"]:
            begin = time.monotonic()
            policy.follow(max(node.newest, reply["versions"]["actor"], key=lambda v: v["version"]))
            row = play(lease, policy)
            if node.over.is_set():
                break
            if node.lost == lives and (lease["episode_id"], lease["attempt"]) not in node.cancelled:
                commit(url, node.id, row, time.monotonic() - begin)
    node.over.set()
    ask(url, "DELETE", f"/nodes/{node.id}")


if __name__ == "__main__":
    main(sys.argv[1].rstrip("/"))
