"""Who plays the episodes: workers of the nodes, clients of their doors, or both."""

from __future__ import annotations

from astraflow.config.schema import RunConfig

ELSEWHERE = "swarm"  # the type of a workflow that lives with its clients
_HIGHEST_PORT = 65535


def without_idle_workers(config: RunConfig) -> RunConfig:
    """The same; where the workflow lives with clients, nodes for which nothing else is said have no workers."""
    nodes = config.rollout.nodes
    if config.workflow.type != ELSEWHERE or all("workers" in node.model_fields_set for node in nodes):
        return config
    alone = [n if "workers" in n.model_fields_set else n.model_copy(update={"workers": 0}) for n in nodes]
    return config.model_copy(update={"rollout": config.rollout.model_copy(update={"nodes": alone})})


def swarm_problems(config: RunConfig) -> list[str]:
    """Nodes on which nobody could play, one sentence each."""
    problems, swarm = [], config.rollout.swarm
    for place, node in enumerate(config.rollout.nodes):
        workers = f"rollout.nodes.{place}.workers={node.workers}"
        if not node.workers and swarm is None and not (node.serves or node.listen):
            problems.append(
                f"{workers} leaves nobody who plays; use 1 or more, open a door by [rollout.swarm], or let other nodes "
                "use its engines by serves or listen"
            )
        if node.workers and config.workflow.type == ELSEWHERE:
            problems.append(
                f"{workers} must be 0: workflow.type='{ELSEWHERE}' lives with clients of the swarm; set it to 0, or "
                "name a workflow that the workers can play"
            )
    if swarm is not None and swarm.port + len(config.rollout.nodes) - 1 > _HIGHEST_PORT:
        problems.append(
            f"rollout.swarm.port={swarm.port} must leave a port for each of {len(config.rollout.nodes)} nodes; lower it"
        )
    return problems
