"""Who plays: what leaves nobody is refused before the start."""

from __future__ import annotations

import pytest

from astraflow.config.load import check_run
from astraflow.errors import ConfigError


def _raw(workflow="tool_use", **rollout):
    return {
        "run": {"name": "r", "steps": 6},
        "sources": {"train": {"type": "calculator"}},
        "workflow": {"type": workflow, **({"environment": "calculator"} if workflow == "tool_use" else {})},
        "policies": {"actor": {"model": "tiny-char"}},
        "rollout": rollout,
    }


@pytest.mark.parametrize(
    ("raw", "named"),
    [
        (_raw(nodes=[{"workers": 0}]), r"rollout.nodes.0.workers=0 leaves nobody who plays"),
        (_raw("swarm"), r"rollout.nodes.0.workers=0 leaves nobody"),
        (
            _raw("swarm", nodes=[{"workers": 1}], swarm={}),
            r"rollout.nodes.0.workers=1 must be 0: workflow.type='swarm'",
        ),
        (_raw("swarm", nodes=[{"workers": 0}]), r"rollout.nodes.0.workers=0 leaves nobody"),
        (_raw(nodes=2, swarm={"port": 65535}), r"rollout.swarm.port=65535 must leave a port for each of 2 nodes"),
        (_raw(swarm={"dead_after_s": 0}), r"rollout.swarm.dead_after_s"),
        (_raw(swarm={"ports": 1}), r"rollout.swarm.ports"),
    ],
)
def test_nodes_on_which_nobody_could_play_are_refused(raw, named):
    with pytest.raises(ConfigError, match=named):
        check_run(raw, "run file")


@pytest.mark.parametrize(
    "raw",
    [
        _raw(),
        _raw(swarm={}),
        _raw(nodes=[{"workers": 0}], swarm={}),
        _raw("swarm", nodes=[{"workers": 0}], swarm={"port": 7800}),
        _raw(swarm="none"),
    ],
)
def test_workers_clients_or_both_may_play(raw):
    assert check_run(raw, "run file")


def test_a_workflow_that_lives_with_clients_has_no_workers_unless_they_are_asked_for():
    nodes = check_run(_raw("swarm", nodes=2, swarm={}), "run file").rollout.nodes
    assert [(node.name, node.workers) for node in nodes] == [("node0", 0), ("node1", 0)]
    assert check_run(_raw(swarm={}), "run file").rollout.nodes[0].workers == 1
