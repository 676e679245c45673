"""Prefill and decode of ragged rows with any decoder-only Hugging Face model; one thread, no clock, no locks.

The invariant of every row: keys and values of all its tokens but the last are stored, computed under the weights in
force, or, where caches are kept at a swap, under those that were in force when each of them was read. A decode step
reads the last token of every row, so the first token after a prompt is sampled like any other.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import numpy as np
import torch
from transformers import PreTrainedModel

from astraflow.engines.local.rows import NO_VERSION, Request, Rows
from astraflow.engines.local.sampler import sample, uniforms
from astraflow.engines.local.shelf import Prefix, Shelf
from astraflow.engines.local.slots import SlotCache
from astraflow.types import FinishReason, Generation

Finished = tuple[Request, Generation]
_PREFILL_TOKENS = 8192  # of one forward pass, padding included: bounds its memory


class Decoder:
    """The rows that run, the weights in force, and what they cost so far."""

    def __init__(
        self, model: PreTrainedModel, eos_ids: Sequence[int], max_rows: int, max_context: int, shelf_bytes: int = 0,
        keep_caches: bool = False,
    ) -> None:  # fmt: skip
        """`keep_caches`: running rows go on with the keys and values that they have when the weights change."""
        self.version = -1
        self.prefill_tokens = 0  # computed: neither padding nor what the shelf held
        self.sampled_tokens = 0
        self.decode_steps = 0
        self._model = model
        self._max_context, self._keep_caches = max_context, keep_caches
        config = model.config.get_text_config()
        self._rows = Rows(max_rows, max_context, eos_ids, config.vocab_size)
        self._cache = SlotCache(config.num_hidden_layers, max_rows, max_context)
        self._shelf = Shelf(shelf_bytes)

    def __len__(self) -> int:
        return len(self._rows)

    def admit(self, requests: Sequence[Request]) -> None:
        """New rows, prefilled together; what the shelf holds of them is not computed again."""
        new: list[Request] = []
        known: list[tuple[Request, Prefix]] = []
        for request in requests:
            prefix = self._shelf.find(self.version, request.prompt_ids)
            new.append(request) if prefix is None else known.append((request, prefix))
        known.sort(key=lambda pair: pair[0].prompt_ids.size - pair[1].tokens)
        first = len(self._rows)
        for request in [*new, *(request for request, _ in known)]:
            self._rows.add(request, self.version)
        self._reserve()
        self._prefill(range(first, first + len(new)))
        if known:
            self._continue(first + len(new), [prefix for _, prefix in known])

    def step(self) -> list[Finished]:
        """One token for every row. Returns the requests that ended with it."""
        rows = self._rows
        self._reserve()
        at = rows.records["length"][:, None] - 1
        logits = self._forward(self._model, rows.last_ids()[:, None], 0, at, int(at.max()) + 1).logits[:, -1]
        uniform = uniforms(rows.records["key"], rows.records["length"] - rows.records["prompt"])
        ids, logprobs = sample(logits, rows.records, uniform)
        stopped, full = rows.append(ids, logprobs, self.version)
        self.sampled_tokens += len(rows)
        self.decode_steps += 1
        rows.hand_out(ids, logprobs, self.version)
        return self._end(stopped | full, lambda row: "stop" if stopped[row] else "length")

    def drop_cancelled(self) -> list[Finished]:
        """End the rows whose request was cancelled, with what they have."""
        gone = np.fromiter((request.cancelled for request in self._rows.requests), bool, len(self._rows))
        return self._end(gone, lambda row: "cancelled")

    def renew(self, version: int) -> None:
        """The model has other weights now; keys and values of all rows are computed afresh under them, or kept."""
        self.version = version
        self._shelf.clear()
        self._rows.records["cached"] = NO_VERSION if self._keep_caches else version
        if not self._keep_caches:
            self._prefill(range(len(self._rows)))

    def _forward(self, model: torch.nn.Module, ids: np.ndarray, first: int, at: np.ndarray, width: int) -> Any:
        """A pass over tokens `ids` at positions `at` (both [n, tokens]) of the rows from `first` on; each sees what its
        row holds up to its own position, all of it below `width`."""
        positions = torch.from_numpy(at)
        self._cache.expect_tokens(first, positions, width)
        mask = None
        if at.shape[1] > 1 or int(at.min()) + 1 < width:
            hidden = torch.from_numpy(np.arange(width) > at[:, :, None])
            mask = torch.zeros(hidden.shape, dtype=self._model.dtype).masked_fill_(hidden, -torch.inf)[:, None]
        return model(
            input_ids=torch.from_numpy(ids),
            position_ids=positions,
            attention_mask=mask,
            cache=self._cache,
            use_cache=True,
        )

    def _prefill(self, rows: range) -> None:
        """Store keys and values of these rows' prefixes; equal prefixes (siblings of a group) are computed once."""
        equal: dict[bytes, list[int]] = {}
        for row in rows:
            prefix = self._rows.prefix(row)
            if prefix.size:
                equal.setdefault(prefix.tobytes(), []).append(row)
        groups = sorted(equal.values(), key=lambda group: self._rows.prefix(group[0]).size)
        for start, stop in _chunks([self._rows.prefix(group[0]).size for group in groups]):
            self._prefill_together(groups[start:stop])

    def _prefill_together(self, groups: Sequence[Sequence[int]]) -> None:
        prefixes = [self._rows.prefix(group[0]) for group in groups]
        # Padded on the right: causal attention keeps a row's own tokens from seeing it, so no mask is needed.
        ids = _padded(prefixes)
        slots = torch.tensor([row for group in groups for row in group])
        source = torch.tensor([i for i, group in enumerate(groups) for _ in group])
        self._cache.expect_prompts(slots, source if len(source) > len(groups) else None)
        self._model.base_model(
            input_ids=torch.from_numpy(ids),
            position_ids=torch.arange(ids.shape[1])[None],
            cache=self._cache,
            use_cache=True,
        )
        self.prefill_tokens += sum(prefix.size for prefix in prefixes)
        for group in groups:
            self._shelve(group[0])

    def _continue(self, first: int, known: Sequence[Prefix]) -> None:
        """Prefill rows from `first` on, in ascending order of what is missing after their known prefix."""
        for row, prefix in enumerate(known, first):
            self._cache.copy_in(row, prefix)
        missing = [self._rows.prefix(row)[prefix.tokens :] for row, prefix in enumerate(known, first)]
        start_at = np.array([prefix.tokens for prefix in known])
        for start, stop in _chunks([ids.size for ids in missing]):
            ids = _padded(missing[start:stop])
            if not ids.size:
                continue
            # Padding writes beyond its row's end, where the row's own later tokens overwrite it before it is read;
            # the last position of the context is never read.
            at = np.minimum(start_at[start:stop, None] + np.arange(ids.shape[1]), self._max_context - 1)
            width = int(max(s + m.size for s, m in zip(start_at[start:stop], missing[start:stop], strict=True)))
            self._cache.reserve(len(self._rows), int(at.max()) + 1)
            self._forward(self._model.base_model, ids, first + start, at, width)
            self.prefill_tokens += sum(m.size for m in missing[start:stop])

    def _shelve(self, row: int) -> None:
        """Keep what a row has stored, unless the weights changed while it ran and it kept what it had."""
        prefix, version = self._rows.prefix(row), int(self._rows.records["cached"][row])
        if prefix.size and version == self.version and not self._shelf.holds(version, prefix):
            self._shelf.put(version, prefix, self._cache.copy_out(row, prefix.size))

    def _reserve(self) -> None:
        if len(self._rows):
            self._cache.reserve(len(self._rows), int(self._rows.records["length"].max()))

    def _end(self, gone: np.ndarray, reason: Callable[[int], FinishReason]) -> list[Finished]:
        ended = np.flatnonzero(gone).tolist()
        if not ended:
            return []
        finished = [(self._rows.requests[row], self._rows.generation(row, reason(row))) for row in ended]
        for row in ended:
            self._shelve(row)
        source, target = self._rows.remove(gone)
        if source.size:
            positions = int(self._rows.records["length"].max())
            self._cache.move(torch.from_numpy(source), torch.from_numpy(target), positions)
        return finished


def _chunks(sizes: Sequence[int]) -> list[tuple[int, int]]:
    """Cut ascending `sizes` into runs that hold at most _PREFILL_TOKENS padded to their longest (or are one alone)."""
    chunks = []
    start = 0
    for stop in range(1, len(sizes) + 1):
        if stop == len(sizes) or sizes[stop] * (stop + 1 - start) > _PREFILL_TOKENS:
            chunks.append((start, stop))
            start = stop
    return chunks


def _padded(rows: Sequence[np.ndarray]) -> np.ndarray:
    """[n, longest] int64, zeros on the right."""
    ids = np.zeros((len(rows), max(row.size for row in rows)), np.int64)
    for line, row in zip(ids, rows, strict=True):
        line[: row.size] = row
    return ids
