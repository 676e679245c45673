"""The engine `vllm`: a vLLM server that the node starts, or one that runs already."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

from astraflow.engines.launching import Argument
from astraflow.engines.requests import require
from astraflow.engines.served.engine import ServedEngine
from astraflow.engines.served.options import ServedOptions, signature_of
from astraflow.engines.served.shadow import Shadow
from astraflow.engines.vllm.command import VLLM
from astraflow.engines.vllm.protocol import VllmServer
from astraflow.wire.streams.web import Web


@dataclass(frozen=True, kw_only=True)
class VllmOptions(ServedOptions):
    """Those of every server, and what becomes of caches."""

    kv_after_swap: Literal["recompute", "keep"] = "recompute"

    def __post_init__(self) -> None:
        super().__post_init__()
        known = self.kv_after_swap in ("recompute", "keep")
        require("engine.kv_after_swap", self.kv_after_swap, known, "must be recompute or keep", "use recompute")


class VllmEngine(ServedEngine):
    """vLLM of a Python environment of its own."""

    __signature__ = signature_of(VllmOptions)

    def __init__(self, model_dir: Path | str, **options: Any) -> None:
        """`options`: of `VllmOptions`.

        Raises: ModelError, EngineError, LaunchError: there is no such server; nothing is left of it.
        """
        given = VllmOptions(model_dir=Path(model_dir), **options)
        given.check_start(VLLM)
        model, shadow = given.model(), Shadow(given.model_dir, given.dtype, given.share)

        def open_server(web: Web) -> VllmServer:
            return VllmServer(web, shadow.path, given.dtype, recompute=given.kv_after_swap == "recompute")

        settings: dict[str, Argument] = {
            "dtype": given.dtype, "seed": given.seed % 2**31, "max_num_seqs": given.max_concurrency,
        }  # fmt: skip
        if given.max_context:
            settings["max_model_len"] = given.max_context
        host = given.host(VLLM, shadow, settings, open_server)
        super().__init__(host, shadow, model, given.limits, delay_s=given.delay_s)
