"""Keys and values of what rows start with: prompts together, what is known from the shelf, a long prompt in chunks."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass

import numpy as np

from astraflow.engines.local.caches.shelf import Prefix, Shelf
from astraflow.engines.local.caches.slots import SlotCache
from astraflow.engines.local.compute.passes import Passes
from astraflow.engines.local.rows import NO_VERSION, Request, Rows

TOKENS = 8192  # of one forward pass, padding included: bounds its memory


@dataclass(slots=True, eq=False)
class Long:
    """A prompt that is read in chunks while rows go on, in a cache of its own until it becomes a row."""

    request: Request
    ids: np.ndarray  # [tokens] what must be stored before it can be a row
    cache: SlotCache
    cached: int  # as of a row
    done: int  # tokens read

    @property
    def is_read(self) -> bool:
        """It can become a row."""
        return self.done == self.ids.size


class Prefill:
    """Of the rows of one decoder."""

    def __init__(
        self, passes: Passes, rows: Rows, cache: SlotCache, shelf: Shelf, max_context: int, versions: Sequence[int]
    ) -> None:
        """`versions`: in force, of each policy; it changes."""
        self.tokens = 0  # computed: neither padding nor what the shelf held
        self._passes, self._rows, self._cache, self._shelf = passes, rows, cache, shelf
        self._max_context, self._versions = max_context, versions

    def whole(self, rows: Iterable[int]) -> None:
        """All that these rows need; equal prefixes (siblings of a group) are computed once."""
        equal: dict[tuple[int, bytes], list[int]] = {}
        for row in rows:
            prefix = self._rows.prefix(row)
            if prefix.size:
                equal.setdefault((self._policy(row), prefix.tobytes()), []).append(row)
        groups = sorted(equal.values(), key=lambda group: self._rows.prefix(group[0]).size)
        for start, stop in _chunks([self._rows.prefix(group[0]).size for group in groups]):
            self._together(groups[start:stop])

    def after(self, first: int, known: Sequence[Prefix]) -> None:
        """Rows from `first` on, in ascending order of what is missing after their known prefix."""
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
            self._passes.tokens(
                self._cache, ids, first + start, at, width, self._policies(range(first + start, first + stop))
            )
            self.tokens += sum(m.size for m in missing[start:stop])

    def begin(self, request: Request, known: Prefix | None) -> Long:
        """A long prompt, of which `known` need not be read."""
        ids, version = request.ids[:-1], self._versions[request.policy]
        long = Long(request, ids, self._cache.alike(1), version, known.tokens if known else 0)
        long.cache.reserve(1, ids.size)
        if known is not None:
            long.cache.copy_in(0, known)
        return long

    def read_on(self, long: Long, tokens: int) -> None:
        """At most so many more tokens of it."""
        stop = min(long.done + tokens, long.ids.size)
        if stop > long.done:
            at = np.arange(long.done, stop)[None]
            ids = long.ids[None, long.done : stop].astype(np.int64)
            self._passes.tokens(long.cache, ids, 0, at, stop, np.array([long.request.policy]))
            self.tokens += stop - long.done
            long.done = stop

    def renew(self, long: Long, keep: bool, tokens: int) -> None:
        """The weights changed: what was read of it is read again, `tokens` at a time, or kept."""
        version = self._versions[long.request.policy]
        if keep:
            long.cached = NO_VERSION if long.done else version
            return
        done, long.done, long.cached = long.done, 0, version
        while long.done < done:
            self.read_on(long, min(tokens, done - long.done))

    def shelve(self, row: int) -> None:
        """Keep what a row has stored, unless the weights changed while it ran and it kept what it had."""
        prefix, cached, policy = self._rows.prefix(row), int(self._rows.records["cached"][row]), self._policy(row)
        weights = (policy, self._versions[policy])
        if prefix.size and cached == weights[1] and not self._shelf.holds(weights, prefix):
            self._shelf.put(weights, prefix, self._cache.view(row, prefix.size))

    def _policy(self, row: int) -> int:
        return int(self._rows.records["policy"][row])

    def _policies(self, rows: Iterable[int]) -> np.ndarray:
        policies: np.ndarray = self._rows.records["policy"][list(rows)]
        return policies

    def _together(self, groups: Sequence[Sequence[int]]) -> None:
        prefixes = [self._rows.prefix(group[0]) for group in groups]
        slots = np.array([row for group in groups for row in group])
        source = np.array([i for i, group in enumerate(groups) for _ in group])
        policies = self._policies(group[0] for group in groups)
        self._passes.prompts(
            self._cache, _padded(prefixes), slots, source if len(source) > len(groups) else None, policies
        )
        self.tokens += sum(prefix.size for prefix in prefixes)
        for group in groups:
            self.shelve(group[0])


def _chunks(sizes: Sequence[int]) -> list[tuple[int, int]]:
    """Cut ascending `sizes` into runs that hold at most TOKENS padded to their longest (or are one alone)."""
    chunks = []
    start = 0
    for stop in range(1, len(sizes) + 1):
        if stop == len(sizes) or sizes[stop] * (stop + 1 - start) > TOKENS:
            chunks.append((start, stop))
            start = stop
    return chunks


def _padded(rows: Sequence[np.ndarray]) -> np.ndarray:
    """[n, longest] int64, zeros on the right."""
    ids = np.zeros((len(rows), max(row.size for row in rows)), np.int64)
    for line, row in zip(ids, rows, strict=True):
        line[: row.size] = row
    return ids
