"""A complete group on its way through its policy's operators, in the machine and in the service."""

from __future__ import annotations

import json
import math
import sys
from collections.abc import Callable, Sequence
from typing import Any

import msgspec
import numpy as np
import pytest
from msgspec.structs import replace

from astraflow.contracts import Operator
from astraflow.dataflow.machine.records import Put
from astraflow.errors import JournalError
from astraflow.testing.dataflow import Desk, check_law, episode, policy_section, row_tokens, small_config, trajectory
from astraflow.types import EpisodeLease, Group, Tokens, Trajectory
from astraflow.wire.codec import list_lengths

HERE = "own_routing_operators"
sys.modules.setdefault(HERE, sys.modules[__name__])


class Spoils(Operator):
    """Changes what it should not, after it counted the group."""

    def __init__(self, how: str) -> None:
        self.how, self.seen = how, 0

    def on_group(self, group: Group) -> Group | str:
        self.seen += 1
        match self.how:
            case "raise":
                raise RuntimeError("boom")
            case "metrics":
                group.metrics[0]["success"] = 9.0  # type: ignore[index]
            case "lose":
                group.episode_ids.pop()
            case "name":
                return f"reason_{self.seen}"
            case "unscore":
                group.rewards = [None] * len(group.rewards)
        return group

    def state_dict(self) -> dict[str, Any]:
        return {"seen": self.seen}

    def load_state_dict(self, state: Any) -> None:
        self.seen = state["seen"]


def desk(operators: Sequence[Any] = ("keep_all",), advantage: Any = "grpo", **more: Any) -> Desk:
    section = policy_section(operators=list(operators), algorithm={"advantage": advantage}, **more)
    made = Desk(small_config(policies__actor=section))
    made.start()
    return made


@pytest.mark.parametrize("how", ["raise", "metrics", "lose"])
def test_an_operator_that_breaks_its_contract_stops_the_run_by_name_and_the_group_is_counted(how: str) -> None:
    one = desk([{"type": f"{HERE}:Spoils", "how": how}])
    one.play(2)
    failure = one.machine.state.failure
    assert failure is not None and "policies.actor Spoils" in str(failure) and "train/0/" in str(failure)
    assert one.machine.state.policies["actor"].dropped == {"operator_failed": 1}
    assert not one.machine.state.puts
    check_law(one.machine)
    one.machine.snapshot()
    before = one.machine.state.policies["actor"].operators
    one.restart()
    assert one.machine.state.failure is None, "a start tries again"
    one.machine.snapshot()
    assert one.machine.state.policies["actor"].operators == before and before[0] == {"seen": 1}


def test_a_group_without_scored_episodes_after_its_operators_is_dropped_as_unscored() -> None:
    one = desk([{"type": f"{HERE}:Spoils", "how": "unscore"}])
    one.play(2)
    assert one.machine.state.failure is None
    assert one.machine.state.policies["actor"].dropped == {"unscored": 1}
    check_law(one.machine)


class Punishes(Operator):
    """An episode without a reward failed."""

    phase = "shape"

    def on_group(self, group: Group) -> Group | str:
        group.rewards = [-1.0 if r is None else r for r in group.rewards]
        return group


@pytest.mark.parametrize("group_size", [3, 4])
def test_an_operator_may_score_what_the_workflow_did_not(group_size: int) -> None:
    section = policy_section(1, operators=[f"{HERE}:Punishes", "staleness_weight"])
    one = Desk(small_config(policies__actor=section, workflow__group_size=group_size))
    one.start()
    one.commit(one.lease(group_size), [1.0, 0.0, None, None][:group_size])
    batch = one.take(0)
    assert batch is not None and [e.sibling for e in batch.groups[0].entries] == list(range(group_size))
    assert [e.part.reward for e in batch.groups[0].entries] == [1.0, 0.0, -1.0, -1.0][:group_size]
    assert batch.metrics["reward/mean"] == sum([1.0, 0.0, -1.0, -1.0][:group_size]) / group_size
    assert one.machine.state.policies["actor"].dropped_episodes == {}
    check_law(one.machine)
    before = json.loads(one.machine.snapshot())
    one.keep_snapshot()
    one.restart()
    assert json.loads(one.machine.snapshot()) == before


