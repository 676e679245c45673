"""Jobs and verdicts: what crosses between code and tests, and faults of the sandbox itself."""

from __future__ import annotations

import asyncio
import os
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path

import pytest

from astraflow.errors import Problem
from astraflow.sandbox import isolation, pool
from astraflow.sandbox.inside.driver import same_output
from astraflow.sandbox.inside.values import pack, unpack
from astraflow.sandbox.isolation import find_way
from astraflow.sandbox.pool import Sandbox
from astraflow.sandbox.records import Job, Settings, settings_of
from sandboxed import needs_sandbox


@pytest.fixture(scope="module")
def sandbox() -> Iterator[Sandbox]:
    box = Sandbox(Settings(slots=1, wall_s=30.0))
    yield box
    box.close()


VALUES = [
    None, True, 0, -1, 1 << 80, 1.5, float("inf"), "x", "\ud800\u20ac\x00", b"\x00\xff", [1, (2, {3})],
    {"a": {1: (2,)}},
    frozenset({1}), 1 + 2j, {(1, 2): [None]}, int, [],
]  # fmt: skip


@pytest.mark.parametrize("value", VALUES, ids=repr)
def test_plain_values_cross_as_they_are(value: object) -> None:
    crossed = unpack(pack(value, lambda _: pytest.fail("not plain")), lambda _: pytest.fail("not plain"))
    assert crossed == value and type(crossed) is type(value)


@needs_sandbox
def test_values_cross_in_both_directions(sandbox: Sandbox) -> None:
    tests = tuple(
        f"v = {value!r}\nassert f(v) == v and type(f(v)) is type(v)"
        for value in VALUES
        if type(value) not in (float, type)
    )
    verdict = sandbox.submit(Job(code="def f(x):\n    return x", entries=("f",), tests=tests, stop=False)).result(60)
    assert (verdict.outcome, verdict.num_passed) == ("passed", len(tests)), verdict


NODE = "class f:\n    def __init__(self, a): self.a = a"


@needs_sandbox
@pytest.mark.parametrize(
    ("code", "test"),
    [
        ("def f(x):\n    x.append(1); x[0] = 5", "y = [0]\nf(y)\nassert y == [5, 1]"),
        ("def f(x):\n    raise KeyError('k')", "try:\n    f(1)\nexcept KeyError:\n    pass\nelse:\n    assert False"),
        (NODE + "\n    def g(self): return f(self.a + 1)", "assert f(1).g().g().a == 3"),
        (NODE, "r = f(1)\nr.a = f(2)\nassert r.a == r.a and r.a != f(2) and r.a.a == 2"),
        ("def f(n):\n    yield from range(n)", "assert list(f(3)) == [0, 1, 2]"),
        ("class Solution:\n    def f(self, x): return x", "assert f(3) == 3"),
        (
            "from dataclasses import dataclass\nfrom typing import ClassVar\n@dataclass\nclass f:\n    a: int\n"
            "    b: 'ClassVar[int]' = 2",
            "assert f(3).a == 3",
        ),
        ("def f(x: int):\n    return f.__annotations__", "assert f(1) == {'x': int}"),
        ("import sys\ndef f():\n    return sys.modules[f.__module__].f is f", "assert f()"),
        ("f = lambda *a, **k: (a, k)", "assert f(1, b=2) == ((1,), {'b': 2})"),
    ],
)  # fmt: skip
def test_what_a_test_may_do(sandbox: Sandbox, code: str, test: str) -> None:
    verdict = sandbox.submit(Job(code=code, entries=("f",), tests=(test,))).result(60)
    assert verdict.outcome == "passed", verdict


@needs_sandbox
@pytest.mark.parametrize(
    "code",
    [
        "import threading\nthreading.Thread(target=lambda: print(int(input()) + 1)).start()",
        "import atexit, io, sys\nsys.stdout = out = io.StringIO()\n"
        "atexit.register(lambda: sys.__stdout__.write(out.getvalue()))\nprint(int(input()) + 1)",
        "from dataclasses import dataclass\n@dataclass\nclass P:\n    x: 'int'\nprint(P(int(input())).x + 1)",
        "import __main__\ny = 1\nprint(int(input()) + __main__.y)",
        "import sys\nsys.stdout.write(str(int(input()) + 1))\nsys.stdout = None",
    ],
)  # fmt: skip
def test_programs_end_as_those_of_a_file_do(sandbox: Sandbox, code: str) -> None:
    verdict = sandbox.submit(Job(code=code, cases=(("1\n", "2\n"),))).result(60)
    assert verdict.outcome == "passed", verdict


@needs_sandbox
def test_failures_say_why_and_count(sandbox: Sandbox) -> None:
    job = Job(
        code="def f(x):\n    return x", entries=("f",), tests=("assert f(1) == 1", "assert f(1) == 2, 'no'", "f(3)")
    )
    first = sandbox.submit(job).result(60)
    assert (first.outcome, first.num_passed, first.num_tests, first.why) == ("failed", 1, 3, "AssertionError: no")
    broken = sandbox.submit(Job(code="def f(:", entries=("f",), tests=("f(1)",))).result(60)
    assert broken.outcome == "failed" and broken.why.startswith("load: SyntaxError")
    absent = sandbox.submit(Job(code="", entries=("f",), tests=("f(1)",))).result(60)
    assert (absent.outcome, absent.why) == ("failed", "NameError: the code defines no f")


