"""The shell at the moments where it may be killed: what was answered is there, what was not can be sent again."""

from __future__ import annotations

import asyncio
import errno
import json
import os
import shutil
import threading
from pathlib import Path

import pytest

from astraflow.dataflow.journal.recovery import JournalDamaged, read_log
from astraflow.dataflow.machine import commands as c
from astraflow.dataflow.machine.records import EpisodeCommit, Part
from astraflow.dataflow.shell import Shell
from astraflow.dataflow.storage.segments import SegmentGone
from astraflow.errors import JournalError
from astraflow.observe.jsonl import read_jsonl
from astraflow.testing.dataflow import check_law, small_config, sources
from astraflow.types import EpisodeLease
from astraflow.wire import messages as m

CONFIG = small_config(run__steps=100, dataflow={"snapshot_every": 10})


def shell(directory: Path) -> Shell:
    return Shell(CONFIG, directory, sources())


async def begin(shell: Shell) -> list[EpisodeLease]:
    """A trainer and a node start; the first leases."""
    resume = m.Resume(trainer_id="t", version=0, urls=(), run_id=shell.run_id)
    await shell.submit(c.ResumePolicy("actor", resume))
    await shell.submit(c.JoinNode(m.Join(node_id="n", name="n", capacity=8, run_id=shell.run_id)))
    leases: list[EpisodeLease] = await shell.submit(c.LeaseEpisodes("n", "r", 8))
    return leases


def commit_of(shell: Shell, leases: list[EpisodeLease]) -> c.CommitEpisodes:
    put = shell.segments.append(b"rows" * 100)
    episodes = [
        EpisodeCommit(x.episode_id, x.attempt, None, {}, [Part("actor", put.key, [i], [0], 0, 3, 0, float(i % 2))])
        for i, x in enumerate(leases)
    ]
    return c.CommitEpisodes("n", put, episodes)


def image(run_dir: Path, to: Path) -> Path:
    """The files as a kill at this moment would leave them."""
    shutil.copytree(run_dir, to)
    return to


async def test_a_kill_before_the_transaction_forgets_the_commit_and_after_it_keeps_it(tmp_path: Path) -> None:
    first = shell(tmp_path / "run")
    leases = await begin(first)
    pending = asyncio.ensure_future(first.submit(commit_of(first, leases[:2])))
    before = image(tmp_path / "run", tmp_path / "before")
    assert set((await pending).values()) == {"accepted"}
    after = image(tmp_path / "run", tmp_path / "after")
    state = json.loads(first.machine.snapshot())
    first.close()

    second = shell(before)
    assert second.machine.state.num_episodes == 0 and len(second.machine.state.nodes["n"].held) == 8
    assert set((await second.submit(commit_of(second, leases[:2]))).values()) == {"accepted"}
    check_law(second.machine)
    second.close()
    third = shell(after)
    assert json.loads(third.machine.snapshot()) == state
    put = next(iter(third.machine.state.puts.values()))
    assert third.segments.read(put).to_pybytes() == b"rows" * 100
    third.close()


async def test_a_torn_segment_tail_that_nobody_was_answered_for_is_ignored(tmp_path: Path) -> None:
    first = shell(tmp_path / "run")
    leases = await begin(first)
    await first.submit(commit_of(first, leases[:2]))
    first.segments.append(b"half a bo")
    crashed = image(tmp_path / "run", tmp_path / "crashed")
    first.close()
    segment = crashed / "dataflow" / "segments" / "000001.arrow"
    os.truncate(segment, segment.stat().st_size - 5)
    second = shell(crashed)
    check_law(second.machine)
    second.close()


@pytest.mark.parametrize("left", [None, 0, 60])
async def test_groups_in_a_segment_that_is_cut_or_gone_are_dropped_at_the_start(
    tmp_path: Path, left: int | None
) -> None:
    first = shell(tmp_path / "run")
    leases = await begin(first)
    for pair in (leases[:2], leases[2:4]):
        await first.submit(commit_of(first, pair))
    segment = tmp_path / "run" / "dataflow" / "segments" / "000001.arrow"
    first.close()
    if left is None:
        segment.unlink()
        with pytest.raises(SegmentGone, match=r"000001\.arrow is gone"):
            shell(tmp_path / "run")
    else:
        os.truncate(segment, left)
    for _ in range(2):  # the second start knows of no damage any more
        again = Shell(CONFIG, tmp_path / "run", sources(), accept_damage=left is None)
        left = 0
        await again.tick()
        assert again.machine.state.policies["actor"].dropped == {"damaged": 2}
        assert again.machine.state.puts == {} and again.machine.state.failure is None
        check_law(again.machine)
        again.close()
    again = shell(tmp_path / "run")
    await again.submit(commit_of(again, await again.submit(c.LeaseEpisodes("n", "r2", 4))))
    assert await again.submit(c.TakeBatch("actor", "t", 0)) is not None
    check_law(again.machine)
    again.close()


