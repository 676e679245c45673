"""The running requests as columns: one record and one line of tokens per row, rows 0..n-1 in use."""

from __future__ import annotations

from collections.abc import Sequence
from concurrent.futures import Future
from dataclasses import dataclass, field

import numpy as np

from astraflow.contracts import TokenSink
from astraflow.engines.requests import GREEDY_BELOW
from astraflow.types import FinishReason, Generation, Sampling

_ROW = np.dtype(
    [
        ("length", np.int64),  # tokens so far, prompt included
        ("prompt", np.int64),  # tokens of the prompt
        ("stored", np.int64),  # tokens whose keys and values are there
        ("limit", np.int64),  # length at which the row ends
        ("top_k", np.int64),
        ("key", np.uint64),  # of its random numbers
        ("cached", np.int64),  # the one version that all its stored keys and values are of; NO_VERSION: of several
        ("temperature", np.float64),
        ("logprob_temperature", np.float64),
        ("top_p", np.float64),
        ("min_p", np.float64),
        ("turn", np.int64),  # who came first has the lowest
        ("policy", np.int64),  # of an engine that several share, else 0
    ]
)
NO_VERSION = -2  # below every version, -1 included
TOKEN = np.dtype([("id", np.int32), ("logprob", np.float32), ("version", np.int32)])


@dataclass(slots=True, eq=False)
class Request:
    """One generation asked for. `key` seeds its random numbers; `ready_s` is the clock time before which it waits."""

    request_id: str
    prompt_ids: np.ndarray  # [P] int32
    sampling: Sampling
    future: Future[Generation]
    key: int  # 64 bits
    ready_s: float
    on_tokens: TokenSink | None = None
    policy: int = 0  # of an engine that several share
    cancelled: bool = False
    sampled: np.ndarray = field(default_factory=lambda: np.zeros(0, TOKEN))  # before it had to give up its row

    @property
    def name(self) -> tuple[int, str]:
        """Policy and id, which no other pending request has."""
        return self.policy, self.request_id

    @property
    def ids(self) -> np.ndarray:
        """[P + sampled] int32, what its row starts with."""
        return np.concatenate([self.prompt_ids, self.sampled["id"]]) if self.sampled.size else self.prompt_ids

    def ended(self, reason: FinishReason) -> Generation:
        """Its result while it has no row."""
        return _generation(self.sampled, reason)


