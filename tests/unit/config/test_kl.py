"""[policies.NAME.algorithm.kl]: what cannot work is refused, with advice."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from astraflow.config.load import check_run
from astraflow.config.stages import reference_stage
from astraflow.errors import ConfigError
from astraflow.launch.checks import model_problems


def raw(kl: dict[str, Any], **more: Any) -> dict[str, Any]:
    return {
        "run": {"name": "r", "steps": 1},
        "sources": {"train": "sums"},
        "workflow": {"type": "single_turn", "reward": "sums"},
        "policies": {"actor": {"model": "tiny-char", "algorithm": {"kl": kl}}, "other": {"model": "tiny-char"}},
        **more,
    }


def test_the_estimator_goes_with_the_place() -> None:
    for place, expected in (("loss", "k3"), ("reward", "k1")):
        kl = check_run(raw({"place": place}), "x").policies["actor"].algorithm.kl
        assert kl is not None and (kl.estimator_used, kl.coef) == (expected, 0.001)


@pytest.mark.parametrize(
    ("kl", "stages", "message"),
    [
        ({"estimator": "k1"}, {}, r"kl\.estimator='k1' has the same gradient.*place to 'reward'"),
        ({"coef": 0}, {}, r"kl\.coef=0 must be greater than 0"),
        ({"estimator": "k4"}, {}, r"kl\.estimator='k4' must be"),
        ({"reference": "stage"}, {}, r"kl\.reference='stage' needs a stage that adds 'ref_logprobs'"),
        (
            {"reference": "stage"},
            {"ref": {"type": "ref_logprobs", "policies": ["other"]}},
            r"kl\.reference='stage' needs a stage .* to rows of 'actor'",
        ),
        ({"reference": "tiny-char"}, {"ref": "ref_logprobs"}, r"cannot be beside stages\.ref"),
    ],
)
def test_what_makes_no_sense_is_refused(kl: dict[str, Any], stages: dict[str, Any], message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        check_run(raw(kl, stages=stages), "x")


def test_the_stage_of_a_policy_is_found() -> None:
    config = check_run(
        raw({"reference": "stage"}, stages={"ref": {"type": "ref_logprobs", "policies": ["actor"]}}), "x"
    )
    assert reference_stage(config, "actor") == "ref" and reference_stage(config, "other") is None


def test_a_reference_is_taken_from_beside_the_run_file(tmp_path: Path) -> None:
    (tmp_path / "sft").mkdir()
    for given, expected in (("sft", str(tmp_path / "sft")), ("", ""), ("tiny-char", "tiny-char")):
        kl = check_run(raw({"reference": given}), "x", tmp_path).policies["actor"].algorithm.kl
        assert kl is not None and kl.reference == expected


def test_a_teacher_is_a_reference_too(tmp_path: Path) -> None:
    (tmp_path / "large").mkdir()
    given = raw({})
    algorithm = given["policies"]["actor"]["algorithm"] = {"distill": {"teacher": "large"}}
    distill = check_run(given, "x", tmp_path).policies["actor"].algorithm.distill
    assert distill is not None and distill.teacher == str(tmp_path / "large")
    algorithm["distill"] = {"teacher": "stage"}
    with pytest.raises(ConfigError, match=r"distill\.teacher='stage' needs a stage .*, or give a model: the trainer"):
        check_run(given, "x")
    algorithm["distill"] = {"teacher": str(tmp_path)}
    (problem,) = model_problems(check_run(given, "x"))
    assert problem.startswith(f"policies.actor.algorithm.distill.teacher={tmp_path} holds no config.json; ")


def test_a_reference_that_is_no_model_is_found_before_the_start(tmp_path: Path) -> None:
    (problem,) = model_problems(check_run(raw({"reference": str(tmp_path)}), "x"))
    assert problem.startswith(f"policies.actor.algorithm.kl.reference={tmp_path} holds no config.json; ")
