"""Whether a model can be computed by several ranks together; reads its config only. Loads neither torch nor
transformers, so that `astraflow validate` can ask."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from astraflow.errors import ModelError


def check_parts(config: Mapping[str, Any], tensor: int, context: int) -> None:
    """Raises: ModelError: a model of `config` (config.json) cannot be cut into `tensor` parts of each linear layer and
    `context` parts of a pack."""
    nested = config.get("text_config")
    config = nested if isinstance(nested, dict) else config
    heads = _number(config, "num_attention_heads", "n_head")
    groups = _number(config, "num_key_value_heads") or heads
    inner = _number(config, "intermediate_size")
    if heads % (tensor * context):
        raise ModelError(
            "trainer.tensor_parallel * trainer.context_parallel", tensor * context,
            f"does not divide the {heads} attention heads of the model", "use numbers whose product does, or 1 and 1",
        )  # fmt: skip
    if groups % tensor or inner % tensor:
        raise ModelError(
            "trainer.tensor_parallel", tensor, f"does not divide the {groups} key-value heads and the MLP's {inner} "
            "columns of the model", "use a number that divides both, or trainer.context_parallel instead",
        )  # fmt: skip
    groups //= tensor
    if groups % context and context % groups:
        raise ModelError(
            "trainer.context_parallel", context, f"neither divides the {groups} key-value heads that a rank has nor is "
            "a multiple of them", "use a number that is",
        )  # fmt: skip


def _number(config: Mapping[str, Any], *names: str) -> int:
    """0: it says nothing of that."""
    found = next((config[name] for name in names if config.get(name) is not None), 0)
    return found if isinstance(found, int) else 0
