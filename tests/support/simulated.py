"""Run files and profiles of simulations whose outcome can be computed by hand."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from astraflow.config.load import check_run
from astraflow.config.schema import RunConfig
from astraflow.simulate.profile import Profile, merged, profile_of

GROUPS, SIZE, TOKENS = 4, 2, 10
STEP_S, TRAIN_S = 0.5, 3.0


def config_of(**over: Any) -> RunConfig:
    """`policies`: names; `batch`: of each; `nodes`: number or list; others are of [run]."""
    policies, batch, nodes = over.pop("policies", ["actor"]), over.pop("batch", {}), over.pop("nodes", [{}])
    each = {"groups": GROUPS, "max_staleness": 1, **batch}
    raw = {
        "run": {"name": "case", "steps": 6, **over},
        "sources": {"train": {"type": "calculator"}},
        "workflow": {"type": "tool_use", "environment": "calculator", "group_size": SIZE},
        "policies": {
            name: {"model": "tiny-char", "batch": dict(each), "sampling": {"max_tokens": 1000}} for name in policies
        },
        "rollout": {"nodes": [{"name": f"n{i}", "concurrency": GROUPS * SIZE, **node} for i, node in enumerate(nodes)]},
    }
    if len(policies) > 1:
        raw["workflow"] = {
            "type": "actor_verifier",
            "reward": "exact",
            "actor": "a",
            "verifier": "b",
            "group_size": SIZE,
        }
    return check_run(raw, "case")


def profile(config: RunConfig, over: Mapping[str, Any] | None = None) -> Profile:
    """Decode steps of STEP_S whatever their rows, TOKENS a call, trainer steps of TRAIN_S; nothing else costs time."""
    raw = {
        "engine": {"step_s": STEP_S},
        "trainer": {"step_s": TRAIN_S},
        "weights": {"full_bytes": 1000.0},
        "episode": {"calls": [{"policy": name, "tokens": TOKENS} for name in config.policies]},
        "serving": {"commit_apart_s": 0.0},
    }
    return profile_of(merged(raw, over or {}), config, "case")