def test_a_metric_that_json_cannot_say_stops_the_run_before_the_batch_is_formed() -> None:
    one = desk()
    one.play(4)
    waiting = one.machine.state.policies["actor"].queue
    before = dict(waiting)
    for arrival, group in list(waiting.items()):
        entries = [msgspec.structs.replace(e, success=math.inf) for e in group.entries]
        waiting[arrival] = msgspec.structs.replace(group, entries=entries)
    assert one.take(0) is None
    assert "batch of step 1 success/mean=inf must be finite" in str(one.machine.state.failure)
    assert one.machine.state.policies["actor"].batches == {} and waiting.keys() == before.keys()
    check_law(one.machine)


def test_what_an_operator_leaves_out_of_a_group_is_not_trained_and_its_rows_are_released() -> None:
    same: Callable[[Put, Sequence[int]], list[Tokens]] = lambda put, rows: [  # noqa: E731
        row_tokens(Put(1, 0, 1), [row // 2])[0] for row in rows
    ]
    section = policy_section(1, operators=["dedup"])
    one = Desk(small_config(policies__actor=section, workflow__group_size=4), read_tokens=same)
    one.start()
    leases = one.lease(4)
    one.commit(leases, [1.0, 0.0, 0.0, 1.0])
    batch = one.take(0)
    assert batch is not None and [e.sibling for e in batch.groups[0].entries] == [0, 2]
    assert [e.part.reward for e in batch.groups[0].entries] == [1.0, 0.0]
    check_law(one.machine)
    before = json.loads(one.machine.snapshot())
    one.restart()
    assert json.loads(one.machine.snapshot()) == before


def test_success_is_of_the_reward_that_the_workflow_gave_not_of_what_operators_made_of_it() -> None:
    one = desk([{"type": "reward_scale", "factor": 0.1}])
    one.play(4)
    batch = one.take(0)
    assert batch is not None and batch.metrics["success/mean"] == 0.5 and batch.metrics["reward/max"] == 1.0


def test_zero_variance_keeps_the_size_of_a_batch_by_admitting_others() -> None:
    one = desk(["zero_variance"])
    for equal in (True, False, True, True, False):
        leases = one.lease(2)
        assert len(leases) == 2
        one.commit(leases, [1.0, 1.0 if equal else 0.0])
    batch = one.take(0)
    assert batch is not None and len(batch.groups) == 2
    assert one.machine.state.policies["actor"].dropped == {"zero_variance": 3}
    assert batch.metrics["groups/zero_variance_fraction"] == 3 / 5
    check_law(one.machine)


def test_the_share_of_equal_groups_is_that_since_the_last_batch() -> None:
    one, shares = desk(["zero_variance"]), []
    for step, equals in enumerate(((True, False, False), (False, False), (True, True, False, False))):
        for equal in equals:
            one.commit(one.lease(2), [1.0, 1.0 if equal else 0.0], version=step)
        batch = one.take(step)
        assert batch is not None
        shares.append(batch.metrics["groups/zero_variance_fraction"])
        one.ack(step + 1)
    assert shares == [1 / 3, 0.0, 1 / 2]


def test_equal_groups_that_no_filter_takes_out_count_too_and_single_ones_do_not() -> None:
    one = desk()
    one.commit(one.lease(2), [1.0, 1.0])
    one.commit(one.lease(2), [1.0, 0.0])
    batch = one.take(0)
    assert batch is not None and batch.metrics["groups/zero_variance_fraction"] == 1 / 2
    single = Desk(small_config(policies__actor=policy_section(operators=["keep_all"]), workflow__group_size=1))
    single.start()
    single.play(2)
    batch = single.take(0)
    assert batch is not None and batch.metrics["groups/zero_variance_fraction"] == 0


def test_when_a_filter_leaves_nothing_the_advice_is_about_that_filter() -> None:
    one = desk([{"type": "length_filter", "min_tokens": 50}], batch={"groups": 2, "max_dropped_groups": 3})
    for _ in range(3):
        one.play(2)
    failure = one.machine.state.failure
    assert failure is not None and failure.kind == "NothingToTrainOn"
    assert "length_filter 3" in failure.rule and "length_filter.max_tokens" in failure.fix


def test_reasons_of_a_user_are_counted_up_to_a_number_of_them() -> None:
    one = desk([{"type": f"{HERE}:Spoils", "how": "name"}])
    for _ in range(70):
        one.play(2)
    dropped = one.machine.state.policies["actor"].dropped
    assert len(dropped) == 65 and dropped["other"] == 6
    check_law(one.machine)


def test_rows_that_are_damaged_when_tokens_are_read_drop_the_group_and_not_the_run() -> None:
    def damaged(put: Put, rows: Sequence[int]) -> list[Tokens]:
        raise JournalError("segments", "000001.arrow", "is damaged", "check the disk")

    one = Desk(small_config(policies__actor=policy_section(operators=["dedup"])), read_tokens=damaged)
    one.start()
    one.play(2)
    assert one.machine.state.failure is None
    assert one.machine.state.policies["actor"].dropped == {"damaged": 1}
    check_law(one.machine)


def calls(reward: float, sampled_by: Sequence[int], version: int = 0) -> Trajectory:
    """A trajectory whose sampled tokens come from these calls; given tokens (-1) between."""
    index = np.array(sampled_by, np.int16)
    made = trajectory(reward, version, tokens=len(index))
    made.loss_mask[:] = index >= 0
    made.versions[:] = np.where(index >= 0, version, -1)
    made.call_index[:] = index
    return made


def test_credit_per_call_reaches_the_tokens_of_each_call(serve: Callable[..., Any]) -> None:
    """Returns 1/2, 1 and 0, 0 of two episodes of two calls: +-1/4 for the first call, +-1/2 for the second."""
    section = policy_section(1, operators=["keep_all"], algorithm={"advantage": {"type": "per_call", "gamma": 0.5}})
    client = serve(small_config(policies__actor=section)).start()
    leases: list[EpisodeLease] = client.lease("n", 2).leases
    shapes = [[-1, 0, 0, -1, 1], [-1, 0, 1, 1]]
    episodes = [episode(x, "n", trajectories=[calls(1.0 - k, shapes[k])]) for k, x in enumerate(leases)]
    assert set(client.commit(episodes).values()) == {"accepted"}
    _, table = client.batch("actor", "t", 0)
    assert list_lengths(table.column("advantages")).tolist() == [5, 4]
    assert table.column("advantages").to_pylist() == [[0, 0.25, 0.25, 0, 0.5], [0, -0.25, -0.5, -0.5]]


def test_a_call_of_any_branch_has_its_credit(serve: Callable[..., Any]) -> None:
    """Of two calls without rewards of their own the last one has the outcome, in whatever branch it is."""
    credit = {"type": "per_call", "gamma": 0.0, "baseline": "group"}  # 1, 0 and 0 over all calls: the mean is 1/4
    section = policy_section(1, operators=["keep_all"], algorithm={"advantage": credit})
    client = serve(small_config(policies__actor=section)).start()
    leases: list[EpisodeLease] = client.lease("n", 2).leases
    other = [replace(calls(1.0, [-1, 1, 1]), branch=1), replace(calls(0.0, [-1, 1]), branch=1)]
    episodes = [episode(lease, "n", trajectories=[calls(1.0 - k, [-1, 0]), other[k]]) for k, lease in enumerate(leases)]
    assert set(client.commit(episodes).values()) == {"accepted"}
    _, table = client.batch("actor", "t", 0)
    assert table.column("advantages").to_pylist() == [[0, -0.25], [0, 0.75, 0.75], [0, -0.25], [0, -0.25]]


def test_operators_read_tokens_from_the_segments_also_after_a_restart(serve: Callable[..., Any]) -> None:
    section = policy_section(1, operators=[{"type": "dedup", "min_episodes": 1, "window": 8}])
    config = small_config(policies__actor=section, workflow__group_size=3)
    service = serve(config)
    client = service.start()
    leases = client.lease("n", 3).leases
    same = [trajectory(1.0), trajectory(0.0), trajectory(0.5, marker=8)]
    client.commit([episode(x, "n", trajectories=[t]) for x, t in zip(leases, same, strict=True)])
    _, table = client.batch("actor", "t", 0)
    assert table.column("reward").to_pylist() == [1.0, 0.5]
    state = service.call(service.shell.machine.snapshot)
    service.shell.end("test", RuntimeError("killed"))
    service.wait_for_end()
    again = serve(config)
    recovered = json.loads(again.call(again.shell.machine.snapshot))
    assert recovered["policies"] == json.loads(state)["policies"]
