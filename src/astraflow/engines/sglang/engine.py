"""The engine `sglang`: an SGLang server that the node starts, or one that runs already."""

from __future__ import annotations

import sys
from functools import partial
from pathlib import Path
from typing import Literal

from astraflow.config.env import secret_from_env
from astraflow.engines.fleet import one_of, replicas_of
from astraflow.engines.launching import Argument, check_arguments, check_settings, vocab_size
from astraflow.engines.requests import GREEDY_BELOW, check_sampling, require
from astraflow.engines.served.engine import Model, ServedEngine
from astraflow.engines.served.http import Web
from astraflow.engines.served.keeper import Limits
from astraflow.engines.served.process import Attached, Command, Host, Launched
from astraflow.engines.served.shadow import Shadow
from astraflow.engines.sglang.command import OURS, argv, environment, explain, look_at
from astraflow.engines.sglang.protocol import SglangServer
from astraflow.models.chat import eos_ids
from astraflow.types import Sampling


class SglangEngine(ServedEngine):
    """SGLang of a Python environment of its own.

    Args: model_dir: a Hugging Face directory; python: the interpreter that has SGLang, "": this one; args, env:
    further options of `sglang serve` and variables; port: 0 takes a free one; url: of a server that runs already,
    which is then neither started nor ended, urls: of several, as one; key_env: name of the variable with their API
    key; share: a directory that node and server both see, "": chosen; max_concurrency: requests decoded at once;
    max_context: 0 is the server's limit; threads: of each server process; seed: of sampling; deterministic: seeds of
    requests count, at some cost in speed; delay_s: before each request; ready_s: from start to the first answer;
    hang_s: without a token, until a server counts as hung; max_restarts: within half an hour.
    Raises: ModelError, EngineError, LaunchError: there is no such server; nothing is left of it.
    """

    def __init__(
        self,
        model_dir: Path | str,
        *,
        python: str = "",
        args: dict[str, Argument] | None = None,
        env: dict[str, str] | None = None,
        port: int = 0,
        url: str = "",
        urls: list[str] | None = None,
        key_env: str = "",
        share: str = "",
        dtype: Literal["float32", "bfloat16", "float16"] = "bfloat16",
        max_concurrency: int = 64,
        max_context: int = 0,
        threads: int = 1,
        seed: int = 0,
        deterministic: bool = False,
        delay_s: float = 0.0,
        ready_s: float = 600.0,
        hang_s: float = 300.0,
        max_restarts: int = 3,
    ) -> None:
        check_settings(
            max_concurrency=max_concurrency, max_context=max_context, threads=threads, delay_s=delay_s, ready_s=ready_s,
            hang_s=hang_s, max_restarts=max_restarts,
        )  # fmt: skip
        directory, python, args = Path(model_dir), python or sys.executable, args or {}
        key = secret_from_env(key_env) if key_env else None
        replicas = replicas_of(url, urls or [], alone=not (args or env or port))
        if not replicas:
            check_arguments(args, OURS)
            look_at(python)
        size = vocab_size(directory)
        model = Model(stop_ids=eos_ids(directory), vocab_size=size, max_context=max_context)
        shadow = Shadow(directory, dtype, share)

        def open_server(web: Web) -> SglangServer:
            return SglangServer(web, dtype, size, seed, deterministic=deterministic)

        host: Host
        if replicas:
            host = one_of([Attached("sglang", replica, open_server, ready_s, key) for replica in replicas])
        else:
            settings: dict[str, Argument] = {
                "dtype": dtype, "random_seed": seed % 2**30, "max_running_requests": max_concurrency,
                "enable_deterministic_inference": deterministic,
            }  # fmt: skip
            command = Command(
                "sglang", lambda number: argv(python, shadow.directory, number, settings, args),
                environment(python, threads, env or {}), open_server, explain,
            )  # fmt: skip
            host = Launched(command, port, ready_s, key)

        limits = Limits(hang_s=hang_s, max_restarts=max_restarts)
        super().__init__(host, shadow, model, limits, delay_s=delay_s, check=partial(_check, deterministic))


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
