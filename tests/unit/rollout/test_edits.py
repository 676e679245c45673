"""A workflow that is edited while it plays: running episodes finish on the old code, new ones take the new."""

from __future__ import annotations

import asyncio
import os

import pytest
from rollout_bench import bench, lease

from astraflow.rollout.worker.code import SourceFile, stamp_of, version_of
from astraflow.rollout.worker.edits import Edits

WORKFLOW = """
import asyncio
import {grader}


async def play(task, llm):
    if task["kind"] == "crash":
        import os
        os._exit(3)
    await llm["actor"].chat([{{"role": "user", "content": "1+1?"}}])
    return {grader}.REWARD
"""


class Files:
    """A workflow and the module that holds its reward."""

    def __init__(self, folder, name):
        self.workflow, self.grader = folder / f"{name}.py", folder / f"{name}_grader.py"
        self.workflow.write_text(WORKFLOW.format(grader=self.grader.stem))
        self.grade(0.0)

    def grade(self, reward, more=""):
        """Replaced in one step, as editors do."""
        draft = self.grader.with_suffix(".new")
        draft.write_text(f"{more}\nREWARD = {reward}\n")
        os.replace(draft, self.grader)

    @property
    def type(self):
        return f"{self.workflow}:play"


@pytest.fixture
def files(tmp_path, request):
    return Files(tmp_path, f"edited_{abs(hash(request.node.name))}")


async def until(condition):
    async with asyncio.timeout(60):
        while not condition():
            await asyncio.sleep(0.01)


def reward(episode):
    return episode.trajectories[0].reward


async def test_an_edit_takes_new_episodes_and_leaves_running_ones_alone(files):
    async with bench(files.type, watch=True, workers=2, held=True) as made:
        made.runner.accept([lease("fine", i) for i in range(4)])
        await until(lambda: len(made.engine.seen) == 4)
        old = made.pool.code
        files.grade(1.0)
        await until(lambda: made.pool.num_edits == 1)
        assert made.pool.code != old
        made.runner.accept([lease("fine", i) for i in range(4, 8)])
        await until(lambda: len(made.engine.seen) == 8)
        made.engine.release()
        episodes = await made.play(count=8)
        assert [reward(e) for e in episodes] == [0.0] * 4 + [1.0] * 4
        assert [e.code for e in episodes] == [old] * 4 + [made.pool.code] * 4
        await until(lambda: len(made.pool._workers) == 2)
        assert made.pool.notes() == {"code": made.pool.code}
        assert made.runner.endings == {"done": 8}


@pytest.mark.parametrize(
    ("more", "trace"),
    [
        ("def broken(:", "SyntaxError"),
        ("import no_such_module_of_mine", "No module named 'no_such_module_of_mine'"),
        ("1 / 0", "ZeroDivisionError"),
        ("import os; os._exit(1)", "its process ended before it was ready"),
        ("raise SystemExit('bye')", "SystemExit: bye"),
    ],
)
async def test_a_broken_edit_is_told_and_the_old_code_goes_on_also_in_a_new_worker(files, caplog, more, trace):
    async with bench(files.type, watch=True) as made:
        old = made.pool.code
        files.grade(1.0, more)
        with caplog.at_level("ERROR", "astraflow.node"):
            await until(lambda: made.pool.num_refused_edits == 1)
        assert trace in made.pool.notes()["edit"] and trace in caplog.text
        crashed, played = await made.play(lease("crash", 0), lease("fine", 1, timeout_s=1.5))
        assert crashed.error.startswith("worker_killed")
        if played.error is not None:  # it sat beside the one that crashed
            played = (await made.play(lease("fine", 2), count=3))[2]
        assert (reward(played), played.code, made.pool.num_edits) == (0.0, old, 0)
        files.grade(0.5)
        await until(lambda: made.pool.num_edits == 1)
        assert "edit" not in made.pool.notes()
        (mended,) = (await made.play(lease("fine", 9), count=len(made.episodes) + 1))[-1:]
        assert reward(mended) == 0.5


async def test_a_missing_module_that_appears_mends_an_edit(files):
    async with bench(files.type, watch=True) as made:
        name = f"{files.grader.stem}_late"
        files.grade(0.5, f"import {name}")
        await until(lambda: made.pool.num_refused_edits == 1)
        files.grader.with_name(f"{name}.py").write_text("")
        await until(lambda: made.pool.num_edits == 1)
        (episode,) = await made.play(lease("fine"))
        assert reward(episode) == 0.5


async def test_without_watch_the_code_stays_that_of_the_start(files):
    async with bench(files.type) as made:
        old = made.pool.code
        files.grade(1.0)
        await made.play(lease("crash", 0))
        episodes = await made.play(lease("fine", 1), count=2)
        assert (reward(episodes[1]), episodes[1].code) == (0.0, old)


async def test_a_module_that_an_episode_imports_belongs_to_its_code(files):
    files.workflow.write_text(
        f"async def play(task, llm):\n    import {files.grader.stem} as grader\n"
        '    await llm["actor"].chat([{"role": "user", "content": "1+1?"}])\n    return grader.REWARD\n'
    )
    async with bench(files.type, watch=True) as made:
        built = made.pool.code
        (first,) = await made.play(lease("fine", 0))
        assert first.code == made.pool.code != built
        files.grade(1.0)
        await until(lambda: made.pool.num_edits == 1)
        second = (await made.play(lease("fine", 1), count=2))[1]
        assert reward(second) == 1.0 and second.code != first.code


def test_a_version_is_that_of_names_and_contents():
    def file(module, text, path="/a"):
        return SourceFile(module, path, text, (1, 2))

    one = [file("a", b"x"), file("b", b"y")]
    assert version_of(one) == version_of([file("b", b"y", "/elsewhere"), file("a", b"x")])
    others = [[file("a", b"x")], [file("a", b"xy"), file("b", b"")], [file("a", b"y"), file("b", b"x")], []]
    assert len({version_of(files) for files in [one, *others]}) == 5
    assert version_of([]) == ""


async def test_a_file_counts_as_edited_once_it_holds_still_and_holds_something_else(tmp_path):
    path = tmp_path / "file.py"

    def loaded():
        return SourceFile("file", str(path), path.read_bytes(), stamp_of(str(path)))

    path.write_text("a")
    edits = Edits()
    edits.add([loaded()])
    assert [await edits.found() for _ in range(3)] == [False] * 3
    path.write_text("half")
    assert not await edits.found()
    path.write_text("all of it")
    assert [await edits.found() for _ in range(3)] == [False, True, False]
    edits.add([loaded()])
    os.utime(path, ns=(1, 1))
    assert [await edits.found() for _ in range(3)] == [False] * 3, "only touched"
    path.unlink()
    assert [await edits.found() for _ in range(3)] == [False, True, False]
    edits.replace([])
    path.write_text("b")
    assert [await edits.found() for _ in range(3)] == [False] * 3
