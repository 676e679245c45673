"""From a run file to the processes of one host: names, roles, moments, threads. Pure."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

from astraflow.config.schema import RunConfig

Role = Literal["dataflow", "trainer", "node"]
DATAFLOW = "dataflow"


@dataclass(frozen=True)
class ProcessSpec:
    """One process that the launcher keeps alive. `subject` is the policy of a trainer or the name of a node."""

    name: str  # also the name of its log file
    role: Role
    subject: str = ""
    threads: int = 1  # intra-op threads of torch
    start_after_s: float = 0.0  # counted from the moment the dataflow service first answers
    kill_after_s: float = 0.0  # 0: never; else SIGKILL once, this long after its first start


def plan_processes(config: RunConfig, cores: int) -> list[ProcessSpec]:
    """The dataflow service, one trainer for each policy, and the nodes of `[[rollout.nodes]]`."""
    threads = automatic_threads(config, cores)
    trainers = [
        ProcessSpec(f"trainer-{name}", "trainer", name, policy.trainer.threads or threads)
        for name, policy in config.policies.items()
    ]
    nodes = [
        ProcessSpec(
            f"node-{node.name}", "node", node.name, node.threads or threads, node.start_after_s, node.kill_after_s
        )
        for node in config.rollout.nodes
    ]
    return [ProcessSpec(DATAFLOW, "dataflow"), *trainers, *nodes]


def automatic_threads(config: RunConfig, cores: int) -> int:
    """Cores divided by torch processes, at least 1: intra-op threads that have no core of their own spin and stall."""
    num_torch = len(config.policies) + len(config.rollout.nodes)
    return max(1, cores // max(1, num_torch))
