from __future__ import annotations

from typing import Any

import numpy as np
import pytest

from astraflow.observe.chart import bars, terminal_curve
from astraflow.observe.summary import accounting, law_holds, staleness_label, staleness_metrics, summarise


def step(number: int, policy: str = "actor", **metrics: float) -> dict[str, Any]:
    return {"kind": "step", "policy": policy, "step": number, "time_s": 10.0 * number, **metrics}


def evaluation(version: int, success: float) -> dict[str, Any]:
    return {"kind": "eval", "policy": "", "step": version, "time_s": 10.0 * version + 1, "eval/success": success}


def test_a_run_without_a_step_has_a_summary() -> None:
    summary = summarise([])
    assert summary == {
        "steps": 0,
        "wall_s": 0.0,
        "reward": {"start": None, "end": None, "best": None},
        "success": {"start": None, "end": None, "best": None},
        "idle": {"node": None, "trainer": None},
        "staleness": {"mean": None, "p99": None, "max": None},
        "logprob_gap": {"p50": None, "p99": None, "max": None},
        "accounting": {"admitted": 0, "trained": 0, "dropped": {}, "in_flight": 0},
        "skipped": {},
        "errors": {},
        "engines": {},
        "tokens_per_s": None,
        "versions": {},
        "policies": {},
    }
    assert terminal_curve([]) == ""


def test_reward_is_smoothed_and_success_is_held_out() -> None:
    rows = [step(n, **{"reward/mean": n / 10, "success/mean": 0.0}) for n in range(1, 10)]
    rows += [evaluation(0, 0.1), evaluation(4, 0.7), evaluation(9, 0.6)]
    summary = summarise(rows)
    assert summary["reward"] == pytest.approx({"start": 0.2, "end": 0.8, "best": 0.8})
    assert summary["success"] == {"start": 0.1, "end": 0.6, "best": 0.7}
    assert summary["steps"] == 9
    assert summary["wall_s"] == 91.0


def test_success_of_training_stands_in_without_evaluation() -> None:
    summary = summarise([step(1, **{"success/mean": 0.2}), step(2, **{"success/mean": 0.4})])
    assert summary["success"] == {"start": 0.2, "end": 0.4, "best": 0.4}


def test_staleness_is_counted_over_the_whole_run() -> None:
    first = step(1, **{"staleness/count/0": 90.0, "staleness/count/1": 0.0, "staleness/count/2": 0.0})
    second = step(2, **{"staleness/count/0": 8.0, "staleness/count/1": 1.0, "staleness/count/2": 1.0})
    assert summarise([first, second])["staleness"] == pytest.approx({"mean": 0.03, "p99": 1.0, "max": 2.0})
    third = step(1, **{"staleness/count/0": 5.0, "staleness/count/1": 0.0})
    assert summarise([third])["staleness"] == {"mean": 0.0, "p99": 0.0, "max": 0.0}


@pytest.mark.parametrize(("most", "classes"), [(0, 1), (2, 3), (15, 16), (16, 17), (31, 17), (32, 18), (1000, 22)])
def test_staleness_metrics_are_few_whatever_the_bound_is(most: int, classes: int) -> None:
    values = np.arange(most + 1)
    metrics = staleness_metrics(values, most)
    assert len(metrics) == classes and sum(metrics.values()) == most + 1
    assert metrics["staleness/count/0"] == 1.0
    for least in (16, 32, 512):
        if least <= most:
            assert metrics[f"staleness/count/{least}"] == min(2 * least, most + 1) - least
    named = {"staleness/mean": float(values.mean()), "staleness/max": float(most)}
    summary = summarise([step(1, **metrics, **named)])["staleness"]
    assert summary["mean"] == pytest.approx(most / 2) and summary["max"] == summary["p99"] == most
    assert [staleness_label(x) for x in (3, 15, 16, 512)] == ["3", "15", "16-31", "512-1023"]


def test_idle_fractions_are_weighted_by_time() -> None:
    rows = [
        step(1, **{"perf/wait_s": 1.0, "perf/busy_s": 9.0, "nodes/idle_fraction": 0.5}),
        {**step(2, **{"perf/wait_s": 30.0, "perf/busy_s": 0.0, "nodes/idle_fraction": 0.1}), "time_s": 40.0},
    ]
    idle = summarise(rows)["idle"]
    assert idle["trainer"] == pytest.approx(31 / 40)
    assert idle["node"] == pytest.approx((0.5 * 10 + 0.1 * 30) / 40)


