"""Decoding of ragged rows with any decoder-only Hugging Face model; one thread, no clock, no locks.

The invariant of every row: keys and values of all its tokens but the last are stored, computed under the weights in
force, or, where caches are kept at a swap, under those that were in force when each of them was read. A decode step
reads the last token of every row, so the first token after a prompt is sampled like any other.

    admit ──► queue ──► join: short prompts together, a long one a chunk per step ──► rows ──► step ──► finished
                ▲                                                                       │
                └─── the youngest row, with its tokens, when all together no longer fit into the memory ◄──┘
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass

import numpy as np

from astraflow.engines.local.caches.shelf import Prefix, Shelf
from astraflow.engines.local.caches.slots import SlotCache
from astraflow.engines.local.compute.passes import Passes
from astraflow.engines.local.compute.sampler import sample, uniforms
from astraflow.engines.local.prefill import TOKENS, Long, Prefill
from astraflow.engines.local.rows import NO_VERSION, Request, Rows
from astraflow.types import FinishReason, Generation

Finished = tuple[Request, Generation]
_HEADROOM = 64  # positions that must be free for every row when one joins, so that it stays for a while


@dataclass(frozen=True)
class Room:
    """What a decoder may use."""

    max_rows: int
    max_context: int
    chunk_tokens: int = 512  # read for requests that join between two steps of those that run
    kv_bytes: int = 0  # keys and values of rows and of a prompt that is read in chunks; 0: no limit
    shelf_bytes: int = 0
    position_bytes: int = 0  # keys and values of one token


class Decoder:
    """The rows that run, those that wait, the weights in force, and what they cost so far."""

    def __init__(self, passes: Passes, eos_ids: Sequence[int], room: Room, keep_caches: bool = False) -> None:
        """`keep_caches`: running rows go on with the keys and values that they have when the weights change."""
        self.versions = [-1]  # in force, of each policy
        self.sampled_tokens = [0]  # of each policy
        self.decode_steps = 0
        self.preempted = 0  # times that a row had to give up its place
        self._passes, self._room, self._keep_caches = passes, room, keep_caches
        config = passes.model.config.get_text_config()
        self._rows = Rows(room.max_rows, room.max_context, eos_ids, config.vocab_size)
        self._cache = SlotCache(
            config.num_hidden_layers, room.max_rows, room.max_context, room.position_bytes, room.kv_bytes
        )
        self._shelf = Shelf(room.shelf_bytes)
        self._prefill = Prefill(passes, self._rows, self._cache, self._shelf, room.max_context, self.versions)
        self._queue: deque[Request] = deque()
        self._long: Long | None = None

    def __len__(self) -> int:
        return len(self._rows) + self.waiting

    @property
    def running(self) -> int:
        """Rows."""
        return len(self._rows)

    @property
    def waiting(self) -> int:
        """Requests that were admitted and have no row (any more)."""
        return len(self._queue) + (self._long is not None)

    @property
    def prefill_tokens(self) -> int:
        """Computed: neither padding nor what the shelf held."""
        return self._prefill.tokens

    @property
    def kv_usage(self) -> float:
        """Share of the memory for keys and values that the rows and a long prompt need; 0 without a limit."""
        if not self._room.kv_bytes:
            return 0.0
        return self._needed(len(self._rows), self._longest()) / self._room.kv_bytes

    def admit(self, requests: Sequence[Request]) -> None:
        """They become rows in this order, as there is room; `join` makes it so."""
        self._queue.extend(requests)

    def join(self) -> None:
        """Waiting requests become rows; what the shelf holds of them is not computed again.

        While rows run, about `chunk_tokens` tokens are read, so that no row waits long for its next step.
        """
        if not self.waiting:
            return
        self._start(self._picked())
        if self._long is not None:
            self._read_on(self._long)

    def step(self) -> list[Finished]:
        """One token for every row. Returns the requests that ended with it."""
        rows = self._rows
        if not len(rows):
            return []
        self._make_room()
        at = rows.records["length"][:, None] - 1
        policies = rows.records["policy"]
        logits = self._passes.logits(self._cache, rows.last_ids()[:, None], 0, at, int(at.max()) + 1, policies)
        uniform = uniforms(rows.records["key"], rows.records["length"] - rows.records["prompt"])
        ids, logprobs = sample(logits, rows.records, uniform)
        versions = np.array(self.versions)[policies]
        stopped, full = rows.append(ids, logprobs, versions)
        for policy, count in enumerate(np.bincount(policies).tolist()):
            self.sampled_tokens[policy] += count
        self.decode_steps += 1
        rows.hand_out(ids, logprobs, versions)
        return self._end(stopped | full, lambda row: "stop" if stopped[row] else "length")

    def drop_cancelled(self) -> list[Finished]:
        """End the requests that were cancelled, with what they have."""
        dropped = [request for request in self._queue if request.cancelled]
        if dropped:
            self._queue = deque(request for request in self._queue if not request.cancelled)
        if self._long is not None and self._long.request.cancelled:
            dropped.append(self._long.request)
            self._long = None
        gone = np.fromiter((request.cancelled for request in self._rows.requests), bool, len(self._rows))
        return [(request, request.ended("cancelled")) for request in dropped] + self._end(gone, lambda row: "cancelled")

    def share(self, policies: int) -> None:
        """So many policies have their rows here from now on, none of which has weights yet."""
        self.versions[:], self.sampled_tokens = [-1] * policies, [0] * policies

    def renew(self, version: int, policy: int = 0) -> None:
        """The policy has other weights now; keys and values of all its rows are computed afresh under them, or kept."""
        self._shelf.drop((policy, self.versions[policy]))
        self.versions[policy] = version
        records = self._rows.records
        mine = np.flatnonzero(records["policy"] == policy)
        records["cached"][mine] = NO_VERSION if self._keep_caches else version
        if not self._keep_caches:
            self._prefill.whole(mine.tolist())
        if self._long is not None and self._long.request.policy == policy:
            self._prefill.renew(self._long, self._keep_caches, self._room.chunk_tokens)

    def _picked(self) -> list[tuple[Request, Prefix | None]]:
        """Who joins now, first come first served, and what is known of each. One that would take too long is read in
        chunks, and others pass it meanwhile."""
        budget = self._room.chunk_tokens if len(self._rows) else TOKENS
        left = budget // 2 if self._long is not None else budget
        picked: list[tuple[Request, Prefix | None]] = []
        passed: list[Request] = []
        seen: set[tuple[int, bytes]] = set()
        longest = self._longest()
        while self._queue:
            request = self._queue.popleft()
            ids = request.ids
            known = self._shelf.find((request.policy, self.versions[request.policy]), ids)
            cost = 0 if (request.policy, ids.tobytes()) in seen else ids.size - 1 - (known.tokens if known else 0)
            if cost > budget:
                if self._long is None:
                    self._long = self._prefill.begin(request, known)
                else:
                    passed.append(request)
                continue
            longest = max(longest, ids.size)
            if cost > left or not self._has_room(len(picked) + 1, longest):
                passed.append(request)
                break
            left -= cost
            seen.add((request.policy, ids.tobytes()))
            picked.append((request, known))
        self._queue.extendleft(reversed(passed))
        return picked

    def _start(self, picked: Sequence[tuple[Request, Prefix | None]]) -> None:
        if not picked:
            return
        new = [request for request, prefix in picked if prefix is None]
        known = [(request, prefix) for request, prefix in picked if prefix is not None]
        known.sort(key=lambda pair: pair[0].ids.size - pair[1].tokens)
        first = len(self._rows)
        for request in [*new, *(request for request, _ in known)]:
            self._rows.add(request, self.versions[request.policy])
        self._cache.reserve(len(self._rows), self._longest())
        self._prefill.whole(range(first, first + len(new)))
        if known:
            self._prefill.after(first + len(new), [prefix for _, prefix in known])

    def _read_on(self, long: Long) -> None:
        """A chunk of a long prompt; once it is read, it becomes a row, and so do siblings that wait."""
        self._prefill.read_on(long, self._room.chunk_tokens)
        if not long.is_read or not self._has_room(1, long.ids.size + 1):
            return
        self._long = None  # its memory is counted as the row's from here on
        prefix, key = long.cache.view(0, long.ids.size), (long.request.policy, long.request.ids.tobytes())
        siblings = [request for request in self._queue if (request.policy, request.ids.tobytes()) == key]
        for request in [long.request, *siblings]:
            if not self._has_room(1, long.ids.size + 1):
                break
            if request is not long.request:
                self._queue.remove(request)
            self._rows.add(request, long.cached)
            self._cache.reserve(len(self._rows), self._longest())
            self._cache.copy_in(len(self._rows) - 1, prefix)
        self._prefill.shelve(len(self._rows) - 1)

    def _make_room(self) -> None:
        """For one more token of every row; the youngest give up theirs, keep their tokens, and wait."""
        while len(self._rows) > 1 and self._needed(len(self._rows), self._longest()) > self._room.kv_bytes > 0:
            row = int(self._rows.records["turn"].argmax())
            request = self._rows.requests[row]
            request.sampled = self._rows.sampled(row).copy()
            self._queue.appendleft(request)
            self._remove(np.arange(len(self._rows)) == row)
            self.preempted += 1
        self._cache.reserve(len(self._rows), self._longest())

    def _has_room(self, more: int, longest: int) -> bool:
        """Whether so many more rows fit, the longest of all with so many tokens, and can run for a while."""
        if not self._room.kv_bytes or not len(self._rows) + more > 1:
            return True
        positions = min(max(longest, self._longest()) + _HEADROOM, self._room.max_context)
        return self._needed(len(self._rows) + more, positions) <= self._room.kv_bytes

    def _needed(self, rows: int, positions: int) -> int:
        long = 0 if self._long is None else self._long.cache.num_bytes
        return self._cache.needed(rows, positions) + long

    def _longest(self) -> int:
        return int(self._rows.records["length"].max()) if len(self._rows) else 0

    def _end(self, gone: np.ndarray, reason: Callable[[int], FinishReason]) -> list[Finished]:
        ended = np.flatnonzero(gone).tolist()
        if not ended:
            return []
        finished = [(self._rows.requests[row], self._rows.generation(row, reason(row))) for row in ended]
        self._remove(gone)
        return finished

    def _remove(self, gone: np.ndarray) -> None:
        for row in np.flatnonzero(gone).tolist():
            self._prefill.shelve(row)
        source, target = self._rows.remove(gone)
        if source.size:
            self._cache.move(source, target, self._longest())
