"""The engine `vllm`: a vLLM server that the node starts, or one that runs already."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Literal

from astraflow.config.env import secret_from_env
from astraflow.engines.fleet import one_of, replicas_of
from astraflow.engines.launching import Argument, check_arguments, check_settings, vocab_size
from astraflow.engines.requests import require
from astraflow.engines.served.engine import Model, ServedEngine
from astraflow.engines.served.http import Web
from astraflow.engines.served.keeper import Limits
from astraflow.engines.served.process import Attached, Command, Host, Launched
from astraflow.engines.served.shadow import Shadow
from astraflow.engines.vllm.command import OURS, argv, environment, explain, look_at
from astraflow.engines.vllm.protocol import VllmServer
from astraflow.models.chat import eos_ids


class VllmEngine(ServedEngine):
    """vLLM of a Python environment of its own.

    Args: model_dir: a Hugging Face directory; python: the interpreter that has vLLM, "": this one; args, env: further
    options of `vllm serve` and variables; port: 0 takes a free one; url: of a server that runs already, which is then
    neither started nor ended; urls: of several, replicas of one model; key_env: name of the variable with the API key
    of such servers; share: a directory that node and server both see, "": chosen; max_concurrency: requests decoded at
    once; max_context: 0 is the model's own limit; threads: of each server process, on a CPU; seed: of requests that
    bring none; delay_s: before each request; kv_after_swap: what becomes of the keys and values of running requests
    when weights change; ready_s: from start to the first answer; hang_s: without a token, until a server counts as
    hung; max_restarts: within half an hour.
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
        delay_s: float = 0.0,
        kv_after_swap: Literal["recompute", "keep"] = "recompute",
        ready_s: float = 600.0,
        hang_s: float = 300.0,
        max_restarts: int = 3,
    ) -> None:
        check_settings(
            max_concurrency=max_concurrency, max_context=max_context, threads=threads, delay_s=delay_s, ready_s=ready_s,
            hang_s=hang_s, max_restarts=max_restarts,
        )  # fmt: skip
        known = kv_after_swap in ("recompute", "keep")
        require("engine.kv_after_swap", kv_after_swap, known, "must be recompute or keep", "use recompute")
        directory, python, args = Path(model_dir), python or sys.executable, args or {}
        key = secret_from_env(key_env) if key_env else None
        replicas = replicas_of(url, urls or [], alone=not (args or env or port))
        if not replicas:
            check_arguments(args, OURS)
            look_at(python)
        model = Model(stop_ids=eos_ids(directory), vocab_size=vocab_size(directory), max_context=max_context)
        shadow = Shadow(directory, dtype, share)

        def open_server(web: Web) -> VllmServer:
            return VllmServer(web, shadow.path, dtype, recompute=kv_after_swap == "recompute")

        host: Host
        if replicas:
            host = one_of([Attached("vllm", replica, open_server, ready_s, key) for replica in replicas])
        else:
            settings: dict[str, Argument] = {"dtype": dtype, "seed": seed % 2**31, "max_num_seqs": max_concurrency}
            if max_context:
                settings["max_model_len"] = max_context
            command = Command(
                "vllm", lambda number: argv(python, shadow.directory, number, settings, args),
                environment(python, threads, env or {}), open_server, explain,
            )  # fmt: skip
            host = Launched(command, port, ready_s, key)
        limits = Limits(hang_s=hang_s, max_restarts=max_restarts)
        super().__init__(host, shadow, model, limits, delay_s=delay_s)