@needs_sandbox
def test_helpers_of_the_question_are_never_the_codes(sandbox: Sandbox) -> None:
    code = "def f(x):\n    return 7\ndef near(a, b):\n    return True"
    job = Job(code=code, entries=("f",), setup="def near(a, b):\n    return a == b", tests=("assert near(f(1), 8)",))
    assert sandbox.submit(job).result(60).outcome == "failed"


@pytest.mark.parametrize(
    ("wrote", "wanted", "same"),
    [("1 2\n", "1 2", True), ("1  \n2\n\n", "1\n2", True), ("0.3333333", "0.33333333", True), ("1.1", "1.2", False),
     ("10", "1e1", True), ("2", "3", False), ("1 2", "1 2 3", False), ("nan", "1.0", False), ("x", "1.0", False)],
)  # fmt: skip
def test_outputs_are_compared_by_lines_then_by_words(wrote: str, wanted: str, same: bool) -> None:
    assert same_output(wrote, wanted) is same


@needs_sandbox
async def test_jobs_come_from_loops_and_threads_alike(sandbox: Sandbox) -> None:
    job = Job(code="f = abs", entries=("f",), tests=("assert f(-1) == 1",))
    verdicts = await asyncio.gather(sandbox.run(job), asyncio.to_thread(lambda: sandbox.submit(job).result(60)))
    assert [verdict.outcome for verdict in verdicts] == ["passed", "passed"]


@needs_sandbox
def test_a_supervisor_that_dies_fails_its_jobs_by_name_and_the_next_has_another() -> None:
    box = Sandbox(Settings(slots=1))
    slow = box.submit(Job(code="import time\ntime.sleep(5)", entries=("f",), tests=("f()",)))
    assert box._process is not None
    box._process.send_signal(signal.SIGKILL)
    lost = slow.result(60)
    assert lost.outcome == "error" and "supervisor" in lost.why
    assert box.submit(Job(code="f = abs", entries=("f",), tests=("assert f(-1) == 1",))).result(60).outcome == "passed"
    box.close()


@needs_sandbox
def test_nothing_stays_when_the_process_that_asked_is_killed() -> None:
    program = (
        "import sys\nfrom astraflow.sandbox.pool import Sandbox\nfrom astraflow.sandbox.records import Job, Settings\n"
        "s = Sandbox(Settings(slots=1))\n"
        "s.submit(Job(code='f = abs', entries=('f',), tests=('f(1)',))).result(60)\n"
        "s.submit(Job(code='import time; time.sleep(60)', entries=('f',), tests=('f(1)',)))\n"
        "sys.stdout.write(f'{s._process.pid}\\n')\nsys.stdout.flush()\nsys.stdin.read()"
    )
    asker = subprocess.Popen([sys.executable, "-c", program], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True)
    assert asker.stdin is not None and asker.stdout is not None
    supervisor = int(asker.stdout.readline())
    deadline = time.monotonic() + 60
    while len(family := [supervisor, *_children(supervisor)]) <= 2 and time.monotonic() < deadline:
        os.sched_yield()  # until the second job runs
    asker.kill()
    asker.wait()
    asker.stdin.close()
    asker.stdout.close()
    assert len(family) > 2
    deadline = time.monotonic() + 60
    while (left := [pid for pid in family if _lives(pid)]) and time.monotonic() < deadline:
        os.sched_yield()
    assert not left


def _children(pid: int) -> list[int]:
    found = []
    for task in Path(f"/proc/{pid}/task").iterdir():
        found += [int(word) for word in (task / "children").read_text().split()]
    return found


def _lives(pid: int) -> bool:
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] not in "ZX"
    except OSError:
        return False


def test_without_bubblewrap_it_refuses_with_the_fix(monkeypatch: pytest.MonkeyPatch) -> None:
    find_way.cache_clear()
    monkeypatch.setattr(isolation.shutil, "which", lambda name: None)
    with pytest.raises(
        Problem, match=r"isolation=bubblewrap needs the program bwrap.*apt-get install bubblewrap.*weak"
    ):
        find_way("bubblewrap", "")
    find_way.cache_clear()


@needs_sandbox
def test_a_box_that_cannot_start_is_no_grade(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    with pytest.raises(Problem, match=r"python=/nowhere is not a file"):
        Sandbox(Settings(python="/nowhere"))
    monkeypatch.setattr(pool, "usable", lambda *_: None)
    box = Sandbox(Settings(python="/nowhere"))
    verdict = box.submit(Job(code="f = abs", entries=("f",), tests=("f(1)",))).result(60)
    assert verdict.outcome == "error"
    box.close()


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"cpu": 3}, r"w\.sandbox\.cpu=3 is no setting of a sandbox; known: isolation"),
        ({"cpu_s": 0}, r"w\.sandbox\.cpu_s=0 cannot be used"),
        ({"isolation": "none"}, r"w\.sandbox\.isolation=none cannot be used"),
        ({"slots": "two"}, r"w\.sandbox\.slots=two cannot be used"),
    ],
)
def test_wrong_settings_are_named(options: dict[str, object], message: str) -> None:
    with pytest.raises(Problem, match=message):
        settings_of(options, "w.sandbox")


@pytest.mark.skipif(sys.platform != "linux", reason="limits are Linux's")
def test_weak_isolation_is_recorded() -> None:
    box = Sandbox(Settings(isolation="weak", slots=1, cpu_s=1))
    good = box.submit(Job(code="f = abs", entries=("f",), tests=("assert f(-1) == 1",))).result(60)
    loop = box.submit(Job(code="while True: pass", entries=("f",), tests=("f()",))).result(60)
    box.close()
    assert (good.outcome, good.isolation, loop.outcome) == ("passed", "weak", "timeout")
