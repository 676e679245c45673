"""Operators of a source in the machine: the draw, waiting, what is counted, what ends the run, and restarts."""

from __future__ import annotations

import json
from collections import Counter
from itertools import pairwise
from typing import Any

import pytest

from astraflow.config.schema import RunConfig
from astraflow.contracts import Operator
from astraflow.dataflow.machine import commands as c
from astraflow.dataflow.machine.admission import gate
from astraflow.dataflow.state import Machine
from astraflow.dataflow.views.status import prometheus_text, status
from astraflow.testing.dataflow import Desk, Rows, check_law, policy_section, small_config
from astraflow.types import Group, SourceView, Task

HERE = __name__


class Chance(Operator):
    """Admits with a probability that is the same for every task."""

    place = "source"

    def __init__(self, p: float) -> None:
        self._p = p

    def admit(self, task: Task, view: SourceView) -> Any:
        return self._p


class Odd(Operator):
    """Admits odd rows only; counts the results it was told of."""

    place = "source"

    def __init__(self) -> None:
        self.num_results = 0

    def admit(self, task: Task, view: SourceView) -> float:
        return float(task.row % 2)

    def on_result(self, group: Group) -> None:
        self.num_results += 1

    def state_dict(self) -> dict[str, Any]:
        return {"num_results": self.num_results}

    def load_state_dict(self, state: Any) -> None:
        self.num_results = state["num_results"]


class Wrong(Operator):
    """Breaks its contract in the way that it is told to."""

    place = "source"

    def __init__(self, answer: Any = 1.0, fails_on: str = "") -> None:
        self._answer, self._fails_on = answer, fails_on

    def admit(self, task: Task, view: SourceView) -> Any:
        if self._fails_on == "admit":
            raise KeyError("no such thing")
        return self._answer

    def on_result(self, group: Group) -> None:
        if self._fails_on == "on_result":
            raise SystemExit("no such thing")


def config_of(*operators: Any, groups: int = 2, **changes: Any) -> RunConfig:
    train = {"type": "sums", "operators": list(operators)}
    policies = changes.pop("policies", {"actor": policy_section(groups, 1)})
    return small_config(run__steps=1000, sources__train=train, policies=policies, **changes)


def desk_of(config: RunConfig, rows: int = 10) -> Desk:
    desk = Desk(config, {"train": Rows(rows), "b": Rows(7, "b"), "held": Rows(3)})
    desk.start()
    return desk


def user(name: str, **options: Any) -> dict[str, Any]:
    return {"type": f"{HERE}:{name}", **options}


def test_a_skipped_task_is_counted_by_operator_and_was_never_admitted() -> None:
    desk = desk_of(config_of(user("Odd")))
    leases = desk.lease(100)
    assert {x.task.row % 2 for x in leases} == {1} and len(leases) == 8
    state = desk.machine.state
    assert state.admitted == state.sources["train"].admitted == 4
    assert state.skipped == {"train": {f"{HERE}:Odd": state.sources["train"].position - 4}}
    check_law(desk.machine)
    shown = status(desk.machine, 0.0)["sources"]["train"]
    assert shown["skipped"] == state.sources["train"].skipped and shown["in_flight"] == 4
    count = next(iter(shown["skipped"].values()))
    text = prometheus_text(desk.machine, {}).decode()
    assert f'astraflow_tasks_skipped_total{{operator="{HERE}:Odd",source="train"}} {count}' in text


def test_the_draw_depends_on_seed_source_epoch_and_row_only() -> None:
    def admitted(seed: int) -> list[tuple[int, int]]:
        desk = desk_of(config_of(user("Chance", p=0.3), groups=100, run__seed=seed), rows=200)
        return sorted({(x.task.epoch, x.task.row) for x in desk.lease(400)})

    first = admitted(1)
    assert first == admitted(1) != admitted(2)
    of_epoch = [{row for epoch, row in first if epoch == e} for e in (0, 1)]
    assert 35 <= len(of_epoch[0]) <= 85 and of_epoch[0] != of_epoch[1]


def test_probabilities_multiply_and_each_operator_is_counted_with_its_share() -> None:
    half, third = user("Chance", p=0.5), user("Odd")
    desk = desk_of(config_of(half, third, groups=500), rows=4000)
    assert len(desk.lease(1000)) == 1000
    source = desk.machine.state.sources["train"]
    seen = source.admitted + sum(source.skipped.values())
    assert source.admitted / seen == pytest.approx(0.25, abs=0.04)
    assert source.skipped[f"{HERE}:Chance"] / seen == pytest.approx(0.5, abs=0.04)
    assert source.skipped[f"{HERE}:Odd"] / seen == pytest.approx(0.25, abs=0.04)


