"""[stages] and [consumers]: what a run file may ask for, and which stage comes before which."""

from __future__ import annotations

from typing import Any, ClassVar

import pytest

from astraflow.config.load import check_run
from astraflow.config.stages import ROW_COLUMNS, TASK_COLUMN, stage_plans
from astraflow.errors import ConfigError
from astraflow.launch.checks import stage_start_problems
from astraflow.launch.plan import automatic_threads, plan_processes
from astraflow.wire.codec import TRAJECTORY_SCHEMA

TESTING = "astraflow.testing.stages"
ECHO, SUM = {"type": f"{TESTING}:EchoStage"}, {"type": f"{TESTING}:EchoSumStage"}
REWARD, REWARD_OF_ECHO = {"type": f"{TESTING}:LengthReward"}, {"type": f"{TESTING}:EchoReward"}
JUDGE = {"type": "reward_model", "url": "http://127.0.0.1:9/v1", "model": "m", "prompt": "{completion}"}


def raw(stages: Any, **more: Any) -> dict[str, Any]:
    return {
        "run": {"name": "x", "steps": 1},
        "sources": {"train": "sums"},
        "workflow": {"type": "single_turn", "reward": "sums"},
        "policies": {"actor": {"model": "tiny-char"}, "verifier": {"model": "tiny-char"}},
        "stages": stages,
        **more,
    }


def problem(stages: Any, **more: Any) -> str:
    with pytest.raises(ConfigError) as caught:
        check_run(raw(stages, **more), "test")
    assert len(caught.value.problems) == 1, caught.value
    return caught.value.problems[0]


class Circular:
    needs: ClassVar[tuple[str, ...]] = ("loop_b",)
    adds: ClassVar[dict[str, str]] = {"loop_a": "row"}

    def __init__(self, size: int = 1) -> None:
        self.size = size


class Back(Circular):
    needs: ClassVar[tuple[str, ...]] = ("loop_a",)
    adds: ClassVar[dict[str, str]] = {"loop_b": "row"}


class Silent:
    pass


class Overwrites(Circular):
    needs: ClassVar[tuple[str, ...]] = ("token_ids",)
    adds: ClassVar[dict[str, str]] = {"versions": "token"}


class WrongKind(Circular):
    needs: ClassVar[tuple[str, ...]] = ("token_ids",)
    adds: ClassVar[dict[str, str]] = {"x": "tokens"}


class NoReward(Circular):
    needs: ClassVar[tuple[str, ...]] = ("token_ids",)
    adds: ClassVar[dict[str, str]] = {"score": "reward"}


class Misspelt(Circular):
    needs: ClassVar[tuple[str, ...]] = ("token_idx",)
    adds: ClassVar[dict[str, str]] = {"x": "row"}


def own(name: str, **more: Any) -> dict[str, Any]:
    return {"type": f"{__name__}:{name}", **more}


def test_columns_of_rows_are_those_of_the_wire() -> None:
    assert list(ROW_COLUMNS) == TRAJECTORY_SCHEMA.names and TASK_COLUMN not in ROW_COLUMNS


def test_order_follows_from_what_stages_need() -> None:
    plans = stage_plans(check_run(raw({"sum": SUM, "judge": REWARD_OF_ECHO, "echo": ECHO, "ref": "ref_logprobs"}), "x"))
    assert plans["sum"].after == ("echo",) and plans["judge"].after == ("echo",) and plans["echo"].after == ()
    assert [name for name, plan in plans.items() if plan.before_operators] == ["judge", "echo"]
    assert plans["ref"].adds == {"ref_logprobs": "token"} and plans["ref"].policies == ("actor", "verifier")


@pytest.mark.parametrize(
    ("stages", "words"),
    [
        ({"e": {"type": "ref_logprob"}}, "stages.e.type=ref_logprob is not a known name of stages; did you mean"),
        ({"e": {**ECHO, "delay": 1}}, "stages.e.delay=1 is not an option of this type; did you mean 'delay_s'?"),
        ({"e": {**ECHO, "policies": ["actr"]}}, "stages.e.policies='actr' names no policy that is trained"),
        ({"a": ECHO, "b": ECHO}, "stages.b.adds='echo' is added by stages.a already"),
        ({"j": REWARD, "k": JUDGE}, "stages.k.adds='reward' is added by stages.j already"),
        ({"s": SUM}, "stages.s.needs='echo' is no column of a row, and no stage adds it"),
        ({"m": own("Misspelt")}, "did you mean 'token_ids'?"),
        ({"a": own("Circular"), "b": own("Back")}, "stages=a, b wait for each other's columns"),
        ({"s": own("Silent")}, "must say which columns it needs and adds"),
        ({"o": own("Overwrites")}, "stages.o.adds='versions' is a column of every row"),
        ({"w": own("WrongKind")}, "stages.w.adds.x='tokens' must be one of token, row, reward"),
        ({"n": own("NoReward")}, "stages.n.adds.score='reward' does not fit"),
        ({"e": {**ECHO, "policies": ["actor"]}, "s": SUM}, "stages.s.needs='echo' is not added for policy 'verifier'"),
        ({"r": {"type": "reward_model", "url": "u", "model": "m"}}, "stages.r.prompt is missing"),
    ],
)
def test_what_cannot_work_is_refused_at_load(stages: Any, words: str) -> None:
    assert words in problem(stages)


def test_consumers_read_policies_of_the_run() -> None:
    said = problem({}, consumers={"log": {"policies": ["critic"]}})
    assert "consumers.log.policies='critic' names no policy that is trained" in said


def test_values_that_a_built_in_stage_refuses_are_found_before_the_run() -> None:
    config = check_run(raw({"j": {**JUDGE, "pattern": "("}, "r": {"type": "ref_logprobs", "dtype": "int8"}}), "x")
    problems = stage_start_problems(config)
    assert len(problems) == 2 and "stages.j.pattern=(" in problems[0] and "stages.r.dtype=int8" in problems[1]
    assert not stage_start_problems(check_run(raw({"j": {**JUDGE, "pattern": "(", "workers": 0}}), "x"))


def test_each_worker_is_a_process_of_its_own() -> None:
    config = check_run(raw({"j": {**JUDGE, "workers": 2}, "r": "ref_logprobs", "by_hand": {**ECHO, "workers": 0}}), "x")
    specs = [s for s in plan_processes(config, cores=8) if s.role == "stage"]
    assert [(s.name, s.subject) for s in specs] == [("stage-j-0", "j"), ("stage-j-1", "j"), ("stage-r-0", "r")]
    assert automatic_threads(config, cores=8) == 2, "two trainers, a node and the reference model"
