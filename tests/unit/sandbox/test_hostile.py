"""Code that attacks: each attempt is contained, its verdict is a failure, and the next job is judged as ever."""

from __future__ import annotations

import json
import os
import platform
import socket
import subprocess
import textwrap
import threading
from collections.abc import Iterator
from pathlib import Path

import pytest

from astraflow.sandbox import calls, isolation
from astraflow.sandbox.inside import driver
from astraflow.sandbox.pool import Sandbox
from astraflow.sandbox.records import Job, Settings, Verdict
from sandboxed import needs_sandbox

pytestmark = needs_sandbox
RIGHT = "def f(x):\n    return x + 1"
TESTS = ("assert f(1) == 2", "assert f(41) == 42")


@pytest.fixture(scope="module")
def sandbox() -> Iterator[Sandbox]:
    box = Sandbox(Settings(slots=1, cpu_s=1, wall_s=5.0, memory_bytes=128 << 20, processes=8, output_bytes=1 << 16))
    yield box
    box.close()


def judged(sandbox: Sandbox, code: str, tests: tuple[str, ...] = TESTS) -> Verdict:
    return sandbox.submit(Job(code=textwrap.dedent(code), entries=("f",), tests=tests)).result(60)


@pytest.fixture(autouse=True)
def goes_on(sandbox: Sandbox) -> Iterator[None]:
    """Whatever the test did, the slot judges right and wrong code as before."""
    yield
    assert judged(sandbox, RIGHT).outcome == "passed"
    assert judged(sandbox, "def f(x):\n    return x").outcome == "failed"


FAKES = {
    "exit": "import sys\nsys.exit(0)",
    "exit in a call": "def f(x):\n    raise SystemExit(0)",
    "os._exit": "import os\nos._exit(0)",
    "os._exit in a call": "import os\ndef f(x):\n    os._exit(0)",
    "prints": "print('passed'); print('OK')\ndef f(x):\n    return 'passed'",
    "equal to all": """
        class Same:
            def __eq__(self, other): return True
            def __ne__(self, other): return False
            def __bool__(self): return True
            __hash__ = None
        def f(x): return Same()""",
    "equal number": """
        class Same(int):
            def __eq__(self, other): return True
        def f(x): return Same(0)""",
    "builtins": """
        import builtins
        builtins.AssertionError = Exception
        builtins.bool = lambda x: True
        def f(x): return 0""",
    "callers": """
        import sys
        def f(x):
            frame, found = sys._getframe(), []
            while frame:
                found += [v for v in frame.f_globals.values() if isinstance(v, str) and 'assert' in v]
                found += [str(v) for v in frame.f_locals.values()]
                frame = frame.f_back
            return 2 if any('== 2' in v for v in found) else None""",
    "collector": """
        import gc
        def f(x):
            return 2 if any('== 42' in v for v in gc.get_objects() if isinstance(v, str)) else None""",
    "trace": """
        import sys
        sys.settrace(lambda *a: None)
        sys.excepthook = lambda *a: None
        def f(x): raise AssertionError""",
    "forged answers": """
        import os
        for number in range(3, 30):
            try:
                os.write(number, b'\\x00\\x00\\x00\\x0b{"why": ""}' * 5 + b'\\x00\\x00\\x00\\x0a{"end": 0}')
            except OSError:
                pass
        def f(x): return 0""",
    "garbage": """
        import os
        def f(x):
            for number in range(3, 30):
                try:
                    os.write(number, b'\\xff' * 4000)
                except OSError:
                    pass""",
    "deep": "def f(x):\n    y = []\n    for _ in range(100000): y = [y]\n    return y",
    "itself": "def f(x):\n    y = []\n    y.append(y)\n    return y",
    "huge answer": "def f(x):\n    return 'x' * 10000000",
    "huge number": "def f(x):\n    return 1 << 100000000",
    "raises anything": "def f(x):\n    raise type('AssertionError', (BaseException,), {})()",
    "generator": "def f(x):\n    while True:\n        yield 2",
}


def test_the_end_of_a_loop_is_no_answer(sandbox: Sandbox) -> None:
    for test in ("for y in map(f, [1, 2]):\n    assert y == 2", "assert all(y == 2 for y in map(f, [1]))"):
        assert judged(sandbox, "def f(x):\n    raise StopIteration", (test,)).outcome == "failed"
        assert judged(sandbox, "def f(x):\n    return 2", (test,)).outcome == "passed"


