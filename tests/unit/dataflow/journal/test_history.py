"""The lives of tasks: what is kept, what is cut off and written again, what expires, what people read."""

from __future__ import annotations

import asyncio
import errno
import json
import shutil
from pathlib import Path
from typing import Any

import pytest
from typer.testing import CliRunner

from astraflow.cli.app import app
from astraflow.contracts import Operator
from astraflow.dataflow.journal import history as module
from astraflow.dataflow.journal.history import History, Life, read_life, read_lives
from astraflow.dataflow.machine import commands as c
from astraflow.dataflow.shell import Shell
from astraflow.dataflow.views.life import life_lines, where_now
from astraflow.testing.dataflow import small_config, sources
from astraflow.types import SourceView, Task
from astraflow.wire import messages as m

CONFIG = small_config(
    run__steps=50, dataflow={"snapshot_every": 10}, stages={"echo": {"type": "astraflow.testing.stages:EchoStage"}}
)


def whats(life: Life) -> list[str]:
    return [moment.what for moment in life.moments]


def test_lines_of_commands_that_will_be_replayed_are_cut_off(tmp_path: Path) -> None:
    for keep_to in range(12):
        place = tmp_path / f"{keep_to}"
        first = History(place, 0, limit_bytes=2000)  # several files
        for seq in range(1, 11):
            first.add(seq, float(seq), [("t", "leased", {"episode": seq}), ("t", "committed", {"episode": seq})])
            first.flush()
        first.close()
        newest = max(place.iterdir())
        newest.write_bytes(newest.read_bytes() + b'[11, 11.0, "t", "le')  # torn by a kill
        again = History(place, keep_to, limit_bytes=2000)
        again.close()
        life = read_life(place, "t")
        assert [x.seq for x in life.moments] == [n for n in range(1, 11) if n <= keep_to for _ in range(2)]


def test_old_entries_expire_and_that_is_said(tmp_path: Path) -> None:
    history = History(tmp_path, 0, limit_bytes=16_000)
    for seq in range(1, 2001):
        history.add(seq, seq / 10, [(f"train/0/{seq // 4}", "leased", {"episode": seq % 4, "attempt": 1, "node": "n"})])
        history.flush()
    assert sum(p.stat().st_size for p in tmp_path.iterdir()) <= 17_500
    early, late = read_life(tmp_path, "train/0/1"), read_life(tmp_path, "train/0/499")
    assert early.moments == [] and early.begins_s > 100.0
    assert len(late.moments) == 4
    assert life_lines(late)[0] == f"(what happened before {late.begins_s:.3f} s is older than the history kept)"
    history.close()


