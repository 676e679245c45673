"""Commands that raise while they are applied: nobody hears of a spoiled state, and a restart goes on without them."""

from __future__ import annotations

import asyncio
import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from astraflow.dataflow.journal.history import read_life
from astraflow.dataflow.journal.recovery import JournalDamaged, read_log
from astraflow.dataflow.machine import commands as c
from astraflow.dataflow.machine import leases as episodes
from astraflow.dataflow.machine.records import EpisodeCommit, OpenGroup, Part
from astraflow.dataflow.shell import Shell
from astraflow.dataflow.views.status import prometheus_text, status
from astraflow.errors import JournalError, WireError
from astraflow.testing.dataflow import check_law, episode, small_config, sources
from astraflow.types import EpisodeLease
from astraflow.wire import messages as m
from astraflow.wire.app import HttpError

CONFIG = small_config(run__steps=100)


async def begin(shell: Shell) -> list[EpisodeLease]:
    await shell.submit(c.ResumePolicy("actor", m.Resume(trainer_id="t", version=0, urls=(), run_id=shell.run_id)))
    await shell.submit(c.JoinNode(m.Join(node_id="n", name="n", capacity=8, run_id=shell.run_id)))
    leases: list[EpisodeLease] = await shell.submit(c.LeaseEpisodes("n", "r", 6))
    return leases


def commit_of(shell: Shell, leases: list[EpisodeLease]) -> c.CommitEpisodes:
    put = shell.segments.append(b"rows" * 10)
    parts = [[Part("actor", put.key, [i], [0], 0, 3, 0, float(i % 2))] for i in range(len(leases))]
    done = [EpisodeCommit(x.episode_id, x.attempt, None, {}, p) for x, p in zip(leases, parts, strict=True)]
    return c.CommitEpisodes("n", put, done)


Spoil = Callable[[str], None]


@pytest.fixture
def spoil(monkeypatch: pytest.MonkeyPatch) -> Spoil:
    """A bug: the group of this id cannot be closed, and that shows when half of the command is done."""
    close = episodes.Leases._close

    def spoil(group_id: str) -> None:
        def closed(self: Any, group: OpenGroup) -> None:
            if group.group_id == group_id:
                raise SystemExit("a bug \udc80")
            close(self, group)

        monkeypatch.setattr(episodes.Leases, "_close", closed)

    return spoil


async def spoiled(run_dir: Path, spoil: Spoil) -> tuple[Shell, list[EpisodeLease]]:
    """A service that died of the commit of the second of its three groups."""
    shell = Shell(CONFIG, run_dir, sources())
    leases = await begin(shell)
    spoil(leases[2].group_id)
    commands = [commit_of(shell, leases[:2]), commit_of(shell, leases[2:4]), c.LeaseEpisodes("n", "later", 1)]
    asked = [asyncio.ensure_future(shell.submit(command)) for command in commands]
    await asyncio.wait(asked, timeout=5)  # one that nobody answers must not keep the test waiting
    assert all(x.done() for x in asked)
    answers = [x.exception() or x.result() for x in asked]
    assert set(answers[0].values()) == {"accepted"}
    refused, later = answers[1:]
    assert isinstance(refused, HttpError) and refused.status == 500 and isinstance(later, HttpError)
    assert "dataflow command 5 (CommitEpisodes)=SystemExit: a bug ? was not expected" in str(refused)
    assert later.status == 503 and later.pause_s > 0
    return shell, leases


