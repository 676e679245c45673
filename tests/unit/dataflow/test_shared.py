"""A trainer and a node on the same host: bodies become segments, batches are maps of segments."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pyarrow as pa
import pytest
import urllib3

from astraflow.dataflow import client as client_module
from astraflow.dataflow.client import DataflowClient
from astraflow.dataflow.storage.shared import SharedBatch, shared_table
from astraflow.errors import JournalError, WireError
from astraflow.testing.dataflow import episode, small_config, trajectory
from astraflow.wire import client as wire_client
from astraflow.wire.codec import CONTENT_TYPE
from astraflow.wire.local import HOST_HEADER, host_identity
from astraflow.wire.messages import PROTOCOL_HEADER

pytestmark = pytest.mark.skipif(not host_identity(), reason="files are not shared on this system")
Serve = Callable[..., Any]
TOKENS = 40_000  # of a row: two make more than a megabyte


def play(client: DataflowClient, version: int = 0) -> None:
    """One batch: four episodes in one commit, rewards 0 and 1 in turn."""
    leases = client.lease("n", 4).leases
    rows = [trajectory(float(i % 2), version, tokens=TOKENS + i, marker=100 * i) for i in range(len(leases))]
    client.commit([episode(x, "n", trajectories=[row]) for x, row in zip(leases, rows, strict=True)])


def batch(client: DataflowClient, version: int = 0) -> pa.Table:
    got = client.batch("actor", "t", version, wait_s=5)
    assert got is not None
    return got[1]


def segments_of(run_dir: Path) -> list[str]:
    return sorted(p.name for p in (run_dir / "dataflow" / "segments").iterdir() if p.stat().st_size)


def test_the_table_is_the_same_over_files_and_over_tcp(serve: Serve, tmp_path: Path) -> None:
    service = serve(small_config())
    client = service.start()
    play(client)
    assert segments_of(tmp_path) == ["000002.arrow"]  # the body of the commit, where it was written
    assert not list((tmp_path / "dataflow" / "inbox").iterdir())
    far = service.client()
    far._http._headers.pop(HOST_HEADER)
    assert batch(client).equals(batch(far))


def test_what_was_mapped_stays_when_the_segment_is_deleted(serve: Serve, tmp_path: Path) -> None:
    service = serve(small_config())
    client = service.start()
    play(client)
    table = batch(client)
    before = table.to_pydict()
    service.call(lambda: service.shell.segments.drop(2))
    assert segments_of(tmp_path) == []
    assert table.to_pydict() == before


def test_what_cannot_be_mapped_comes_over_the_socket(serve: Serve, monkeypatch: pytest.MonkeyPatch) -> None:
    client = serve(small_config()).start()
    play(client)
    wanted = batch(client)
    asked: list[SharedBatch] = []

    def gone(shared: SharedBatch) -> None:
        asked.append(shared)

    monkeypatch.setattr(client_module, "shared_table", gone)
    assert batch(client).equals(wanted) and len(asked) == 1
    (piece,) = asked[0].rows.rows.pieces
    elsewhere = SharedBatch(asked[0].header, "1:2:/gone", asked[0].rows)
    assert shared_table(elsewhere) is None
    place = Path(asked[0].place.rpartition(":")[2])
    (place / f"{piece.put.segment:06d}.arrow").unlink()
    assert shared_table(asked[0]) is None


def test_an_answer_that_nobody_maps_keeps_nothing(serve: Serve, tmp_path: Path) -> None:
    service = serve(small_config(dataflow__snapshot_every=10))
    client = service.start()
    play(client)
    body = b'{"trainer_id":"t","version":0}'
    for _ in range(3):
        headers = {HOST_HEADER: host_identity(), PROTOCOL_HEADER: "1", "content-type": "application/json"}
        answer = urllib3.request("POST", service.url + "/policies/actor/batches", body=body, headers=headers)
        assert answer.status == 200 and answer.headers["content-type"] == "application/json"
    got = client.batch("actor", "t", 0)
    assert got is not None
    client.ack(got[0], "t")
    client.checkpoint("actor", "t", 1)
    for version in range(1, 4):
        play(client, version)
        step = client.batch("actor", "t", version, wait_s=5)
        assert step is not None
        client.ack(step[0], "t")
        client.checkpoint("actor", "t", step[0].step)
    while "000002.arrow" in segments_of(tmp_path):  # the snapshot behind it is written in a thread
        client.status()
    assert not list((tmp_path / "dataflow" / "inbox").iterdir())


def test_refused_rows_leave_no_file(serve: Serve, tmp_path: Path) -> None:
    service = serve(small_config())
    client = service.start()
    leases = client.lease("n", 4).leases
    strange = [trajectory(1.0, policy="critic", tokens=TOKENS) for _ in leases]
    with pytest.raises(WireError, match="critic is not a policy"):
        client.commit([episode(x, "n", trajectories=[row]) for x, row in zip(leases, strange, strict=True)])
    assert not list((tmp_path / "dataflow" / "inbox").iterdir()) and segments_of(tmp_path) == []


def test_a_full_journal_takes_the_file_back_and_the_client_sends_it_again(serve: Serve, tmp_path: Path) -> None:
    service = serve(small_config())
    client = service.start()
    leases = client.lease("n", 4).leases
    append, fails = service.shell.journal.append, [2]

    def full(entries: Any) -> None:
        if fails[0]:
            fails[0] -= 1
            raise JournalError("journal", "x", "cannot be written", "make room")
        append(entries)

    service.shell.journal.append = full
    rows = [trajectory(float(i % 2), tokens=TOKENS) for i in range(4)]
    answers = client.commit([episode(x, "n", trajectories=[row]) for x, row in zip(leases, rows, strict=True)])
    assert set(answers.values()) == {"accepted"}
    assert len(batch(client)) == 4 and not list((tmp_path / "dataflow" / "inbox").iterdir())


def test_a_body_over_the_limit_is_413_and_says_the_setting(serve: Serve) -> None:
    service = serve(small_config(dataflow__max_body_bytes=1 << 20))
    client = service.start()
    for min_bytes in (wire_client.MIN_BYTES, 1 << 40):  # through a file, and over the socket
        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(wire_client, "MIN_BYTES", min_bytes)
            with pytest.raises(WireError, match=r"must be at most 1048576; .*dataflow.max_body_bytes") as caught:
                play(client)
            assert caught.value.status == 413
    assert client.status()["episodes"]["committed"] == 0


@pytest.mark.parametrize("body", [b"\x80\x04\x95\x0b\x00pickle", b"", b"ARROW1\x00\x00", bytes(2000)])
def test_what_is_no_arrow_stream_is_refused_by_a_sentence(serve: Serve, body: bytes) -> None:
    service = serve(small_config())
    service.start()
    headers = {"content-type": CONTENT_TYPE, PROTOCOL_HEADER: "1"}
    answer = urllib3.request("POST", service.url + "/episodes", body=body, headers=headers)
    assert answer.status == 422 and b"must be an Arrow IPC stream" in answer.data
    answer = urllib3.request(
        "POST", service.url + "/episodes", body=body, headers=headers | {"content-type": "text/plain"}
    )
    assert answer.status == 415 and CONTENT_TYPE.encode() in answer.data