async def test_a_commit_that_cannot_be_journaled_is_not_applied_and_its_bytes_are_taken_back(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    first = shell(tmp_path)
    leases = await begin(first)
    before = first.machine.snapshot()
    append = first.journal.append

    def full(entries: object) -> None:
        raise JournalError("journal", "x", "cannot be written (full)", "make room")

    monkeypatch.setattr(first.journal, "append", full)
    segment = tmp_path / "dataflow" / "segments" / "000001.arrow"
    for _ in range(3):
        with pytest.raises(JournalError):
            await first.submit(commit_of(first, leases[:2]))
        assert segment.stat().st_size == 0
    assert first.machine.snapshot() == before
    monkeypatch.setattr(first.journal, "append", append)
    assert set((await first.submit(commit_of(first, leases[:2]))).values()) == {"accepted"}
    first.close()


async def test_commands_of_one_turn_share_one_transaction(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    first = shell(tmp_path)
    leases = await begin(first)
    sizes = []
    append = first.journal.append
    monkeypatch.setattr(first.journal, "append", lambda entries: (sizes.append(len(entries)), append(entries)))
    await asyncio.gather(*(first.submit(commit_of(first, [x])) for x in leases))
    assert sizes == [8]
    first.close()


async def test_snapshots_replace_the_log_and_give_the_same_state(tmp_path: Path) -> None:
    first = shell(tmp_path / "run")
    leases = await begin(first)
    for lease in leases:
        await first.submit(commit_of(first, [lease]))
    await first.compaction.ended()
    assert first.compaction.num_snapshots == 1 and first.journal.num_since_snapshot == 1
    assert [x.seq for x in read_log(tmp_path / "run" / "dataflow" / "journal.sqlite", 10)[0]] == [11]
    state = json.loads(first.machine.snapshot())
    crashed = image(tmp_path / "run", tmp_path / "crashed")
    first.close()
    second = shell(crashed)
    assert json.loads(second.machine.snapshot()) == state
    second.close()


async def test_a_row_of_metrics_that_was_cut_off_is_written_at_the_next_start(tmp_path: Path) -> None:
    first = shell(tmp_path / "run")
    leases = await begin(first)
    await first.submit(commit_of(first, leases))
    for step in (1, 2):
        assert await first.submit(c.TakeBatch("actor", "t", step - 1)) is not None
        await first.submit(c.AckBatch("actor", f"actor/{step}", m.Ack(trainer_id="t", version=step)))
    crashed = image(tmp_path / "run", tmp_path / "crashed")
    first.close()
    path = crashed / "metrics.jsonl"
    whole = path.read_text().splitlines()
    assert [json.loads(line)["step"] for line in whole] == [1, 2]
    path.write_text(whole[0] + "\n" + whole[1][:40])
    shell(crashed).close()
    assert [json.loads(line)["step"] for line in path.read_text().splitlines()] == [1, 2]


async def test_a_full_disk_for_metrics_ends_nothing_and_its_rows_are_not_forgotten(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    first = shell(tmp_path / "run")
    await first.submit(commit_of(first, await begin(first)))

    def full(row: object) -> None:
        raise OSError(errno.ENOSPC, "No space left on device")

    monkeypatch.setattr(first.metrics._writer, "append", full)
    await first.submit(c.TakeBatch("actor", "t", 0))
    await first.submit(c.AckBatch("actor", "actor/1", m.Ack(trainer_id="t", version=1)))
    assert first.crash is None and first.machine.state.policies["actor"].latest == 1
    for number in range(20):  # more than dataflow.snapshot_every
        await first.submit(c.LeaseEpisodes("n", f"more{number}", 1))
    assert first.journal.num_since_snapshot > 20, "a snapshot would forget the row"
    first.close()
    shell(tmp_path / "run").close()
    assert [row["step"] for row in read_jsonl(tmp_path / "run" / "metrics.jsonl")] == [1]


async def test_run_time_does_not_run_while_the_service_does_not(tmp_path: Path) -> None:
    first = shell(tmp_path)
    await begin(first)
    now = first.now()
    first.close()
    second = shell(tmp_path)
    assert now <= second.now() < now + 60
    assert second.machine.due(second.now()) is None  # nodes and leases have their whole time again
    second.close()


async def test_segments_that_nobody_needs_are_deleted(tmp_path: Path) -> None:
    first = shell(tmp_path)
    leases = await begin(first)
    first.segments._limit = 10
    await first.submit(commit_of(first, leases))
    await first.submit(c.TakeBatch("actor", "t", 0))
    await first.submit(c.AckBatch("actor", "actor/1", m.Ack(trainer_id="t", version=1)))
    more = await first.submit(c.LeaseEpisodes("n", "r2", 8))
    await first.submit(commit_of(first, more))
    directory = tmp_path / "dataflow" / "segments"
    assert len(list(directory.iterdir())) == 2
    await first.submit(c.TakeBatch("actor", "t", 1))
    await first.submit(c.AckBatch("actor", "actor/2", m.Ack(trainer_id="t", version=2)))
    await first.submit(c.CoverBatches("actor", m.Checkpoint(trainer_id="t", version=2)))
    assert len(list(directory.iterdir())) == 2, "a replay of the log may need the rows"
    await first.compaction.ended()
    for number in range(12):  # more than dataflow.snapshot_every
        await first.submit(c.LeaseEpisodes("n", f"more{number}", 0))
    await first.compaction.ended()
    assert first.compaction.num_snapshots >= 1 and first.compaction.waiting_bytes == 400  # the newest is full, too
    assert [p.name for p in directory.iterdir()] == ["000002.arrow"]
    first.close()


async def test_a_segment_that_is_released_while_a_snapshot_is_written_stays_until_the_next(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A replay from that snapshot needs its rows: the command that releases it comes after."""
    first = Shell(small_config(run__steps=100), tmp_path / "run", sources())
    first.segments._limit = 10
    leases = await begin(first)
    await first.submit(commit_of(first, leases))
    for step in (1, 2):
        await first.submit(c.TakeBatch("actor", "t", step - 1))
        await first.submit(c.AckBatch("actor", f"actor/{step}", m.Ack(trainer_id="t", version=step)))
    await first.submit(commit_of(first, (await first.submit(c.LeaseEpisodes("n", "r2", 2)))))  # the first file is full
    written, compact = threading.Event(), first.journal.compact
    monkeypatch.setattr(first.journal, "compact", lambda snapshot: (written.wait(20), compact(snapshot)))
    first.compaction.begin(first.machine.snapshot(), first.now())
    await first.submit(c.CoverBatches("actor", m.Checkpoint(trainer_id="t", version=2)))
    written.set()
    await first.compaction.ended()
    directory = tmp_path / "run" / "dataflow" / "segments"
    assert first.compaction.num_snapshots == 1 and 1 not in first.machine.state.segment_puts
    assert (directory / "000001.arrow").exists()
    crashed = image(tmp_path / "run", tmp_path / "crashed")
    first.compaction.begin(first.machine.snapshot(), first.now())
    await first.compaction.ended()
    assert not (directory / "000001.arrow").exists()
    first.close()
    second = shell(crashed)
    check_law(second.machine)
    second.close()


async def test_with_fsync_rows_are_on_the_disk_before_the_command_that_points_at_them(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    config = small_config(run__steps=100, dataflow={"fsync": True})
    first = Shell(config, tmp_path, sources())
    leases = await begin(first)
    seen: list[str] = []
    append = first.journal.append
    monkeypatch.setattr("astraflow.dataflow.storage.segments.os.fdatasync", lambda file: seen.append("rows"))
    monkeypatch.setattr(first.journal, "append", lambda entries: (seen.append("command"), append(entries)))
    await first.submit(commit_of(first, leases[:2]))
    assert seen == ["rows", "command"]
    first.close()


async def test_a_snapshot_comes_early_when_many_bytes_wait_to_be_deleted(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("astraflow.dataflow.compaction.MAX_WAITING_BYTES", 300)
    first = Shell(small_config(run__steps=100), tmp_path, sources())  # else after 2000 commands
    first.segments._limit = 10
    leases = await begin(first)
    await first.submit(commit_of(first, leases))
    for step in (1, 2):
        await first.submit(c.TakeBatch("actor", "t", step - 1))
        await first.submit(c.AckBatch("actor", f"actor/{step}", m.Ack(trainer_id="t", version=step)))
    assert first.compaction.num_snapshots == 0
    await first.submit(c.CoverBatches("actor", m.Checkpoint(trainer_id="t", version=2)))
    await first.submit(c.LeaseEpisodes("n", "r2", 0))
    await first.compaction.ended()
    assert first.compaction.num_snapshots == 1
    first.close()


async def test_a_damaged_journal_goes_on_from_the_last_good_command_and_says_so(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    first = shell(tmp_path / "run")
    leases = await begin(first)
    await first.submit(commit_of(first, leases[:2]))
    crashed = image(tmp_path / "run", tmp_path / "crashed")
    first.close()
    wal = crashed / "dataflow" / "journal.sqlite-wal"
    content = bytearray(wal.read_bytes())
    content[-100] ^= 1
    wal.write_bytes(content)
    with pytest.raises(JournalDamaged, match="1 command after command 3 would be lost") as refused:
        shell(crashed)
    assert refused.value.num_lost == 1
    second = Shell(CONFIG, crashed, sources(), accept_damage=True)
    assert second.machine.state.num_episodes == 0 and len(second.machine.state.nodes["n"].held) == 8
    assert [d.num_lost for d in second.damage] == [1] and "journal.sqlite-wal was damaged" in caplog.text
    check_law(second.machine)
    assert set((await second.submit(commit_of(second, leases[:2]))).values()) == {"accepted"}
    second.close()
    shell(crashed).close()
