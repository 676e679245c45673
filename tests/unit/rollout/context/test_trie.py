"""The context trie: every sampled token exactly once, on exactly the prefix it was sampled from."""

from __future__ import annotations

import random
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from astraflow.errors import EpisodeError
from astraflow.rollout.context.trie import full_sequence, trajectories
from astraflow.types import Call, Generation, Trajectory

EOS = 0


def call(index: int, prompt: list[int], sampled: list[int], finish: str = "stop", **arrays: Any) -> Call:
    size = len(sampled)
    logprobs = arrays.get("logprobs", [-(index + 1) - i / 100 for i in range(size)])
    versions = arrays.get("versions", [index + i for i in range(size)])
    generation = Generation(
        np.asarray(sampled, np.int32), np.asarray(logprobs, np.float32), np.asarray(versions, np.int32), finish  # type: ignore[arg-type]
    )  # fmt: skip
    return Call("actor", index, np.asarray(prompt, np.int32), generation)


def shape(branches: list[Trajectory]) -> list[tuple[int, int, list[int], list[int]]]:
    """Per branch: parent, fork_at, own ids, own call indices."""
    return [(b.parent_branch, b.fork_at, b.token_ids.tolist(), b.call_index.tolist()) for b in branches]


def check(calls: list[Call], branches: list[Trajectory]) -> None:
    """The whole promise, in plain Python."""
    sampled = []
    for number, branch in enumerate(branches):
        assert branch.branch == number and -1 <= branch.parent_branch < number
        size = len(branch.token_ids)
        assert size == len(branch.loss_mask) == len(branch.behavior_logprobs) == len(branch.versions)
        assert size == len(branch.call_index)
        assert (branch.token_ids.dtype, branch.loss_mask.dtype) == (np.int32, np.bool_)
        assert (branch.behavior_logprobs.dtype, branch.versions.dtype) == (np.float32, np.int32)
        assert branch.call_index.dtype == np.int16
        assert not branch.behavior_logprobs[~branch.loss_mask].any()
        assert (branch.versions[~branch.loss_mask] == -1).all() and (branch.call_index[~branch.loss_mask] == -1).all()
        if branch.parent_branch >= 0:
            assert 0 < branch.fork_at < len(full_sequence(branches, branch.parent_branch))
        else:
            assert branch.fork_at == 0
        path = full_sequence(branches, number).tolist()
        assert len(path) == branch.fork_at + size
        for index in sorted({int(i) for i in branch.call_index if i >= 0}):
            (at,) = np.nonzero(branch.call_index == index)
            sampled.append(index)
            source = calls[index]
            start, length = len(source.prompt_ids), len(source.generation.token_ids)
            assert at.tolist() == list(range(start - branch.fork_at, start - branch.fork_at + length))
            assert path[: start + length] == [*source.prompt_ids.tolist(), *source.generation.token_ids.tolist()]
            assert branch.loss_mask[at].all()
            assert branch.behavior_logprobs[at].tolist() == source.generation.logprobs.tolist()
            assert branch.versions[at].tolist() == source.generation.versions.tolist()
    assert sorted(sampled) == [c.index for c in calls if len(c.generation.token_ids)]


def test_a_linear_agent_is_one_branch() -> None:
    calls = [call(0, [1, 2], [3, 4]), call(1, [1, 2, 3, 4, 5], [6]), call(2, [1, 2, 3, 4, 5, 6, 7, 8], [9])]
    branches = trajectories(calls, "actor")
    assert shape(branches) == [(-1, 0, [1, 2, 3, 4, 5, 6, 7, 8, 9], [-1, -1, 0, 0, -1, 1, -1, -1, 2])]
    check(calls, branches)


def test_tokens_of_twelve_linear_calls_are_stored_once() -> None:
    prompt: list[int] = [1]
    calls = []
    for index in range(12):
        calls.append(call(index, prompt, [100 + index] * 5))
        prompt = [*prompt, *[100 + index] * 5, 7]
    (branch,) = trajectories(calls, "actor")
    assert len(branch.token_ids) == len(prompt) - 1 and branch.loss_mask.sum() == 60


