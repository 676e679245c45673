"""Which policies of a node are served by one engine: adapters of one base, copies of them, and the base itself."""

from __future__ import annotations

import json
from collections.abc import Collection, Iterator
from pathlib import Path
from typing import cast

from astraflow.config.checks.engines import ABILITIES
from astraflow.config.schema import RunConfig
from astraflow.contracts import Engine, SharesBase
from astraflow.rollout.policies import PolicyOptions, directory_of, start_engine


def number_of_engines(config: RunConfig, policy: str) -> int:
    """Engines that a node has for it: one, or one for each past version that it plays."""
    copy = config.policies[policy].copy_of
    return 1 if copy is None else copy.keep


def groups(config: RunConfig, served: Collection[str] | None = None) -> list[list[str]]:
    """Of those that a node serves (None: all), policies of one base and with equal engine settings that differ by
    adapters, where they need several engines."""
    found: dict[str, list[str]] = {}
    for name, section in config.policies.items():
        ability = ABILITIES.get(section.engine.type)
        if (
            (served is not None and name not in served)
            or ability is None
            or not ability.shares_base
            or not (config.lora_of(name) or section.frozen)
        ):
            continue
        key = json.dumps([config.base_of(name), section.engine.model_dump()], sort_keys=True)
        found.setdefault(key, []).append(name)
    return [
        names for names in found.values()
        if any(config.lora_of(name) for name in names) and sum(number_of_engines(config, name) for name in names) > 1
    ]  # fmt: skip


def shared_engines(
    config: RunConfig, options: PolicyOptions, served: Collection[str]
) -> Iterator[tuple[str, list[Engine]]]:
    """Policy -> its engines, for those of `served` that share; the base is loaded once for all of a group.

    Raises: ModelError: a base is not on this node, or cannot be run.
    """
    for names in groups(config, served):
        first = config.policies[names[0]].model_copy(update={"model": config.base_of(names[0])})
        directory: Path = directory_of(first.model, options.cache, options.seed)
        count = sum(number_of_engines(config, name) for name in names)
        whole = cast(SharesBase, start_engine(names[0], first, options, directory, count))
        engines = iter(whole.adapters(count))
        for name in names:
            yield name, [next(engines) for _ in range(number_of_engines(config, name))]
