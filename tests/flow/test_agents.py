"""The agents of examples/agents/, each with its own SDK or language, trained by agents.toml as their page says."""

from __future__ import annotations

import os
import shutil
import socket
import subprocess
import sys
import threading
from collections.abc import Callable, Iterator
from importlib.util import find_spec
from pathlib import Path
from statistics import mean
from typing import Any

import pytest

from astraflow.config.env import child_environment
from astraflow.testing.forked import popen
from astraflow.testing.runs import astraflow_command, wait_until

ROOT = Path(__file__).parents[2]
AGENTS = ROOT / "examples" / "agents"
NEEDS = {
    "own": "astraflow", "openai_sdk": "openai", "anthropic_sdk": "anthropic", "langgraph_agent": "langgraph",
    "openai_agents": "agents",
}  # fmt: skip
FEW = ["--run.steps=2", "--policies.actor.batch.groups=2", "--workflow.group_size=4"]
NUM_FEW, LIMIT_S = 16, 300.0

pytestmark = [pytest.mark.flow, pytest.mark.slow]
Launch = Callable[..., Any]


@pytest.fixture(scope="module")
def warm(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The model after its warm start, which is the same in every run."""
    place = tmp_path_factory.mktemp("warm") / "model"
    with (place.parent / "log").open("wb") as log:
        command = astraflow_command("sft", "agents.toml", f"--out={place}")
        sft = popen(command, cwd=AGENTS, env=child_environment(None), stdout=log, stderr=log, stdin=subprocess.DEVNULL)
        assert sft.wait(LIMIT_S) == 0, (place.parent / "log").read_text()
    return place


@pytest.fixture
def train(run: Launch, warm: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Callable[..., Any]]:
    """`train(*words)`: astraflow run agents.toml, in its folder."""
    monkeypatch.chdir(AGENTS)
    monkeypatch.syspath_prepend(str(AGENTS))
    loaded = set(sys.modules)

    def play(*words: str) -> Any:
        start = [f"--policies.actor.model={warm}", "--policies.actor.warm_start=none"]
        return run(tmp_path, "agents.toml", *start, *words)

    yield play
    for name in [n for n in sys.modules if n not in loaded and n in {*NEEDS, "calculator"}]:
        del sys.modules[name]
    assert not list(AGENTS.glob("runs"))


def client(port: int, place: Path, *command: str) -> threading.Thread:
    """Starts `command URL` when the door at `port` is open; a thread, to be joined."""

    def play() -> None:
        wait_until(lambda: listens(port), "the door", LIMIT_S)
        environment = {name: value for name, value in os.environ.items() if not name.lower().endswith("_proxy")}
        with (place / "client.log").open("wb") as log:
            done = subprocess.run(
                [*command, f"http://127.0.0.1:{port}"], cwd=AGENTS, env=environment, stdout=log, stderr=log,
                timeout=LIMIT_S, check=False,
            )  # fmt: skip
        (place / "client.rc").write_text(str(done.returncode))

    thread = threading.Thread(target=play)
    thread.start()
    return thread


def listens(port: int) -> bool:
    with socket.socket() as sock:
        return sock.connect_ex(("127.0.0.1", port)) == 0


def free_port() -> int:
    with socket.socket() as sock:
        sock.bind(("127.0.0.1", 0))
        return int(sock.getsockname()[1])


def all_played(ended: Any, episodes: int) -> None:
    """No episode failed, nothing was lost, the law holds."""
    assert ended.code == 0, ended.words()
    summary = ended.summary()
    assert not summary["errors"], summary["errors"]
    account = summary["accounting"]
    assert account["trained"] * 4 >= episodes and account["admitted"] == account["trained"] + account["in_flight"]
    assert all(0.0 < row["reward/mean"] <= 1.0 for row in ended.steps())


def rises(ended: Any) -> None:
    assert ended.code == 0 and not ended.summary()["errors"], ended.words()
    rewards = [row["reward/mean"] for row in ended.steps()]
    assert len(rewards) == 16 and mean(rewards[-4:]) > mean(rewards[:4]) + 0.05, rewards


@pytest.mark.parametrize("agent", [name for name in NEEDS if name != "openai_sdk"])
def test_an_agent_in_python(agent: str, train: Launch) -> None:
    if find_spec(NEEDS[agent]) is None:
        pytest.skip(f"NOT TESTED: {NEEDS[agent]} is not installed; pip install 'astraflow[examples]'")
    all_played(train(f"--workflow.type={agent}:solve", "--rollout.swarm=none", *FEW), NUM_FEW)


def test_the_reward_of_an_agent_of_the_openai_sdk_rises(train: Launch) -> None:
    rises(train("--workflow.type=openai_sdk:solve", "--rollout.swarm=none", "--run.steps=16"))


def test_the_reward_of_an_agent_in_node_rises(train: Launch, tmp_path: Path) -> None:
    node, npm = shutil.which("node"), shutil.which("npm")
    if node is None or npm is None:
        pytest.skip("NOT TESTED: node and npm are not installed")
    place = tmp_path / "node"
    shutil.copytree(AGENTS / "node", place, ignore=shutil.ignore_patterns("node_modules"))
    done = subprocess.run(
        [npm, "ci", "--no-audit", "--no-fund"], cwd=place, capture_output=True, text=True, check=False
    )
    assert done.returncode == 0, done.stderr
    port = free_port()
    agent = client(port, tmp_path, node, str(place / "agent.mjs"))
    ended = train(f"--rollout.swarm.port={port}", "--run.steps=16")
    agent.join(LIMIT_S)
    rises(ended)
    assert (tmp_path / "client.rc").read_text() == "0", (tmp_path / "client.log").read_text()


def test_an_agent_of_bash_and_curl(train: Launch, tmp_path: Path) -> None:
    missing = [name for name in ("bash", "curl", "jq") if shutil.which(name) is None]
    if missing:
        pytest.skip(f"NOT TESTED: {', '.join(missing)} not installed")
    port = free_port()
    agent = client(port, tmp_path, "bash", "shell_agent.sh")
    ended = train(f"--rollout.swarm.port={port}", *FEW)
    agent.join(LIMIT_S)
    all_played(ended, NUM_FEW)
    assert (tmp_path / "client.rc").read_text() == "0", (tmp_path / "client.log").read_text()


def test_each_agent_is_short() -> None:
    files = [path for path in AGENTS.rglob("*") if path.suffix in (".py", ".mjs", ".sh") and "modules" not in str(path)]
    assert len(files) >= 8 and all(len(path.read_text().splitlines()) <= 60 for path in files)
