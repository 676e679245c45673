"""How a box is started here, and whether that works: it is tried, never assumed."""

from __future__ import annotations

import os
import shutil
import stat
import subprocess
import sys
from functools import lru_cache
from pathlib import Path
from typing import NamedTuple

from astraflow.errors import Problem
from astraflow.sandbox.calls import FILTER, filter_file
from astraflow.sandbox.records import Isolation, Settings

NOBODY = 65534  # user and group inside a box
_TRY_S = 20.0
_INSTALL = "install bubblewrap (Debian, Ubuntu: apt-get install bubblewrap)"
_WEAK = 'or say isolation = "weak", which holds back mistakes but no attack'
_ENVIRONMENT = {
    "PATH": "/usr/bin:/bin", "HOME": "/tmp", "LANG": "C.UTF-8", "TZ": "UTC", "PYTHONHASHSEED": "0",
    "PYTHONDONTWRITEBYTECODE": "1",
}  # fmt: skip


class Way(NamedTuple):
    """How boxes are started on this host."""

    isolation: Isolation
    python: str
    setpriv: str  # "": boxes keep the user of this process, who is not root
    bwrap: str  # "": weak
    folders: tuple[str, ...] = ()  # that the interpreter needs, to be read
    hidden: tuple[str, ...] = ()  # of these: packages, this one and its data sets perhaps among them

    @property
    def own_users(self) -> bool:
        """Each slot has a user of its own."""
        return bool(self.setpriv)

    def command(self, uid: int, disk_bytes: int, calls: int, program: list[str]) -> list[str]:
        """What starts the interpreter with `program` in a box; `uid` counts where boxes have users of their own.
        `calls`: number of a file with a filter of system calls, for bubblewrap."""
        words = []
        if self.setpriv:
            words = [self.setpriv, f"--reuid={uid}", f"--regid={uid}", "--clear-groups", "--no-new-privs"]
        if self.bwrap:
            words += [self.bwrap, *(["--seccomp", str(calls)] if FILTER else []), *self._walls(disk_bytes)]
        # -S leaves out site-packages; -I the folder, the user's packages and all variables but those that C reads
        return [*words, self.python, "-I", "-S", "-B", *program]

    def _walls(self, disk_bytes: int) -> list[str]:
        """New user, pid, network, mount, ipc, uts and cgroup namespaces; of the host's files only programs and
        libraries, to be read.

        There is no /proc, and no further user namespace can be made inside. As pid 1 of its namespace the program
        takes everything with it when it ends; without that, bubblewrap's own pid 1 is reaped late and slots run out of
        processes.
        """
        words = ["--unshare-all", "--unshare-user", "--disable-userns", "--as-pid-1", "--die-with-parent"]
        words += ["--new-session", "--uid", str(NOBODY), "--gid", str(NOBODY), "--cap-drop", "ALL", "--hostname", "box"]
        words += ["--clearenv", *(word for name, value in _ENVIRONMENT.items() for word in ("--setenv", name, value))]
        words += ["--size", str(disk_bytes), "--tmpfs", "/tmp"]
        for folder in self.folders:
            words += ["--ro-bind", folder, folder]
        for folder in self.hidden:
            words += ["--tmpfs", folder, "--remount-ro", folder]
        return [*words, *_top(), "--remount-ro", "/", "--chdir", "/tmp"]


def _top() -> list[str]:
    """What lies beside /usr."""
    words = []
    for name in ("bin", "lib", "lib64", "lib32"):
        if Path("/", name).is_dir():
            words += ["--symlink", f"usr/{name}", f"/{name}"] if Path("/", name).is_symlink() else [
                "--ro-bind", f"/{name}", f"/{name}"]  # fmt: skip
    for device in ("null", "zero", "urandom"):
        words += ["--dev-bind", f"/dev/{device}", f"/dev/{device}"]
    return words


def environment() -> dict[str, str]:
    """That of a weak box; bubblewrap sets the same."""
    return dict(_ENVIRONMENT)


