"""The parcels: what travels between the stations. Frozen, torch-free, documented field by field.

Shapes: `T` tokens of one trajectory, `C` calls of one episode and policy, `G` siblings of one task.
A trajectory walks forward through the folders; the only thing that walks back is a weight version.
"""

from __future__ import annotations

import re
import zlib
from collections.abc import Mapping
from typing import Any, Literal

import msgspec
import numpy as np

Message = dict[str, Any]
"""One chat message in OpenAI form: role, content, and for assistants perhaps tool_calls."""

FinishReason = Literal["stop", "length", "tool_calls", "cancelled", "error"]
Purpose = Literal["train", "eval"]


class Task(msgspec.Struct, frozen=True):
    """One row to be solved. Produced by a source, consumed by a workflow. `task["question"]` reads a field."""

    source: str  # name in [sources.<name>]
    row: int  # >= 0, position in the source; duplicates in a file are different rows
    epoch: int  # >= 0
    fields: dict[str, Any]  # what the source gave; JSON-able

    def __getitem__(self, key: str) -> Any:
        try:
            return self.fields[key]
        except KeyError:
            raise KeyError(f"{key} (this task has: {', '.join(self.fields)})") from None

    def get(self, key: str, default: Any = None) -> Any:
        """The field `key`, or `default`."""
        return self.fields.get(key, default)

    @property
    def group_id(self) -> str:
        """Identity of the group of this task: one per `(source, epoch, row)`."""
        return f"{self.source}/{self.epoch}/{self.row}"

    @property
    def seed(self) -> int:
        """For an environment's chance, 0 to 2**31 - 1, equal for siblings: the field `seed`, else made from the id."""
        given = self.fields.get("seed")
        return given if isinstance(given, int) else zlib.crc32(self.group_id.encode()) & 0x7FFFFFFF


class Action(msgspec.Struct, frozen=True, kw_only=True):
    """What a policy does in an environment: it calls a tool, or says something. Produced by a workflow."""

    text: str = ""  # the text of its reply
    tool: str | None = None  # None: it called none, and `text` is what it does
    arguments: dict[str, Any] = {}
    finish_reason: str = "stop"  # of the reply; "length": it was cut
    turn: int = 1  # the reply of the episode that it is part of, from 1
    side: int = 0  # who acts, where there are several sides


class Step(msgspec.Struct, frozen=True):
    """What came of an action. Produced by an environment."""

    text: str = ""  # what is told: the result of the tool, or a message to who acts next
    reward: float | list[float] | None = 0.0  # is added up; a list: one per side; None: the episode is unscored
    done: bool = False  # the episode is over
    metrics: dict[str, float] = {}  # of the episode, the newest value counts; "success" (0 or 1): default reward >= 1
    side: int = 0  # who acts next, where there are several sides


class Sampling(msgspec.Struct, frozen=True, kw_only=True):
    """Every sampling parameter, always explicit: nothing is ever taken from a model's generation config.

    Logprobs are those of `log_softmax(logits / temperature)` before top-k, min-p and top-p, or of `logprob_temperature`
    where that is given (the trainer scores at one temperature). temperature 0 is greedy; its logprobs are those of
    temperature 1.
    """

    temperature: float = 1.0  # >= 0
    top_p: float = 1.0  # (0, 1]
    top_k: int = 0  # 0: off
    min_p: float = 0.0  # [0, 1], share of the highest probability below which a token is cut; 0: off
    max_tokens: int = 256  # >= 1, new tokens of one call
    stop_token_ids: tuple[int, ...] = ()  # beside the model's own EOS
    logprob_temperature: float | None = None  # > 0, of the logprobs alone; None: `temperature`
    seed: int | None = None  # None: the engine's own stream


class Generation(msgspec.Struct, frozen=True):
    """What an engine returns for one request. All arrays have the same length T (the sampled tokens)."""

    token_ids: np.ndarray  # [T] int32
    logprobs: np.ndarray  # [T] float32, at the sampling temperature
    versions: np.ndarray  # [T] int32, the weight version of the decode step that made each token
    finish_reason: FinishReason  # "stop": the last token is EOS or a stop id; "length": cut by max_tokens or context


class EffectiveWeights(msgspec.Struct, frozen=True):
    """What the forward pass of an engine uses. Produced by an engine when asked, compared with what the trainer has."""

    version: int
    dtype: str  # of the engine's weights, a name of torch
    checksum: str  # `models.load.effective_checksum`; "": the engine has no weights


class Adapter(msgspec.Struct, frozen=True):
    """What the tensors of a LoRA version become weights with: base + scaling * B A in each layer that has a pair."""

    scaling: float  # alpha / rank
    base: str  # `models.load.content_checksum` of the model directory that they rest on


class Call(msgspec.Struct, frozen=True):
    """One LLM request inside an episode, as captured by the gateway: exact ids, never re-tokenised."""

    policy: str
    index: int  # order of arrival within the episode and policy, from 0
    prompt_ids: np.ndarray  # [P] int32
    generation: Generation
    sampling: Sampling | None = None  # as it was in force; None: not known
    forked: bool = False  # True: the chat template was not append-only here, the prompt was tokenised afresh
    agent: str = ""  # who asked (`model = "<policy>@<agent>"`); empty: it has no name