def test_one_command_looks_at_so_many_rows_and_the_next_one_goes_on() -> None:
    never = {"type": "curriculum", "by": "question", "levels": ["q5000", *(f"q{i}" for i in range(8000) if i != 5000)]}
    desk = desk_of(config_of(never), rows=8000)
    positions = [0]
    for _ in range(20):
        leases = desk.lease(2)
        source = desk.machine.state.sources["train"]
        if leases:
            break
        positions.append(source.position)
        assert desk.machine.leases.available
    assert {x.task.row for x in leases} == {5000}
    moved = {b - a for a, b in pairwise(positions)}
    assert moved == {gate.ROWS_PER_COMMAND} and len(positions) > 1


def test_throttle_leaves_the_row_where_it_is_until_something_happens() -> None:
    desk = desk_of(config_of({"type": "throttle", "in_flight": 1}, groups=1))
    first = desk.lease(100)
    assert len(first) == 2
    position = desk.machine.state.sources["train"].position
    assert desk.lease(100) == [] and desk.machine.state.sources["train"].position == position == 1
    assert not desk.machine.leases.available, "nobody asks again in vain"
    assert status(desk.machine, 0.0)["sources"]["train"]["asleep"] == "throttle"
    desk.commit(first, [0.0, 1.0])
    desk.step(0)
    assert desk.machine.leases.available
    assert len(desk.lease(100)) == 2
    assert desk.machine.state.skipped == {}


def test_a_result_wakes_a_source_that_waits() -> None:
    desk = desk_of(config_of({"type": "throttle", "in_flight": 2}, groups=2))
    leases = desk.lease(100)
    assert desk.lease(1) == []
    desk.instructions.clear()
    desk.commit(leases[:2], [0.0, 1.0])
    assert c.Wake("leases") in desk.instructions
    assert desk.machine.leases.available
    desk.commit(leases[2:], [1.0, 1.0])  # dropped: its place is free
    assert len(desk.lease(100)) == 2


def test_a_source_that_waits_does_not_stall_the_others() -> None:
    raw = {
        "a": {"type": "sums", "operators": [{"type": "throttle", "in_flight": 1}]},
        "b": {"type": "sums"},
        "held": {"type": "sums"},
    }
    config = small_config(
        run__steps=99, sources=raw, mix={"ratios": {"a": 9, "b": 1}}, policies__actor=policy_section(4, 1)
    )
    desk = Desk(config, {"a": Rows(10), "b": Rows(10), "held": Rows(3)})
    desk.start()
    assert Counter(x.task.source for x in desk.lease(100)) == {"a": 2, "b": 14}
    check_law(desk.machine)


def test_a_source_whose_operators_refuse_everything_does_not_stall_the_others() -> None:
    raw = {
        "a": {"type": "sums", "operators": [user("Chance", p=0.0)]},
        "b": {"type": "sums"},
        "held": {"type": "sums"},
    }
    config = small_config(
        run__steps=99, sources=raw, mix={"ratios": {"a": 9, "b": 1}}, policies__actor=policy_section(4, 1)
    )
    desk = Desk(config, {"a": Rows(3000), "b": Rows(10), "held": Rows(3)})
    desk.start()
    for version in range(3):
        while len(desk.machine.state.policies["actor"].queue) < 4:
            assert {x.task.source for x in desk.play(8, version)} <= {"b"}
        desk.step(version)
        check_law(desk.machine)
    assert desk.machine.state.failure is None
    assert abs(desk.machine.state.sources["a"].credit) < 2, "no debt is piled up"


def test_a_whole_epoch_of_refusals_ends_the_run_with_advice() -> None:
    desk = desk_of(config_of(user("Chance", p=0.0)))
    assert desk.lease(10) == []
    failure = desk.machine.state.failure
    assert failure is not None and failure.kind == "NothingToTrainOn"
    assert failure.thing == "sources.train.operators" and failure.value == f"{HERE}:Chance"
    assert "refused a whole epoch of 10 tasks" in failure.rule and f"{HERE}:Chance 10" in failure.rule
    assert "loosen its options" in failure.fix
    assert not desk.machine.leases.available
    check_law(desk.machine)


def test_refusals_do_not_end_the_run_while_something_is_under_way() -> None:
    desk = desk_of(config_of({"type": "filter_solved", "min_visits": 1, "revisit": 0.0}, groups=2), rows=3)
    leases = desk.lease(100)  # each row, and the first one of the next epoch
    assert len({x.task.row for x in leases}) == 3
    *first, one, two = leases
    desk.commit(first, [1.0] * len(first))
    assert desk.lease(100) == [] and desk.machine.state.failure is None, "a group is being played"
    position = desk.machine.state.sources["train"].position
    assert desk.lease(100) == [] and desk.machine.state.sources["train"].position == position, "one epoch is enough"
    desk.commit([one, two], [1.0, 1.0])
    assert desk.lease(100) == []
    failure = desk.machine.state.failure
    assert failure is not None and failure.value == "filter_solved" and "the tasks are solved" in failure.fix


def test_bad_luck_alone_does_not_end_the_run() -> None:
    desk = desk_of(config_of(user("Chance", p=0.01)), rows=5)
    leases: list[Any] = []
    for _ in range(50):
        leases += desk.lease(100)
    assert len(leases) == 8 and desk.machine.state.failure is None
    assert desk.machine.state.sources["train"].epoch > 10


