"""Whether an engine computes with the weights of the version that it says: a node's own look, after each swap."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Callable
from pathlib import Path

from astraflow.contracts import Engine
from astraflow.models.lora.adapter import read_adapter
from astraflow.rollout.loop import in_thread
from astraflow.weights.client import Fetched

log = logging.getLogger("astraflow.node")


class ServedCheck:
    """Of one policy. `counts` only grow: weights_checked, weights_wrong."""

    def __init__(self, policy: str, directory: Callable[[], Path]) -> None:
        """`directory`: of the policy's model, on which adapters rest; it may take long."""
        self._policy, self._directory = policy, directory
        self.counts = {"weights_checked": 0, "weights_wrong": 0}
        self._warned = False

    async def look(self, engine: Engine, fetched: Fetched) -> None:
        """Compare what `engine` computes with to what it has just loaded; a difference is logged and counted."""
        served = await asyncio.wrap_future(engine.effective_weights())
        if not served.checksum:
            if not self._warned:
                log.warning("the engine of %s says no checksum of its weights; weights.check cannot look", self._policy)
            self._warned = True
            return
        expected = await in_thread(lambda: self._expected(fetched, served.dtype), f"checksum-{self._policy}")
        self.counts["weights_checked"] += 1
        if (served.version, served.checksum) != (fetched.version, expected):
            self.counts["weights_wrong"] += 1
            log.error(
                "the engine of %s computes with other weights than those of version %d (%s, must be %s; "
                "it says version %d): what it samples has the wrong label; stop this node",
                self._policy, fetched.version, served.checksum, expected, served.version,
            )  # fmt: skip

    def _expected(self, fetched: Fetched, dtype: str) -> str:
        from astraflow.models.load import effective_checksum  # loads torch
        from astraflow.models.lora.merge import merged_checksum

        adapter = read_adapter(fetched.files)
        if adapter is None:
            return effective_checksum(fetched.tensors, dtype)
        return merged_checksum(self._directory(), fetched.tensors, adapter.scaling, dtype)
