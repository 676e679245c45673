"""The verbs: what each station promises. Every implementation, fakes included, passes one conformance suite."""

from __future__ import annotations

from collections.abc import Awaitable, Callable, Mapping, Sequence
from concurrent.futures import Future
from typing import TYPE_CHECKING, Any, ClassVar, Literal, Protocol

import numpy as np

from astraflow.errors import EngineError
from astraflow.types import (
    Action,
    Adapter,
    EffectiveWeights,
    Generation,
    Group,
    Message,
    Outcome,
    Sampling,
    SourceView,
    Step,
    Stored,
    Task,
)

if TYPE_CHECKING:
    import pyarrow as pa


class Source(Protocol):
    """Where tasks come from: a deterministic function of the row, so a cursor is its whole state."""

    def __len__(self) -> int:
        """Rows of one epoch (> 0)."""

    def row(self, index: int) -> dict[str, Any]:
        """Fields of row `index` (0 <= index < len). The same index always gives the same fields."""

    def fingerprint(self) -> str:
        """Changes when the rows change; a resumed run refuses another data set."""


class Operator(Protocol):
    """A data algorithm, of one source or of one policy. Inherit and override what it does; the rest is neutral.

    Deterministic given its state and arguments; the state is journaled by replay and snapshot. An operator that needs
    chance returns a probability, or draws from a generator seeded by ids that it was given.

    | listed in              | hooks, in the order in which a task meets them         |
    |------------------------|--------------------------------------------------------|
    | sources.*.operators    | admit, on_result                                       |
    | policies.*.operators   | on_group, then for each batch: select, on_batch, retain |
    """

    place: ClassVar[Literal["source", "policy"]] = "policy"
    phase: ClassVar[Literal["filter", "shape", "credit", "weight"]] = "filter"
    """Order within a policy's list, as written here: what drops groups, changes rewards, makes advantages, weighs."""
    makes: tuple[str, ...] = ()
    """What is made once only ("normalized", "balanced"): a list in which two operators make the same is refused. An
    option may decide it, so it may be set in `__init__`."""
    needs_tokens: ClassVar[bool] = False
    """True: `Group.tokens` is filled for `on_group`."""
    max_age: int | None = None
    """Versions by which what it selects may be behind the trainer, set in `__init__`; None: `batch.max_staleness`. More
    than that is refused unless the loss corrects off-policy data."""
    estimator: Operator | None = None
    """What makes the advantages after this operator of a policy; set when the list is made, before the first hook."""
    min_siblings: int = 1
    """Episodes per task below which it can do nothing: such a run file is refused. May be set in `__init__` too."""

    def __init__(self) -> None:
        """Its options are parameters of the `__init__` of a subclass; without one it has none."""
        return

    def admit(self, task: Task, view: SourceView) -> float | Literal["wait"]:
        """Probability (0 to 1) that the task is rolled out now, else it is skipped; "wait": not now, ask again."""
        return 1.0

    def on_result(self, group: Group) -> None:
        """A group of this source is complete for one policy (failed ones too), before that policy's operators."""
        return None

    def on_group(self, group: Group) -> Group | str:
        """Pass the (perhaps changed) group on, or return the reason for which it is dropped."""
        return group

    def sees_difference(self, group: Group, min_std: float) -> bool:
        """Of phase credit: it tells episodes of equal rewards apart all the same, as by the rewards of their calls:
        what it compares has a standard deviation above `min_std`."""
        return False

    def select(self, stored: Sequence[Stored], groups: int, step: int) -> list[str]:
        """Trained groups that take part in the batch of `step` again: ids from `stored`, fewer than `groups`.

        Asked a second time, with the others, when groups that were selected earlier had to give way to fresh ones.
        """
        return []

    def retain(self, stored: Sequence[Stored], step: int) -> list[str]:
        """After `step`: the trained groups that stay stored."""
        return []

    def on_batch(self, groups: Sequence[Group], step: int) -> None:
        """Change advantages and weights, and nothing else, of the groups of the batch of `step`."""
        return None

    def state_dict(self) -> dict[str, Any]:
        """JSON-able state."""
        return {}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Inverse of `state_dict`."""
        return None


class Stage(Protocol):
    """A worker that adds columns to rows that wait to be trained: reference logprobs, a judge's reward, values.

    It pulls rows, so a fast worker takes more, and nothing waits for a slow one but its own rows. All rows of one
    episode and policy come together. A constructor with a parameter `run` gets a `stages.context.StageRun`.
    """

    needs: ClassVar[tuple[str, ...]]
    """Columns of `wire.codec.TRAJECTORY_SCHEMA`, or added by other stages, that `run` reads; "task": the fields of the
    row's task as JSON text."""
    adds: ClassVar[Mapping[str, Literal["token", "row", "reward"]]]
    """Column -> what it holds: "token": list<float32>, one per token; "row": float32. "reward" (the column reward,
    float32, null is unscored) is made before the policy's operators see the group, the others after them."""

    def run(self, rows: pa.Table) -> pa.Table:
        """The added columns, one row for each of `rows`, in their order."""

    def close(self) -> None:
        """Release what it holds."""


