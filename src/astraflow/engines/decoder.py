"""Prefill and decode of ragged rows with any decoder-only Hugging Face model; one thread, no clock, no locks.

The invariant of every row: keys and values of all its tokens but the last are stored, computed under the weights in
force. A decode step reads the last token of every row, so the first token after a prompt is sampled like any other.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence

import numpy as np
import torch
from transformers import PreTrainedModel

from astraflow.engines.rows import Request, Rows
from astraflow.engines.sampler import sample, uniforms
from astraflow.engines.slots import SlotCache
from astraflow.models.load import load_tensors
from astraflow.types import FinishReason, Generation

Finished = tuple[Request, Generation]
_PREFILL_TOKENS = 8192  # of one forward pass, padding included: bounds its memory


class Decoder:
    """The rows that run, the weights in force, and what they cost so far."""

    def __init__(self, model: PreTrainedModel, eos_ids: Sequence[int], max_rows: int, max_context: int) -> None:
        self.version = -1
        self.prefill_tokens = 0  # computed, padding not counted
        self.sampled_tokens = 0
        self._model = model
        self._rows = Rows(max_rows, max_context, eos_ids, model.config.get_text_config().vocab_size)
        self._cache = SlotCache(max_rows, max_context)
        self._dtype = model.dtype

    def __len__(self) -> int:
        return len(self._rows)

    def admit(self, requests: Sequence[Request]) -> None:
        """New rows, prefilled together."""
        first = len(self._rows)
        for request in requests:
            self._rows.add(request)
        self._reserve()
        self._prefill(range(first, len(self._rows)))

    def step(self) -> list[Finished]:
        """One token for every row. Returns the requests that ended with it."""
        rows = self._rows
        count = len(rows)
        self._reserve()
        at = rows.records["length"] - 1
        width = int(at.max()) + 1
        positions = torch.from_numpy(at)
        self._cache.expect_tokens(torch.arange(count), positions, width)
        logits = self._model(
            input_ids=torch.from_numpy(rows.last_ids())[:, None],
            position_ids=positions[:, None],
            attention_mask=self._mask(at, width),
            cache=self._cache,
            use_cache=True,
        ).logits[:, -1]
        uniform = uniforms(rows.records["key"], rows.records["length"] - rows.records["prompt"])
        ids, logprobs = sample(logits, rows.records, uniform)
        stopped, full = rows.append(ids, logprobs, self.version)
        self.sampled_tokens += count
        return self._end(stopped | full, lambda row: "stop" if stopped[row] else "length")

    def drop_cancelled(self) -> list[Finished]:
        """End the rows whose request was cancelled, with what they have."""
        gone = np.fromiter((request.cancelled for request in self._rows.requests), bool, len(self._rows))
        return self._end(gone, lambda row: "cancelled")

    def drop_all(self) -> list[Request]:
        """Forget every row; their requests are the caller's to answer."""
        requests = list(self._rows.requests)
        self._rows.remove(np.ones(len(self._rows), bool))
        return requests

    def swap(self, version: int, tensors: Mapping[str, torch.Tensor]) -> None:
        """New weights; keys and values of all rows are computed afresh under them. Raises: ModelError."""
        load_tensors(self._model, tensors)
        self.version = version
        self._prefill(range(len(self._rows)))

    def _prefill(self, rows: range) -> None:
        """Store keys and values of these rows' prefixes; equal prefixes (siblings of a group) are computed once."""
        equal: dict[bytes, list[int]] = {}
        for row in rows:
            prefix = self._rows.prefix(row)
            if prefix.size:
                equal.setdefault(prefix.tobytes(), []).append(row)
        groups = sorted(equal.values(), key=lambda group: self._rows.prefix(group[0]).size)
        start = 0
        while start < len(groups):
            stop = start + 1
            while (
                stop < len(groups) and self._rows.prefix(groups[stop][0]).size * (stop + 1 - start) <= _PREFILL_TOKENS
            ):
                stop += 1
            self._prefill_together(groups[start:stop])
            start = stop

    def _prefill_together(self, groups: Sequence[Sequence[int]]) -> None:
        prefixes = [self._rows.prefix(group[0]) for group in groups]
        width = max(prefix.size for prefix in prefixes)
        # Padded on the right: causal attention keeps a row's own tokens from seeing it, so no mask is needed.
        ids = np.zeros((len(prefixes), width), np.int64)
        for line, prefix in zip(ids, prefixes, strict=True):
            line[: prefix.size] = prefix
        slots = torch.tensor([row for group in groups for row in group])
        source = torch.tensor([i for i, group in enumerate(groups) for _ in group])
        self._cache.expect_prompts(slots, source if len(source) > len(groups) else None)
        self._model.base_model(
            input_ids=torch.from_numpy(ids), position_ids=torch.arange(width)[None], cache=self._cache, use_cache=True
        )
        self.prefill_tokens += sum(prefix.size for prefix in prefixes)

    def _mask(self, at: np.ndarray, width: int) -> torch.Tensor | None:
        """[n, 1, 1, width] added to the scores: row `i` sees positions up to `at[i]`. None: all rows see all."""
        if int(at.min()) + 1 == width:
            return None
        hidden = torch.from_numpy(np.arange(width) > at[:, None])
        return torch.zeros(hidden.shape, dtype=self._dtype).masked_fill_(hidden, -torch.inf)[:, None, None]

    def _reserve(self) -> None:
        if len(self._rows):
            self._cache.reserve(len(self._rows), int(self._rows.records["length"].max()))

    def _end(self, gone: np.ndarray, reason: Callable[[int], FinishReason]) -> list[Finished]:
        ended = np.flatnonzero(gone).tolist()
        if not ended:
            return []
        finished = [(self._rows.requests[row], self._rows.generation(row, reason(row))) for row in ended]
        source, target = self._rows.remove(gone)
        if source.size:
            positions = int(self._rows.records["length"].max())
            self._cache.move(torch.from_numpy(source), torch.from_numpy(target), positions)
        return finished
