"""The entry point `vllm.general_plugins`: called once in every process of a server, before a model is loaded."""

from __future__ import annotations

BACKEND = "astraflow"
"""Of `--weight-transfer-config`. A server that does not ask for it stays as it is."""


def register() -> None:
    """Tell vLLM how weights come."""
    from vllm.distributed.weight_transfer.factory import WeightTransferEngineFactory

    if BACKEND not in WeightTransferEngineFactory._registry:
        WeightTransferEngineFactory.register_engine(BACKEND, "astraflow.engines.vllm.inside.transfer", "FileTransfer")
