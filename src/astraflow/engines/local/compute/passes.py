"""One forward pass over tokens of many rows, as many of each row as it has to read, on the device of the model."""

from __future__ import annotations

import numpy as np
import torch
from transformers import PreTrainedConfig, PreTrainedModel

from astraflow.engines.local.caches.slots import SlotCache
from astraflow.engines.local.compute.attention import IMPLEMENTATION, SlotLayout
from astraflow.engines.local.compute.mixed import Mix
from astraflow.engines.local.compute.packed import pack
from astraflow.errors import ModelError
from astraflow.models.linear import ROWS

_FEW, _MANY = 8, 128
FULL, SLIDING = "full_attention", "sliding_attention"


class Passes:
    """Of one model, whose attention and linear layers are others from here on."""

    def __init__(self, model: PreTrainedModel) -> None:
        self.model, self.device = model, model.device
        self.mix: Mix | None = None  # of a model that several policies share; then a pass is told whose its tokens are
        model.set_attn_implementation(IMPLEMENTATION)
        pack(model)

    def renew(self) -> None:
        """The weights of the model, or an adapter on a base that is shared, changed."""
        if self.mix is None:
            pack(self.model)

    def read(
        self, cache: SlotCache, ids: np.ndarray, layout: SlotLayout, wanted: np.ndarray,
        policies: np.ndarray | None = None,
    ) -> torch.Tensor:  # fmt: skip
        """Store keys and values of `ids` [tokens], which lie as `layout` says. `policies`: of each slot, whose it is.

        Returns: logits [len(wanted), vocabulary] after the tokens at `wanted` (indices into `ids`, at least one).
        """
        starts, counts = layout.starts, layout.stops - layout.starts
        within = np.arange(ids.size) - np.repeat(np.cumsum(counts) - counts, counts)
        at = np.repeat(starts, counts) + within
        cache.expect(self._tensor(np.repeat(layout.slots, counts)), self._tensor(at))
        more = padded(ids.size) - ids.size
        if self.mix is not None:
            assert policies is not None
            self.mix.choose(np.pad(np.repeat(policies[layout.slots], counts), (0, more), mode="edge"), wanted)
        found = self.model(
            input_ids=self._tensor(np.pad(ids.astype(np.int64), (0, more)))[None],
            position_ids=self._tensor(np.pad(at, (0, more)))[None],
            cache=cache,
            use_cache=True,
            logits_to_keep=self._tensor(wanted),
            slot_layout=layout,
        )
        logits: torch.Tensor = found.logits[0]
        return logits

    def _tensor(self, array: np.ndarray) -> torch.Tensor:
        return torch.from_numpy(array).to(self.device)


def padded(tokens: int) -> int:
    """Tokens of a pass with those that nobody reads, so that passes come in few sizes: kernels are made for each."""
    step = 1 if tokens <= _FEW else _FEW if tokens < _MANY else ROWS
    return -(-tokens // step) * step


def sliding_window(config: PreTrainedConfig) -> int:
    """Of those layers that have one; 0: none has.

    Raises: ModelError: layers that are no attention over tokens.
    """
    settings = config.get_text_config().to_dict()
    window: int = settings.get("sliding_window") or 0
    kinds = set(settings.get("layer_types") or [SLIDING if window else FULL])
    if not kinds <= {FULL, SLIDING}:
        raise ModelError(
            "config.layer_types", sorted(kinds), "must be attention over tokens",
            f"use a model whose layers are all of kind {FULL} or {SLIDING}, or the vllm engine",
        )  # fmt: skip
    return window if SLIDING in kinds else 0