@pytest.mark.parametrize("key", ["code", "signal", "raised"])
def test_a_forged_reply_is_a_failure_however_long(key: str) -> None:
    """What is too long for the host would count as a failure of the sandbox, which is no grade."""
    ours, control = socket.socketpair()
    code, channel = socket.socketpair()
    with ours, control, code, channel:
        reply = json.dumps({key: "\0" * 20_000}).encode()
        threading.Thread(target=code.sendall, args=(len(reply).to_bytes(4, "big") + reply,), daemon=True).start()
        job = {"code": "", "cases": [("", "")], "tests": [], "limit": 1 << 20, "stop": True}
        driver._judge(control.fileno(), job, channel.fileno())
        told = ours.recv(1 << 20)
    assert 10 < len(told) < 1 << 12


@pytest.mark.parametrize("name", FAKES)
def test_no_trick_passes(sandbox: Sandbox, name: str) -> None:
    verdict = judged(sandbox, FAKES[name])
    assert (verdict.outcome, verdict.num_passed) == ("failed", 0), verdict


HOGS = {
    "loop": ("def f(x):\n    while True: pass", "timeout"),
    "loop when loaded": ("while True: pass", "timeout"),
    "sleep": ("import time\ndef f(x):\n    time.sleep(1000)", "timeout"),
    "ignores signals": (
        "import signal\nfor s in range(1, 65):\n    try: signal.signal(s, signal.SIG_IGN)\n    except Exception: pass\n"
        "def f(x):\n    while True: pass",
        "timeout",
    ),
    "memory": ("def f(x):\n    return len(bytearray(2 << 30))", "failed"),
    "memory of many": (
        "import os, time\nfor _ in range(6):\n    if not os.fork():\n        y = bytearray(60 << 20)\n"
        "        for i in range(0, len(y), 4096): y[i] = 1\n        time.sleep(100)\ntime.sleep(100)",
        "failed",
    ),
    "recursion": ("import sys\nsys.setrecursionlimit(10**9)\ndef f(x):\n    return f(x)", ""),
}  # fmt: skip


@pytest.mark.parametrize("name", HOGS)
def test_limits_hold(sandbox: Sandbox, name: str) -> None:
    code, outcome = HOGS[name]
    verdict = judged(sandbox, code)
    assert verdict.num_passed == 0 and verdict.outcome == (outcome or verdict.outcome), verdict
    assert verdict.outcome in ("failed", "timeout")
    assert name != "memory of many" or verdict.why.startswith("memory")


def seen(sandbox: Sandbox, expression: str) -> str:
    """What the code saw, by a test that fails with it."""
    code = f"""
        import os
        def f():
            try:
                return str({expression})
            except Exception as error:
                return repr(error)"""
    verdict = judged(sandbox, code, ("raise ValueError('<' + f() + '>')",))
    return verdict.why.partition("<")[2].rpartition(">")[0]


def test_a_fork_bomb_is_limited_and_leaves_nothing(sandbox: Sandbox) -> None:
    code = """
        import os, time
        made = 0
        def f():
            global made
            try:
                while True:
                    if os.fork() == 0:
                        time.sleep(100)
                    made += 1
            except OSError:
                return made"""
    verdict = judged(sandbox, code, ("n = f()\nassert 1 <= n <= 12, n",))
    assert verdict.outcome == "passed", verdict
    bomb = "import os\ndef f(x):\n    while True:\n        try: os.fork()\n        except OSError: pass"
    assert judged(sandbox, bomb).outcome == "timeout"


def test_threads_are_limited(sandbox: Sandbox) -> None:
    code = """
        import threading, time
        def f():
            for number in range(1000):
                try:
                    threading.Thread(target=time.sleep, args=(100,), daemon=True).start()
                except Exception:
                    return number"""
    assert judged(sandbox, code, ("n = f()\nassert 1 <= n <= 12, n",)).outcome == "passed"


def test_files_of_the_host_are_not_there(sandbox: Sandbox, tmp_path: Path) -> None:
    secret = tmp_path / "secret"
    secret.write_text("planted")
    for path in (secret, Path("/etc/shadow"), Path("/etc/passwd"), Path("/root"), Path("/home"), Path("/work")):
        assert "No such file" in seen(sandbox, f"os.stat({str(path)!r})"), path
    assert seen(sandbox, "sorted(set(os.listdir('/')) - {'bin', 'lib', 'lib32', 'lib64'})") == "['dev', 'tmp', 'usr']"
    assert seen(sandbox, "os.listdir('/tmp')") == "[]"
    links = "os.symlink('/etc/shadow', '/tmp/a') or open('/tmp/a').read()"
    assert "No such file" in seen(sandbox, links)