class Rows:
    """Bookkeeping of the running rows; knows no model."""

    def __init__(self, max_rows: int, max_context: int, eos_ids: Sequence[int], vocab_size: int) -> None:
        self.requests: list[Request] = []
        self._num_streaming = 0  # rows whose tokens are handed out as they come
        self._max_context = max_context
        self._records = np.zeros(max_rows, _ROW)
        self._tokens = np.zeros((max_rows, 0), TOKEN)
        self._ends = np.zeros(vocab_size, bool)
        self._ends[[i for i in eos_ids if i < vocab_size]] = True
        self._stops = np.full((max_rows, 0), -1, np.int64)  # more ids that end a row, padded with -1

    def __len__(self) -> int:
        return len(self.requests)

    @property
    def records(self) -> np.ndarray:
        """[n] records, see above."""
        return self._records[: len(self.requests)]

    def ids(self, row: int) -> np.ndarray:
        """[length] int32, all tokens of a row so far, a view."""
        ids: np.ndarray = self._tokens["id"][row, : self._records["length"][row]]
        return ids

    def ids_at(self, rows: np.ndarray, at: np.ndarray) -> np.ndarray:
        """One token of each of `rows`, at positions `at`."""
        ids: np.ndarray = self._tokens["id"][rows, at]
        return ids

    def add(self, request: Request, version: int, stored: int = 0, turn: int = 0) -> None:
        """Append a row whose keys and values will be those of `version`, with what the request had sampled. Grows the
        lines to hold its limit."""
        row, size, sampling = len(self.requests), len(request.prompt_ids), request.sampling
        length = size + len(request.sampled)
        limit = min(size + sampling.max_tokens, self._max_context)
        if limit > self._tokens.shape[1]:
            self._tokens = _widened(self._tokens, max(limit, self._tokens.shape[1] * 3 // 2), 0)
        if len(sampling.stop_token_ids) > self._stops.shape[1]:
            self._stops = _widened(self._stops, len(sampling.stop_token_ids), -1)
        temperature = sampling.temperature if sampling.temperature >= GREEDY_BELOW else 0.0
        told = temperature if sampling.logprob_temperature is None else sampling.logprob_temperature
        self._records[row] = (
            length, size, stored, limit, sampling.top_k, request.key, version, temperature,
            told if told >= GREEDY_BELOW else 1.0, sampling.top_p, sampling.min_p, turn, request.policy,
        )  # fmt: skip
        self._tokens["id"][row, :size] = request.prompt_ids
        self._tokens[row, size:length] = request.sampled
        self._stops[row] = -1
        self._stops[row, : len(sampling.stop_token_ids)] = sampling.stop_token_ids
        self.requests.append(request)
        self._num_streaming += request.on_tokens is not None

    def append(
        self, rows: np.ndarray, ids: np.ndarray, logprobs: np.ndarray, versions: np.ndarray
    ) -> tuple[np.ndarray, np.ndarray]:
        """One token for each of `rows`. Returns which of all rows ended by a stop id, and which only by their limit
        ([n] bool)."""
        at = (rows, self.records["length"][rows])
        self._tokens["id"][at] = ids
        self._tokens["logprob"][at] = logprobs
        self._tokens["version"][at] = versions
        self.records["length"][rows] += 1
        stopped = np.zeros(len(self), bool)
        stopped[rows] = self._ends[ids]
        if self._stops.shape[1]:
            stopped[rows] |= (self._stops[rows] == ids[:, None]).any(1)
        return stopped, (self.records["length"] >= self.records["limit"]) & ~stopped

    def hand_out(self, rows: np.ndarray, ids: np.ndarray, logprobs: np.ndarray, versions: np.ndarray) -> None:
        """The tokens of one step to those who asked for them at once."""
        if self._num_streaming:
            columns = (rows.tolist(), ids.tolist(), logprobs.tolist(), versions.tolist())
            for row, token, logprob, version in zip(*columns, strict=True):
                on_tokens = self.requests[row].on_tokens
                if on_tokens is not None:
                    on_tokens((token,), (logprob,), (version,))

    def generation(self, row: int, reason: FinishReason) -> Generation:
        """What row has sampled so far."""
        return _generation(self.sampled(row), reason)

    def sampled(self, row: int) -> np.ndarray:
        """[T] tokens of a row after its prompt, a view."""
        record = self._records[row]
        return self._tokens[row, record["prompt"] : record["length"]]

    def remove(self, gone: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
        """Drop rows where `gone` ([n] bool); the last rows move into the holes. Returns (from, to), equal lengths."""
        left = len(gone) - int(gone.sum())
        holes = np.flatnonzero(gone[:left])
        movers = left + np.flatnonzero(~gone[left:])
        for hole, mover in zip(holes.tolist(), movers.tolist(), strict=True):
            self.requests[hole] = self.requests[mover]
        del self.requests[left:]
        if self._num_streaming:
            self._num_streaming = sum(request.on_tokens is not None for request in self.requests)
        for columns in (self._records, self._tokens, self._stops):
            columns[holes] = columns[movers]
        return movers, holes


def _generation(tokens: np.ndarray, reason: FinishReason) -> Generation:
    return Generation(tokens["id"].copy(), tokens["logprob"].copy(), tokens["version"].copy(), reason)


def _widened(columns: np.ndarray, width: int, fill: int) -> np.ndarray:
    wider = np.full((columns.shape[0], width), fill, columns.dtype)
    wider[:, : columns.shape[1]] = columns
    return wider
