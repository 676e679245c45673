"""Every command and snippet of docs/bring-your-agent.md, against one run whose door the page's clients play at."""

from __future__ import annotations

import json
import os
import re
import shutil
import signal
import socket
import subprocess
import sys
import threading
import urllib.request
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from astraflow.cli.app import main
from astraflow.testing.runs import wait_until

ROOT = Path(__file__).parents[2]
AGENTS = ROOT / "examples" / "agents"
BLOCK = re.compile(r"^```(\w+)\n(.*?)^```", re.MULTILINE | re.DOTALL)
PAGE = (ROOT / "docs" / "bring-your-agent.md").read_text()
SMALL = ["--run.steps=40", "--workflow.group_size=4", "--policies.actor.batch.groups=2"]
SMALL += ["--policies.actor.warm_start.steps=3"]
LIMIT_S = 300.0

pytestmark = [pytest.mark.flow, pytest.mark.slow]


def blocks(language: str) -> list[str]:
    return [text for kind, text in BLOCK.findall(PAGE) if kind == language]


def command(start: str) -> str:
    """The only block that begins so."""
    (found,) = [text for text in blocks("bash") if text.startswith(start)]
    return found


@pytest.fixture
def place(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """examples/agents with the files of the page in it."""
    place = tmp_path / "agents"
    shutil.copytree(AGENTS, place, ignore=shutil.ignore_patterns("node_modules", "runs", "__pycache__"))
    for text in [*blocks("python"), *blocks("toml")]:
        name = text.splitlines()[0].removeprefix("# ")
        assert re.fullmatch(r"my_\w+\.(py|toml)", name), "the first line of a file of the page is its name"
        (place / name).write_text(text)
    (tasks,) = blocks("json")
    (place / "tasks.jsonl").write_text(tasks)
    monkeypatch.chdir(place)
    return place


class Visitors:
    """What the page's other terminals do while the run goes on. A failure ends the run."""

    def __init__(self, place: Path, port: int) -> None:
        self.said: dict[str, str] = {}
        self.problem: BaseException | None = None
        self._place, self._port = place, port
        self._thread = threading.Thread(target=self._visit)
        self._thread.start()

    def join(self) -> None:
        self._thread.join(LIMIT_S)
        if self.problem is not None:
            raise self.problem

    def _visit(self) -> None:
        players: list[tuple[str, subprocess.Popen[str]]] = []
        try:
            wait_until(self._listens, "the door", LIMIT_S)
            for start in ("astraflow try my_agent.py", "astraflow try my_wrapper.py", "door="):
                self.said[start] = self._end(start, self._begin(start))
            wanted = ["astraflow worker", "python my_script.py", "bash shell_agent.sh"]
            wanted += ["npm ci"] if shutil.which("npm") else []
            players = [(start, self._begin(start)) for start in wanted]
            wait_until(lambda: self._num_played() > len(players), "an episode of each client", LIMIT_S)
            for start, player in players:
                self.said[start] = self._end(start, player)
        except BaseException as error:
            self.problem = error
            os.kill(os.getpid(), signal.SIGINT)  # as Ctrl-C in the terminal of the run
        finally:
            for _, player in players:
                if player.poll() is None:
                    os.killpg(player.pid, signal.SIGKILL)

    def _begin(self, start: str) -> subprocess.Popen[str]:
        path = f"{Path(sys.executable).parent}:{os.environ['PATH']}"
        environment = {**os.environ, "PATH": path, "PYTHONPATH": str(ROOT / "src")}
        return subprocess.Popen(
            ["bash", "-euo", "pipefail", "-c", command(start).replace("7800", str(self._port))], cwd=self._place,
            env=environment, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True, start_new_session=True,
        )  # fmt: skip

    def _end(self, start: str, process: subprocess.Popen[str]) -> str:
        out, _ = process.communicate(timeout=LIMIT_S)
        assert process.returncode == 0, f"{start}\n{out}"
        return out

    def _num_played(self) -> int:
        """Clients that have finished an episode; the first of them is the curl of before."""
        with urllib.request.urlopen(f"http://127.0.0.1:{self._port}/swarm/status", timeout=LIMIT_S) as reply:
            return sum("done" in client["endings"] for client in json.loads(reply.read())["clients"])

    def _listens(self) -> bool:
        with socket.socket() as sock:
            return sock.connect_ex(("127.0.0.1", self._port)) == 0


def test_every_command_and_snippet_of_the_page_works(run: Callable[..., Any], place: Path, tmp_path: Path) -> None:
    missing = [name for name in ("bash", "curl", "jq") if shutil.which(name) is None]
    if missing:
        pytest.skip(f"NOT TESTED: {', '.join(missing)} not installed")
    with socket.socket() as sock:
        sock.bind(("127.0.0.1", 0))
        port = int(sock.getsockname()[1])
    visitors = Visitors(place, port)
    _, _, recipe, *words = command("astraflow run agents.toml\n").split()
    ended = run(tmp_path, recipe, *words, *SMALL, f"--rollout.swarm.port={port}")
    visitors.join()
    assert ended.code == 0 and not ended.summary()["errors"], ended.words()
    assert f"at http://127.0.0.1:{port}" in ended.output
    assert "task train/3" in visitors.said["astraflow try my_agent.py"]
    assert "reward" in visitors.said["astraflow try my_wrapper.py"]
    assert '"accepted"' in visitors.said["door="]


def test_the_run_file_of_the_page_is_valid(place: Path) -> None:
    assert main(command("astraflow validate").split()[1:]) == 0


def test_the_page_shows_the_example_as_it_is() -> None:
    _, _, code = next(text for text in blocks("python") if text.startswith("# my_agent.py")).partition("\n")
    assert (AGENTS / "openai_sdk.py").read_text().endswith(code)


def test_the_runs_that_the_page_names_are_those_that_are_tested() -> None:
    tested = (Path(__file__).parent / "test_agents.py").read_text()
    named = re.findall(r"--workflow.type=(\w+):solve", PAGE)
    assert len(named) >= 4 and not [name for name in named if f'"{name}"' not in tested]
    assert not [
        name for name in re.findall(r"^\| `([\w/]+\.\w+)` \|", PAGE, re.MULTILINE) if not (AGENTS / name).exists()
    ]
