"""Numbers of a service for Prometheus: every name is in `METRICS`, nothing else can be said."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Literal, NamedTuple

from prometheus_client import CollectorRegistry, generate_latest
from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily
from prometheus_client.registry import Collector

from astraflow.errors import Problem

Kind = Literal["counter", "gauge"]
CONTENT_TYPE = "text/plain; version=0.0.4; charset=utf-8"


class Metric(NamedTuple):
    """One documented name. Counters only rise, and their names end in `_total`."""

    name: str
    kind: Kind
    unit: str
    help: str
    labels: tuple[str, ...] = ()


METRICS: tuple[Metric, ...] = (
    Metric("astraflow_policy_version", "gauge", "version", "newest weight version", ("policy",)),
    Metric("astraflow_queue_groups", "gauge", "groups", "groups that wait for a batch", ("policy",)),
    Metric("astraflow_groups_in_flight", "gauge", "groups", "admitted, neither trained nor dropped", ("policy",)),
    Metric("astraflow_groups_limit", "gauge", "groups", "groups that may be in flight", ("policy",)),
    Metric("astraflow_groups_admitted_total", "counter", "groups", "groups admitted", ("policy",)),
    Metric("astraflow_groups_trained_total", "counter", "groups", "groups of acknowledged steps", ("policy",)),
    Metric("astraflow_groups_dropped_total", "counter", "groups", "groups dropped, by reason", ("policy", "reason")),
    Metric("astraflow_accounting_imbalance", "gauge", "groups", "what the accounting law misses: 0", ("policy",)),
    Metric("astraflow_refused_total", "counter", "requests", "malformed or unknown names, by reason", ("reason",)),
    Metric("astraflow_void_commands_total", "counter", "commands", "raised while they were applied", ("kind",)),
    Metric("astraflow_groups_replayed_total", "counter", "groups", "groups trained again, each time", ("policy",)),
    Metric("astraflow_groups_stored", "gauge", "groups", "trained groups that may be trained again", ("policy",)),
    Metric("astraflow_dropped_episodes_total", "counter", "episodes", "left out of groups", ("policy", "reason")),
    Metric("astraflow_source_tasks_admitted_total", "counter", "tasks", "tasks admitted", ("source",)),
    Metric("astraflow_source_tasks_in_flight", "gauge", "tasks", "admitted, neither trained nor dropped", ("source",)),
    Metric("astraflow_tasks_skipped_total", "counter", "tasks", "tasks that were refused", ("source", "operator")),
    Metric("astraflow_episodes_committed_total", "counter", "episodes", "episodes accepted"),
    Metric("astraflow_episodes_refused_total", "counter", "episodes", "episodes of older attempts, refused"),
    Metric(
        "astraflow_code_episodes_total", "counter", "episodes", "episodes that a version of the code played", ("code",)
    ),
    Metric("astraflow_code_reward", "gauge", "1", "mean reward of its training episodes", ("code",)),
    Metric("astraflow_engine_episodes_total", "counter", "episodes", "episodes that it sampled", ("engine",)),
    Metric("astraflow_engine_tokens_total", "counter", "tokens", "tokens that it sampled", ("engine",)),
    Metric("astraflow_episode_errors_total", "counter", "episodes", "episodes that ended with an error", ("kind",)),
    Metric("astraflow_leases_lost_total", "counter", "leases", "leases that ran out"),
    Metric("astraflow_stage_entries_waiting", "gauge", "entries", "entries that wait for a worker", ("stage",)),
    Metric("astraflow_stage_entries_leased", "gauge", "entries", "entries that a worker has", ("stage",)),
    Metric("astraflow_stage_entries_total", "counter", "entries", "entries that got their columns", ("stage",)),
    Metric("astraflow_stage_leases_lost_total", "counter", "entries", "attempts without columns", ("stage",)),
    Metric("astraflow_stage_refused_total", "counter", "entries", "columns refused", ("stage", "reason")),
    Metric("astraflow_stage_stat", "gauge", "as named", "what a worker reports", ("stage", "worker", "name")),
    Metric("astraflow_consumer_behind", "gauge", "groups", "groups not acknowledged", ("consumer", "policy")),
    Metric("astraflow_consumer_missed_total", "counter", "groups", "groups that it skipped", ("consumer", "policy")),
    Metric("astraflow_node_leases", "gauge", "episodes", "episodes that a node plays", ("node",)),
    Metric("astraflow_node_stat", "gauge", "as named", "what a node reports in its heartbeats", ("node", "name")),
    Metric("astraflow_retriever_passages", "gauge", "passages", "passages of its corpus"),
    Metric("astraflow_retriever_queries_total", "counter", "queries", "queries asked of a retriever"),
    Metric("astraflow_retriever_empty_total", "counter", "queries", "queries that found nothing"),
    Metric("astraflow_retriever_batches_total", "counter", "batches", "batches that they were answered in"),
    Metric("astraflow_retriever_waiting", "gauge", "queries", "queries that wait for a batch"),
    Metric("astraflow_retriever_reads_total", "counter", "passages", "passages asked for by id"),
    Metric("astraflow_retriever_missing_total", "counter", "passages", "ids that there are not"),
    Metric("astraflow_retriever_refused_total", "counter", "requests", "requests refused"),
)
"""Every metric of AstraFlow. Documented in docs; a test compares."""

_BY_NAME = {metric.name: metric for metric in METRICS}


class MetricsRegistry(Collector):
    """The numbers of one answer: made, filled from what the service knows, and written. There is no global one."""

    def __init__(self) -> None:
        self._values: dict[str, dict[tuple[str, ...], float]] = {}

    def set(self, name: str, value: float, /, **labels: str) -> None:
        """Say a number. Labels must be those of `METRICS`."""
        metric = _BY_NAME.get(name)
        if metric is None:
            raise Problem("metric", name, "is not a documented name", "add it to observe.metrics.METRICS")
        if set(labels) != set(metric.labels):
            raise Problem(
                f"labels of {name}", sorted(labels), f"must be {list(metric.labels)}", "give exactly these labels"
            )
        self._values.setdefault(name, {})[tuple(labels[label] for label in metric.labels)] = value

    def prometheus_text(self) -> bytes:
        """The exposition format of Prometheus, see `CONTENT_TYPE`."""
        registry = CollectorRegistry(auto_describe=False)
        registry.register(self)
        return generate_latest(registry)

    def collect(self) -> Iterable[CounterMetricFamily | GaugeMetricFamily]:
        """For prometheus-client: the metrics that were said."""
        for name, values in self._values.items():
            metric = _BY_NAME[name]
            kind = CounterMetricFamily if metric.kind == "counter" else GaugeMetricFamily
            family: CounterMetricFamily | GaugeMetricFamily = kind(name, metric.help, labels=metric.labels)
            for key, value in sorted(values.items()):
                family.add_metric(key, value)
            yield family
