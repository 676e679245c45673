"""Frames survive any cut of the stream, and leave in one send per turn of the loop."""

from __future__ import annotations

import asyncio
import socket
import subprocess
import sys

import pytest
from hypothesis import given
from hypothesis import strategies as st

from astraflow.errors import WireError
from astraflow.rollout.worker.channel import (
    MAX_FRAME_BYTES,
    Answer,
    Ask,
    Cancel,
    Channel,
    Done,
    Drop,
    Hello,
    Pulse,
    Ready,
    Start,
)
from astraflow.types import Outcome, Task

numbers = st.integers(0, 2**40)
outcomes = st.builds(lambda r, m: Outcome(reward=r, metrics=m), st.none() | st.floats(-1, 1), st.just({"success": 1.0}))
fields = st.dictionaries(st.text(max_size=5), st.integers(-(2**60), 2**60) | st.text())
messages = st.one_of(
    st.builds(Ask, numbers, numbers, st.binary(max_size=300)),
    st.builds(Answer, numbers, st.integers(100, 599), st.binary(max_size=300)),
    st.builds(Cancel, numbers),
    st.builds(Drop, numbers, numbers),
    st.builds(Ready, st.none() | st.text(max_size=20)),
    st.builds(Pulse),
    st.builds(
        Done, numbers,
        st.none() | outcomes,
        st.none() | st.text(max_size=20), st.booleans(),
    ),
    st.builds(
        Start, numbers, st.text(max_size=9),
        st.builds(Task, st.text(max_size=9), numbers, numbers, fields),
        st.floats(0.1, 99),
    ),
    st.just(Hello("tool_use", {"environment": {"type": "calculator"}}, ["actor"], "http://127.0.0.1:1/v1", 0.5)),
)  # fmt: skip


class Kept(asyncio.WriteTransport):
    """Keeps what was written."""

    def __init__(self):
        self.sends = []

    def write(self, data):
        self.sends.append(bytes(data))


async def frames_of(sent):
    channel, transport = Channel(lambda m: None, lambda: None), Kept()
    channel.connection_made(transport)
    for message in sent:
        channel.send(message)
    await asyncio.sleep(0)
    return transport.sends


@given(st.lists(messages, min_size=1, max_size=8), st.lists(st.integers(1, 60), min_size=1))
def test_messages_survive_any_cut_of_the_stream(sent, cuts):
    async def main():
        (stream,) = await frames_of(sent)
        got = []
        reader = Channel(got.append, lambda: None)
        at = turn = 0
        while at < len(stream):
            size = cuts[turn % len(cuts)]
            reader.data_received(stream[at : at + size])
            at, turn = at + size, turn + 1
        assert got == sent

    asyncio.run(main())


async def test_a_frame_of_an_absurd_length_is_refused():
    reader = Channel(lambda m: None, lambda: None)
    with pytest.raises(WireError, match="frame_bytes"):
        reader.data_received(b"\xff\xff\xff\xff")


async def test_the_end_of_the_other_side_is_told_once():
    ours, theirs = socket.socketpair()
    lost = []
    channel = Channel(lambda m: None, lambda: lost.append(1))
    await asyncio.get_running_loop().create_unix_connection(lambda: channel, sock=ours)
    theirs.close()
    async with asyncio.timeout(60):
        while not lost:
            await asyncio.sleep(0.01)
    channel.send(Pulse())  # dropped
    channel.close()
    await asyncio.sleep(0.02)
    assert lost == [1]


def test_a_worker_never_loads_torch_or_the_run_file_schema():
    code = (
        "import sys, astraflow.rollout.worker.__main__, astraflow.workflows.tool_use, astraflow.workflows.single_turn;"
        "import astraflow.environments.calculator, astraflow.rewards.numbers;"
        "print([m for m in ('torch', 'transformers', 'pydantic', 'pyarrow') if m in sys.modules])"
    )
    found = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True, env=_env())
    assert found.stdout.strip() == "[]"


def _env():
    import os

    return {**os.environ, "PYTHONPATH": os.pathsep.join(p for p in sys.path if p)}


def test_a_worker_ends_with_its_node(tmp_path):
    """The node is killed where it stands; its worker must not stay."""
    code = """
import asyncio, sys
from astraflow.rollout.pool import WorkerPool
from astraflow.rollout.worker.channel import Hello
async def main():
    hello = Hello("rollout_scripts:play_by_kind", {}, ["actor"], "http://127.0.0.1:1/v1", 0.1)
    pool = WorkerPool(1, hello, lambda: None)
    await pool.start()
    sys.stdout.write(f"{pool._workers[0].process.pid}\\n")
    sys.stdout.flush()
    await asyncio.sleep(60)
asyncio.run(main())
"""
    import psutil

    with subprocess.Popen([sys.executable, "-c", code], stdout=subprocess.PIPE, text=True, env=_env()) as node:
        assert node.stdout is not None
        worker = psutil.Process(int(node.stdout.readline()))
        assert worker.is_running()
        node.kill()
        node.wait()
        worker.wait(60)
    assert not worker.is_running()


@pytest.mark.parametrize(
    "message",
    [
        Done(1, Outcome(metrics={"x": 10**30}), None, False),
        Done(1, None, "half a pair: \udcff", False),
        Ask(1, 2, bytes(MAX_FRAME_BYTES)),
    ],
)
async def test_a_message_that_cannot_be_sent_leaves_nothing_of_itself(message):
    channel, transport, heard = Channel(lambda m: None, lambda: None), Kept(), []
    channel.connection_made(transport)
    channel.send(Ask(7, 1, b"before"))
    with pytest.raises(WireError, match="cannot be sent"):
        channel.send(message)
    channel.send(Ask(7, 2, b"after"))
    await asyncio.sleep(0)
    other = Channel(heard.append, lambda: None)
    other.data_received(b"".join(transport.sends))
    assert heard == [Ask(7, 1, b"before"), Ask(7, 2, b"after")]
