"""What a trainer of several ranks is refused."""

from __future__ import annotations

import pytest

from astraflow.config.checks.ranks import rank_problems
from astraflow.config.load import check_run
from astraflow.errors import ConfigError


def _raw(**policy):
    return {
        "run": {"name": "r", "steps": 6},
        "sources": {"train": {"type": "calculator"}},
        "workflow": {"type": "tool_use", "environment": "calculator"},
        "policies": {"actor": {"model": "tiny-char", **policy}},
    }


@pytest.mark.parametrize(
    ("policy", "named"),
    [
        ({"lora": {"rank": 4}}, r"policies.actor.trainer.ranks=2 cannot be with policies.actor.lora"),
        ({"optimizer": {"type": "adamw_8bit"}}, r"cannot be with policies.actor.optimizer.type='adamw_8bit'"),
    ],
)
def test_what_cannot_be_in_parts_is_refused_before_the_start(policy, named):
    with pytest.raises(ConfigError, match=named):
        check_run(_raw(**policy, trainer={"ranks": 2}), "run file")
    assert rank_problems(check_run(_raw(**policy), "run file")) == []


def test_ranks_of_whole_models_are_fine():
    config = check_run(_raw(trainer={"ranks": 3}, algorithm={"loss": "m2po", "kl": {}}), "run file")
    assert config.policies["actor"].trainer.ranks == 3
