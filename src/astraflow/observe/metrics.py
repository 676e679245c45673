"""Numbers of a process for people and for Prometheus: every name is in `METRICS`, nothing else can be counted.

A registry belongs to one service; there is no global one. All calls are thread-safe and cost about a microsecond.
"""

from __future__ import annotations

import bisect
import threading
from collections.abc import Iterable
from typing import Literal, NamedTuple

from prometheus_client import CollectorRegistry, generate_latest
from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, HistogramMetricFamily
from prometheus_client.registry import Collector

from astraflow.errors import Problem

Kind = Literal["counter", "gauge", "histogram"]
CONTENT_TYPE = "text/plain; version=0.0.4; charset=utf-8"


class Metric(NamedTuple):
    """One documented name. Counters only rise, and their names end in `_total`."""

    name: str
    kind: Kind
    unit: str
    help: str
    labels: tuple[str, ...] = ()
    buckets: tuple[float, ...] = ()  # upper bounds, rising; histograms only


METRICS: tuple[Metric, ...] = (
    Metric("astraflow_policy_version", "gauge", "version", "newest weight version", ("policy",)),
    Metric("astraflow_queue_groups", "gauge", "groups", "groups that wait for a batch", ("policy",)),
    Metric("astraflow_groups_in_flight", "gauge", "groups", "admitted, neither trained nor dropped", ("policy",)),
    Metric("astraflow_groups_limit", "gauge", "groups", "groups that may be in flight", ("policy",)),
    Metric("astraflow_groups_admitted_total", "counter", "groups", "groups admitted", ("policy",)),
    Metric("astraflow_groups_trained_total", "counter", "groups", "groups of acknowledged steps", ("policy",)),
    Metric("astraflow_groups_dropped_total", "counter", "groups", "groups dropped, by reason", ("policy", "reason")),
    Metric("astraflow_accounting_imbalance", "gauge", "groups", "what the accounting law misses: 0", ("policy",)),
    Metric("astraflow_refused_total", "counter", "requests", "malformed requests, by what was wrong", ("reason",)),
    Metric("astraflow_groups_replayed_total", "counter", "groups", "groups trained again, each time", ("policy",)),
    Metric("astraflow_groups_stored", "gauge", "groups", "trained groups that may be trained again", ("policy",)),
    Metric("astraflow_dropped_episodes_total", "counter", "episodes", "left out of groups", ("policy", "reason")),
    Metric("astraflow_source_tasks_admitted_total", "counter", "tasks", "tasks admitted", ("source",)),
    Metric("astraflow_source_tasks_in_flight", "gauge", "tasks", "admitted, neither trained nor dropped", ("source",)),
    Metric("astraflow_tasks_skipped_total", "counter", "tasks", "tasks that were refused", ("source", "operator")),
    Metric("astraflow_episodes_committed_total", "counter", "episodes", "episodes accepted"),
    Metric("astraflow_episodes_refused_total", "counter", "episodes", "episodes of older attempts, refused"),
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
)
"""Every metric of AstraFlow. Documented in docs; a test compares."""

_BY_NAME = {metric.name: metric for metric in METRICS}
_Key = tuple[str, ...]


class _Histogram:
    def __init__(self, num_buckets: int) -> None:
        self.counts = [0] * (num_buckets + 1)  # the last one is +Inf
        self.sum = 0.0