async def test_a_command_that_raises_is_void_and_the_run_goes_on_without_it(tmp_path: Path, spoil: Spoil) -> None:
    first, leases = await spoiled(tmp_path, spoil)
    assert str(first.crash) and "command 5" in str(first.crash)
    seq = first.journal.seq
    with pytest.raises(HttpError, match="stopping"):  # the state is spoiled
        await first.submit(c.AckRows("nobody", "actor", 0))
    assert first.journal.seq == seq == 7
    first.close()
    assert [x.seq for x in read_log(tmp_path / "dataflow" / "journal.sqlite", 0)[0]] == [1, 2, 3, 4, 5, 6, 7]

    states = []
    for _ in range(2):  # from the log, then from the snapshot; the bug is still there
        again = Shell(CONFIG, tmp_path, sources())
        state = again.machine.state
        assert state.voids == {"CommitEpisodes": 1} and state.num_episodes == 2
        assert status(again.machine, 0.0)["void_commands"] == {"CommitEpisodes": 1}
        assert b'astraflow_void_commands_total{kind="CommitEpisodes"} 1.0' in prometheus_text(again.machine, {})
        held = state.nodes["n"].held
        assert [held.get(x.episode_id) for x in leases] == [None, None, 1, 1, 1, 1] and len(held) == 5
        check_law(again.machine)
        states.append(json.loads(again.machine.snapshot()))
        again.close()
    assert states[0] == states[1]
    life = read_life(tmp_path / "dataflow" / "history", leases[2].group_id)
    assert "committed" not in [x.what for x in life.moments]
    spoil("nothing")
    again = Shell(CONFIG, tmp_path, sources())
    assert set((await again.submit(commit_of(again, leases[2:4]))).values()) == {"accepted"}
    assert await again.submit(c.TakeBatch("actor", "t", 0)) is not None
    check_law(again.machine)
    again.close()


async def test_without_a_mark_a_start_refuses_and_a_person_may_leave_the_command_out(
    tmp_path: Path, spoil: Spoil, monkeypatch: pytest.MonkeyPatch
) -> None:
    append = Shell.__init__.__globals__["Journal"].append

    def no_room_for_marks(self: Any, entries: Any) -> None:
        if any(b"VoidCommand" in command for _, command in entries):
            raise JournalError("journal", "x", "cannot be written (full)", "make room")
        append(self, entries)

    with monkeypatch.context() as patch:
        patch.setattr(Shell.__init__.__globals__["Journal"], "append", no_room_for_marks)
        first, leases = await spoiled(tmp_path, spoil)
    first.close()
    for _ in range(2):  # nothing was changed by the refusal
        with pytest.raises(JournalDamaged, match=r"command 5 \(CommitEpisodes\) raised SystemExit: a bug") as refused:
            Shell(CONFIG, tmp_path, sources())
        assert refused.value.exit_code == 2 and "--accept-damage" in str(refused.value)
    for accept in (True, False):
        again = Shell(CONFIG, tmp_path, sources(), accept_damage=accept)
        life = read_life(tmp_path / "dataflow" / "history", leases[0].group_id)
        told = [x.fields["episodes"] for x in life.moments if x.what == "committed"]
        assert told == [[0, 1]], "what came before is told once"
        assert again.machine.state.voids == {"CommitEpisodes": 1} and again.machine.state.num_episodes == 2
        check_law(again.machine)
        again.close()
    spoil("nothing")
    again = Shell(CONFIG, tmp_path, sources())
    assert set((await again.submit(commit_of(again, leases[2:4]))).values()) == {"accepted"}
    again.close()


async def test_what_cannot_be_told_stops_neither_the_run_nor_its_restart(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def broken(command: Any, applied: Any, machine: Any) -> Any:
        yield from [] if not isinstance(command, c.CommitEpisodes) else [1 / 0]

    monkeypatch.setattr("astraflow.dataflow.shell.moments_of", broken)
    first = Shell(CONFIG, tmp_path, sources())
    leases = await begin(first)
    await first.submit(commit_of(first, leases[:2]))
    first.write_histories()
    assert first.crash is None and first.history.num_dropped == 1
    first.journal.close()
    first.history.close()
    first.metrics.close()
    first.segments.close()  # as a kill leaves it: no snapshot
    again = Shell(CONFIG, tmp_path, sources())
    assert again.machine.state.num_episodes == 2 and again.history.num_dropped == 1
    again.close()


def test_a_client_hears_of_it_once_and_the_service_ends_by_name(serve: Any, tmp_path: Path, spoil: Spoil) -> None:
    service = serve(CONFIG)
    client = service.start()
    leases = client.lease("n", 2).leases
    spoil(leases[0].group_id)
    with pytest.raises(WireError, match=r"\(CommitEpisodes\)=SystemExit: a bug") as caught:
        client.commit([episode(x, "n") for x in leases])
    assert caught.value.status == 500
    service.wait_for_end()
    assert "CommitEpisodes" in str(service.error)
    again = serve(CONFIG)
    shown = again.client().status()
    assert shown["void_commands"] == {"CommitEpisodes": 1} and shown["episodes"]["leased"] == 2
