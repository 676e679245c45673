"""What a stage may know of its run: it is given as `run` to a constructor that has a parameter of that name."""

from __future__ import annotations

import inspect
import threading
from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING, cast

from astraflow.config.env import cache_dir
from astraflow.config.rooms import build, resolve
from astraflow.config.schema import RunConfig
from astraflow.contracts import Stage
from astraflow.errors import ConfigError
from astraflow.types import WeightVersion
from astraflow.weights.client import ANNOUNCED_WAIT_S, WeightClient

if TYPE_CHECKING:
    import torch

    from astraflow.models.chat import ChatTokenizer


class StageRun:
    """The run as a stage sees it. `stop` is set when the worker is told to end: long waits should watch it."""

    def __init__(
        self,
        config: RunConfig,
        name: str,
        *,
        threads: int = 0,
        token: str | None = None,
        stop: threading.Event | None = None,
    ) -> None:
        self.config, self.name, self.threads, self.stop = config, name, threads, stop or threading.Event()
        self.stats: dict[str, float] = {}  # of the stage, shown in /status: gauges and monotonic counters
        self._versions: dict[str, WeightVersion] = {}
        self._client = WeightClient(token, wait_s=ANNOUNCED_WAIT_S)

    def hear(self, versions: Mapping[str, WeightVersion]) -> None:
        """The newest versions, and where they are."""
        self._versions.update(versions)

    def model_directory(self, policy: str) -> Path:
        """The model that versions of a policy are of or rest on, as a directory."""
        from astraflow.models.registry import model_directory  # loads torch

        return model_directory(self.config.base_of(policy), cache_dir(), self.config.run.seed)

    def tokenizer(self, policy: str) -> ChatTokenizer:
        """The tokenizer of a policy."""
        from astraflow.models.chat import ChatTokenizer

        return ChatTokenizer(self.model_directory(policy))

    def first_weights(self, policy: str) -> dict[str, torch.Tensor] | None:
        """The tensors of version 0, with `lora` those of the adapter; None: without a warm start they are those of
        `model_directory`.

        Raises: WeightError: version 0 cannot be fetched.
        """
        if self.config.policies[policy].warm_start is None:
            return None
        urls = self._versions[policy].urls if policy in self._versions else ()
        return self._client.fetch(WeightVersion(policy, 0, urls)).tensors

    def close(self) -> None:
        """Drop connections."""
        self._client.close()


def build_stage(run: StageRun) -> Stage:
    """The stage that the run file describes.

    Raises: ConfigError: there is no such stage. Problem: what its constructor refuses.
    """
    if run.name not in run.config.stages:
        known = ", ".join(run.config.stages) or "none"
        raise ConfigError(run.config.run.name, [f"stage={run.name!r} is not in the run; known: {known}"])
    section, where = run.config.stages[run.name], f"stages.{run.name}"
    target = resolve("stages", section.type, f"{where}.type")
    given = {"run": run} if "run" in inspect.signature(target).parameters else {}
    return cast(Stage, build("stages", section.type, section.options, where, **given))
