"""What the settings of a policy's trainer may ask for together."""

from __future__ import annotations

import pytest

from astraflow.config.checks.training import training_problems
from astraflow.config.schema import RunConfig


def _problems(**policy):
    return training_problems(
        RunConfig.model_validate(
            {
                "run": {"name": "r", "steps": 6},
                "sources": {"train": {"type": "calculator"}},
                "workflow": {"type": "single_turn"},
                "policies": {"actor": {"model": "tiny-char", **policy}},
            }
        )
    )


@pytest.mark.parametrize(
    "policy",
    [
        {},
        {"batch": {"groups": 4, "minibatches": 4, "epochs": 3}},
        {"batch": {"episodes": 64, "minibatches": 32}},
        {"algorithm": {"anchor": "proximal", "loss": "gspo"}},
        {"algorithm": {"advantage": "gae"}, "critic": {}},
        {"algorithm": {"advantage": "distill", "distill": {"teacher": "tiny-char"}}},
        {"algorithm": {"distill": {"teacher": "tiny-char", "coef": 0.1}}},
    ],
)
def test_good_settings(policy):
    assert _problems(**policy) == []


@pytest.mark.parametrize(
    ("policy", "said"),
    [
        (
            {"batch": {"groups": 4, "minibatches": 5}},
            "actor.batch.minibatches=5 must be <= policies.actor.batch.groups=4",
        ),
        ({"algorithm": {"anchor": "proximal", "loss": "decoupled_ppo"}}, "anchor='proximal' takes away the weight"),
        ({"algorithm": {"advantage": "gae"}}, "algorithm.advantage='gae' needs a critic; add policies.actor.critic"),
        ({"critic": {}}, "policies.actor.critic has no effect with policies.actor.algorithm.advantage='grpo'"),
        ({"algorithm": {"advantage": "distill"}}, "advantage='distill' needs a teacher; add policies.actor.algorithm"),
        (
            {"algorithm": {"kl": {}, "distill": {"teacher": "tiny-char"}}},
            "policies.actor.algorithm.kl cannot be beside policies.actor.algorithm.distill",
        ),
        (
            {"algorithm": {"advantage": "gae", "mask_truncated": True}, "critic": {}},
            "mask_truncated=true cannot be with policies.actor.critic",
        ),
    ],
)
def test_settings_that_do_not_fit_are_named(policy, said):
    (problem,) = _problems(**policy)
    assert said in problem
