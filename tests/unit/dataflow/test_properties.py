"""Random interleavings of everything that can happen, crashes included: the accounting law holds at all times."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, ClassVar, Literal

from hypothesis import event
from hypothesis.stateful import initialize

from astraflow.contracts import Operator
from astraflow.dataflow.machine.records import Put
from astraflow.testing.dataflow import Desk, Rows, policy_section, row_tokens, small_config, sources
from astraflow.types import Group, SourceView, Task, Tokens
from dataflow_model import MIN_STEPS, NUM_MACHINES, Dataflow, counted


class TwoPolicies(Dataflow):
    """Two policies with batches of different size and different bounds."""

    policies = {"actor": policy_section(2, 1), "verifier": policy_section(1, 2)}  # noqa: RUF012


class Synchronous(Dataflow):
    """Staleness 0."""

    policies = {"actor": policy_section(1, 0)}  # noqa: RUF012


class Moody(Operator):
    """Every answer there is, by row, number of results and what is in flight."""

    place = "source"

    def __init__(self) -> None:
        self.num_results = 0

    def admit(self, task: Task, view: SourceView) -> float | Literal["wait"]:
        answers: tuple[float | Literal["wait"], ...] = (1.0, 0.5, 0.0, 1.0, "wait")
        if not view.in_flight:
            return 1.0  # a source that waits with nothing in flight would end the run
        return answers[(task.row + self.num_results + view.step + view.in_flight) % 5]

    def on_result(self, group: Group) -> None:
        self.num_results += 1

    def state_dict(self) -> dict[str, Any]:
        return {"num_results": self.num_results}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        self.num_results = state["num_results"]


class Mixed(Dataflow):
    """Two sources whose operators wait, skip and draw, with groups of different sizes."""

    sources: ClassVar[dict[str, Any]] = {
        "train": {"type": "sums", "operators": ["greso", f"{__name__}:Moody"]},
        "b": {"type": "sums", "group_size": 3, "operators": [{"type": "throttle", "per_step": 2}, f"{__name__}:Moody"]},
        "held": {"type": "sums"},
    }

    @initialize()
    def begin(self) -> None:
        super().begin()
        config = small_config(
            run__steps=6,
            policies=self.policies,
            sources=self.sources,
            mix={"ratios": {"train": [3, 1], "b": 1}},
            evaluation={"source": "held", "every": 3, "num_tasks": 1},
        )
        self.desk = Desk(config, {"train": Rows(4), "b": Rows(3), "held": Rows(3)})
        self.desk.start("a", "b")

    def teardown(self) -> None:
        if self.desk is not None:
            state = self.desk.machine.state
            event(f"failed: {state.failure}")
            event(f"skipped: {bool(state.skipped)}, from both: {all(s.admitted for s in state.sources.values())}")
        super().teardown()


class Operators(Dataflow):
    """Operators of every phase, with state and tokens; some answers are copies of others."""

    policies: ClassVar[dict[str, Any]] = {
        "actor": policy_section(
            1,
            2,
            operators=[
                {"type": "dedup", "window": 3},
                {"type": "reward_clip", "low": 0.5},
                {"type": "balance", "smooth": 0.5},
                "staleness_weight",
            ],
            algorithm={"advantage": {"type": "reinforce_pp", "baseline": "group"}},
        ),
        "verifier": policy_section(
            1, 1, operators=["reward_normalize"], algorithm={"advantage": {"type": "per_call", "gamma": 0.5}}
        ),
    }

    @initialize()
    def begin(self) -> None:
        super().begin()
        assert self.desk is not None

        def copies(put: Put, rows: Sequence[int]) -> list[Tokens]:
            return row_tokens(Put(1, put.offset % 128, 1), [row // 3 for row in rows])

        self.desk = Desk(self.desk.config, sources(4), copies)
        self.desk.start("a", "b")

    def teardown(self) -> None:
        if self.desk is not None:
            assert self.desk.machine.state.failure is None
            policies = self.desk.machine.state.policies
            event(f"copies: {policies['actor'].dropped.get('dedup', 0) > 0}")
            event(f"steps of each: {[p.latest for p in policies.values()]}")
        super().teardown()


TestDataflow = counted(Dataflow)
TestTwoPolicies = counted(TwoPolicies)
TestSynchronous = counted(Synchronous)
TestOperators = counted(Operators)
TestMixed = counted(Mixed)


def test_all_of_them_take_ten_thousand_steps() -> None:
    assert sum(name.startswith("Test") for name in globals()) == NUM_MACHINES["test_properties"]
    assert sum(NUM_MACHINES.values()) * MIN_STEPS >= 10_000
