"""Each warning: from rows that show it, never from healthy ones, once and then seldom."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from astraflow.config.schema import RunConfig
from astraflow.observe.health.rules import RULES
from astraflow.observe.health.watch import Warned, Watch, warnings_of
from astraflow.observe.health.window import Limits

HEALTHY = {
    "reward/mean": 0.5, "reward/std": 0.4, "success/mean": 0.5, "groups/zero_variance_fraction": 0.2,
    "policy/entropy": 0.6, "policy/clip_fraction": 0.02, "policy/ess": 0.98, "episodes/truncated": 0.01,
    "staleness/mean": 1.0, "logprob_gap/p50": 1e-4, "logprob_gap/p99": 2e-3, "grad_norm": 0.3, "skipped_steps": 0.0,
    "microbatch_tokens/max": 8000.0, "perf/idle_fraction": 0.3, "nodes/weights_wrong": 0.0,
}  # fmt: skip
LIMITS = Limits("ppo_clip", "grpo", max_staleness=3, max_logprob_gap=0.5, tokens_per_microbatch=8192)


def row(step: int, **changes: float) -> dict[str, Any]:
    counters = {"groups/trained": 16.0 * step, "nodes/episodes_done": 128.0 * step}
    return {"kind": "step", "policy": "actor", "step": step, **HEALTHY, **counters, **changes}


def said(rows: list[dict[str, Any]], limits: Limits = LIMITS) -> list[Warned]:
    watch = Watch({"actor": limits})
    return [warned for each in rows for warned in watch.add(each)]


def rules(rows: list[dict[str, Any]], limits: Limits = LIMITS) -> set[str]:
    return {warned.rule for warned in said(rows, limits)}


def then(bad: dict[str, float], good: int = 20, num: int = 6) -> list[dict[str, Any]]:
    """Healthy steps, then some with these numbers."""
    return [row(i) for i in range(1, good + 1)] + [row(i, **bad) for i in range(good + 1, good + num + 1)]


def test_a_healthy_run_says_nothing() -> None:
    assert not said([row(step) for step in range(1, 200)])


def test_rows_that_lack_everything_say_nothing() -> None:
    assert not said([{"kind": "step", "policy": "actor", "step": step} for step in range(1, 60)])


CASES: dict[str, tuple[list[dict[str, Any]], str]] = {
    "entropy_collapse": (then({"policy/entropy": 0.03, "success/mean": 0.3}), "algorithm.entropy"),
    "entropy_explosion": (then({"policy/entropy": 2.5}), "lower optimizer.lr"),
    "gap": (then({"logprob_gap/p99": 0.7}, num=1), "trainer.max_logprob_gap=0.5"),
    "gap_grows": (then({"logprob_gap/p50": 5e-3}), "weights.check"),
    "equal_groups": (then({"groups/zero_variance_fraction": 0.95, "success/mean": 0.02}), "too hard"),
    "no_reward": (then({"reward/std": 0.0, "reward/mean": 0.0}), "grader"),
    "clip": (then({"policy/clip_fraction": 0.5}), "widen clip_low and clip_high"),
    "far": (then({"policy/approx_kl": 0.8}, num=1), "lower optimizer.lr"),
    "ess": (then({"policy/ess": 0.2}), "max_staleness"),
    "truncation": (then({"episodes/truncated": 0.6}), "sampling.max_tokens"),
    "staleness": (then({"staleness/mean": 2.9}), "nodes are ahead of the trainer"),
    "stale_drops": (then({"groups/dropped/stale": 40.0}, num=1), "raise batch.max_staleness"),
    "skipped": (then({"skipped_steps": 1.0}, num=1), "skipped_batches/"),
    "gradient": (then({"grad_norm": 40.0}), "optimizer.grad_clip"),
    "long_trajectory": (then({"microbatch_tokens/max": 9000.0}, num=1), "batch.tokens_per_microbatch=8192"),
    "waiting": (then({"perf/idle_fraction": 0.95}), "add nodes"),
    "failures": (then({"nodes/episodes_failed/timeout": 600.0}, num=1), "astraflow status"),
    "wrong_weights": (then({"nodes/weights_wrong": 1.0}, num=1), "other weights than were published"),
}


def test_every_rule_has_a_case() -> None:
    assert set(CASES) == set(RULES)


@pytest.mark.parametrize("rule", CASES)
def test_a_rule_speaks_when_its_fault_is_there_and_says_what_to_try(rule: str) -> None:
    rows, advice = CASES[rule]
    found = said(rows)
    assert [warned.rule for warned in found] == [rule]
    assert found[0].step > 20 and found[0].policy == "actor" and advice in found[0].message
    assert not said(rows[:20])


def test_entropy_may_fall_where_tasks_are_solved() -> None:
    assert not rules(then({"policy/entropy": 0.01, "success/mean": 0.97}))


def test_equal_groups_of_solved_tasks_ask_for_harder_ones() -> None:
    (warned,) = said(then({"groups/zero_variance_fraction": 0.95, "success/mean": 0.95}))
    assert "too easy:" in warned.message


def test_equal_groups_of_which_some_are_solved_are_not_called_too_easy() -> None:
    (warned,) = said(then({"groups/zero_variance_fraction": 0.95, "success/mean": 0.69}))
    assert "69% of the episodes succeed" in warned.message and "too easy or too hard:" in warned.message


def test_gspo_clips_more_and_short_bounds_are_always_reached() -> None:
    rows = then({"policy/clip_fraction": 0.5, "staleness/mean": 1.0})
    assert not rules(rows, Limits("gspo", "grpo", 1, 0.5, 8192))


def test_where_siblings_are_not_compared_equal_groups_are_no_fault() -> None:
    rows = then({"groups/zero_variance_fraction": 1.0, "reward/std": 0.0})
    assert rules(rows) == {"equal_groups", "no_reward"}
    assert not rules(rows, Limits("ppo_clip", "gae", 3, 0.5, 8192))


def test_one_bad_batch_is_no_trend() -> None:
    bad = {"policy/entropy": 0.0, "policy/ess": 0.6, "episodes/truncated": 0.9, "policy/clip_fraction": 0.9}
    assert not said([*then(bad, num=1), row(22), row(23)])


def test_a_warning_that_goes_on_is_said_seldom() -> None:
    found = said(then({"policy/clip_fraction": 0.5}, num=200))
    assert [warned.step for warned in found][:4] == [found[0].step, found[0].step + 20, found[0].step + 60,
                                                     found[0].step + 140]  # fmt: skip


def test_a_warning_of_a_skipped_first_step_is_not_lost() -> None:
    assert rules([row(1, skipped_steps=1.0)]) == {"skipped"}


def test_policies_are_watched_apart_and_unknown_ones_not_at_all() -> None:
    watch = Watch({"actor": LIMITS, "critic": LIMITS})
    found = []
    for each in then({"policy/ess": 0.1}):
        found += watch.add(each) + watch.add({**each, "policy": "critic", "policy/ess": 1.0})
        assert not watch.add({**each, "policy": "other"}) and not watch.add({**each, "kind": "eval"})
    assert {warned.policy for warned in found} == {"actor"}


def test_limits_are_those_of_the_run_file(tmp_path: Path) -> None:
    config = RunConfig.model_validate(
        {
            "run": {"name": "r", "steps": 5},
            "sources": {"train": {"type": "calculator"}},
            "workflow": {"type": "single_turn"},
            "policies": {
                "actor": {
                    "model": "tiny-char",
                    "algorithm": {"loss": "gspo"},
                    "batch": {"max_staleness": 4, "tokens_per_microbatch": 7999},
                    "trainer": {"max_logprob_gap": 0.25},
                }
            },
        }
    )
    assert Limits.of(config) == {"actor": Limits("gspo", "grpo", 4, 0.25, 7999)}
    assert {warned.rule for warned in warnings_of([row(1)], config)} == {"long_trajectory"}
