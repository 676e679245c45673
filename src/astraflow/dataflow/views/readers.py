"""Stages and consumers, for people and for Prometheus."""

from __future__ import annotations

from typing import Any

from astraflow.dataflow.state import Machine
from astraflow.observe.metrics import MetricsRegistry


def stages_status(machine: Machine, now: float) -> dict[str, Any]:
    """Stage -> what waits for it, who works, how that went, all in entries."""
    return {
        name: {
            "waiting": len(stage.pending),
            "leased": sum(len(w.held) for w in stage.workers.values()),
            "done": stage.num_done,
            "lost": stage.num_lost,
            "refused": stage.refused,
            "last_problem": stage.last_problem,
            "workers": [
                {
                    "id": worker_id,
                    "leased": len(stage.workers[worker_id].held) if worker_id in stage.workers else 0,
                    "silent_s": round(now - seen.at, 3),
                    "stats": seen.stats,
                }
                for (of, worker_id), seen in machine.live.workers.items()
                if of == name
            ],
        }
        for name, stage in machine.state.stages.items()
    }


def consumers_status(machine: Machine) -> dict[str, Any]:
    """Consumer -> where it stands in the log of each policy, and whether it holds admission."""
    holding, state = machine.consumers.holding, machine.state
    return {
        name: {
            "holds": name in holding,
            "policies": {
                policy: {
                    "position": position,
                    "behind": machine.consumers.behind(name, policy),
                    "missed": state.consumers[name].missed.get(policy, 0),
                }
                for policy, position in state.consumers[name].positions.items()
            },
        }
        for name in machine.consumers.sections
    }


def set_metrics(machine: Machine, registry: MetricsRegistry) -> None:
    """Everything about stages and consumers that `observe.metrics` names."""
    for name, stage in machine.state.stages.items():
        registry.set("astraflow_stage_entries_waiting", len(stage.pending), stage=name)
        leased = sum(len(w.held) for w in stage.workers.values())
        registry.set("astraflow_stage_entries_leased", leased, stage=name)
        registry.set("astraflow_stage_entries_total", stage.num_done, stage=name)
        registry.set("astraflow_stage_leases_lost_total", stage.num_lost, stage=name)
        for reason, count in stage.refused.items():
            registry.set("astraflow_stage_refused_total", count, stage=name, reason=reason)
    for (name, worker_id), seen in machine.live.workers.items():
        for stat, value in seen.stats.items():
            registry.set("astraflow_stage_stat", value, stage=name, worker=worker_id, name=stat)
    for name, consumer in machine.state.consumers.items():
        for policy in consumer.positions:
            behind = machine.consumers.behind(name, policy)
            registry.set("astraflow_consumer_behind", behind, consumer=name, policy=policy)
            missed = consumer.missed.get(policy, 0)
            registry.set("astraflow_consumer_missed_total", missed, consumer=name, policy=policy)
