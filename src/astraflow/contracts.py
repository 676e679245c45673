"""The verbs: what each station promises. Every implementation, fakes included, passes one conformance suite."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from concurrent.futures import Future
from typing import TYPE_CHECKING, Any, Protocol

import numpy as np

from astraflow.errors import EngineError
from astraflow.types import Generation, Group, Message, Outcome, Sampling, Task, WeightVersion

if TYPE_CHECKING:
    from pathlib import Path


class Source(Protocol):
    """Where tasks come from: a deterministic function of the row, so a cursor is its whole state."""

    def __len__(self) -> int:
        """Rows of one epoch (> 0)."""

    def row(self, index: int) -> dict[str, Any]:
        """Fields of row `index` (0 <= index < len). The same index always gives the same fields."""

    def fingerprint(self) -> str:
        """Changes when the rows change; a resumed run refuses another data set."""


class Operator(Protocol):
    """A data algorithm of one policy. Deterministic given its state; the state is journaled by replay and snapshot."""

    def on_group(self, group: Group) -> Group | str:
        """Pass the (perhaps changed) group on, or return the reason for which it is dropped."""

    def state_dict(self) -> dict[str, Any]:
        """JSON-able state."""

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Inverse of `state_dict`."""


class Engine(Protocol):
    """Turns prompt ids into sampled ids. Thread-safe. Weights change between two decode steps, tokens are kept."""

    def submit(self, request_id: str, prompt_ids: Sequence[int] | np.ndarray, sampling: Sampling) -> Future[Generation]:
        """Queue one generation. The future fails with EngineError; a cancelled request ends as "cancelled"."""

    def cancel(self, request_id: str) -> None:
        """Stop a request: its future ends with what was sampled so far, finish_reason "cancelled"."""

    def load_weights(self, version: int, tensors: Mapping[str, Any]) -> Future[int]:
        """Swap to `version` between two decode steps; in-flight requests go on under it.

        `tensors`: Hugging Face name -> torch tensor. The future gives the version once it is in force."""

    @property
    def version(self) -> int:
        """The version in force; -1 before the first load."""

    @property
    def max_context(self) -> int:
        """Longest prompt plus generation, in tokens."""

    @property
    def ended(self) -> Future[EngineError]:
        """Done, with the reason, before any request fails because the engine serves no more; also after `close`."""

    def stats(self) -> dict[str, float]:
        """Monotonic counters: busy_s, sampled_tokens, prefill_tokens, requests, swaps; gauges: running, waiting."""

    def close(self) -> None:
        """Stop the engine; pending futures fail with EngineError."""


class LLM(Protocol):
    """One policy as a workflow sees it: a light OpenAI-compatible client bound to this episode."""

    base_url: str
    api_key: str

    async def chat(self, messages: Sequence[Message], **options: Any) -> Any:
        """One call. Options as in OpenAI's chat completions: tools, temperature, max_tokens, ... Returns a `Reply`."""


class Workflow(Protocol):
    """The whole contract a user must know: play one episode."""

    async def __call__(self, task: Task, llm: Mapping[str, LLM]) -> float | Outcome | Mapping[str, float | None] | None:
        """Return the reward (or an Outcome with more)."""


class Environment(Protocol):
    """A world with tools; one instance per episode."""

    @property
    def tools(self) -> list[dict[str, Any]]:
        """OpenAI function schemas."""

    def reset(self, task: Task) -> list[Message]:
        """The opening messages."""

    def call(self, name: str, arguments: Mapping[str, Any]) -> str | None:
        """Run one tool; a wrong call gives a text that says so, it does not raise. None: the conversation ends here."""

    def score(self, messages: Sequence[Message]) -> Outcome:
        """The outcome of the finished conversation."""


class RewardFunction(Protocol):
    """Grade one completion; None is "unscored", never 0."""

    def __call__(self, completion: str, task: Task) -> float | Outcome | None:
        """An Outcome when "success" is something else than a reward of 1, as with shaped rewards."""


class WeightStore(Protocol):
    """Immutable numbered versions of one policy's weights."""

    def publish(self, version: int, tensors: Mapping[str, Any], files: Iterable[Path] = ()) -> None:
        """Make `version` visible atomically. Publishing an existing version with equal content is a no-op."""

    def latest(self) -> WeightVersion:
        """The newest visible version (-1: none)."""

    def fetch(self, version: int) -> dict[str, Any]:
        """Verified tensors of `version`, name -> torch tensor. Raises WeightError."""