TokenSink = Callable[[Sequence[int], Sequence[float], Sequence[int]], None]
"""(ids, logprobs, versions) of the tokens that a request sampled since the call before; all of equal length > 0."""


class Engine(Protocol):
    """Turns prompt ids into sampled ids. Thread-safe. Weights change between two decode steps, tokens are kept."""

    def submit(
        self,
        request_id: str,
        prompt_ids: Sequence[int] | np.ndarray,
        sampling: Sampling,
        on_tokens: TokenSink | None = None,
    ) -> Future[Generation]:
        """Queue one generation. The future fails with EngineError; a cancelled request ends as "cancelled".

        `prompt_ids`: [P] ids of the model's tokenizer, 1 <= P < `max_context`. `request_id`: of no other that runs.
        `on_tokens` gets the tokens as they are sampled, in any thread, in order and before the future's result, of
        which they are a prefix. It returns at once, does not raise, and asks nothing of the engine.
        """

    def cancel(self, request_id: str) -> None:
        """Stop a request: its future ends with what was sampled so far, finish_reason "cancelled"."""

    def load_weights(self, version: int, tensors: Mapping[str, Any], adapter: Adapter | None = None) -> Future[int]:
        """Swap to `version` between two decode steps; in-flight requests go on under it.

        `tensors`: Hugging Face name -> torch tensor; with `adapter`, peft name -> torch tensor, on the weights that the
        engine was started with. The future gives the version once it is in force."""

    def effective_weights(self) -> Future[EffectiveWeights]:
        """Checksum of the weights that the forward pass uses now. It costs a pass over their bytes."""

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


class SharesBase(Engine, Protocol):
    """An engine that can serve several policies whose versions are adapters on the weights that it was started with.
    `config.checks.engines` says which types do."""

    def adapters(self, policies: int) -> list[Engine]:
        """An engine for each of so many policies, instead of itself and before anything else is asked of it. They have
        versions of their own, decode together, and end together. Whole versions are refused with ModelError."""


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
    """A world that lasts one episode. Inherit, and write `reset` and `step`; the rest is neutral.

    All three methods may be coroutine functions. The constructor only looks at its options: one is made to check a run
    file. The same task and the same actions give the same steps, in any process. What a policy does wrong is told in a
    step. What raises, or misses its deadline, is a failure of the environment: the episode is played again in a fresh
    one, and in the end fails with the error `env_error` or `env_timeout`.
    """

    runs: Literal["cheap", "cpu", "box", "service", "judge"] = "cheap"
    """Where the work of a step is done: here, in less than a millisecond; in a process of a pool, which is killed at
    the deadline; in the sandbox; by another service; by a model. The last three have a coroutine function as `step`."""
    sides: int = 1
    """How many policies act in it, as in a game for two."""

    def __init__(self) -> None:
        """Its options are parameters of the `__init__` of a subclass; without one it has none."""
        return

    @property
    def tools(self) -> list[dict[str, Any]]:
        """OpenAI function schemas, read after `reset`; a class attribute will do. Empty: it is acted in by text."""
        return []

    def reset(self, task: Task) -> str | list[Message] | Step | Awaitable[str | list[Message] | Step]:
        """What the policy is told first: a text, whole messages, or, where there are several sides, a Step."""

    def step(self, action: Action) -> Step | Awaitable[Step]:
        """What comes of one action. A reply that calls no tool is an action too: its text, perhaps the answer."""

    def close(self) -> Awaitable[None] | None:
        """Release what it holds; called once, however the episode ended."""
        return None


class RewardFunction(Protocol):
    """Grade one completion; None is "unscored", never 0."""

    def __call__(self, completion: str, task: Task) -> float | Outcome | Awaitable[float | Outcome | None] | None:
        """An Outcome when "success" is something else than a reward of 1, as with shaped rewards. What takes longer
        than a millisecond is a coroutine function: other episodes go on meanwhile."""