def test_but_a_probability_that_is_as_good_as_0_does() -> None:
    desk = desk_of(config_of(user("Chance", p=1e-12)), rows=50)
    for _ in range(5):
        assert desk.lease(1) == []
    failure = desk.machine.state.failure
    assert failure is not None and failure.kind == "NothingToTrainOn"


def test_a_throttle_below_one_batch_is_named_instead_of_waiting_forever() -> None:
    desk = desk_of(config_of({"type": "throttle", "in_flight": 1}, groups=2))
    leases = desk.lease(100)
    assert desk.machine.state.failure is None
    desk.commit(leases, [0.0, 1.0])
    assert desk.lease(100) == []
    failure = desk.machine.state.failure
    assert failure is not None and failure.kind == "NothingToTrainOn" and failure.value == "throttle"
    assert "waits" in failure.rule and "lower batch.groups" in failure.fix


def test_a_failed_run_that_starts_again_asks_afresh() -> None:
    desk = desk_of(config_of(user("Chance", p=0.0)))
    desk.lease(10)
    desk.do(c.Reopen())
    assert desk.machine.state.failure is None and desk.machine.leases.available
    desk.lease(10)
    assert desk.machine.state.failure is not None


@pytest.mark.parametrize("answer", [1.5, -0.1, float("nan"), "later", None, True, [1.0]])
def test_a_wrong_answer_ends_the_run_and_names_the_operator(answer: Any) -> None:
    desk = desk_of(config_of("accept_all", user("Wrong", answer=answer)))
    assert desk.lease(10) == []
    failure = desk.machine.state.failure
    assert failure is not None and failure.kind == "DataflowError"
    assert failure.thing == f"sources.train.operators.1 {HERE}:Wrong"
    assert 'must be a probability from 0 to 1 or "wait"' in failure.rule
    assert desk.machine.state.admitted == 0
    check_law(desk.machine)


def test_an_operator_that_raises_ends_the_run_and_is_named() -> None:
    desk = desk_of(config_of(user("Wrong", fails_on="admit")))
    assert desk.lease(10) == []
    failure = desk.machine.state.failure
    assert failure is not None and failure.rule.startswith("failed on task train/0/")
    assert failure.value == "KeyError: 'no such thing'"
    desk = desk_of(config_of(user("Wrong", fails_on="on_result")))
    desk.play(2)
    failure = desk.machine.state.failure
    assert failure is not None and failure.rule.startswith("failed on the result of group train/0/")
    check_law(desk.machine)


def test_results_are_told_once_per_policy_failed_ones_too_and_never_of_evaluation() -> None:
    policies = {"actor": policy_section(2, 1), "verifier": policy_section(2, 1)}
    config = config_of(user("Odd"), policies=policies, evaluation={"source": "held"})
    desk = desk_of(config)
    leases = desk.lease(100)
    groups = {x.group_id for x in leases if x.purpose == "train"}
    for lease in leases:
        desk.commit([lease], error="env: broke")
    assert desk.machine.state.num_results == 2 * len(groups)
    state = json.loads(desk.machine.snapshot())["sources"]["train"]["operators"]
    assert state == [{"num_results": 2 * len(groups)}]


def test_operators_and_cursors_survive_a_restart() -> None:
    operators = [{"type": "greso", "warmup_epochs": 0}, {"type": "filter_solved", "min_visits": 1, "revisit": 0.5}]

    def run(restarts: bool) -> tuple[list[str], Any]:
        desk = desk_of(config_of(*operators), rows=6)
        seen = []
        for version in range(12):
            while len(desk.machine.state.policies["actor"].queue) < 2:
                leases = desk.lease(4)
                seen += [x.episode_id for x in leases]
                reward = {0: [0.0, 1.0], 1: [1.0, 1.0], 2: [0.0, 0.0]}
                for x in leases:
                    desk.commit([x], [reward[x.task.row % 3][int(x.episode_id[-1])]], version=version)
                if restarts and len(seen) % 3 == 0:
                    desk.restart()
            desk.step(version)
            if restarts and version % 4 == 0:
                desk.keep_snapshot()
        return seen, json.loads(desk.machine.snapshot())["sources"]

    assert run(False) == run(True)


def test_evaluation_goes_on_beside_sources_that_wait() -> None:
    config = config_of({"type": "throttle", "in_flight": 1}, groups=1, evaluation={"source": "held"})
    desk = desk_of(config)
    leases = [x for _ in range(8) for x in desk.lease(1)]
    assert Counter(x.task.source for x in leases) == {"train": 2, "held": 3}


def test_a_machine_of_another_list_of_operators_cannot_read_the_state() -> None:
    desk = desk_of(config_of("greso"))
    desk.play(4)
    with pytest.raises(ValueError, match="zip"):
        Machine(config_of("greso", "accept_all"), {"train": Rows(10), "held": Rows(3)}, desk.machine.snapshot())
