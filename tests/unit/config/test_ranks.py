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
        (
            {"lora": {"rank": 4}, "trainer": {"tensor_parallel": 2}},
            r"policies.actor.trainer.tensor_parallel=2 cannot be with policies.actor.lora",
        ),
        (
            {"optimizer": {"type": "adamw_8bit"}, "trainer": {"tensor_parallel": 2}},
            r"tensor_parallel=2 cannot be with policies.actor.optimizer.type='adamw_8bit'",
        ),
        (
            {"trainer": {"tensor_parallel": 2, "context_parallel": 2}},
            r"trainer.ranks=2 must be a multiple of .*; use 4",
        ),
        (
            {"lora": {"quantize": "nf4"}},
            r"trainer.ranks=2 cannot be with policies.actor.lora.quantize='nf4', whose packed weights are not divided",
        ),
        ({"trainer": {"context_parallel": 3}}, r"trainer.context_parallel=3; use 3, or lower one"),
    ],
)
def test_what_cannot_be_in_parts_is_refused_before_the_start(policy, named):
    with pytest.raises(ConfigError, match=named):
        check_run(_raw(**policy | {"trainer": {"ranks": 2, **policy.get("trainer", {})}}), "run file")
    assert rank_problems(check_run(_raw(**policy | {"trainer": {}}), "run file")) == []


def test_ranks_of_whole_models_are_fine():
    trainer = {"ranks": 6, "context_parallel": 3}
    config = check_run(_raw(trainer=trainer, algorithm={"loss": "m2po", "kl": {}}), "run file")
    assert config.policies["actor"].trainer.ranks == 6


@pytest.mark.parametrize(
    ("trainer", "named"),
    [
        ({"ranks": 2}, r"policies.b.trainer.ranks=2 cannot be with policies.b.trainer.process='both'"),
        (
            {"threads": 3},
            r"policies.b.trainer.threads=3 must be that of policies.actor, 0, which is trained",
        ),
    ],
)
def test_policies_of_one_process_have_its_threads_and_no_ranks(trainer, named):
    raw = _raw(trainer={"process": "both"})
    raw["policies"]["b"] = {"model": "tiny-char", "trainer": {"process": "both", **trainer}}
    with pytest.raises(ConfigError, match=named):
        check_run(raw, "run file")
    raw["policies"]["b"]["trainer"]["process"] = "other"
    assert check_run(raw, "run file").trainers == {"both": ["actor"], "other": ["b"]}