class MetricsRegistry(Collector):
    """Counters, gauges and histograms of one service. Labels are keyword arguments and must be those of `METRICS`.

    Args: metrics: the documented names; tests and user plug-ins may bring their own.
    """

    def __init__(self, metrics: Iterable[Metric] = METRICS) -> None:
        self._metrics = _BY_NAME if metrics is METRICS else {metric.name: metric for metric in metrics}
        self._lock = threading.Lock()
        self._values: dict[str, dict[_Key, float]] = {}
        self._histograms: dict[str, dict[_Key, _Histogram]] = {}
        self._prometheus = CollectorRegistry(auto_describe=False)
        self._prometheus.register(self)

    def add(self, name: str, amount: float = 1.0, /, **labels: str) -> None:
        """Raise a counter (amount >= 0) or move a gauge."""
        metric, key = self._find(name, ("counter", "gauge"), labels)
        if metric.kind == "counter" and amount < 0:
            raise Problem(name, amount, "must be >= 0; a counter only rises", "use a gauge")
        with self._lock:
            series = self._values.setdefault(name, {})
            series[key] = series.get(key, 0.0) + amount

    def set(self, name: str, value: float, /, **labels: str) -> None:
        """Set a gauge, or a counter whose total is kept elsewhere (a lower total than before is ignored)."""
        metric, key = self._find(name, ("counter", "gauge"), labels)
        with self._lock:
            series = self._values.setdefault(name, {})
            series[key] = max(value, series.get(key, value)) if metric.kind == "counter" else value

    def observe(self, name: str, value: float, /, count: int = 1, **labels: str) -> None:
        """Put `count` observations of `value` into a histogram."""
        metric, key = self._find(name, ("histogram",), labels)
        with self._lock:
            series = self._histograms.setdefault(name, {})
            histogram = series.get(key)
            if histogram is None:
                histogram = series[key] = _Histogram(len(metric.buckets))
            histogram.counts[bisect.bisect_left(metric.buckets, value)] += count
            histogram.sum += value * count

    def value(self, name: str, /, **labels: str) -> float:
        """A counter's or gauge's value (0 before its first use), or the number of a histogram's observations."""
        metric, key = self._find(name, ("counter", "gauge", "histogram"), labels)
        with self._lock:
            if metric.kind != "histogram":
                return self._values.get(name, {}).get(key, 0.0)
            histogram = self._histograms.get(name, {}).get(key)
            return float(sum(histogram.counts)) if histogram else 0.0

    def prometheus_text(self) -> bytes:
        """The exposition format of Prometheus, see `CONTENT_TYPE`."""
        return generate_latest(self._prometheus)

    def collect(self) -> Iterable[CounterMetricFamily | GaugeMetricFamily | HistogramMetricFamily]:
        """For prometheus-client: the metrics that were used."""
        with self._lock:
            values = {name: dict(series) for name, series in self._values.items()}
            histograms = {
                name: {key: (list(h.counts), h.sum) for key, h in series.items()}
                for name, series in self._histograms.items()
            }
        for name, plain in values.items():
            metric = self._metrics[name]
            family: CounterMetricFamily | GaugeMetricFamily
            if metric.kind == "counter":
                family = CounterMetricFamily(name, metric.help, labels=metric.labels)
            else:
                family = GaugeMetricFamily(name, metric.help, labels=metric.labels)
            for key, value in sorted(plain.items()):
                family.add_metric(key, value)
            yield family
        for name, series in histograms.items():
            metric = self._metrics[name]
            spread = HistogramMetricFamily(name, metric.help, labels=metric.labels)
            for key, (counts, total) in sorted(series.items()):
                spread.add_metric(key, _cumulated(metric.buckets, counts), total)
            yield spread

    def _find(self, name: str, kinds: tuple[Kind, ...], labels: dict[str, str]) -> tuple[Metric, _Key]:
        metric = self._metrics.get(name)
        if metric is None:
            raise Problem("metric", name, "is not a documented name", "add it to observe.metrics.METRICS")
        if metric.kind not in kinds:
            raise Problem(f"metric {name}", metric.kind, f"must be one of {kinds} here", "use add, set or observe")
        if len(labels) != len(metric.labels) or not all(label in labels for label in metric.labels):
            raise Problem(
                f"labels of {name}", sorted(labels), f"must be {list(metric.labels)}", "give exactly these labels"
            )
        return metric, tuple(labels[label] for label in metric.labels)


def _cumulated(buckets: tuple[float, ...], counts: list[int]) -> list[tuple[str, float]]:
    rows: list[tuple[str, float]] = []
    total = 0
    for bound, count in zip((*buckets, float("inf")), counts, strict=True):
        total += count
        rows.append(("+Inf" if bound == float("inf") else f"{bound:g}", float(total)))
    return rows
