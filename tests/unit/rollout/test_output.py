"""Output of user code: what an episode may write, what the log takes, and when it is a flood."""

from __future__ import annotations

import asyncio

import pytest

from astraflow.errors import EpisodeError
from astraflow.rollout.worker.output import Budget, Drain, _Counted


class Text:
    """A text stream."""

    def __init__(self):
        self.text, self.buffer = "", None

    def write(self, text):
        self.text += text
        return len(text)


async def test_a_task_and_what_it_starts_pay_and_others_do_not():
    over, stream = [], Text()
    counted = _Counted(stream)

    async def writes(count):
        for _ in range(count):
            counted.write("x" * 10)

    async def episode():
        budget = Budget(100, lambda: over.append(1))
        with budget:
            await writes(5)
            await asyncio.gather(writes(5))  # a task of its own
            with pytest.raises(EpisodeError, match=r"^output: the episode wrote more than 100 bytes"):
                await writes(1)
            with pytest.raises(EpisodeError):
                await writes(1)
        counted.write("after")
        assert budget.over and over == [1]

    await asyncio.gather(episode(), writes(50))
    assert len(stream.text) == 10 * 60 + len("after")


@pytest.fixture
def drain(monkeypatch):
    class Made:
        def __init__(self):
            self.now, self.floods, self.lines = 0.0, [], []
            self.drain = Drain("worker 1", 1 << 20, lambda: self.floods.append(self.now), lambda: self.now)
            monkeypatch.setattr("astraflow.rollout.worker.output._write", self.lines.append)

    return Made()


def test_whole_lines_are_kept_however_they_are_cut(drain):
    text = "one\ntwö\nthree".encode()
    for i in range(len(text)):
        drain.drain.data_received(text[i : i + 1])
    assert drain.lines == ["one\n", "twö\n"]
    drain.drain.connection_lost(None)
    assert drain.lines[-1] == "three\n" and drain.drain.ended.is_set()


def test_a_log_takes_a_burst_and_then_a_little(drain, caplog):
    line = b"x" * 1023 + b"\n"
    for _ in range(300):
        drain.drain.data_received(line)
    assert (len(drain.lines), drain.drain.num_left_out) == (256, 44 << 10)
    drain.now += 1.0
    for _ in range(100):
        drain.drain.data_received(line)
    assert len(drain.lines) == 256 + 8
    with caplog.at_level("WARNING"):
        drain.drain.tell()
        drain.drain.tell()
    assert [r.getMessage() for r in caplog.records] == [
        f"worker 1 wrote too much: {(44 + 92) << 10} bytes are left out of this log"
    ]
    assert not drain.floods


def test_a_line_without_an_end_is_not_kept_for_ever(drain):
    for _ in range(40):
        drain.drain.data_received(b"x" * 1000)
    assert sum(map(len, drain.lines)) > 30_000 and len(drain.drain._line) <= 17_000


def test_a_flood_is_so_much_within_a_second(drain):
    for _ in range(10):
        drain.drain.data_received(b"x" * (1 << 19))
        drain.now += 0.6
    assert not drain.floods
    drain.drain.data_received(b"x" * ((1 << 20) + 1))
    assert drain.floods
