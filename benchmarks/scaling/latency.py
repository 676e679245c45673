"""When does latency hurt small, frequent updates? Real runs behind the shaper, and the simulator for the whole grid.

Trainer and data service in one region, one node in the other; round trips of 0 to 300 ms, batches of 1 to 64 groups of
4 episodes, `max_staleness` 1, the quickstart's model. The node has places for two batches, and the link has no other
limit than its delay. The costs of each batch size are fitted on its real run without delay; a simulated time is that of
the same costs with the round trip as the only change.
"""

from __future__ import annotations

import os
import shutil
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import msgspec

from astraflow.config.schema import RunConfig
from astraflow.launch.rundir import RunDirectory
from astraflow.simulate.fit import fitted, measured
from astraflow.simulate.profile import Profile
from astraflow.simulate.world import Plan, simulate
from astraflow.testing.network.pacing import Conditions
from astraflow.testing.network.regions import Region, TwoRegions
from benchmarks.bench_regions import config_of

RTTS_MS = (0, 10, 50, 150, 300)
GROUPS = (1, 4, 16, 64)
STALENESS = 1
LIMIT_S = 300.0
HEARTBEAT_S = 0.5  # with which nodes report; the shortest run takes two seconds, and the fit needs two reports
SEEDS = (0, 1, 2)


def rows(place: Path, rtts_ms: Sequence[int], steps: int) -> Iterator[dict[str, Any]]:
    """One row of each batch size and round trip. `rtts_ms`: those that are measured, 0 first. `steps`: of a run; twice
    as many of small batches."""
    for groups in GROUPS:
        config = run_file(groups, STALENESS, steps * (2 if groups < 16 else 1))
        real: dict[int, dict[str, Any]] = {}
        loads: dict[int, float] = {}
        for rtt_ms in rtts_ms:
            loads[rtt_ms] = round(os.getloadavg()[0], 1)
            real[rtt_ms] = played(place / f"g{groups}-{rtt_ms}ms", config, rtt_ms)
        costs = fitted(place / f"g{groups}-0ms" / "a", float(os.cpu_count() or 1))
        alone = simulated(config, costs, groups, 0)
        for rtt_ms in RTTS_MS:
            said = simulated(config, costs, groups, rtt_ms)
            row: dict[str, Any] = {
                "part": "latency", "groups": groups, "rtt_ms": rtt_ms, "s_per_step": None, "simulated": round(said, 3),
                "error": None, "slowdown": None, "simulated_slowdown": round(said / alone, 2),
                "simulated_staleness_4": round(simulated(config, costs, groups, rtt_ms, staleness=4), 3),
                "load": loads.get(rtt_ms),
            }  # fmt: skip
            if rtt_ms in real:
                own, base = real[rtt_ms]["step_s"], real[0]["step_s"]
                row |= {
                    "s_per_step": round(own, 3),
                    "error": round(said / own - 1, 3),
                    "slowdown": round(own / base, 2),
                }
            yield row


def run_file(groups: int, staleness: int, steps: int) -> RunConfig:
    """As `bench_regions --model tiny`, with batches of another size."""
    config = config_of("tiny", steps, 1e-3, deltas=True)
    policy = config.policies["actor"]
    batch = policy.batch.model_copy(update={"groups": groups, "max_staleness": staleness})
    policies = {"actor": policy.model_copy(update={"batch": batch})}
    nodes = [config.rollout.nodes[0].model_copy(update={"concurrency": places(config, groups)})]
    rollout = config.rollout.model_copy(update={"nodes": nodes})
    dataflow = config.dataflow.model_copy(update={"heartbeat_s": HEARTBEAT_S})
    return config.model_copy(update={"policies": policies, "rollout": rollout, "dataflow": dataflow})


def places(config: RunConfig, groups: int) -> int:
    """Of the node: two batches."""
    return 2 * groups * config.workflow.group_size


def played(place: Path, config: RunConfig, rtt_ms: int) -> dict[str, Any]:
    """A real run over the shaper: `fit.measured` of its policy."""
    kept = RunDirectory(place / "a").config_file
    if not kept.exists():
        region = Region(1, concurrency=config.rollout.nodes[0].concurrency)
        TwoRegions(config, place, Conditions(delay_s=rtt_ms / 2e3), region).run(LIMIT_S)
        shutil.copy(place / "run.json", kept)
    found: dict[str, Any] = measured(place / "a")["policies"]["actor"]
    return found


def simulated(config: RunConfig, costs: Profile, groups: int, rtt_ms: int, staleness: int = STALENESS) -> float:
    """Seconds a step, mean of three seeds; with more staleness the node has more places, too."""
    network = msgspec.structs.replace(costs.network, rtt_s=rtt_ms / 1e3)
    policy = config.policies["actor"]
    batch = policy.batch.model_copy(update={"max_staleness": staleness})
    node = config.rollout.nodes[0]
    node = node.model_copy(update={"concurrency": node.concurrency * (1 + staleness) // (1 + STALENESS)})
    config = config.model_copy(update={
        "policies": {"actor": policy.model_copy(update={"batch": batch})},
        "rollout": config.rollout.model_copy(update={"nodes": [node]}),
    })  # fmt: skip
    costs = msgspec.structs.replace(costs, network=network)
    found = [simulate(config, costs, Plan(seed=seed)).policies["actor"].step_s for seed in SEEDS]
    return sum(found) / len(found)
