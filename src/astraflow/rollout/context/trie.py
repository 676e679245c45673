"""The calls of one episode and policy become branches: every sampled token exactly once, on exactly its own prefix.

    call 0: [system user] -> A            branch 0: system user A tool B           (calls 0 and 1)
    call 1: [system user A tool] -> B     branch 1: fork of 0 after `user`: C      (call 2, a parallel sample)
    call 2: [system user] -> C            branch 2: fork of 0 after `system`: D    (call 3, a rewritten history)
    call 3: [system note] -> note D

A prompt is laid along the longest path of its agent that is there already, over given and sampled tokens alike. If it
covers a branch to its tip, the branch grows; else a new branch forks where they part. Sampled tokens are never laid
over others: two equal replies are two branches and keep their weight.

A branch's whole path is always the prompt of its last call plus what that call sampled, so nothing is copied or
compared token by token in Python.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from astraflow.errors import EpisodeError
from astraflow.types import Call, Trajectory


class _Branch:
    __slots__ = ("calls", "fork_at", "last", "length", "parent")

    def __init__(self, parent: int, fork_at: int, call: Call) -> None:
        self.parent, self.fork_at = parent, fork_at
        self.calls: list[Call] = []
        self.add(call)

    def add(self, call: Call) -> None:
        self.calls.append(call)
        self.last = call
        self.length = len(call.prompt_ids) + len(call.generation.token_ids)  # of the whole path

    def continued_by(self, call: Call) -> bool:
        """The prompt covers the whole path."""
        return self.last.agent == call.agent and self.common(call.prompt_ids, 0) == self.length

    def common(self, prompt: np.ndarray, start: int) -> int:
        """Length of the prefix that `prompt` shares with the whole path, given that `start` tokens are shared."""
        ids = self.last.prompt_ids
        shared = start
        if start < len(ids):
            shared = start + _common(prompt[start:], ids[start:])
            if shared < len(ids):
                return shared
        return shared + _common(prompt[shared:], self.last.generation.token_ids[shared - len(ids) :])


def trajectories(
    calls: Sequence[Call],
    policy: str,
    reward: float | None = None,
    rewards_per_call: Sequence[float] = (),
) -> list[Trajectory]:
    """The branches of one episode and policy, parents before children. Calls that sampled nothing leave no trace.

    Args: calls: in any order, of `policy` only; rewards_per_call: one per call by index, or empty. Every branch gets
        `reward` and all of `rewards_per_call` (the branch's `call_index` points into it).
    Raises: EpisodeError: as many rewards per call as calls are needed.
    """
    per_call = tuple(float(r) for r in rewards_per_call)
    if per_call and len(per_call) != len(calls):
        raise EpisodeError(
            f"rewards_per_call.{policy}={len(per_call)} values must be one per call ({len(calls)} calls); "
            "return one reward for each call that was answered"
        )
    branches: list[_Branch] = []
    for call in sorted(calls, key=lambda c: c.index):
        if len(call.generation.token_ids):
            _place(branches, call)
    return [_trajectory(b, number, policy, reward, per_call) for number, b in enumerate(branches)]


def full_sequence(branches: Sequence[Trajectory], branch: int) -> np.ndarray:
    """The whole token path [fork_at + T] int32 of `branch`; `branches`: all of one episode and policy, by number."""
    own = branches[branch]
    pieces = [own.token_ids]
    number, needed = own.parent_branch, own.fork_at
    while needed > 0:
        ancestor = branches[number]
        if needed > ancestor.fork_at:
            pieces.append(ancestor.token_ids[: needed - ancestor.fork_at])
            needed = ancestor.fork_at
        number = ancestor.parent_branch
    return np.concatenate(pieces[::-1])


def _place(branches: list[_Branch], call: Call) -> None:
    prompt = call.prompt_ids
    if len(branches) == 1 and branches[0].continued_by(call):  # the usual linear agent
        branches[0].add(call)
        return
    shared: list[int] = []  # per branch: length of the prefix of its path that the prompt shares
    longest, where, at_tip = 0, -1, False
    for number, branch in enumerate(branches):
        if branch.last.agent != call.agent:
            shared.append(0)
            continue
        inherited = shared[branch.parent] if branch.parent >= 0 else 0
        length = branch.common(prompt, branch.fork_at) if inherited >= branch.fork_at else inherited
        shared.append(length)
        tip = length == branch.length
        if length > longest or (length == longest and tip and not at_tip):
            longest, where, at_tip = length, number, tip
    if at_tip:
        branches[where].add(call)
    else:
        branches.append(_Branch(where, longest, call))


def _trajectory(
    branch: _Branch, number: int, policy: str, reward: float | None, rewards_per_call: tuple[float, ...]
) -> Trajectory:
    fork_at, last = branch.fork_at, branch.last
    token_ids = np.concatenate((last.prompt_ids[fork_at:], last.generation.token_ids)).astype(np.int32, copy=False)
    length = len(token_ids)
    loss_mask = np.zeros(length, dtype=np.bool_)
    logprobs = np.zeros(length, dtype=np.float32)
    versions = np.full(length, -1, dtype=np.int32)
    call_index = np.full(length, -1, dtype=np.int16)
    for call in branch.calls:
        start = len(call.prompt_ids) - fork_at
        own = slice(start, start + len(call.generation.token_ids))
        loss_mask[own] = True
        logprobs[own] = call.generation.logprobs
        versions[own] = call.generation.versions
        call_index[own] = call.index
    return Trajectory(
        policy=policy, branch=number, parent_branch=branch.parent, fork_at=fork_at, token_ids=token_ids,
        loss_mask=loss_mask, behavior_logprobs=logprobs, versions=versions, call_index=call_index, reward=reward,
        rewards_per_call=rewards_per_call, finish_reason=last.generation.finish_reason,
        truncated=any(call.generation.finish_reason == "length" for call in branch.calls),
    )  # fmt: skip


def _common(a: np.ndarray, b: np.ndarray) -> int:
    """Length of the common prefix."""
    length = min(len(a), len(b))
    differs = a[:length] != b[:length]
    first = int(differs.argmax()) if length else 0
    return first if length and differs[first] else length
