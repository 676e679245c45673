"""The engine `sglang`: an SGLang server that the node starts, or one that runs already."""

from __future__ import annotations

from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

from astraflow.engines.launching import Argument
from astraflow.engines.requests import GREEDY_BELOW, check_sampling, require
from astraflow.engines.served.engine import ServedEngine
from astraflow.engines.served.options import ServedOptions, signature_of
from astraflow.engines.served.shadow import Shadow
from astraflow.engines.sglang.command import SGLANG
from astraflow.engines.sglang.protocol import SglangServer
from astraflow.types import Sampling
from astraflow.wire.streams.web import Web


@dataclass(frozen=True, kw_only=True)
class SglangOptions(ServedOptions):
    """Those of every server, and whether seeds of requests count, at some cost in speed."""

    deterministic: bool = False


class SglangEngine(ServedEngine):
    """SGLang of a Python environment of its own."""

    __signature__ = signature_of(SglangOptions)

    def __init__(self, model_dir: Path | str, **options: Any) -> None:
        """`options`: of `SglangOptions`.

        Raises: ModelError, EngineError, LaunchError: there is no such server; nothing is left of it.
        """
        given = SglangOptions(model_dir=Path(model_dir), **options)
        given.check_start(SGLANG)
        model, shadow = given.model(), Shadow(given.model_dir, given.dtype, given.share)

        def open_server(web: Web) -> SglangServer:
            return SglangServer(web, given.dtype, model.vocab_size, given.seed, deterministic=given.deterministic)

        settings: dict[str, Argument] = {
            "dtype": given.dtype, "random_seed": given.seed % 2**30, "max_running_requests": given.max_concurrency,
            "enable_deterministic_inference": given.deterministic,
        }  # fmt: skip
        host = given.host(SGLANG, shadow, settings, open_server)
        check = partial(_check, given.deterministic)
        super().__init__(host, shadow, model, given.limits, delay_s=given.delay_s, check=check)


def _check(deterministic: bool, sampling: Sampling) -> None:
    """Raises: EngineError: out of its range, or what SGLang cannot do."""
    check_sampling(sampling)
    own = sampling.temperature if sampling.temperature >= GREEDY_BELOW else 1.0
    require(
        "sampling.logprob_temperature", sampling.logprob_temperature, sampling.logprob_temperature in (None, own),
        f"must be that of sampling, {own:g}, with engine = 'sglang'",
        "take temperature out of sampling.agents_choose, or use engine = 'vllm'",
    )  # fmt: skip
    require(
        "sampling.seed", sampling.seed, sampling.seed is None or deterministic,
        "has no effect in an SGLang server that is not deterministic",
        "set engine = { deterministic = true }, or let the agent send no seed",
    )  # fmt: skip
