"""bench_collaboration: what is counted of a run, and when the team has won."""

from __future__ import annotations

import pytest
from benchmarks.bench_collaboration import checks, markdown, row


def _metrics(policies: dict[str, float], success: list[float], dropped: float = 0.0) -> list[dict[str, object]]:
    """Two steps of two episodes, a round before and after; `policies`: tokens of a step."""
    steps = [
        {"kind": "step", "policy": policy, "step": step, "tokens/sampled": tokens, "batch/episodes": 2.0,
         "batch/groups": 2.0, "groups/dropped": dropped * (step == 2)}
        for step in (1, 2) for policy, tokens in policies.items()
    ]  # fmt: skip
    rounds = [{"kind": "eval", "step": at, "eval/success": s} for at, s in zip((0, 2), success, strict=True)]
    return [*rounds[::-1], *steps]


def test_tokens_of_all_policies_count_up_to_the_evaluated_step() -> None:
    made = row(_metrics({"coder": 10.0, "tester": 4.0}, [0.1, 0.5]), "team", 0)
    assert made["curve"] == {0: {"success": 0.1, "tokens": 0}, 2: {"success": 0.5, "tokens": 28.0}}
    assert (made["start"], made["end"], made["tokens"], made["tokens_per_task"]) == (0.1, 0.5, 28, 7.0)


def test_what_was_sampled_for_groups_that_were_dropped_counts() -> None:
    made = row(_metrics({"coder": 10.0}, [0.1, 0.5], dropped=1.0), "team", 0)
    assert (made["tokens"], made["tokens_per_task"], made["trained"], made["dropped"]) == (25, 5.0, 4, 1)


def test_the_worst_seed_decides() -> None:
    rows = [
        row(_metrics({"coder": tokens}, [0.0, end]), side, seed)
        for side, seed, tokens, end in (
            ("team", 0, 8.0, 0.6), ("alone", 0, 10.0, 0.3), ("team", 1, 12.0, 0.4), ("alone", 1, 10.0, 0.5),
        )
    ]  # fmt: skip
    gain, tokens = checks(rows)
    assert gain.value == pytest.approx(-0.1) and not gain.ok
    assert tokens.value == pytest.approx(1.2) and not tokens.ok
    assert all(check.ok for check in checks(rows[:2]))
    assert "| team | mean | 5.0 | 0.000 (0k) | 0.500 (0k) |" in markdown(rows)
    assert not any(check.ok for check in checks(rows[:1]))
