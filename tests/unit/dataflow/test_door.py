"""Bad input at POST /episodes: one clear error each, counted by reason; the service goes on and forgets nothing."""

from __future__ import annotations

import pickle
import random
import re
from collections.abc import Callable
from pathlib import Path
from typing import Any

import msgspec
import numpy as np
import pyarrow as pa
import pytest
import urllib3

from astraflow.dataflow.client import DataflowClient
from astraflow.testing.dataflow import episode, small_config, trajectory
from astraflow.types import EpisodeLease
from astraflow.wire.codec import CONTENT_TYPE, HEADER_KEY, TRAJECTORY_SCHEMA, read_stream, write_stream
from astraflow.wire.episodes import encode_episodes
from astraflow.wire.messages import PROTOCOL_HEADER, EpisodesHeader

LIMIT = 4 << 20
CONFIG = small_config(run__steps=100, dataflow={"max_body_bytes": LIMIT})
Change = Callable[[dict[str, Any]], None]


def body_of(leases: list[EpisodeLease], change: Change = lambda columns: None, **header: Any) -> bytes:
    """A commit of two rows for each lease, with its columns (as Python lists) or header changed."""
    episodes = [
        episode(x, "n", trajectories=[trajectory(1.0, 0), trajectory(1.0, 0, branch=1, tokens=6)]) for x in leases
    ]
    sent, table = read_stream(write_stream(*encode_episodes(episodes, "n")), EpisodesHeader)
    columns = {name: table.column(name).to_pylist() for name in table.column_names}
    types = {field.name: field.type for field in TRAJECTORY_SCHEMA}
    columns["types"] = types
    change(columns)
    arrays = {name: pa.array(values, types[name]) for name, values in columns.items() if name != "types"}
    schema = pa.schema([pa.field(n, a.type, TRAJECTORY_SCHEMA.field(n).nullable) for n, a in arrays.items()])
    raw = {**msgspec.to_builtins(sent), **header}
    schema = schema.with_metadata({HEADER_KEY: msgspec.json.encode(raw)})
    sink = pa.BufferOutputStream()
    with pa.ipc.new_stream(sink, schema) as writer:
        writer.write_table(pa.Table.from_arrays(list(arrays.values()), schema=schema))
    return bytes(sink.getvalue())


def put(column: str, row: int, value: Any) -> Change:
    """Another value in one cell; a function gets the old one."""

    def change(columns: dict[str, Any]) -> None:
        old = columns[column][row]
        columns[column][row] = value(old) if callable(value) else value

    return change


def without(columns: dict[str, Any]) -> None:
    del columns["versions"]


def as_float(columns: dict[str, Any]) -> None:
    columns["types"]["token_ids"] = pa.list_(pa.float32())


def no_tokens(columns: dict[str, Any]) -> None:
    for name in ("token_ids", "loss_mask", "behavior_logprobs", "versions", "call_index"):
        columns[name][2] = columns[name][3] = []


def entry(at: int, value: Any) -> Callable[[list[Any]], list[Any]]:
    """A list with one entry changed."""
    return lambda old: [*old[:at], value, *old[at + 1 :]]


NAN = float("nan")
MALFORMED = [
    (put("behavior_logprobs", 3, entry(2, NAN)), "column_behavior_logprobs", r"behavior_logprobs=nan .*\(row 3\)"),
    (put("behavior_logprobs", 1, entry(0, -np.inf)), "column_behavior_logprobs", r"behavior_logprobs=-inf .*\(row 1\)"),
    (put("policy", 2, "critic"), "column_policy", r"policy=critic is not a policy of this run \(row 2\); known: actor"),
    (put("versions", 2, lambda old: old[:-1]), "column_versions", r"versions=3 must have 4 entries in row 2"),
    (put("loss_mask", 3, lambda old: [*old, True]), "column_loss_mask", r"loss_mask=7 must have 6 entries in row 3"),
    (put("versions", 1, entry(3, -1)), "column_versions", r"versions=-1 must be >= 0 .*\(row 1\)"),
    (put("token_ids", 2, entry(1, None)), "column_token_ids", r"token_ids=null must not be null \(row 2\)"),
    (put("policy", 1, None), "column_policy", r"policy=null must not be null \(row 1\)"),
    (put("rewards_per_call", 1, [NAN]), "column_rewards_per_call", r"rewards_per_call=.* must be finite \(row 1\)"),
    (put("episode_id", 1, "train/0/9/9"), "column_episode_id", r"must follow the header, .*row 1"),
    (without, "column_missing", r"column=versions is missing; send it as list<item: int32>"),
    (as_float, "column_token_ids", r"token_ids=list<item: float> must be list<item: int32>"),
    (no_tokens, "empty_episode", r"episode=train/0/3/1 must have tokens or an error \(rows 2 to 4\)"),
]  # fmt: skip


class Sender:
    """Raw requests to a service."""

    def __init__(self, client: DataflowClient, url: str) -> None:
        self.client, self._url, self._pool = client, url, urllib3.PoolManager(retries=False)

    def post(self, body: bytes, kind: str = CONTENT_TYPE) -> tuple[int, str]:
        reply = self._pool.request(
            "POST", f"{self._url}/episodes", body=body, headers={"content-type": kind, PROTOCOL_HEADER: "1"}
        )
        return reply.status, reply.json()["error"] if reply.status >= 400 else ""

    def refused(self) -> dict[str, int]:
        counts: dict[str, int] = self.client.status()["refused"]
        return counts