@pytest.mark.parametrize("place", ["/", "/usr", "/usr/lib", "/dev", "/bin"])
def test_nothing_can_be_written_outside_of_tmp(sandbox: Sandbox, place: str) -> None:
    assert "Read-only" in seen(sandbox, f"open({place!r} + '/x', 'w')") or "Permission" in seen(
        sandbox, f"open({place!r} + '/x', 'w')"
    )


def test_what_is_written_is_limited_and_gone_afterwards(sandbox: Sandbox) -> None:
    assert "File too large" in seen(
        sandbox, "open('/tmp/a', 'wb', 0).write(bytes(1 << 16)) and open('/tmp/a', 'ab', 0).write(b'x')"
    )
    many = "[open(f'/tmp/{n}', 'wb', 0).write(bytes(1 << 16)) for n in range(10000)]"
    assert "No space" in seen(sandbox, many)
    assert seen(sandbox, "os.listdir('/tmp')") == "[]"


def test_there_is_no_network(sandbox: Sandbox) -> None:
    connect = "__import__('socket').create_connection(({!r}, {}), 2)"
    for host, port in (("8.8.8.8", 53), ("127.0.0.1", 22), ("::1", 22)):
        assert "not permitted" in seen(sandbox, connect.format(host, port))
    assert "gaierror" in seen(sandbox, connect.format("example.org", 80))
    assert "not permitted" in seen(sandbox, "__import__('socket').if_nameindex()")
    with socket.socket(socket.AF_UNIX) as door:
        door.bind(f"\0astraflow-{os.getpid()}")
        door.listen()
        local = f"__import__('socket').socket(__import__('socket').AF_UNIX).connect({door.getsockname()!r})"
        assert "refused" in seen(sandbox, local)
    assert seen(sandbox, "len(__import__('socket').socketpair())") == "2"  # as of an event loop


@pytest.mark.parametrize("name", calls.REFUSED)
def test_calls_of_the_kernel_that_no_limit_counts_are_refused(sandbox: Sandbox, name: str) -> None:
    if not calls.FILTER:
        pytest.skip("the numbers of this machine are not known")
    number = calls.REFUSED[name][calls.MACHINES[platform.machine()][0]]
    ask = f"(lambda c, k: (k.syscall({number}, 0, 0, 0, 0, 0, 0), c.get_errno()))"
    assert seen(sandbox, f"{ask}(*(lambda c: (c, c.CDLL(None, use_errno=True)))(__import__('ctypes')))") == "(-1, 1)"


WRAPPED = {
    "memfd_create": "os.memfd_create('a')",
    "shmget": "__import__('ctypes').CDLL(None).shmget(0, 1 << 20, 0o1600)",
    "msgget": "__import__('ctypes').CDLL(None).msgget(0, 0o1600)",
    "ptrace": "__import__('ctypes').CDLL(None).ptrace(0, 0, 0, 0)",
    "process_vm_readv": "__import__('ctypes').CDLL(None).process_vm_readv(1, 0, 0, 0, 0, 0)",
    "process_vm_writev": "__import__('ctypes').CDLL(None).process_vm_writev(1, 0, 0, 0, 0, 0)",
}


@pytest.mark.skipif(not calls.FILTER, reason="the numbers of this machine are not known")
@pytest.mark.parametrize("name", WRAPPED)
def test_calls_by_their_names_are_refused(sandbox: Sandbox, name: str) -> None:
    """Whatever numbers the filter has, it must mean these."""
    assert seen(sandbox, WRAPPED[name]) in ("-1", "PermissionError(1, 'Operation not permitted')")


def test_packages_beside_an_interpreter_are_not_seen(tmp_path: Path) -> None:
    """Data sets with their answers come as packages, and so does this one."""
    packages = tmp_path / "lib" / "python3.11" / "site-packages"
    for folder in (packages, tmp_path / "bin", tmp_path / "src"):
        folder.mkdir(parents=True)
        (folder / "answers").write_text("2")
    (packages.parent / "os.py").touch()
    folders, hidden = isolation._folders(tmp_path / "bin" / "python3")
    way = isolation.find_way("bubblewrap", "")
    way = way._replace(setpriv="", folders=(*way.folders, *folders), hidden=hidden)  # as who may enter here
    places = [str(folder) for folder in (packages.parent, packages, tmp_path)]
    look = f"import os\nprint([sorted(os.listdir(place)) for place in {places!r}])"
    with calls.filter_file() as rules:
        words = way.command(0, 1 << 20, rules, ["-c", look])
        done = subprocess.run(words, pass_fds=(rules,), capture_output=True, check=False, text=True, timeout=60)
    assert done.stdout == "[['os.py', 'site-packages'], [], ['bin', 'lib']]\n", done.stderr


