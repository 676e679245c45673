"""`/status` as JSON and `/metrics` as Prometheus text: two readings of the same state."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from typing import Any

from prometheus_client import CollectorRegistry, generate_latest
from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, Metric

from astraflow.dataflow.machine.records import PolicyState
from astraflow.dataflow.state import Machine


def status(machine: Machine, now: float) -> dict[str, Any]:
    """Everything a person or the launcher wants to know of the run."""
    state = machine.state
    return {
        "time_s": round(now, 3),
        "finished": machine.finished,
        "failure": None if state.failure is None else {"kind": state.failure.kind, "error": str(state.failure)},
        "steps": machine.context.plan.steps,
        "policies": {name: _policy(machine, name, p, now) for name, p in state.policies.items()},
        "accounting": {
            "admitted": state.admitted,
            "trained": state.trained,
            "dropped": state.dropped,
            "in_flight": len(state.tasks),
        },
        "episodes": {
            "committed": state.num_episodes,
            "leased": sum(len(n.held) for n in state.nodes.values()),
            "waiting": len(state.pending) + len(state.eval_pending),
            "refused": state.num_refused,
            "lost": state.num_lost,
            "errors": state.errors,
        },
        "nodes": _nodes(machine, now),
        "evaluation": {
            "done": machine.evaluation.done,
            "open": [{"version": r.version, "done": r.num_done, "of": r.num_tasks} for r in state.rounds],
            "results": state.results,
        },
        "cursor": {"source": machine.context.plan.train_source, "epoch": state.epoch, "position": state.position},
    }


def _policy(machine: Machine, name: str, policy: PolicyState, now: float) -> dict[str, Any]:
    seen = machine.live.trainers.get(name)
    return {
        "version": policy.latest,
        "checkpoint": policy.covered,
        "queue": len(policy.queue),
        "gate": {"in_flight": policy.in_flight, "limit": machine.admission.limit(name)},
        "accounting": {
            "admitted": policy.admitted,
            "trained": policy.trained,
            "dropped": policy.dropped,
            "in_flight": policy.in_flight,
        },
        "batches": [
            {"step": b.step, "groups": len(b.groups), "acked": b.acked, "holder": b.holder}
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
            }
        )
    return nodes


class _Collector:
    def __init__(self, machine: Machine) -> None:
        self._machine = machine

    def collect(self) -> Iterator[Metric]:
        """Metric families, read from the state at the moment of the scrape."""
        state, policies = self._machine.state, self._machine.state.policies
        yield _gauge(
            "astraflow_policy_version", "Newest version.", "policy", ((n, p.latest) for n, p in policies.items())
        )
        yield _gauge(
            "astraflow_queue_groups", "Waiting groups.", "policy", ((n, len(p.queue)) for n, p in policies.items())
        )
        yield _gauge(
            "astraflow_groups_in_flight", "Gate use.", "policy", ((n, p.in_flight) for n, p in policies.items())
        )
        limits = ((n, self._machine.admission.limit(n)) for n in policies)
        yield _gauge("astraflow_groups_limit", "Groups that may be in flight.", "policy", limits)
        yield _counter(
            "astraflow_groups_admitted", "Admitted.", ["policy"], {(n,): p.admitted for n, p in policies.items()}
        )
        yield _counter(
            "astraflow_groups_trained", "Trained.", ["policy"], {(n,): p.trained for n, p in policies.items()}
        )
        dropped = {(n, reason): count for n, p in policies.items() for reason, count in p.dropped.items()}
        yield _counter("astraflow_groups_dropped", "Dropped, by reason.", ["policy", "reason"], dropped)
        yield _counter("astraflow_episodes_committed", "Committed.", [], {(): state.num_episodes})
        yield _counter("astraflow_episodes_refused", "Refused.", [], {(): state.num_refused})
        yield _counter("astraflow_leases_lost", "Lost leases.", [], {(): state.num_lost})
        errors = {(kind,): count for kind, count in state.errors.items()}
        yield _counter("astraflow_episode_errors", "Episodes with an error.", ["kind"], errors)
        held = ((n, len(node.held)) for n, node in state.nodes.items())
        yield _gauge("astraflow_node_leases", "Episodes a node plays.", "node", held)
        yield from self._stats()

    def _stats(self) -> Iterator[Metric]:
        stats = {(n, key): v for n, seen in self._machine.live.nodes.items() for key, v in seen.stats.items()}
        family = GaugeMetricFamily("astraflow_node_stat", "What nodes report.", labels=["node", "name"])
        for labels, value in stats.items():
            family.add_metric(list(labels), value)
        yield family


def prometheus_text(machine: Machine) -> bytes:
    """The state in Prometheus' text format."""
    registry = CollectorRegistry(auto_describe=False)
    registry.register(_Collector(machine))
    return generate_latest(registry)


def _gauge(name: str, text: str, label: str, values: Iterable[tuple[str, float]]) -> Metric:
    family = GaugeMetricFamily(name, text, labels=[label])
    for key, value in values:
        family.add_metric([key], value)
    return family


def _counter(name: str, text: str, labels: list[str], values: Mapping[Any, float]) -> Metric:
    family = CounterMetricFamily(name, text, labels=labels)
    for key, value in values.items():
        family.add_metric(list(key), value)
    return family
