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
        {"optimizer": {"type": "sgd", "momentum": 0.9, "schedule": "wsd", "decay_steps": 3, "warmup_steps": 3}},
        {"optimizer": {"type": "adamw_8bit", "betas": [0.9, 0.999], "schedule": "cosine", "min_lr_ratio": 0.1}},
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
        (
            {"lora": {}, "trainer": {"frozen": ["layers.0"]}},
            "trainer.frozen=['layers.0'] has no effect with",
        ),
        ({"critic": {}}, "policies.actor.critic has no effect with policies.actor.algorithm.advantage='grpo'"),
        (
            {"optimizer": {"momentum": 0.9}},
            "momentum=0.9 has no effect with policies.actor.optimizer.type='adamw'",
        ),
        (
            {"optimizer": {"type": "sgd", "eps": 1e-5}},
            "eps=1e-05 has no effect with policies.actor.optimizer",
        ),
        ({"optimizer": {"type": "sgd", "betas": [0, 0]}}, "has no effect with policies.actor.optimizer.type='sgd'"),
        (
            {"optimizer": {"decay_steps": 2}},
            "decay_steps=2 has no effect with policies.actor.optimizer.schedule",
        ),
        ({"optimizer": {"min_lr_ratio": 0.1}}, "min_lr_ratio=0.1 has no effect with"),
        ({"optimizer": {"schedule": "wsd", "decay_steps": 4, "warmup_steps": 3}}, "must be <= run.steps=6 together"),
        (
            {"algorithm": {"advantage": "gae"}, "critic": {}, "trainer": {"dtype": "float16"}},
            "trainer.dtype='float16' cannot be with policies.actor.critic",
        ),
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
