"""Forward passes over ragged rows: which layer of a model sees what, on the device where the model is."""

from __future__ import annotations

from typing import Any

import numpy as np
import torch
from transformers import PreTrainedConfig, PreTrainedModel

from astraflow.engines.local.caches.slots import SlotCache
from astraflow.engines.local.compute.mixed import Mix
from astraflow.errors import ModelError

FULL, SLIDING = "full_attention", "sliding_attention"


class Passes:
    """Of one model. Positions are always given, and masks wherever a row must not see all that lies below `width`."""

    def __init__(self, model: PreTrainedModel) -> None:
        """Raises: ModelError: layers that are no attention over tokens."""
        self.model, self.device = model, model.device
        self.mix: Mix | None = None  # of a model that several policies share; then a pass is told whose its rows are
        self._kinds, self._window = attention_kinds(model.config)

    def prompts(
        self, cache: SlotCache, ids: np.ndarray, slots: np.ndarray, source: np.ndarray | None,
        policies: np.ndarray | None = None,
    ) -> None:  # fmt: skip
        """Whole prompts from position 0, `ids` [n, tokens] padded on the right: what comes after a row's own tokens is
        not seen by them. Row `source[i]` (or `i`) is stored in `slots[i]`. `policies` [n]: whose they are."""
        self._choose(policies)
        cache.expect_prompts(self._tensor(slots), None if source is None else self._tensor(source))
        positions = torch.arange(ids.shape[1], device=self.device)[None]
        self.model.base_model(input_ids=self._tensor(ids), position_ids=positions, cache=cache, use_cache=True)

    def tokens(
        self, cache: SlotCache, ids: np.ndarray, first: int, at: np.ndarray, width: int,
        policies: np.ndarray | None = None,
    ) -> None:  # fmt: skip
        """Tokens `ids` at positions `at` (both [n, tokens]) of the rows from `first` on; each sees what its row holds
        up to its own position, all of it below `width`."""
        self._choose(policies)
        self._read(self.model.base_model, cache, ids, first, at, width)

    def logits(
        self, cache: SlotCache, ids: np.ndarray, first: int, at: np.ndarray, width: int,
        policies: np.ndarray | None = None,
    ) -> torch.Tensor:  # fmt: skip
        """The same, and what follows the last token of each row, [n, vocabulary]."""
        self._choose(policies)
        found: torch.Tensor = self._read(self.model, cache, ids, first, at, width).logits[:, -1]
        return found

    def _choose(self, policies: np.ndarray | None) -> None:
        if self.mix is not None:
            assert policies is not None
            self.mix.choose(policies)

    def _read(
        self, model: torch.nn.Module, cache: SlotCache, ids: np.ndarray, first: int, at: np.ndarray, width: int
    ) -> Any:
        positions = self._tensor(at)
        cache.expect_tokens(first, positions, width)
        return model(
            input_ids=self._tensor(ids),
            position_ids=positions,
            attention_mask=self._masks(at, width),
            cache=cache,
            use_cache=True,
        )

    def _masks(self, at: np.ndarray, width: int) -> Any:
        """What `at` must not see, as one mask or, of models whose layers differ, one of each kind; None: nothing."""
        masks = {kind: self._mask(kind, at, width) for kind in self._kinds}
        return masks if len(masks) > 1 else next(iter(masks.values()))

    def _mask(self, kind: str, at: np.ndarray, width: int) -> torch.Tensor | None:
        window = self._window if kind == SLIDING else 0
        # On a CPU, attention of grouped heads without a mask is slow (bfloat16: 9 times): there it always gets one.
        if self.device.type != "cpu" and at.shape[1] == 1 and int(at.min()) + 1 >= width and not 0 < window < width:
            return None
        seen = np.arange(width)
        hidden = seen > at[:, :, None]
        if window:
            hidden |= seen <= at[:, :, None] - window
        flags = self._tensor(hidden)
        zeros = torch.zeros(flags.shape, dtype=self.model.dtype, device=self.device)
        return zeros.masked_fill_(flags, -torch.inf)[:, None]

    def _tensor(self, array: np.ndarray) -> torch.Tensor:
        return torch.from_numpy(array).to(self.device)


def attention_kinds(config: PreTrainedConfig) -> tuple[list[str], int]:
    """Kinds of a model's layers, of FULL and SLIDING, and the window of the latter.

    Raises: ModelError: layers of another kind.
    """
    settings = config.get_text_config().to_dict()
    window = settings.get("sliding_window") or 0
    kinds = set(settings.get("layer_types") or [SLIDING if window else FULL])
    if not kinds <= {FULL, SLIDING}:
        raise ModelError(
            "config.layer_types", sorted(kinds), "must be attention over tokens",
            f"use a model whose layers are all of kind {FULL} or {SLIDING}, or the vllm engine",
        )  # fmt: skip
    return sorted(kinds), window