def test_two_equal_calls_keep_their_weight() -> None:
    calls = [call(0, [1, 2], [3, EOS]), call(1, [1, 2], [3, EOS]), call(2, [1, 2], [3, EOS])]
    branches = trajectories(calls, "actor")
    assert shape(branches) == [
        (-1, 0, [1, 2, 3, EOS], [-1, -1, 0, 0]),
        (0, 2, [3, EOS], [1, 1]),
        (0, 2, [3, EOS], [2, 2]),
    ]
    check(calls, branches)


def test_a_prompt_may_run_along_sampled_tokens_and_fork_inside_them() -> None:
    calls = [call(0, [1, 2], [3, 4, 5]), call(1, [1, 2, 3, 9], [6])]
    branches = trajectories(calls, "actor")
    assert shape(branches)[1] == (0, 3, [9, 6], [-1, 1])
    check(calls, branches)


def test_a_prompt_that_ends_inside_a_branch_forks_without_given_tokens() -> None:
    calls = [call(0, [1, 2, 3], [4]), call(1, [1, 2], [3, 4])]
    branches = trajectories(calls, "actor")
    assert shape(branches)[1] == (0, 2, [3, 4], [1, 1])  # equal to given tokens, and still its own
    check(calls, branches)


def test_unrelated_prompts_are_roots() -> None:
    calls = [call(0, [1], [2]), call(1, [5], [6]), call(2, [5, 6, 7], [8])]
    branches = trajectories(calls, "actor")
    assert [(p, f) for p, f, _, _ in shape(branches)] == [(-1, 0), (-1, 0)]
    check(calls, branches)


def test_a_rewritten_history_forks_where_it_parts_and_shares_the_rest() -> None:
    calls = [call(0, [1, 2, 3], [4]), call(1, [1, 2, 3, 4, 5], [6]), call(2, [1, 2, 8, 5], [7])]
    branches = trajectories(calls, "actor", reward=0.5)
    assert shape(branches)[1] == (0, 2, [8, 5, 7], [-1, -1, 2])
    assert [b.reward for b in branches] == [0.5, 0.5]
    check(calls, branches)


def test_the_longest_path_wins_over_a_shorter_tip() -> None:
    calls = [
        call(0, [1, 2], [3]),  # branch 0: 1 2 3
        call(1, [1, 2], [3]),  # branch 1: the same path
        call(2, [1, 2, 3, 4], [5]),  # grows one of them
        call(3, [1, 2, 3, 4, 5, 6], [7]),  # must follow it, not the shorter tip
    ]
    branches = trajectories(calls, "actor")
    assert len(branches) == 2
    assert sorted(len(b.token_ids) for b in branches) == [1, 7]
    check(calls, branches)


def test_of_two_equal_paths_the_one_that_ends_there_grows() -> None:
    calls = [call(0, [1], [2]), call(1, [1], [2]), call(2, [1, 2, 3], [4]), call(3, [1, 2, 5], [6])]
    branches = trajectories(calls, "actor")
    assert shape(branches) == [(-1, 0, [1, 2, 3, 4], [-1, 0, -1, 2]), (0, 1, [2, 5, 6], [1, -1, 3])]
    check(calls, branches)


def test_a_longer_branch_wins_over_the_first_branchs_tip() -> None:
    calls = [call(0, [1], [2, 3]), call(1, [1], [2, 3, 4]), call(2, [1, 2, 3, 4, 5], [6])]
    branches = trajectories(calls, "actor")
    assert shape(branches)[1] == (0, 1, [2, 3, 4, 5, 6], [1, 1, 1, -1, 2])
    check(calls, branches)


def test_a_fork_of_a_fork_expands_to_its_whole_path() -> None:
    calls = [call(0, [1, 2, 3, 4], [5]), call(1, [1, 2, 9, 9], [6]), call(2, [1, 2, 9, 7], [8]), call(3, [1, 5], [5])]
    branches = trajectories(calls, "actor")
    assert [(b.parent_branch, b.fork_at) for b in branches] == [(-1, 0), (0, 2), (1, 3), (0, 1)]
    assert full_sequence(branches, 2).tolist() == [1, 2, 9, 7, 8]
    check(calls, branches)


def test_a_turn_cut_by_length_gains_no_trained_eos() -> None:
    calls = [call(0, [1, 2], [3, 4], "length"), call(1, [1, 2, 3, 4, EOS, 5], [6, EOS])]
    (branch,) = trajectories(calls, "actor")
    assert branch.token_ids[branch.loss_mask].tolist() == [3, 4, 6, EOS]
    assert not branch.loss_mask[4] and branch.token_ids[4] == EOS
    assert (branch.truncated, branch.finish_reason) == (True, "stop")
    check(calls, [branch])