@lru_cache(maxsize=8)
def find_way(isolation: Isolation, python: str, where: str = "sandbox") -> Way:
    """The way to start boxes with this isolation, tried once.

    Raises: Problem: there is none; says what is missing and how to get it.
    """
    setpriv = shutil.which("setpriv") or "" if os.geteuid() == 0 else ""
    if sys.platform != "linux":
        setpriv = ""
    if isolation == "weak":
        return _tried(Way("weak", _interpreter(python, bool(setpriv), where), setpriv, ""), where)
    bwrap = shutil.which("bwrap")
    if sys.platform != "linux" or bwrap is None:
        raise Problem(
            f"{where}.isolation", isolation, "needs the program bwrap, which is not here", f"{_INSTALL}, {_WEAK}"
        )
    if os.geteuid() == 0 and not setpriv:
        raise Problem(
            f"{where}.isolation", isolation, "needs the program setpriv when root runs it",
            f"install util-linux, run as another user, {_WEAK}",
        )  # fmt: skip
    interpreter = _interpreter(python, bool(setpriv), where)
    return _tried(Way("bubblewrap", interpreter, setpriv, bwrap, *_folders(Path(interpreter))), where)


def _folders(python: Path) -> tuple[tuple[str, ...], tuple[str, ...]]:
    """What an interpreter needs: programs and libraries, of which only the standard library of Python is seen."""
    prefixes = dict.fromkeys((Path("/usr"), python.parent.parent))
    wanted = [prefix / name for prefix in prefixes for name in ("bin", "lib", "lib64", "lib32", "share/zoneinfo")]
    folders = [folder for folder in wanted if folder.is_dir() and not folder.is_symlink()]
    hidden = [path for folder in folders for path in sorted(folder.glob("python*/*-packages")) if path.is_dir()]
    return tuple(map(str, folders)), tuple(map(str, hidden))


def _interpreter(python: str, others: bool, where: str) -> str:
    """An interpreter that boxes can read. `others`: they have users of their own."""
    if python:
        path = Path(python).resolve()
        if not path.is_file():
            raise Problem(f"{where}.python", python, "is not a file", "name an interpreter, or leave it out")
        return str(path)
    mine = Path(getattr(sys, "_base_executable", sys.executable)).resolve()
    if not others or all(p.stat().st_mode & stat.S_IXOTH for p in (mine, *mine.parents)):
        return str(mine)
    system = Path("/usr/bin/python3").resolve()
    if not system.is_file():
        raise Problem(
            f"{where}.python", str(mine), "cannot be read by other users, and there is no /usr/bin/python3",
            "install python3, or name an interpreter that all may read",
        )  # fmt: skip
    return str(system)


def _tried(way: Way, where: str) -> Way:
    program = ["-c", "import json, resource, sys; assert sys.version_info >= (3, 9)"]
    try:
        with filter_file() as calls:
            done = subprocess.run(
                way.command(FIRST_UID, 1 << 20, calls, program), stdin=subprocess.DEVNULL, capture_output=True,
                env=environment(), timeout=_TRY_S, check=False, cwd="/", pass_fds=(calls,),
            )  # fmt: skip
    except (OSError, subprocess.TimeoutExpired) as error:
        raise _unusable(way, where, str(error)) from error
    if done.returncode:
        raise _unusable(way, where, done.stderr.decode(errors="replace").strip()[-300:] or f"exit {done.returncode}")
    return way


def _unusable(way: Way, where: str, why: str) -> Problem:
    fix = "allow user namespaces (sysctl kernel.unprivileged_userns_clone=1, or a container with them), " + _WEAK
    if not way.bwrap:
        fix = f"see that {way.python} runs"
    return Problem(f"{where}.isolation", way.isolation, f"does not work here ({why})", fix)


def usable(settings: Settings, where: str = "sandbox") -> Way:
    """As `find_way`."""
    return find_way(settings.isolation, settings.python, where)


FIRST_UID = 0x1000_0000  # users of boxes are far above those of people and services