class Trajectory(msgspec.Struct, frozen=True, kw_only=True):
    """One token sequence of one policy in one episode: a branch of the episode's token trie.

    A branch holds only its own tokens, after `fork_at` tokens of `parent_branch`. All [T] arrays have equal length.
    """

    policy: str
    branch: int  # from 0 within the episode and policy
    parent_branch: int  # -1: none (then fork_at is 0)
    fork_at: int  # length of the shared prefix, in tokens of the parent's full sequence
    token_ids: np.ndarray  # [T] int32
    loss_mask: np.ndarray  # [T] bool: True where the token was sampled by this policy
    behavior_logprobs: np.ndarray  # [T] float32; 0 where loss_mask is False
    versions: np.ndarray  # [T] int32; -1 where loss_mask is False
    call_index: np.ndarray  # [T] int16: the call that sampled the token; -1 where loss_mask is False
    reward: float | None = None  # None: unscored, takes no part in any baseline
    rewards_per_call: tuple[float, ...] = ()  # empty: no per-call reward
    finish_reason: str = "stop"  # of the last call of the branch
    truncated: bool = False  # some call of the branch ended by "length"


class Outcome(msgspec.Struct, frozen=True, kw_only=True):
    """What a workflow says of its episode. A plain float or dict that it returns becomes one of these."""

    reward: float | dict[str, float | None] | None = None  # of all, or by "policy", "policy@agent"; None: unscored
    rewards_per_call: dict[str, list[float]] | list[float] = {}  # policy -> one per call; a list: of the only policy
    metrics: dict[str, float] = {}  # "success" (0 or 1) is shown in reports; default: reward >= 1


class Episode(msgspec.Struct, frozen=True, kw_only=True):
    """One attempt at a task by a workflow; committed atomically, all policies at once."""

    episode_id: str  # "<group_id>/<k>"
    attempt: int  # from 1; a late result of an older attempt is refused
    node_id: str
    task: Task
    trajectories: list[Trajectory]  # may be empty when `error` is set
    error: str | None = None  # "<kind>: <message>"; None: the episode ran to its end
    metrics: dict[str, float] = {}
    wall_s: float = 0.0  # duration on the node
    code: str = ""  # version of the workflow's code that played it, by its worker; "": not known
    engines: dict[str, str] = {}  # policy -> "<engine>@<node>" that sampled it, where that was not one of this node


_ERROR_KIND = re.compile(r"[a-z][a-z0-9_]{0,31}(?=:)")


def error_kind(error: str) -> str:
    """The kind of `Episode.error`; "other" when it names none."""
    found = _ERROR_KIND.match(error)
    return found[0] if found else "other"


class EpisodeLease(msgspec.Struct, frozen=True, kw_only=True):
    """The right to play one episode until a deadline. Produced by dataflow, consumed by a node."""

    episode_id: str
    group_id: str
    attempt: int
    task: Task
    purpose: Purpose = "train"
    timeout_s: float  # the node must commit within this many seconds of receiving the lease
    min_versions: dict[str, int]  # policy -> oldest weight version that may start this episode
    sampling: dict[str, Sampling]  # policy -> defaults of every call (max_tokens is the cap)


class WeightVersion(msgspec.Struct, frozen=True):
    """The newest published version of a policy and where to fetch it."""

    policy: str
    version: int  # -1: nothing published yet
    urls: tuple[str, ...] = ()  # weight stores to try in order: file:// first when on the same host


class BatchHeader(msgspec.Struct, frozen=True, kw_only=True):
    """The control part of a batch; its rows travel as Arrow beside it (`wire.codec.TRAINING_SCHEMA`)."""

    batch_id: str
    policy: str
    step: int  # the step this batch is for: the version that will be published after it (>= 1)
    num_groups: int
    num_episodes: int
    replay: bool = False  # True: served again after a resume
    metrics: dict[str, float] = {}  # reward/mean, success/mean, staleness/mean, ... of this batch
    rank: int = 0  # whose rows these are; all counts and metrics are those of the whole batch
    ranks: int = 1
    num_rows: int = 0  # trajectories
    num_sampled_tokens: int = 0


class Tokens(msgspec.Struct, frozen=True):
    """The token columns of one branch, as views of the stored rows. All arrays have length T."""

    token_ids: np.ndarray  # [T] int32
    loss_mask: np.ndarray  # [T] bool
    behavior_logprobs: np.ndarray  # [T] float32
    versions: np.ndarray  # [T] int32
    call_index: np.ndarray  # [T] int16


class Group(msgspec.Struct, kw_only=True):
    """The sibling episodes of one task as an operator sees them. Lists have one entry per scored-or-not episode."""

    group_id: str
    policy: str
    task: Task
    episode_ids: list[str]
    rewards: list[float | None]  # [G] None: unscored or failed
    rewards_per_call: list[tuple[float, ...]]  # [G] empty, or one per call
    num_calls: list[int] = []  # [G] calls of this policy; 0: no rows
    metrics: list[Mapping[str, float]]  # [G]
    num_tokens: list[int]  # [G] sampled tokens
    num_truncated: list[int] = []  # [G] branches cut by a length limit
    min_version: list[int]  # [G] oldest version among sampled tokens; -1: none sampled
    errors: list[str | None]  # [G]
    tokens: list[list[Tokens]] | None = None  # [G][branches]; None unless the operator has `needs_tokens`
    advantages: list[float] | None = None  # [G] set by an advantage operator; None: not yet
    call_advantages: list[tuple[float, ...]] | None = None  # [G][C] where credit is per call; replaces `advantages`
    weight: float = 1.0  # loss weight, >= 0


class SourceView(msgspec.Struct, frozen=True):
    """What an operator of a source may know when it decides on a task."""

    step: int  # newest weight version of the slowest policy; 0 at the start
    in_flight: int  # groups of this source that are admitted and neither trained nor dropped
    admitted: int  # groups of this source so far


class Stored(msgspec.Struct, frozen=True):
    """A trained group that may be trained again, as a replay operator sees it."""

    group_id: str
    source: str
    step: int  # when it was trained last
    uses: int  # how often it was trained, >= 1
    min_version: int  # oldest version among its sampled tokens
    mean_abs_advantage: float
    mean_reward: float