def test_truncation_belongs_to_the_branch_that_has_the_cut_call() -> None:
    branches = trajectories([call(0, [1], [2], "length"), call(1, [1], [3])], "actor")
    assert [(b.truncated, b.finish_reason) for b in branches] == [(True, "length"), (False, "stop")]


def test_a_marker_logprob_and_its_version_stay_on_their_token() -> None:
    marked = call(1, [1, 2, 3], [6, 77, 8], logprobs=[-1.0, -7.25, -1.0], versions=[4, 5, 6])
    calls = [call(0, [1], [2]), marked, call(2, [1, 2, 3, 6, 77, 8, 9], [9]), call(3, [1, 2, 3, 6, 77], [5])]
    branches = trajectories(calls, "actor")
    at = [(b.branch, int(i)) for b in branches for i in np.nonzero(b.behavior_logprobs == np.float32(-7.25))[0]]
    assert at == [(0, 4)]
    assert (branches[0].token_ids[4], branches[0].versions[4], branches[0].call_index[4]) == (77, 5, 1)
    check(calls, branches)


def test_rewards_per_call_go_to_every_branch_and_must_be_one_per_call() -> None:
    calls = [call(0, [1], [2]), call(1, [1], [3])]
    branches = trajectories(calls, "actor", 1.0, [0.25, 0.75])
    assert all(b.rewards_per_call == (0.25, 0.75) for b in branches)
    with pytest.raises(EpisodeError, match=r"rewards_per_call\.actor=1 values must be one per call"):
        trajectories(calls, "actor", 1.0, [0.25])
    assert trajectories(calls, "actor")[0].reward is None


def test_no_calls_and_empty_generations_leave_no_branch() -> None:
    assert trajectories([], "actor") == []
    assert trajectories([call(0, [1], [])], "actor") == []
    calls = [call(0, [1], [2]), call(1, [1, 2], []), call(2, [1, 2, 3], [4])]
    branches = trajectories(calls, "actor")
    assert len(branches) == 1
    check(calls, branches)


@st.composite
def episodes(draw: st.DrawFn) -> list[Call]:
    """Calls whose prompts continue, cut, rewrite or repeat what is there, over so few symbols that much is equal."""
    token = st.integers(0, 2)
    known: list[list[int]] = [[]]
    calls = []
    for index in range(draw(st.integers(1, 9))):
        base = draw(st.sampled_from(known))
        base = base[: draw(st.integers(0, len(base)))] if draw(st.booleans()) else base
        prompt = base + draw(st.lists(token, max_size=4)) or [draw(token)]
        sampled = draw(st.lists(token, min_size=draw(st.sampled_from([0, 1, 1, 1])), max_size=4))
        calls.append(call(index, prompt, sampled, draw(st.sampled_from(["stop", "length"]))))
        known += [prompt, prompt + sampled]
    return calls


@given(episodes())
def test_any_episode_keeps_every_sampled_token_once_on_its_own_prefix(calls: list[Call]) -> None:
    check(calls, trajectories(calls, "actor"))


@given(episodes(), st.randoms(use_true_random=False))
def test_the_order_of_completion_does_not_matter(calls: list[Call], rng: random.Random) -> None:
    shuffled = list(calls)
    rng.shuffle(shuffled)
    assert shape(trajectories(shuffled, "actor")) == shape(trajectories(calls, "actor"))


@given(episodes())
def test_each_call_adds_only_what_no_path_has(calls: list[Call]) -> None:
    paths: list[list[int]] = []
    added = 0
    for c in calls:
        if len(c.generation.token_ids):
            prompt, sampled = c.prompt_ids.tolist(), c.generation.token_ids.tolist()
            added += len(prompt) - max((_common(prompt, path) for path in paths), default=0) + len(sampled)
            paths.append(prompt + sampled)
    assert sum(len(b.token_ids) for b in trajectories(calls, "actor")) == added


def _common(a: list[int], b: list[int]) -> int:
    shared = 0
    while shared < min(len(a), len(b)) and a[shared] == b[shared]:
        shared += 1
    return shared
