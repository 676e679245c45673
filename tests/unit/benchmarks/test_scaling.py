"""The simulated tables of bench_scaling: what must hold whatever the figures are."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from benchmarks.scaling import check, latency, sizes, sweeps
from benchmarks.scaling.cases import config_of, profile
from benchmarks.scaling.tables import filled, tables

ROOT = Path(__file__).parents[3]


def test_overlap_pays_most_where_both_sides_take_as_long() -> None:
    played_s = sweeps.rollout_s(1, 0.0)
    found = {ratio: sweeps.speed_up(1, 0.0, ratio, 1, played_s) for ratio in (0.1, 1.0, 10.0)}
    assert found[1.0] == pytest.approx(2.0, abs=0.1)
    assert found[0.1] == pytest.approx(1.1, abs=0.01) and found[10.0] == pytest.approx(1.1, abs=0.01)


def test_without_staleness_there_is_no_gain() -> None:
    assert sweeps.speed_up(1, 1.0, 2.0, 0, sweeps.rollout_s(1, 1.0)) == pytest.approx(1.0)


def test_runs_are_checked_on_other_settings_than_those_they_were_fitted_on() -> None:
    assert {fitted_on for _, fitted_on, _ in check.RUNS.values()} == {"source", "team"}
    assert sum(name != fitted_on for name, (_, fitted_on, _) in check.RUNS.items()) >= 3
    names = list(check.RUNS)
    assert all(names.index(fitted_on) <= names.index(name) for name, (_, fitted_on, _) in check.RUNS.items())


def test_the_node_behind_the_link_has_places_for_two_batches() -> None:
    config = latency.run_file(16, 1, 8)
    assert config.policies["actor"].batch.groups == 16 and config.evaluation is None
    assert config.rollout.nodes[0].concurrency == 2 * 16 * config.workflow.group_size


def test_larger_models_cost_more_of_everything() -> None:
    small, _, large = sizes.MODELS
    config = config_of(groups=sizes.GROUPS)
    few, many = (profile(config, model.costs(free=False)).cost("p0") for model in (small, large))
    assert few.weights.delta_bytes < many.weights.delta_bytes < many.weights.full_bytes
    assert few.engine.step_s < many.engine.step_s and few.weights.publish_s < many.weights.publish_s
    free = profile(config, large.costs(free=True))
    assert free.cost("p0").weights.full_bytes == free.cost("p0").engine.swap_s == free.serving.call_s == 0


def test_a_table_says_what_it_lacks_and_what_ran_beside() -> None:
    row = {
        "part": "latency", "groups": 1, "s_per_step": 1.0, "simulated": 1.0, "simulated_staleness_4": 1.0, "load": 12.0,
    }  # fmt: skip
    some = [row | {"rtt_ms": rtt_ms} for rtt_ms in latency.RTTS_MS]
    assert (
        "(Seen beside other work: load 12 on two cores. Yet to be measured, groups: 4, 16, 64.)"
        in tables(some)["latency"]
    )
    every = [row | {"groups": groups, "load": 1.5} for row in some for groups in latency.GROUPS]
    assert "(" not in tables(every)["latency"]


def test_the_tables_of_the_docs_are_those_of_the_results() -> None:
    rows = json.loads((ROOT / "benchmarks" / "results" / "scaling.json").read_text())["rows"]
    page = (ROOT / "docs" / "scaling.md").read_text()
    assert filled(page, rows) == page
    assert {"ratio", "staleness", "policies"} <= set(tables(rows))
    assert all(f"<!-- {name} -->" in page for name in tables(rows))
