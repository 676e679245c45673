"""What a journal belongs to: a start with other data, or with settings that its log does not fit, is refused."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from astraflow.config.schema import RunConfig
from astraflow.errors import JournalError

_FREE_OF_WORKFLOW = ("timeout_s", "max_attempts")


def fixed_settings(config: RunConfig) -> dict[str, Any]:
    """Settings that may not change within a run directory, by dotted path; all others may."""
    raw = config.model_dump(mode="json")
    fixed: dict[str, Any] = {"run.seed": config.run.seed}
    fixed["mix"] = raw["mix"]
    fixed["train_source"] = config.train_source if config.mix is None else None
    for name in config.train_sources:
        fixed[f"sources.{name}.group_size"] = raw["sources"][name]["group_size"]
        fixed[f"sources.{name}.operators"] = raw["sources"][name]["operators"]
    for key, value in raw["workflow"].items():
        if key not in _FREE_OF_WORKFLOW:
            fixed[f"workflow.{key}"] = value
    fixed["policies"] = sorted(raw["policies"])
    for name, policy in raw["policies"].items():
        where = f"policies.{name}"
        fixed[f"{where}.model"] = policy["model"]
        fixed[f"{where}.lora"] = policy["lora"]
        fixed[f"{where}.frozen"], fixed[f"{where}.copy_of"] = policy["frozen"], policy["copy_of"]
        fixed[f"{where}.frozen_steps"] = policy["frozen_steps"]
        fixed[f"{where}.batch.groups"] = policy["batch"]["groups"]
        fixed[f"{where}.operators"] = policy["operators"]
        fixed[f"{where}.sampling.temperature"] = policy["sampling"]["temperature"]  # what waits is scored with it
        fixed[f"{where}.algorithm.advantage"] = policy["algorithm"]["advantage"]
    fixed["stages"] = sorted(raw["stages"])
    for name, stage in raw["stages"].items():
        fixed[f"stages.{name}.type"], fixed[f"stages.{name}.policies"] = stage["type"], stage["policies"]
    evaluation = raw["evaluation"] or {}
    for key in ("source", "num_tasks", "samples"):
        fixed[f"evaluation.{key}"] = evaluation.get(key)
    return fixed


def refuse_other_run(old: RunConfig, new: RunConfig) -> None:
    """Compare the run file of the journal with that of this start.

    Raises: JournalError: naming the first setting that may not change.
    """
    before, after = fixed_settings(old), fixed_settings(new)
    for key in [*before, *(k for k in after if k not in before)]:
        if before.get(key) != after.get(key):
            raise JournalError(
                key, after.get(key), f"is {before.get(key)!r} in the journal of this run directory",
                "set it back to go on with the run, or give the run another name",
            )  # fmt: skip


def refuse_other_data(old: Mapping[str, str], new: Mapping[str, str]) -> None:
    """Compare the fingerprints of the sources.

    Raises: JournalError: naming the source whose rows changed.
    """
    for name, fingerprint in new.items():
        if old.get(name, fingerprint) != fingerprint:
            raise JournalError(
                f"sources.{name}", fingerprint, f"holds other rows than when the run began ({old[name]})",
                "restore the data to go on with the run, or give the run another name",
            )  # fmt: skip
