from __future__ import annotations

import re
import threading
from pathlib import Path

import prometheus_client
import pytest
from prometheus_client.parser import text_string_to_metric_families

import astraflow
from astraflow.errors import Problem
from astraflow.observe.metrics import METRICS, Metric, MetricsRegistry

OWN = (
    Metric("jobs_total", "counter", "jobs", "done", ("room",)),
    Metric("depth", "gauge", "jobs", "waiting"),
    Metric("wait_seconds", "histogram", "s", "wait", ("room",), (0.1, 1.0)),
)


def parsed(registry: MetricsRegistry) -> dict[tuple[str, tuple[tuple[str, str], ...]], float]:
    families = text_string_to_metric_families(registry.prometheus_text().decode())
    return {(s.name, tuple(sorted(s.labels.items()))): s.value for family in families for s in family.samples}


def test_prometheus_reads_back_what_was_counted() -> None:
    registry = MetricsRegistry(OWN)
    registry.add("jobs_total", room="a")
    registry.add("jobs_total", 2, room="a")
    registry.set("depth", 7)
    registry.add("depth", -3)
    for value in (0.05, 0.1, 0.5, 5.0):
        registry.observe("wait_seconds", value, room="b")
    found = parsed(registry)
    assert found["jobs_total", (("room", "a"),)] == 3
    assert found["depth", ()] == 4
    buckets = {labels[0][1]: v for (name, labels), v in found.items() if name == "wait_seconds_bucket"}
    assert [buckets[k] for k in sorted(buckets, key=float)] == [2, 3, 4]
    assert found["wait_seconds_count", (("room", "b"),)] == 4
    assert found["wait_seconds_sum", (("room", "b"),)] == pytest.approx(5.65)
    assert registry.value("wait_seconds", room="b") == 4


def test_a_counter_only_rises() -> None:
    registry = MetricsRegistry(OWN)
    registry.set("jobs_total", 5, room="a")
    registry.set("jobs_total", 3, room="a")
    assert registry.value("jobs_total", room="a") == 5
    with pytest.raises(Problem, match="a counter only rises"):
        registry.add("jobs_total", -1, room="a")


def test_unknown_names_labels_and_kinds_are_refused() -> None:
    registry = MetricsRegistry(OWN)
    with pytest.raises(Problem, match="is not a documented name"):
        registry.add("job_total")
    with pytest.raises(Problem, match="must be"):
        registry.add("jobs_total")
    with pytest.raises(Problem, match="must be"):
        registry.add("jobs_total", shelf="a")
    with pytest.raises(Problem, match="must be one of"):
        registry.observe("depth", 1)


def test_nothing_reaches_the_global_registry() -> None:
    MetricsRegistry(OWN).add("jobs_total", room="a")
    MetricsRegistry(OWN)  # a second one of the same names is no clash
    assert b"jobs_total" not in prometheus_client.generate_latest()


def test_no_count_is_lost_between_threads() -> None:
    registry = MetricsRegistry(OWN)

    def count() -> None:
        for _ in range(2000):
            registry.add("jobs_total", room="a")
            registry.observe("wait_seconds", 0.2, room="a")

    threads = [threading.Thread(target=count) for _ in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert registry.value("jobs_total", room="a") == 8000
    assert registry.value("wait_seconds", room="a") == 8000


def test_the_list_of_metrics_is_well_formed() -> None:
    assert len({m.name for m in METRICS}) == len(METRICS)
    for m in METRICS:
        assert m.name.startswith("astraflow_") and m.help and m.unit
        assert m.name.endswith("_total") == (m.kind == "counter")
        assert bool(m.buckets) == (m.kind == "histogram")
        assert list(m.buckets) == sorted(m.buckets)


def test_every_metric_that_a_service_names_is_in_the_list() -> None:
    known = {m.name.removesuffix("_total") for m in METRICS}
    named: set[str] = set()
    for path in (Path(astraflow.__file__).parent / "dataflow").rglob("*.py"):
        named |= set(re.findall(r'"(astraflow_[a-z_]+)"', path.read_text()))
    assert {name.removesuffix("_total") for name in named} == known
