"""Every command and snippet of the README, in order, in an empty directory; commands with services take two steps."""

from __future__ import annotations

import os
import re
import signal
import socket
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
BLOCK = re.compile(r"^```(\w+)\n(.*?)^```", re.MULTILINE | re.DOTALL)
SMALL = [
    "--run.steps=2",
    "--workflow.group_size=4",
    "--policies.actor.batch.groups=2",
    "--policies.actor.operators=['keep_all']",
    "--policies.actor.warm_start.steps=3",
    "--policies.actor.warm_start.batch=8",
    "--evaluation.num_tasks=4",
]


def blocks(language: str) -> list[str]:
    return [text for kind, text in BLOCK.findall((ROOT / "README.md").read_text()) if kind == language]


def shortened(script: str, port: int) -> str:
    """The same commands, with small settings behind every recipe and a free port."""
    lines = []
    for line in script.splitlines():
        verb = line.split()[:2]
        if verb in (["astraflow", "run"], ["astraflow", "dataflow"]):
            words = SMALL
            body, background = (line[:-1], "&") if line.endswith("&") else (line, "")
            line = f"{body} {' '.join(map(quoted, words))} {background}"
        if line.endswith("&"):
            line += ' pids="$pids $!"'
        lines.append(line.replace("7700", str(port)).replace("make ", f"make -C '{ROOT}' -n "))
    return "\n".join(["set -e", *lines, ""])


def quoted(word: str) -> str:
    return f'"{word}"'


def free_port() -> int:
    with socket.socket() as sock:
        sock.bind(("127.0.0.1", 0))
        return int(sock.getsockname()[1])


def run_script(script: str, place: Path, limit_s: float) -> subprocess.CompletedProcess[str]:
    """A bash script in a process group of its own, of which nothing is left, with the installed `astraflow`."""
    environment = {**os.environ, "PATH": f"{Path(sys.executable).parent}:{os.environ['PATH']}"}
    environment.pop("PYTHONPATH", None)
    process = subprocess.Popen(
        ["bash", "-c", script], cwd=place, env=environment, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True,
        start_new_session=True,
    )  # fmt: skip
    try:
        out, _ = process.communicate(timeout=limit_s)
    except subprocess.TimeoutExpired:
        os.killpg(process.pid, signal.SIGKILL)
        out, _ = process.communicate()
        pytest.fail(f"took more than {limit_s} s:\n{script}\n{out}")
    return subprocess.CompletedProcess(script, process.returncode, out)


@pytest.fixture
def place(tmp_path: Path) -> Path:
    """An empty directory with the README's files in it."""
    for text in [*blocks("python"), *blocks("toml")]:
        name = text.splitlines()[0].removeprefix("# ")
        assert re.fullmatch(r"\w+\.(py|toml)", name), "the first line of a file in the README is its name"
        (tmp_path / name).write_text(text)
    return tmp_path


@pytest.mark.flow
@pytest.mark.slow
def test_every_command_of_the_readme_works(place: Path) -> None:
    port = free_port()
    scripts = blocks("bash")
    assert len(scripts) >= 6
    done = run_script(shortened("astraflow run quickstart", port), place, 300)  # what `make quickstart` does
    assert done.returncode == 0, done.stdout
    for script in scripts:
        text = shortened(script, port)
        by_hand = "astraflow node" in script
        if by_hand:  # the node leaves when the run is over; the dataflow service stays until it is told to end
            text = text.replace("--concurrency 512", "--concurrency 8")
            text += "set -- $pids\nwait $2\nkill $1\nwait $1\n"
        done = run_script(text, place, 300)
        assert done.returncode == 0, f"{text}\n{done.stdout}"
        if "make -C" in text and "quickstart" in text:
            assert "astraflow run quickstart" in done.stdout
        if by_hand:
            assert (place / "runs" / "by-hand" / "checkpoints" / "actor" / "step-000002" / "config.json").exists()
    assert (place / "my-agent" / "runs" / "my-agent" / "report" / "summary.md").exists()
    assert (place / "runs" / "second" / "report" / "summary.json").exists()
