"""What batches and replay may ask for together is checked when a run file is loaded."""

from __future__ import annotations

from typing import Any

import pytest

from astraflow.config.load import check_run
from astraflow.errors import ConfigError


def problems(
    loss: str = "ppo_clip", batch: dict[str, Any] | None = None, corrections: list[Any] | None = None, **replay: Any
) -> list[str]:
    raw = {
        "run": {"name": "a", "steps": 1},
        "sources": {"train": {"type": "sums"}},
        "workflow": {"type": "single_turn", "reward": "sums"},
        "policies": {
            "actor": {
                "model": "tiny-char",
                "algorithm": {"loss": loss, "corrections": corrections or []},
                "batch": batch or {},
                "operators": [{"type": "replay"} | replay] if replay else [],
            }
        },
    }
    try:
        check_run(raw, "a run")
    except ConfigError as error:
        return list(error.problems)
    return []


def test_older_data_than_max_staleness_needs_a_loss_that_corrects_it() -> None:
    (found,) = problems(max_age=4)
    assert "policies.actor.operators.0.max_age=4 must be <= policies.actor.batch.max_staleness=1" in found
    assert "m2po" in found
    assert problems(loss="m2po", max_age=4) == []
    assert problems(max_age=1) == [] and problems(ratio=0.2) == []


def test_a_loss_of_the_user_is_asked_by_the_trainer() -> None:
    assert problems(loss="my_losses:Mine", max_age=4) == []


@pytest.mark.parametrize(("more", "words"), [({"tokens": 8}, "batch.tokens=8"), ({"groups": 3}, "batch.groups=3")])
def test_a_batch_of_episodes_is_nothing_else(more: dict[str, int], words: str) -> None:
    (found,) = problems(batch={"episodes": 4} | more)
    assert words in found
    assert problems(batch={"episodes": 4}) == [] == problems(batch=more)


def test_two_replays_are_one_too_many() -> None:
    raw = {
        "run": {"name": "a", "steps": 1},
        "sources": {"train": {"type": "sums"}},
        "workflow": {"type": "single_turn", "reward": "sums"},
        "policies": {"actor": {"model": "tiny-char", "operators": ["replay", "replay"]}},
    }
    with pytest.raises(ConfigError, match="makes 'replay'"):
        check_run(raw, "a run")


def test_a_correction_that_weighs_lets_any_loss_take_old_data() -> None:
    assert problems(loss="reinforce", corrections=["truncate"], max_age=4) == []
    assert problems(loss="gspo", corrections=["reject", {"type": "mask", "level": "sequence"}], max_age=4) == []
    (found,) = problems(loss="reinforce", corrections=["reject"], max_age=4)
    assert "algorithm.corrections that weigh (mask, truncate)" in found
    (found,) = problems(loss="reinforce", corrections=["trunkate"])
    assert "policies.actor.algorithm.corrections.0=trunkate" in found and "did you mean 'truncate'" in found
