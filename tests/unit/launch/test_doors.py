"""The swarm doors of the nodes that the launcher starts: where they open, and where again."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from astraflow.config.schema import RunConfig
from astraflow.errors import LaunchError
from astraflow.launch.checks import check_ports
from astraflow.launch.rundir import RunDirectory
from astraflow.launch.supervision import Start
from astraflow.launch.supervisor import Supervisor
from astraflow.observe.jsonl import write_whole
from astraflow.wire.app import bind


class Told:
    """What the launcher says."""

    def __init__(self) -> None:
        self.notes: list[str] = []

    def update(self, status: dict[str, Any]) -> None: ...

    def note(self, text: str) -> None:
        self.notes.append(text)


class Process:
    """One that lives."""

    pid = 4711

    def __init__(self, command: list[str], **options: Any) -> None:
        self.command = command

    def poll(self) -> None: ...

    def kill(self) -> None: ...

    def wait(self) -> None: ...


def config(**swarm: Any) -> RunConfig:
    return RunConfig.model_validate(
        {
            "run": {"name": "x", "steps": 1},
            "sources": {"train": "calculator"},
            "workflow": {"type": "swarm"},
            "policies": {"actor": {"model": "tiny-char"}},
            "rollout": {"nodes": [{"name": "a", "workers": 0}, {"name": "b", "workers": 0}], "swarm": swarm},
        }
    )


@pytest.fixture
def launch(tmp_path: Path) -> Iterator[Callable[..., Supervisor]]:
    """A launcher in `tmp_path` that starts processes of the class above."""
    directory, started = RunDirectory(tmp_path), []
    directory.logs.mkdir()

    def start(told: Told | None = None, **swarm: Any) -> Supervisor:
        popen: Any = Process
        started.append(Supervisor(config(**swarm), directory, 2, told or Told(), popen=popen))
        return started[-1]

    yield start
    for supervisor in started:
        supervisor._clear_away()


def opened(supervisor: Supervisor, name: str) -> str:
    """HOST:PORT that a node is started with."""
    supervisor.url = "http://127.0.0.1:1"
    supervisor._start(Start(name, 1))
    command: list[str] = supervisor._children[name].popen.command  # type: ignore[attr-defined]
    return command[command.index("--swarm") + 1]


def test_each_node_has_a_port_of_its_own(launch: Callable[..., Supervisor]) -> None:
    supervisor = launch(host="::1", port=7800)
    assert [opened(supervisor, name) for name in ("node-a", "node-b")] == ["[::1]:7800", "[::1]:7801"]


def test_a_node_that_starts_again_opens_where_its_clients_know_it(launch: Callable[..., Supervisor]) -> None:
    told = Told()
    supervisor = launch(told)
    directory = supervisor.directory
    assert opened(supervisor, "node-a") == "127.0.0.1:0"
    said = {"url": "http://127.0.0.1:40123", "pid": Process.pid + 1}  # by a process before this one
    directory.door_file("node-a").parent.mkdir()
    write_whole(directory.door_file("node-a"), json.dumps(said))
    list(supervisor._events())
    assert not told.notes
    write_whole(directory.door_file("node-a"), json.dumps(said | {"pid": Process.pid}))
    list(supervisor._events()), list(supervisor._events())
    assert told.notes == ["swarm clients join node-a at http://127.0.0.1:40123"]
    supervisor._exited("node-a", supervisor._children["node-a"], -9)
    assert opened(supervisor, "node-a") == "127.0.0.1:40123"
    assert opened(supervisor, "node-b") == "127.0.0.1:0"


def test_a_port_that_is_used_is_refused_before_the_run_takes_its_name() -> None:
    with bind("127.0.0.1", 0, "test") as taken:
        port = taken.getsockname()[1]
        with pytest.raises(LaunchError, match=r"rollout\.swarm\.port"):
            check_ports(config(port=port - 1))
