"""Which settings may change within a run directory."""

from __future__ import annotations

from typing import Any

import pytest

from astraflow.dataflow.storage.identity import refuse_other_data, refuse_other_run
from astraflow.errors import JournalError
from astraflow.testing.dataflow import policy_section, small_config


@pytest.mark.parametrize(
    ("changes", "named"),
    [
        ({"run__seed": 4}, "run.seed"),
        ({"workflow__group_size": 3}, "workflow.group_size"),
        ({"workflow__type": "tool_use"}, "workflow.type"),
        ({"policies__actor": policy_section(3)}, "policies.actor.batch.groups"),
        ({"policies__actor": policy_section(operators=["keep_all"])}, "policies.actor.operators"),
        ({"policies": {"actor": policy_section(), "b": policy_section()}}, "policies"),
        ({"evaluation": {"source": "held"}}, "evaluation.source"),
        ({"train_source": "held"}, "train_source"),
        ({"mix": {"ratios": {"train": 1, "held": 1}}}, "mix"),
        ({"sources__train": {"type": "sums", "operators": ["greso"]}}, r"sources\.train\.operators"),
        ({"sources__train": {"type": "sums", "group_size": 3}}, r"sources\.train\.group_size"),
    ],
)
def test_a_setting_that_the_log_does_not_fit_is_refused_by_name(changes: dict[str, Any], named: str) -> None:
    with pytest.raises(JournalError, match=named + "="):
        refuse_other_run(small_config(), small_config(**changes))


@pytest.mark.parametrize(
    "changes",
    [
        {"run__steps": 50}, {"workflow__timeout_s": 5.0}, {"policies__actor": policy_section(2, 7)},
        {"policies__actor": policy_section(optimizer={"lr": 1e-3})}, {"dataflow__dead_after_s": 3.0},
    ],
)  # fmt: skip
def test_other_settings_may_change(changes: dict[str, Any]) -> None:
    refuse_other_run(small_config(), small_config(**changes))


@pytest.mark.parametrize(
    "changed",
    [
        {"ratios": {"train": 3, "held": [1, 3]}, "steps": 2},
        {"ratios": {"train": 3, "held": 1}, "steps": 3},
        {"ratios": {"train": 3, "held": 1}, "steps": 2, "schedule": "cosine"},
        {"ratios": {"train": 3}, "steps": 2},
        None,
    ],
)
def test_a_mix_may_not_change(changed: Any) -> None:
    ratios = {"train": 3, "held": 1}
    with pytest.raises(JournalError, match=r"^mix="):
        refuse_other_run(small_config(mix={"ratios": ratios, "steps": 2}), small_config(mix=changed))
    refuse_other_run(small_config(mix={"ratios": ratios}), small_config(mix={"ratios": {"train": 3.0, "held": [1, 1]}}))


def test_operators_of_a_source_without_training_tasks_may_change() -> None:
    refuse_other_run(small_config(), small_config(sources__held={"type": "sums", "group_size": 3}))


def test_other_rows_are_refused_by_the_name_of_the_source() -> None:
    refuse_other_data({"train": "a"}, {"train": "a", "held": "b"})
    with pytest.raises(JournalError, match=r"sources\.train=b holds other rows"):
        refuse_other_data({"train": "a"}, {"train": "b"})