def test_other_processes_are_not_there(sandbox: Sandbox) -> None:
    assert seen(sandbox, "(os.getpid(), os.getppid())") == "(1, 0)"
    assert "No such process" in seen(sandbox, f"os.kill({os.getpid()}, 9)")
    assert "No such file" in seen(sandbox, "os.listdir('/proc')")
    ptrace = f"__import__('ctypes').CDLL(None, use_errno=True).ptrace(16, {os.getpid()}, 0, 0)"
    assert seen(sandbox, ptrace) in ("-1", "")  # attach
    assert seen(sandbox, "os.kill(0, 9)") in ("None", "")  # itself at most


def test_it_is_nobody_and_knows_nothing(sandbox: Sandbox) -> None:
    assert seen(sandbox, "(os.getuid(), os.getgid(), 0 in os.getgroups())") == "(65534, 65534, False)"
    assert "ermitted" in seen(sandbox, "os.setuid(0)") or "Invalid" in seen(sandbox, "os.setuid(0)")
    assert seen(sandbox, "sorted(k for k in os.environ if k != 'PWD')") == (
        "['HOME', 'LANG', 'PATH', 'PYTHONDONTWRITEBYTECODE', 'PYTHONHASHSEED', 'TZ']"
    )
    assert seen(sandbox, "__import__('socket').gethostname()") == "box"
    unshare = "__import__('ctypes').CDLL(None, use_errno=True).unshare(0x10000000)"
    assert seen(sandbox, unshare) == "-1"  # no further user namespace
    assert seen(sandbox, "open('/dev/tty')").startswith(("FileNotFound", "OSError", "PermissionError"))


def test_what_it_leaves_behind_is_not_there_for_the_next(sandbox: Sandbox) -> None:
    left = """
        import os, time
        open('/tmp/left', 'w').write('x')
        if not os.fork():
            os.setsid()
            time.sleep(100)
        """
    code = textwrap.dedent(left)
    assert judged(sandbox, code + RIGHT).outcome == "passed"
    assert seen(sandbox, "os.path.exists('/tmp/left')") == "False"


def test_a_box_of_a_user_of_its_own_when_root_runs_it(sandbox: Sandbox) -> None:
    if os.geteuid():
        pytest.skip("only root can give boxes users of their own")
    judged(sandbox, RIGHT)
    users = {
        os.stat(f"/proc/{name}").st_uid
        for name in os.listdir("/proc")
        if name.isdecimal() and Path(f"/proc/{name}").exists()
    }
    assert any(user >= 0x1000_0000 for user in users)


PROGRAM = "print(int(input()) + 1)"
CASES = (("1\n", "2\n"), ("41\n", "42\n"))


@pytest.mark.parametrize(
    ("code", "outcome"),
    [
        ("import os\nos.kill(os.getppid(), 9)\nprint(2)", "failed"),
        ("while True: print('x' * 1000)", "failed"),
        ("while True: pass", "timeout"),
        ("import os\nos.write(1, b'2\\n'); os._exit(1)", "failed"),
        ("import sys\nsys.exit(3)", "failed"),
        ("import os\nif not os.fork():\n    while True: pass\nprint(int(input()) + 2)", "failed"),
    ],
)
def test_programs_that_attack(sandbox: Sandbox, code: str, outcome: str) -> None:
    assert sandbox.submit(Job(code=code, cases=CASES)).result(60).outcome == outcome
    assert sandbox.submit(Job(code=PROGRAM, cases=CASES)).result(60).outcome == "passed"


@pytest.mark.parametrize(
    "test",
    [
        "import os\nos._exit(0)",
        "while True: pass",
        "import os\nos.kill(os.getppid(), 9)",
        "import os\nfor n in range(3, 20):\n    try: os.write(n, b'\\xff' * 5000)\n    except OSError: pass",
        "import builtins\nbuiltins.compile = None",
    ],
)
def test_tests_that_attack_their_driver_harm_no_other_job(sandbox: Sandbox, test: str) -> None:
    job = Job(code=RIGHT, entries=("f",), tests=(test, "assert f(1) == 2"), trusted=False)
    verdict = sandbox.submit(job).result(60)
    assert verdict.outcome != "passed" or "os.kill" in test, verdict  # a process cannot end the first of its namespace
    assert judged(sandbox, RIGHT).outcome == "passed"
