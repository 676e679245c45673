"""Run files and profiles of the simulated tables."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from astraflow.config.load import check_run
from astraflow.config.schema import RunConfig
from astraflow.simulate.profile import Profile, merged, profile_of
from astraflow.simulate.world import Plan, Prediction, simulate

GROUPS, SIZE, STEPS = 32, 8, 40
SEEDS = (0,)


def config_of(
    *, policies: int = 1, groups: int = GROUPS, staleness: int = 1, nodes: int = 1, places: int = 0, steps: int = STEPS
) -> RunConfig:
    """Batches of groups of SIZE episodes. `places`: of a node; 0: the nodes together play one batch at once."""
    places = places or -(-groups * SIZE // nodes)
    names = [f"p{i}" for i in range(policies)]
    each = {
        "model": "tiny-char",
        "batch": {"groups": groups, "max_staleness": staleness},
        "sampling": {"max_tokens": 1 << 14},
    }
    raw = {
        "run": {"name": "scaling", "steps": steps},
        "sources": {"train": {"type": "calculator"}},
        "workflow": {"type": "benchmarks.scaling.cases:play", "group_size": SIZE},
        "policies": {name: dict(each) for name in names},
        "rollout": {"nodes": [{"name": f"n{i}", "concurrency": places} for i in range(nodes)]},
    }
    return check_run(raw, "scaling")


async def play(task: Any, llm: Any) -> float:
    """Named by the run files of this module and never played."""
    raise NotImplementedError


def profile(config: RunConfig, raw: Mapping[str, Any]) -> Profile:
    """Of `raw`, whose calls lack their policy: each policy makes them in turn."""
    calls = [{**call, "policy": name} for name in config.policies for call in raw["episode"]["calls"]]
    return profile_of(merged(raw, {"episode": {"calls": calls}}), config, "scaling")


def mean_step_s(config: RunConfig, costs: Profile, *, barrier: bool = False, nodes: int = 0) -> float:
    """Seconds from a step of all policies to the next, mean over SEEDS."""
    found = [simulate(config, costs, Plan(seed=seed, barrier=barrier, num_nodes=nodes)) for seed in SEEDS]
    return sum(step_s(one) for one in found) / len(found)


def step_s(found: Prediction) -> float:
    """Of the slowest policy."""
    return max(policy.step_s for policy in found.policies.values())