def test_a_full_disk_costs_lines_and_nothing_else(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    history = History(tmp_path, 0)
    history.add(1, 1.0, [("t", "leased", {})])
    history.flush()

    def full(file: int, content: bytes) -> None:
        raise OSError(errno.ENOSPC, "No space left on device")

    with monkeypatch.context() as patch:
        patch.setattr(module, "_write_all", full)
        history.add(2, 2.0, [("t", "committed", {})])
        history.flush()
    assert history.num_dropped == 1
    history.add(3, 3.0, [("t", "queued", {})])
    history.close()
    assert whats(read_life(tmp_path, "t")) == ["leased", "queued"]


def test_the_life_of_a_task_survives_snapshots_kills_and_is_read_while_the_service_runs(tmp_path: Path) -> None:
    run_dir = tmp_path / "run"
    tasks = asyncio.run(_live(run_dir, tmp_path / "killed"))
    for directory in (tmp_path / "killed", run_dir):
        Shell(CONFIG, directory, sources()).close()
        life = read_life(directory / "dataflow" / "history", tasks[0])
        seen = whats(life)
        assert seen[0] == "admitted" and seen.count("leased") == 2 and seen.count("committed") == 2
        after = ["judged", "columns", "columns", "queued", "batch", "trained"]
        assert [x for x in seen if x in after] == after
        text = "\n".join(life_lines(life))
        assert "leased    episodes=0,1 attempt=1 node=n" in text and "leased    episodes=0 attempt=2 node=n" in text
        assert "lost      episode=0 attempt=1 node=n why=silent" in text
        assert "reward=actor:1" in text and "stage=echo" in text
        assert text.endswith("trained by actor in step 1")
        dropped = life_lines(read_life(directory / "dataflow" / "history", tasks[2]))
        assert dropped[-1] == "dropped for actor: zero_variance"
        waiting = life_lines(read_life(directory / "dataflow" / "history", tasks[3]))
        assert waiting[-1] == "in flight for actor (last: leased)"


async def _live(run_dir: Path, killed: Path) -> list[str]:
    """Two tasks are trained, one is dropped, one is being played; a copy is taken as a kill would leave it."""
    shell = Shell(CONFIG, run_dir, sources())

    async def do(command: c.Command) -> Any:
        return await shell.submit(command)

    resume = m.Resume(trainer_id="t", version=0, urls=(), run_id=shell.run_id)
    await do(c.ResumePolicy("actor", resume))
    await do(c.JoinNode(m.Join(node_id="n", name="n", capacity=8, run_id=shell.run_id)))
    leases = await do(c.LeaseEpisodes("n", "r", 8))
    await do(c.Expire(leases=[(leases[0].episode_id, 1)]))
    leases[:1] = await do(c.LeaseEpisodes("n", "r2", 1))
    for i in range(0, 6, 2):
        await do(commit_of(shell, leases[i : i + 2], [1.0, 0.0] if i < 4 else [1.0, 1.0]))
    for number in range(4):
        given = await do(c.LeaseRows("echo", "w", f"q{number}", 1))
        put = shell.segments.append(b"columns")
        columns = [c.EntryColumns(e, a, [0]) for e, a in given]
        await do(c.AddColumns("echo", "w", f"p{number}", put, columns))
    assert await do(c.TakeBatch("actor", "t", 0)) is not None
    await do(c.AckBatch("actor", "actor/1", m.Ack(trainer_id="t", version=1)))
    tasks = [leases[i].group_id for i in (0, 2, 4, 6)]
    shell.write_histories()  # else a little later
    assert whats(read_life(run_dir / "dataflow" / "history", tasks[0]))[-1] == "trained", "while it runs"
    await shell.compaction.ended()
    assert shell.compaction.num_snapshots >= 1
    shutil.copytree(run_dir, killed)
    shell.close()
    return tasks


def commit_of(shell: Shell, leases: list[Any], rewards: list[float]) -> c.CommitEpisodes:
    """Journal rows of one episode for each lease."""
    from astraflow.dataflow.machine.records import EpisodeCommit, Part

    put = shell.segments.append(b"rows" * 100)
    episodes = [
        EpisodeCommit(x.episode_id, x.attempt, None, {}, [Part("actor", put.key, [i], [0], 0, 3, 0, rewards[i])])
        for i, x in enumerate(leases)
    ]
    return c.CommitEpisodes("n", put, episodes)


async def test_a_skipped_task_is_told_by_its_operator(tmp_path: Path) -> None:
    config = small_config(sources__train={"type": "sums", "operators": [{"type": f"{__name__}:OddRows"}]})
    shell = Shell(config, tmp_path, sources())
    resume = m.Resume(trainer_id="t", version=0, urls=(), run_id=shell.run_id)
    await shell.submit(c.ResumePolicy("actor", resume))
    await shell.submit(c.JoinNode(m.Join(node_id="n", name="n", capacity=8, run_id=shell.run_id)))
    await shell.submit(c.LeaseEpisodes("n", "r", 8))
    shell.close()
    lives = read_lives(tmp_path / "dataflow" / "history")
    assert lives and {whats(Life(moments, 0.0))[0] for moments in lives.values()} == {"skipped", "admitted"}
    for task, moments in lives.items():
        odd = int(task.rpartition("/")[2]) % 2
        assert where_now(moments).startswith("in flight" if odd else f"skipped by {__name__}:OddRows, never admitted")


class OddRows(Operator):
    """Admits odd rows only."""

    place = "source"

    def admit(self, task: Task, view: SourceView) -> float:
        return float(task.row % 2)


def test_the_verb_prints_a_life_or_says_why_it_cannot(tmp_path: Path) -> None:
    run_dir = tmp_path / "run"
    tasks = asyncio.run(_live(run_dir, tmp_path / "killed"))
    (run_dir / "run.resolved.json").write_text(CONFIG.model_dump_json())
    runner = CliRunner()
    done = runner.invoke(app, ["trace", str(run_dir), tasks[1]])
    assert done.exit_code == 0 and done.stdout.startswith(f"task {tasks[1]}\n") and "trained by actor" in done.stdout
    moments = json.loads(runner.invoke(app, ["trace", str(run_dir), tasks[1], "--json"]).stdout)
    assert moments[0]["what"] == "admitted" and moments[0]["fields"]["policies"] == ["actor"]
    unknown = runner.invoke(app, ["trace", str(run_dir), "train/9/9"])
    assert "was not looked at by this run" in str(unknown.exception)
    every = runner.invoke(app, ["trace", str(run_dir)]).stdout.splitlines()
    assert [line.split("  ")[0] for line in every] == tasks
    assert every[2] == f"{tasks[2]}  dropped for actor: zero_variance"
    assert (
        json.loads(runner.invoke(app, ["trace", str(run_dir), "--json"]).stdout)[tasks[0]]
        == "trained by actor in step 1"
    )
    History(run_dir / "dataflow" / "history", 0).close()
    (run_dir / "dataflow" / "history" / "000001.jsonl").rename(run_dir / "dataflow" / "history" / "000002.jsonl")
    with (run_dir / "dataflow" / "history" / "000002.jsonl").open("w") as file:
        file.write('[90, 12.5, "train/1/1", "leased", {}]\n')
    old = runner.invoke(app, ["trace", str(run_dir), tasks[1]])
    assert "is older than the history kept, which begins at 12.500 s" in str(old.exception)