def test_the_gap_of_the_worst_step_counts() -> None:
    rows = [
        step(n, **{"logprob_gap/p50": 1e-6 * n, "logprob_gap/p99": p99, "logprob_gap/max": 2 * p99})
        for n, p99 in ((1, 1e-5), (2, 3e-5), (3, 2e-5))
    ]
    assert summarise(rows)["logprob_gap"] == pytest.approx({"p50": 2e-6, "p99": 3e-5, "max": 6e-5})


def test_the_law_is_read_from_the_last_rows_or_the_status() -> None:
    rows = [
        step(1, **{"groups/admitted": 9.0, "groups/trained": 4.0, "groups/in_flight": 5.0}),
        step(
            2, **{"groups/admitted": 12.0, "groups/trained": 8.0, "groups/dropped/stale": 1.0, "groups/in_flight": 3.0}
        ),
        step(2, "critic", **{"groups/admitted": 12.0, "groups/trained": 12.0, "groups/in_flight": 0.0}),
    ]
    account = accounting(rows, None)
    assert account == {"admitted": 24, "trained": 20, "dropped": {"stale": 1}, "in_flight": 3}
    assert law_holds(account)
    final = {"admitted": 12, "trained": 8, "dropped": {"stale": 1, "finished": 3}, "in_flight": 0}
    assert accounting(rows, {"accounting": final}) == final
    assert not law_holds({**final, "trained": 9})


def test_skipped_tasks_are_those_of_the_last_row() -> None:
    rows = [
        step(1, **{"sources/train/skipped/greso": 3.0}),
        step(2, **{"sources/train/skipped/greso": 5.0, "sources/b/skipped/x.y:Z": 1.0, "sources/b/admitted": 9.0}),
    ]
    assert summarise(rows)["skipped"] == {"train": {"greso": 5}, "b": {"x.y:Z": 1}}


def test_tokens_per_second_and_versions() -> None:
    rows = [step(1, **{"tokens/sampled": 100.0}), step(2, **{"tokens/sampled": 300.0}), step(1, "critic")]
    summary = summarise(rows, {"time_s": 20.0, "policies": {"actor": {"version": 3}}})
    assert summary["tokens_per_s"] == 20.0
    assert summary["versions"] == {"actor": 3, "critic": 1}
    rows = [step(1, **{"nodes/tokens_per_s": 50.0}), step(2, **{"nodes/tokens_per_s": 150.0})]
    assert summarise(rows)["tokens_per_s"] == pytest.approx(100.0)


def test_a_curve_is_as_wide_as_asked_and_rises_where_the_run_did() -> None:
    rows = [step(n, **{"reward/mean": n / 200}) for n in range(1, 201)] + [evaluation(0, 0.0), evaluation(200, 1.0)]
    text = terminal_curve(rows, width=60)
    lines = text.splitlines()
    assert "reward (training): 0.005 at step 1, 1 at step 200" in text
    assert "success (held-out)" in text
    assert max(len(line) for line in lines) == 10 + 60
    top, bottom = lines[1].partition("│")[2], lines[4].partition("│")[2]
    assert top.index("█") > 45
    assert len(bottom) == 60


@pytest.mark.parametrize("values", [[0.5], [0.0, 0.0], [-1.0, 0.5, -0.2], [1e-12, 1e-12]])
def test_odd_curves_are_drawn_too(values: list[float]) -> None:
    assert "reward" in terminal_curve([step(n, **{"reward/mean": v}) for n, v in enumerate(values)])


def test_bars_say_shares() -> None:
    lines = bars({"0": 3, "2": 1}, width=8).splitlines()
    assert lines[0].split() == ["0", "██████", "3", "75.0%"]
    assert lines[1].split() == ["2", "██", "1", "25.0%"]


def test_the_axis_of_a_curve_at_zero_is_no_odd_number() -> None:
    lines = terminal_curve([step(n, **{"reward/mean": 0.0}) for n in (1, 2)]).splitlines()
    assert [line.split()[0] for line in lines[1:] if line[:8].strip()] == ["1", "0"]
