"""From a run file to the processes of one host: names, roles, moments, threads. Pure."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

from astraflow.config.schema import RunConfig, TrainerSection

Role = Literal["dataflow", "trainer", "node", "stage"]
DATAFLOW = "dataflow"
TORCH_FREE_STAGES = ("reward_model",)


@dataclass(frozen=True)
class ProcessSpec:
    """One process that the launcher keeps alive. `subject`: the policies of a trainer (with commas), the name of a
    node, the stage."""

    name: str  # also the name of its log file
    role: Role
    subject: str = ""
    threads: int = 1  # intra-op threads of torch
    start_after_s: float = 0.0  # counted from the moment the dataflow service first answers
    kill_after_s: float = 0.0  # 0: never; else SIGKILL once, this long after its first start


def plan_processes(config: RunConfig, cores: int) -> list[ProcessSpec]:
    """The dataflow service, trainers of policies, the nodes of `[[rollout.nodes]]`, the workers of stages."""
    threads = automatic_threads(config, cores)
    trainers = [
        ProcessSpec(f"trainer-{name}", "trainer", ",".join(policies), _trainer(config, policies).threads or threads)
        for name, policies in config.trainers.items()
    ]
    nodes = [
        ProcessSpec(
            f"node-{node.name}", "node", node.name, node.threads or threads, node.start_after_s, node.kill_after_s
        )
        for node in config.rollout.nodes
    ]
    stages = [
        ProcessSpec(f"stage-{name}-{i}", "stage", name, threads)
        for name, stage in config.stages.items()
        for i in range(stage.workers)
    ]
    return [ProcessSpec(DATAFLOW, "dataflow"), *trainers, *nodes, *stages]


def automatic_threads(config: RunConfig, cores: int) -> int:
    """Cores divided by torch processes, at least 1: intra-op threads that have no core of their own spin and stall."""
    num_torch = sum(_trainer(config, policies).ranks for policies in config.trainers.values())
    num_torch += len(config.rollout.nodes)
    num_torch += sum(stage.workers for stage in config.stages.values() if stage.type not in TORCH_FREE_STAGES)
    return max(1, cores // max(1, num_torch))


def _trainer(config: RunConfig, policies: list[str]) -> TrainerSection:
    """What the policies of one process have in common."""
    return config.policies[policies[0]].trainer
