"""`/status` as JSON and `/metrics` as Prometheus text: two readings of the same state."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from astraflow.dataflow.compaction import Compaction
from astraflow.dataflow.journal.log import Journal
from astraflow.dataflow.machine.records import CodeAccount, EngineAccount, PolicyState, SourceState
from astraflow.dataflow.state import Machine
from astraflow.dataflow.views.law import imbalance, task_imbalance
from astraflow.dataflow.views.readers import consumers_status, set_metrics, stages_status
from astraflow.observe.metrics import MetricsRegistry


def status(machine: Machine, now: float) -> dict[str, Any]:
    """Everything a person or the launcher wants to know of the run."""
    state = machine.state
    return {
        "time_s": round(now, 3),
        "finished": machine.finished,
        "failure": None if state.failure is None else {"kind": state.failure.kind, "error": str(state.failure)},
        "steps": machine.context.plan.steps,
        "policies": {name: _policy(machine, name, p, now) for name, p in state.policies.items()},
        "served": {name: {"copy_of": p.copy_of} for name, p in machine.context.plan.served.items()},
        "accounting": {
            "admitted": state.admitted,
            "trained": state.trained,
            "dropped": state.dropped,
            "in_flight": len(state.tasks),
        },
        "imbalance": {"tasks": task_imbalance(state), "groups": {n: imbalance(state, n) for n in state.policies}},
        "episodes": {
            "committed": state.num_episodes,
            "leased": sum(len(n.held) for n in state.nodes.values()),
            "waiting": len(state.pending) + len(state.eval_pending),
            "refused": state.num_refused,
            "lost": state.num_lost,
            "errors": state.errors,
            "first_errors": state.first_errors,
            "codes": {code: _code(account) for code, account in state.codes.items()},
            "engines": _engines(state.engines),
        },
        "void_commands": state.voids,
        "nodes": _nodes(machine, now),
        "stages": stages_status(machine, now),
        "consumers": consumers_status(machine),
        "evaluation": {
            "done": machine.evaluation.done,
            "open": [{"version": r.version, "done": r.num_done, "of": r.num_tasks} for r in state.rounds],
            "results": state.results,
        },
        "sources": {name: _source(machine, name, source) for name, source in state.sources.items()},
    }


def _code(account: CodeAccount) -> dict[str, Any]:
    mean = round(account.reward_sum / account.scored, 4) if account.scored else None
    return {"episodes": account.episodes, "failed": account.failed, "reward": mean}


def _engines(accounts: Mapping[str, EngineAccount]) -> dict[str, dict[str, Any]]:
    total = sum(account.tokens for account in accounts.values())
    return {
        name: {
            "episodes": account.episodes,
            "tokens": account.tokens,
            "share": round(account.tokens / total, 4) if total else 0.0,
            "reward": round(account.reward_sum / account.scored, 4) if account.scored else None,
        }
        for name, account in sorted(accounts.items())
    }


def _source(machine: Machine, name: str, source: SourceState) -> dict[str, Any]:
    return {
        "share": round(machine.admission.shares()[name], 4),
        "epoch": source.epoch,
        "position": source.position,
        "rows": machine.context.plan.sources[name].num_rows,
        "admitted": source.admitted,
        "in_flight": source.in_flight,
        "skipped": source.skipped,
        "asleep": source.asleep,
    }


def _policy(machine: Machine, name: str, policy: PolicyState, now: float) -> dict[str, Any]:
    seen = machine.live.trainers.get(name)
    return {
        "version": policy.latest,
        "checkpoint": policy.covered,
        "queue": policy.num_waiting,
        "gate": {"in_flight": policy.in_flight, "limit": machine.admission.limit(name)},
        "accounting": {
            "admitted": policy.admitted,
            "trained": policy.trained,
            "dropped": policy.dropped,
            "in_flight": policy.in_flight,
        },
        "dropped_episodes": policy.dropped_episodes,
        "waited_s": {cause: round(seconds, 3) for cause, seconds in policy.waited.items()},
        "replay": {"stored": len(policy.stored), "next": len(policy.selected), "replayed": policy.num_replayed},
        "batches": [
            {
                "step": b.step,
                "groups": len(b.groups),
                "replayed": b.num_replayed,
                "acked": b.acked,
                "holder": b.holder,
            }
            for b in policy.batches.values()
        ],
        "trainer": {
            "id": policy.trainer_id,
            "version": policy.version,
            "silent_s": round(now - seen.at, 3) if seen is not None else None,
            "stats": seen.stats if seen is not None else {},
        },
    }


def _nodes(machine: Machine, now: float) -> list[dict[str, Any]]:
    nodes = []
    for node_id, node in machine.state.nodes.items():
        seen = machine.live.nodes.get(node_id)
        nodes.append(
            {
                "id": node_id,
                "name": node.name,
                "host": node.host,
                "capacity": node.capacity,
                "leased": len(node.held),
                "silent_s": round(now - seen.at, 3) if seen is not None else None,
                "versions": seen.versions if seen is not None else {},
                "stats": seen.stats if seen is not None else {},
                "notes": seen.notes if seen is not None else {},
            }
        )
    return nodes


def journal_status(journal: Journal, compaction: Compaction) -> dict[str, Any]:
    """How the journal fares. `damage`: what was found at the start of this service."""
    return {
        "command": journal.seq,
        "since_snapshot": journal.num_since_snapshot,
        "snapshots": compaction.num_snapshots,
        "failed_snapshots": compaction.num_failures,
        "released_bytes": compaction.waiting_bytes,
        "damage": [{"file": d.file, "at": d.position, "lost": d.num_lost} for d in journal.recovered.damage],
    }


def prometheus_text(machine: Machine, refused: Mapping[str, int]) -> bytes:
    """The state in Prometheus' text format, read at the moment of the scrape. `refused`: requests by reason."""
    state, registry = machine.state, MetricsRegistry()
    for name, policy in state.policies.items():
        registry.set("astraflow_policy_version", policy.latest, policy=name)
        registry.set("astraflow_queue_groups", policy.num_waiting, policy=name)
        registry.set("astraflow_groups_stored", len(policy.stored), policy=name)
        registry.set("astraflow_groups_replayed_total", policy.num_replayed, policy=name)
        registry.set("astraflow_groups_in_flight", policy.in_flight, policy=name)
        registry.set("astraflow_groups_limit", machine.admission.limit(name), policy=name)
        registry.set("astraflow_groups_admitted_total", policy.admitted, policy=name)
        registry.set("astraflow_groups_trained_total", policy.trained, policy=name)
        registry.set("astraflow_accounting_imbalance", imbalance(state, name), policy=name)
        for reason, count in policy.dropped.items():
            registry.set("astraflow_groups_dropped_total", count, policy=name, reason=reason)
        for reason, count in policy.dropped_episodes.items():
            registry.set("astraflow_dropped_episodes_total", count, policy=name, reason=reason)
    for name, source in state.sources.items():
        registry.set("astraflow_source_tasks_admitted_total", source.admitted, source=name)
        registry.set("astraflow_source_tasks_in_flight", source.in_flight, source=name)
        for operator, count in source.skipped.items():
            registry.set("astraflow_tasks_skipped_total", count, source=name, operator=operator)
    for reason, count in refused.items():
        registry.set("astraflow_refused_total", count, reason=reason)
    for kind, count in state.voids.items():
        registry.set("astraflow_void_commands_total", count, kind=kind)
    registry.set("astraflow_episodes_committed_total", state.num_episodes)
    registry.set("astraflow_episodes_refused_total", state.num_refused)
    registry.set("astraflow_leases_lost_total", state.num_lost)
    for kind, count in state.errors.items():
        registry.set("astraflow_episode_errors_total", count, kind=kind)
    for code, account in state.codes.items():
        registry.set("astraflow_code_episodes_total", account.episodes, code=code)
        registry.set("astraflow_code_reward", account.reward_sum / max(1, account.scored), code=code)
    for name, made in state.engines.items():
        registry.set("astraflow_engine_episodes_total", made.episodes, engine=name)
        registry.set("astraflow_engine_tokens_total", made.tokens, engine=name)
    set_metrics(machine, registry)
    for node_id, node in state.nodes.items():
        registry.set("astraflow_node_leases", len(node.held), node=node_id)
    for node_id, seen in machine.live.nodes.items():
        for stat, value in seen.stats.items():
            registry.set("astraflow_node_stat", value, node=node_id, name=stat)
    return registry.prometheus_text()
