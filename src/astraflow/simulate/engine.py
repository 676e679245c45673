"""An engine: decode steps over all its rows, prompts read between them, a pause when other weights come into force."""

from __future__ import annotations

import heapq
import math
from collections.abc import Callable

from astraflow.config.checks.engines import ABILITIES
from astraflow.config.schema import RunConfig
from astraflow.simulate.clock import Clock, Host, Work
from astraflow.simulate.profile import EngineCost

QUIET_S = 0.001

Done = Callable[[int], None]
"""Called with the version under which the first token was sampled, the oldest of the call."""


def shared_by(config: RunConfig) -> dict[str, str]:
    """Policy -> the first of those that one engine of a node serves: adapters of one base, see `rollout.serving`."""
    firsts: dict[str, str] = {}
    found = {}
    for name, section in config.policies.items():
        ability = ABILITIES.get(section.engine.type)
        if ability is not None and ability.shares_base and (config.lora_of(name) or section.frozen):
            found[name] = firsts.setdefault(f"{config.base_of(name)} {section.engine.model_dump_json()}", name)
        else:
            found[name] = name
    return found


class Engine:
    """`versions` -1: no weights yet."""

    def __init__(self, clock: Clock, host: Host, cost: EngineCost, most_rows: int) -> None:
        self._clock, self._host, self._cost = clock, host, cost
        self._most = min(cost.rows or most_rows, most_rows)
        self._arrived: list[tuple[str, int, float, Done]] = []  # policy, tokens, prompt tokens
        self._rows: list[tuple[int, int, Done, int]] = []  # ends at this decode step, order, done, version
        self._swaps: list[tuple[str, int, Callable[[], None]]] = []
        self._work: Work | None = None
        self._steps = 0  # that the running work makes; 0: it is no decoding
        self._since = 0.0
        self._joined = 0
        self._waking = False
        self.versions: dict[str, int] = {}
        self.num_steps = self.num_tokens = 0
        self._busy_s = 0.0

    def submit(self, policy: str, tokens: int, prompt_tokens: float, done: Done) -> None:
        """A call."""
        self._arrived.append((policy, tokens, prompt_tokens, done))
        self._interrupt()

    def swap(self, policy: str, version: int, done: Callable[[], None]) -> None:
        """`version` comes into force between two steps."""
        self._swaps.append((policy, version, done))
        self._interrupt()

    def busy_s(self) -> float:
        """Wall time in which it did something, so far."""
        return self._busy_s + (self._clock.now - self._since if self._work is not None else 0.0)

    def _step_s(self) -> float:
        return self._cost.step_s + len(self._rows) * self._cost.row_s

    def _interrupt(self) -> None:
        """What is new begins at the end of the decode step that runs."""
        if self._work is None:
            self._wake()
            return
        step_s = self._step_s()
        if self._steps <= 1 or step_s <= 0 or (self._arrived and not self._swaps and len(self._rows) >= self._most):
            return
        left_s = self._host.left_s(self._work)
        made = min(self._steps, max(1, math.ceil(self._steps - left_s / step_s - 1e-9)))
        if made < self._steps:
            self._host.shorten(self._work, max(0.0, left_s - (self._steps - made) * step_s))
            self._steps = made

    def _wake(self) -> None:
        """What arrives at one moment begins together."""
        if not self._waking and self._work is None:
            self._waking = True
            self._clock.after(0.0, self._next)

    def _next(self) -> None:
        """Before calls join, a burst of them may pass: it lasts until none came for `QUIET_S`, at most `gather_s`."""
        if self._arrived and self._cost.gather_s and len(self._rows) < self._most:
            self._gather(0, self._clock.now + self._cost.gather_s)
        else:
            self._turn()

    def _gather(self, known: int, until: float) -> None:
        left_s = until - self._clock.now
        if len(self._arrived) == known or len(self._rows) + len(self._arrived) >= self._most or left_s <= 1e-9:
            self._turn()
            return
        known = len(self._arrived)
        self._clock.after(min(QUIET_S, left_s), lambda: self._gather(known, until))

    def _turn(self) -> None:
        self._waking = False
        if self._swaps:
            policy, version, done = self._swaps.pop(0)
            self._start(self._cost.swap_s, lambda: self._swapped(policy, version, done))
        elif self._arrived and len(self._rows) < self._most:
            room = self._most - len(self._rows)
            joining, self._arrived = self._arrived[:room], self._arrived[room:]
            prompt = sum(tokens for _, _, tokens, _ in joining)
            self._start(prompt * self._cost.prefill_token_s, lambda: self._join(joining))
        elif self._rows:
            self._steps = self._rows[0][0] - self.num_steps
            self._start(self._steps * self._step_s(), self._decoded)

    def _start(self, seconds: float, end: Callable[[], None]) -> None:
        if seconds <= 0.0 and not self._steps:
            end()
            return
        self._since = self._clock.now

        def ended() -> None:
            self._busy_s += self._clock.now - self._since
            self._work = None
            end()

        self._work = self._host.start(seconds, ended)

    def _swapped(self, policy: str, version: int, done: Callable[[], None]) -> None:
        self.versions[policy] = version
        done()
        self._wake()

    def _join(self, joining: list[tuple[str, int, float, Done]]) -> None:
        for policy, tokens, _, done in joining:
            self._joined += 1
            heapq.heappush(self._rows, (self.num_steps + tokens, self._joined, done, self.versions[policy]))
        self._wake()

    def _decoded(self) -> None:
        self.num_steps += self._steps
        self.num_tokens += self._steps * len(self._rows)
        self._steps = 0
        ended = []
        while self._rows and self._rows[0][0] <= self.num_steps:
            ended.append(heapq.heappop(self._rows))
        for _, _, done, version in ended:
            done(version)
        self._wake()
