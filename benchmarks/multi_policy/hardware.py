"""The machine that is modelled: two policies of 8B parameters on 16 GPUs, and how long their episodes are.

What is sampled and trained is real (a tiny model, whose reward rises); how long it takes is that of the modelled
machine, `SCALE` times faster. Both sides of the benchmark have the same engine and loss, and so the same times.

- Tokens of a call: log-normal, median 800, sigma 0.8, at most 4,096, mean 1,040. Published: 200 to 4,000 tokens an
  answer, and 4,096 at most for each of AstraFlow's solver and verifier, two Qwen3-8B.
- A tool before each verdict: log-normal, median 2 s, sigma 1, at most 60 s. Assumed: a test run or a search.
- A decode step: 7 ms, and 55 us for each row of a GPU. 16.4 GB of weights, and 147 kB of keys and values for each of
  about 1,200 tokens, read at the 3.35 TB/s of an H100; 2 ms for all else.
- New weights in an engine: 3 s, then the contexts of the rows that run are read again, 20,000 tokens/s and GPU.
  Published: 1 to 2.4 s at 1.7B (AstraFlow), 4.4 s at 30B (verl). The loop pays it once a step, with no row running.
- Training: 0.26 GPU seconds for a trained token of the tiny model, of which a call has 2. It is set so that the
  synchronous loop on shared GPUs spends about 70 % of a step in rollout, as is published. That is 8 operations (old
  logprobs, forward, backward) for each of 8.2e9 parameters and 1,900 tokens of context and answer of a call, at 24 % of
  990 TFLOP/s. It divides evenly among any number of GPUs.
- 16 GPUs: two nodes of eight. Who shares them pays nothing for changing between rollout and training.
"""

from __future__ import annotations

import heapq
import random
from collections import deque
from dataclasses import dataclass, field

SCALE = 60.0  # modelled seconds that pass in a real one
GPUS = 16
TRAIN_GPU_S_PER_TOKEN = 0.26


@dataclass(frozen=True)
class LongTail:
    """A log-normal distribution, cut from above."""

    median: float
    sigma: float
    most: float

    def draw(self, rng: random.Random) -> float:
        """One value."""
        return min(self.most, self.median * rng.lognormvariate(0.0, self.sigma))


CALL_TOKENS = LongTail(800.0, 0.8, 4096.0)
TOOL_S = LongTail(2.0, 1.0, 60.0)


@dataclass(frozen=True)
class Decoding:
    """What an engine's GPUs need; modelled seconds."""

    step_s: float = 0.007
    row_s: float = 0.000055
    rows_per_gpu: int = 128
    swap_s: float = 3.0
    prefill_tokens_per_s: float = 20_000.0  # of a GPU


@dataclass
class Rows:
    """The rows of one engine on `gpus` GPUs that share them evenly: all advance by a token a step. No clock: times are
    given, in modelled seconds, and never fall."""

    gpus: float
    decoding: Decoding = field(default_factory=Decoding)
    now: float = 0.0
    busy_s: float = 0.0  # at least one row ran
    row_s: float = 0.0  # seconds times rows
    _depth: float = 0.0  # tokens that a row has got that has run since the start
    _paused_until: float = 0.0
    _running: list[tuple[float, float, int]] = field(default_factory=list)  # (depth at its end, at its start, key)
    _waiting: deque[tuple[float, int]] = field(default_factory=deque)

    @property
    def running(self) -> int:
        """Rows that decode."""
        return len(self._running)

    @property
    def waiting(self) -> int:
        """Rows for which there is no place yet."""
        return len(self._waiting)

    def add(self, key: int, tokens: float, now: float) -> list[int]:
        """A row that ends after so many tokens. Returns those that ended before `now`."""
        ended = self.advance(now)
        self._waiting.append((tokens, key))
        self._admit()
        return ended

    def pause(self, now: float) -> tuple[float, list[int]]:
        """New weights: no row advances until the time that is returned, beside the rows that ended before `now`."""
        ended = self.advance(now)
        context = sum(self._depth - start for _, start, _ in self._running)
        read_again_s = context / (self.decoding.prefill_tokens_per_s * self.gpus)
        self._paused_until = max(now, self._paused_until) + self.decoding.swap_s + read_again_s
        return self._paused_until, ended

    def next_end(self) -> float | None:
        """When the next row ends if none joins; None: nothing runs."""
        if not self._running:
            return None
        return max(self.now, self._paused_until) + (self._running[0][0] - self._depth) * self._step_s()

    def advance(self, now: float) -> list[int]:
        """Rows that have ended until `now`, in order."""
        ended: list[int] = []
        while self._running and (end := self.next_end()) is not None and end <= now:
            self._pass(end)
            self._depth = max(self._depth, self._running[0][0])
            ended.append(heapq.heappop(self._running)[2])
            self._admit()
        self._pass(now)
        return ended

    def _pass(self, until: float) -> None:
        if until <= self.now:
            return
        rows = len(self._running)
        decoded_s = max(0.0, until - max(self.now, self._paused_until))
        if rows:
            self._depth += decoded_s / self._step_s()
            self.busy_s += until - self.now
            self.row_s += rows * (until - self.now)
        self.now = until

    def _step_s(self) -> float:
        return self.decoding.step_s + self.decoding.row_s * len(self._running) / self.gpus

    def _admit(self) -> None:
        while self._waiting and len(self._running) < self.decoding.rows_per_gpu * self.gpus:
            tokens, key = self._waiting.popleft()
            heapq.heappush(self._running, (self._depth + tokens, self._depth, key))
