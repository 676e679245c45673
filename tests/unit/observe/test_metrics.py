from __future__ import annotations

import re
from pathlib import Path

import prometheus_client
import pytest
from prometheus_client.parser import text_string_to_metric_families

import astraflow
from astraflow.errors import Problem
from astraflow.observe.metrics import METRICS, MetricsRegistry

ADMITTED, NODES = "astraflow_source_tasks_admitted_total", "astraflow_node_stat"


def test_prometheus_reads_back_what_was_said() -> None:
    registry = MetricsRegistry()
    registry.set(ADMITTED, 3, source="a")
    registry.set(ADMITTED, 4, source="b")
    registry.set(NODES, 0.5, name="idle", node="n")
    families = list(text_string_to_metric_families(registry.prometheus_text().decode()))
    assert [(f.type, f.documentation) for f in families] == [
        ("counter", "tasks admitted"),
        ("gauge", families[1].documentation),
    ]
    found = {(s.name, tuple(sorted(s.labels.items()))): s.value for family in families for s in family.samples}
    assert found == {
        (ADMITTED, (("source", "a"),)): 3,
        (ADMITTED, (("source", "b"),)): 4,
        (NODES, (("name", "idle"), ("node", "n"))): 0.5,
    }
    assert ADMITTED.encode() not in prometheus_client.generate_latest()


def test_unknown_names_and_labels_are_refused() -> None:
    registry = MetricsRegistry()
    with pytest.raises(Problem, match="is not a documented name"):
        registry.set("astraflow_jobs", 1)
    for labels in ({}, {"shelf": "a"}, {"source": "a", "shelf": "a"}):
        with pytest.raises(Problem, match=r"must be \['source'\]"):
            registry.set(ADMITTED, 1, **labels)


def test_the_list_of_metrics_is_well_formed() -> None:
    assert len({m.name for m in METRICS}) == len(METRICS)
    for m in METRICS:
        assert m.name.startswith("astraflow_") and m.help and m.unit
        assert m.name.endswith("_total") == (m.kind == "counter")


def test_every_metric_that_a_service_names_is_in_the_list() -> None:
    known = {m.name.removesuffix("_total") for m in METRICS}
    named: set[str] = set()
    for room in ("dataflow", "retrieval"):
        for path in (Path(astraflow.__file__).parent / room).rglob("*.py"):
            named |= set(re.findall(r'"(astraflow_[a-z_]+)"', path.read_text()))
    assert {name.removesuffix("_total") for name in named} == known
