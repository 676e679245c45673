"""Decoding of ragged rows with any decoder-only Hugging Face model; one thread, no clock, no locks.

Of every row, keys and values of its first `stored` tokens are there, computed under the weights in force, or, where
caches are kept at a swap, under those that were in force when each of them was read. A step is one pass: a row that
decodes reads its last token, a new one reads its prompt beside it, or a part of it, and every row that has read all of
its tokens samples the next one.

    admit ──► queue ──► join ──► rows ──► step ──► finished
                ▲                 │
                └─────────────────┘ the youngest, with its tokens, when all no longer fit into the memory
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass

import numpy as np
import torch

from astraflow.engines.local.caches.shelf import Prefix, Shelf
from astraflow.engines.local.caches.slots import SlotCache
from astraflow.engines.local.compute.attention import SlotLayout
from astraflow.engines.local.compute.passes import Passes
from astraflow.engines.local.compute.sampler import sample, uniforms
from astraflow.engines.local.reading import Reading, reading_of
from astraflow.engines.local.rows import NO_VERSION, Request, Rows
from astraflow.types import FinishReason, Generation

Finished = tuple[Request, Generation]
_PASS_TOKENS = 8192  # of one pass in which no row decodes: bounds its memory
_HEADROOM = 64  # positions that must be free for every row when one joins, so that it stays for a while
_ONE = np.zeros(1, np.int64)  # logits of one token are computed where none are wanted


@dataclass(frozen=True)
class Room:
    """What a decoder may use."""

    max_rows: int
    max_context: int
    chunk_tokens: int = 512  # of new prompts in a pass in which rows decode
    kv_bytes: int = 0  # keys and values of rows; 0: no limit
    shelf_bytes: int = 0
    position_bytes: int = 0  # keys and values of one token


class Decoder:
    """The rows that run, those that wait, the weights in force, and what they cost so far."""

    def __init__(self, passes: Passes, eos_ids: Sequence[int], room: Room, keep_caches: bool = False) -> None:
        """`keep_caches`: running rows go on with the keys and values that they have when the weights change."""
        self.versions = [-1]  # in force, of each policy
        self.sampled_tokens = [0]  # of each policy
        self.prefill_tokens = 0  # read, and no sampled token's turn to be read: neither what the shelf held
        self.decode_steps = 0
        self.preempted = 0  # times that a row had to give up its place
        self._passes, self._room, self._keep_caches = passes, room, keep_caches
        config = passes.model.config.get_text_config()
        self._rows = Rows(room.max_rows, room.max_context, eos_ids, config.vocab_size)
        self._cache = SlotCache(
            config.num_hidden_layers, room.max_rows, room.max_context, room.position_bytes, room.kv_bytes
        )
        self._shelf = Shelf(room.shelf_bytes)
        self._queue: deque[Request] = deque()
        self._turns = 0  # rows so far

    def __len__(self) -> int:
        return len(self._rows) + len(self._queue)

    @property
    def running(self) -> int:
        """Rows."""
        return len(self._rows)

    @property
    def waiting(self) -> int:
        """Requests that were admitted and have no row (any more)."""
        return len(self._queue)

    @property
    def kv_usage(self) -> float:
        """Share of the memory for keys and values that the rows need; 0 without a limit."""
        if not self._room.kv_bytes:
            return 0.0
        return self._cache.needed(len(self._rows), self._longest()) / self._room.kv_bytes

    def admit(self, requests: Sequence[Request]) -> None:
        """They become rows in this order, as there is room; `join` makes it so."""
        self._queue.extend(requests)

    def join(self) -> None:
        """Waiting requests become rows; what the shelf holds of them is not read again."""
        picked: list[tuple[Request, Prefix | None]] = []
        longest = self._longest()
        while self._queue:
            ids = self._queue[0].ids
            longest = max(longest, ids.size)
            if not self._has_room(len(picked) + 1, longest):
                break
            request = self._queue.popleft()
            picked.append((request, self._shelf.find((request.policy, self.versions[request.policy]), ids)))
        if not picked:
            return
        stored = [known.tokens if known else 0 for _, known in picked]
        # Neighbours that read about as much attend together.
        order = sorted(range(len(picked)), key=lambda at: picked[at][0].ids.size - stored[at])
        first = len(self._rows)
        for at in order:
            request = picked[at][0]
            self._rows.add(request, self.versions[request.policy], stored[at], self._turns + at)
        self._turns += len(picked)
        self._cache.reserve(len(self._rows), self._longest())
        for row, at in enumerate(order, first):
            known = picked[at][1]
            if known is not None:
                self._cache.copy_in(row, known)

    def step(self) -> list[Finished]:
        """One pass. Returns the requests that ended with it."""
        if not len(self._rows):
            return []
        self._make_room()
        lengths = self._rows.records["length"]
        decoding = bool((lengths - self._rows.records["stored"] == 1).any())
        reading = reading_of(self._rows, lengths, self._room.chunk_tokens if decoding else _PASS_TOKENS)
        ready, wanted = _ready(reading, lengths)
        logits = self._read(reading, wanted)
        done = set(ready.tolist())
        for row, count in zip(reading.rows.tolist(), reading.counts.tolist(), strict=True):
            first = lengths[row] == self._rows.records["prompt"][row]  # nothing is sampled yet
            if (first or count > 1) and row in done:  # a prompt, for siblings and the next turn
                self._shelve(row, int(lengths[row]) - 1)
        return self._sampled(ready, logits) if ready.size else []

    def drop_cancelled(self) -> list[Finished]:
        """End the requests that were cancelled, with what they have."""
        dropped = [request for request in self._queue if request.cancelled]
        if dropped:
            self._queue = deque(request for request in self._queue if not request.cancelled)
        gone = np.fromiter((request.cancelled for request in self._rows.requests), bool, len(self._rows))
        return [(request, request.ended("cancelled")) for request in dropped] + self._end(gone, lambda row: "cancelled")

    def share(self, policies: int) -> None:
        """So many policies have their rows here from now on, none of which has weights yet."""
        self.versions[:], self.sampled_tokens = [-1] * policies, [0] * policies

    def renew(self, version: int, policy: int = 0) -> None:
        """The policy has other weights now; what its rows had read is read again under them, or kept."""
        self._passes.renew()
        self._shelf.drop((policy, self.versions[policy]))
        self.versions[policy] = version
        records = self._rows.records
        mine, upto = records["policy"] == policy, records["stored"].copy()
        if self._keep_caches:
            records["cached"][mine] = np.where(upto[mine] > 0, NO_VERSION, version)
            return
        records["cached"][mine], records["stored"][mine] = version, 0
        while (records["stored"] < upto).any():
            self._read(reading_of(self._rows, upto, _PASS_TOKENS), _ONE)

    def _read(self, reading: Reading, wanted: np.ndarray) -> torch.Tensor:
        """Logits after the tokens at `wanted` (of all that are read, in order); twins get what they share."""
        records = self._rows.records
        ids = np.concatenate([
            self._rows.ids(row)[start:stop]
            for row, start, stop in zip(reading.rows, reading.starts, reading.stops, strict=True)
        ]) if int(reading.counts.max()) > 1 else self._rows.ids_at(reading.rows, reading.starts)  # fmt: skip
        layout = SlotLayout(reading.rows, reading.starts, reading.stops, self._passes.device)
        logits = self._passes.read(self._cache, ids, layout, wanted if wanted.size else _ONE, records["policy"])
        records["stored"][reading.rows] = reading.stops
        for row, twins in reading.twins.items():
            stop = int(records["stored"][row])
            start = int(records["stored"][twins[0]])
            if stop > start:
                self._cache.repeat(row, twins, start, stop)
                records["stored"][twins] = stop
        self.prefill_tokens += ids.size - int((reading.stops == records["length"][reading.rows]).sum())
        return logits

    def _sampled(self, ready: np.ndarray, logits: torch.Tensor) -> list[Finished]:
        """One token for each of the rows `ready`."""
        rows, chosen = self._rows, self._rows.records[ready]
        ids, logprobs = sample(logits, chosen, uniforms(chosen["key"], chosen["length"] - chosen["prompt"]))
        versions = np.array(self.versions)[chosen["policy"]]
        stopped, full = rows.append(ready, ids, logprobs, versions)
        for policy, count in enumerate(np.bincount(chosen["policy"]).tolist()):
            self.sampled_tokens[policy] += count
        self.decode_steps += 1
        rows.hand_out(ready, ids, logprobs, versions)
        return self._end(stopped | full, lambda row: "stop" if stopped[row] else "length")

    def _shelve(self, row: int, tokens: int) -> None:
        """Keep what a row has stored, unless the weights changed while it ran and it kept what it had."""
        ids, record = self._rows.ids(row)[:tokens], self._rows.records[row]
        weights = (int(record["policy"]), self.versions[record["policy"]])
        if tokens and record["cached"] == weights[1] and not self._shelf.holds(weights, ids):
            self._shelf.put(weights, ids, self._cache.view(row, tokens))

    def _make_room(self) -> None:
        """For one more token of every row; the youngest give up theirs, keep their tokens, and wait."""
        while len(self._rows) > 1 and self._cache.needed(len(self._rows), self._longest()) > self._room.kv_bytes > 0:
            row = int(self._rows.records["turn"].argmax())
            request = self._rows.requests[row]
            request.sampled = self._rows.sampled(row).copy()
            self._queue.appendleft(request)
            self._remove(np.arange(len(self._rows)) == row)
            self.preempted += 1
        self._cache.reserve(len(self._rows), self._longest())

    def _has_room(self, more: int, longest: int) -> bool:
        """Whether so many more rows fit, the longest of all with so many tokens, and can run for a while."""
        if len(self._rows) + more > self._room.max_rows:
            return False
        if not self._room.kv_bytes or len(self._rows) + more == 1:
            return True
        positions = min(longest + _HEADROOM, self._room.max_context)
        return self._cache.needed(len(self._rows) + more, positions) <= self._room.kv_bytes

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
            self._shelve(row, int(self._rows.records["stored"][row]))
        source, target = self._rows.remove(gone)
        if source.size:
            self._cache.move(source, target, self._longest())


def _ready(reading: Reading, lengths: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """Rows that will have read all of their tokens, twins too, and which token of the pass is the last of each."""
    ends = np.cumsum(reading.counts) - 1
    done = reading.stops == lengths[reading.rows]
    ready, wanted = reading.rows[done].tolist(), ends[done].tolist()
    last = dict(zip(ready, wanted, strict=True))
    for row, twins in reading.twins.items():
        if row in last:
            ready += twins
            wanted += [last[row]] * len(twins)
    return np.array(ready, np.int64), np.array(wanted, np.int64)