@pytest.fixture
def sender(serve: Any) -> Any:
    service = serve(CONFIG)
    sender = Sender(service.start(), service.url)
    sender.service = service
    yield sender
    sender._pool.clear()


def test_each_malformed_commit_has_one_clear_error_and_is_counted(sender: Any) -> None:
    leases = sender.client.lease("n", 2).leases
    expected: dict[str, int] = {}
    for number, (change, reason, words) in enumerate(MALFORMED):
        status, said = sender.post(body_of(leases, change))
        assert status == 422, (number, status, said)
        assert re.search(words, said), said
        assert ";" in said, "it says what to do"
        expected[reason] = expected.get(reason, 0) + 1
        assert sender.refused() == expected, said
    assert sender.client.status()["episodes"]["committed"] == 0
    assert sender.post(body_of(leases)) == (200, "")
    assert sender.client.status()["episodes"]["committed"] == 2
    metrics = sender._pool.request("GET", f"{sender._url}/metrics").data.decode()
    assert f'astraflow_refused_total{{reason="column_policy"}} {expected["column_policy"]}.0' in metrics
    assert 'astraflow_accounting_imbalance{policy="actor"} 0.0' in metrics


def test_bodies_that_are_no_commit_at_all(sender: Any) -> None:
    leases = sender.client.lease("n", 2).leases
    good, chance = body_of(leases), random.Random(0)
    cases: list[tuple[bytes, str, int, str, str]] = [
        (pickle.dumps({"episodes": [1, 2]}), CONTENT_TYPE, 422, "not_arrow", "must be an Arrow IPC stream"),
        (chance.randbytes(5000), CONTENT_TYPE, 422, "not_arrow", "must be an Arrow IPC stream"),
        (b"", CONTENT_TYPE, 422, "not_arrow", "must be an Arrow IPC stream"),
        (good[: len(good) // 2], CONTENT_TYPE, 422, "not_arrow", "must be an Arrow IPC stream"),
        (good, "application/json", 415, "content_type", "content-type=application/json must be"),
        (pickle.dumps([1]), "application/octet-stream", 415, "content_type", "must be application/vnd.apache.arrow"),
        (b"x" * (LIMIT + 1), CONTENT_TYPE, 413, "too_large", f"must be at most {LIMIT}"),
        (body_of(leases, node_id=7), CONTENT_TYPE, 422, "header", "must be a EpisodesHeader"),
        (body_of(leases, episodes=[]), CONTENT_TYPE, 422, "column_episode_id", "must follow the header"),
    ]
    expected: dict[str, int] = {}
    for body, kind, status, reason, words in cases:
        got, said = sender.post(body, kind)
        assert (got, words in said) == (status, True), said
        expected[reason] = expected.get(reason, 0) + 1
        assert sender.refused() == expected
    assert sender.post(good) == (200, "")


def test_flipped_bytes_never_end_the_service(sender: Any) -> None:
    leases = sender.client.lease("n", 2).leases
    good, chance = body_of(leases), random.Random(5)
    for _ in range(150):
        broken = bytearray(good)
        broken[chance.randrange(len(broken))] ^= 1 << chance.randrange(8)
        status, _ = sender.post(bytes(broken))
        assert status in (200, 422)
    assert sender.client.status()["failure"] is None and sender.service.error is None
    sender.client.commit([episode(x, "n") for x in sender.client.lease("n", 2).leases])


def test_an_episode_of_a_million_tokens_is_trained_like_any_other_where_that_is_allowed(serve: Any) -> None:
    allowed = {"max_episode_tokens": 1_000_000}
    client = serve(small_config(run__steps=100, policies__actor__operators=["keep_all"], dataflow=allowed)).start()
    leases = client.lease("n", 4).leases
    giant = trajectory(1.0, tokens=1_000_000)
    done = [episode(x, "n", trajectories=[giant if i == 0 else trajectory(0.0)]) for i, x in enumerate(leases)]
    assert set(client.commit(done).values()) == {"accepted"}
    header, table = client.batch("actor", "t", 0, wait_s=5.0)
    lengths = [len(row) for row in table.column("token_ids")]
    assert sorted(lengths) == [4, 4, 4, 1_000_000] and header.num_episodes == 4
    tokens = table.column("token_ids")[lengths.index(1_000_000)].values.to_numpy()
    assert np.array_equal(tokens, giant.token_ids)


def test_a_repeated_refusal_keeps_what_was_journaled(serve: Any, tmp_path: Path) -> None:
    service = serve(CONFIG)
    sender = Sender(service.start(), service.url)
    leases = sender.client.lease("n", 4).leases
    assert sender.post(body_of(leases[:2]))[0] == 200
    for _ in range(20):
        assert sender.post(body_of(leases[2:], without))[0] == 422
    sender._pool.clear()
    service.close()
    again = serve(CONFIG)
    status = again.client().status()
    assert status["episodes"]["committed"] == 2 and status["refused"] == {}, "refusals are no part of the state"
    assert again.client().commit([episode(x, "n") for x in leases[:2]]) == {
        x.episode_id: "duplicate" for x in leases[:2]
    }
