from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from astraflow.launch.plan import ProcessSpec
from astraflow.launch.supervision import (
    Event,
    Exited,
    Failed,
    Finished,
    Instruction,
    Interrupted,
    Limits,
    Ready,
    Signal,
    Start,
    Supervision,
    Tick,
)

SPECS = [
    ProcessSpec("dataflow", "dataflow"),
    ProcessSpec("trainer-actor", "trainer", "actor"),
    ProcessSpec("node-a", "node", "a"),
    ProcessSpec("node-late", "node", "late", start_after_s=20.0),
]
KILLED = [*SPECS[:3], ProcessSpec("node-k", "node", "k", kill_after_s=30.0)]


def running(specs: list[ProcessSpec] = SPECS) -> Supervision:
    """A run whose dataflow service answered at time 1."""
    state = Supervision(specs, 0.0)
    assert state.handle(Tick(), 0.0) == [Start("dataflow", 1)]
    state.handle(Ready(), 1.0)
    return state


def names(instructions: list[Instruction]) -> list[str]:
    return [i.name for i in instructions]


def test_workers_start_when_dataflow_answers_and_late_nodes_later() -> None:
    state = Supervision(SPECS, 0.0)
    assert state.handle(Tick(), 0.0) == [Start("dataflow", 1)]
    assert state.handle(Tick(), 5.0) == []
    assert state.handle(Ready(), 6.0) == [Start("trainer-actor", 1), Start("node-a", 1)]
    assert state.handle(Tick(), 25.9) == []
    assert state.handle(Tick(), 26.0) == [Start("node-late", 1)]


def test_a_crashed_process_starts_again_after_a_growing_pause() -> None:
    state = running()
    assert state.handle(Exited("trainer-actor", -9), 10.0) == []
    assert state.handle(Tick(), 10.3) == [Start("trainer-actor", 2)]
    assert state.handle(Exited("trainer-actor", 1), 11.0) == []
    assert state.handle(Tick(), 11.4) == []
    assert state.handle(Tick(), 11.6) == [Start("trainer-actor", 3)]
    assert state.num_restarts == 2


def test_the_dataflow_service_starts_again_and_workers_stay() -> None:
    state = running()
    state.handle(Exited("dataflow", -9), 10.0)
    assert state.handle(Tick(), 10.3) == [Start("dataflow", 2)]
    assert state.handle(Ready(), 11.0) == []
    assert set(state.running()) == {"dataflow", "trainer-actor", "node-a"}


def test_too_many_crashes_fail_the_run_with_the_last_words() -> None:
    state = running()
    now = 10.0
    for _ in range(6):
        state.handle(Exited("node-a", 1, "Traceback ...\nZeroDivisionError"), now)
        now += 10.0
        state.handle(Tick(), now)
    assert state.failure is not None and state.phase == "stopping"
    assert state.failure.startswith("node-a died 6 times") and "ZeroDivisionError" in state.failure


def test_old_crashes_are_forgiven() -> None:
    state = running()
    now = 10.0
    for _ in range(20):
        state.handle(Exited("node-a", -9), now)
        now += 100.0
        state.handle(Tick(), now)
    assert state.failure is None and "node-a" in state.running()


def test_a_wrong_setting_is_not_tried_again() -> None:
    state = running()
    todo = state.handle(Exited("trainer-actor", 2, "model='x' is no directory"), 3.0)
    assert state.failure is not None and "model='x'" in state.failure
    assert todo == [Signal("node-a", kill=False)]


def test_a_worker_that_left_while_the_run_goes_on_comes_back_and_is_no_crash() -> None:
    state = running()
    assert state.handle(Exited("trainer-actor", 0), 10.0) == []
    assert state.handle(Tick(), 14.9) == []
    assert state.handle(Tick(), 15.0) == [Start("trainer-actor", 2)]


def test_a_worker_that_saw_the_end_first_does_not_come_back() -> None:
    state = running()
    state.handle(Exited("trainer-actor", 0), 10.0)
    state.handle(Exited("node-a", 0), 10.0)
    assert state.handle(Finished(), 10.5) == [Signal("dataflow", kill=False)]
    state.handle(Exited("dataflow", 0), 11.0)
    assert state.phase == "done" and state.succeeded


def test_a_dataflow_service_that_refuses_its_first_start_is_not_tried_again() -> None:
    state = Supervision(SPECS, 0.0)
    state.handle(Tick(), 0.0)
    state.handle(Exited("dataflow", 1, "dataflow.port=80 cannot be bound"), 1.0)
    assert state.phase == "done" and state.failure is not None and "cannot be bound" in state.failure


def test_planned_kill_happens_once_is_replaced_and_is_no_crash() -> None:
    state = running(KILLED)
    assert state.handle(Tick(), 30.9) == []
    assert state.handle(Tick(), 31.0) == [Signal("node-k", kill=True)]
    assert state.handle(Tick(), 31.1) == []
    state.handle(Exited("node-k", -9), 31.2)
    assert state.handle(Tick(), 31.5) == [Start("node-k", 2)]
    assert state.handle(Tick(), 500.0) == []
    assert state.failure is None


def test_a_finished_run_waits_for_its_workers_then_ends_dataflow() -> None:
    state = running()
    assert state.handle(Finished(), 50.0) == []
    assert state.handle(Exited("node-a", 0), 51.0) == []
    assert not state.succeeded
    assert state.handle(Exited("trainer-actor", 0), 52.0) == [Signal("dataflow", kill=False)]
    state.handle(Exited("dataflow", 0), 53.0)
    assert state.phase == "done" and state.succeeded


def test_a_trainer_that_dies_while_the_run_finishes_starts_again() -> None:
    state = running()
    state.handle(Finished(), 50.0)
    state.handle(Exited("node-a", -9), 51.0)
    state.handle(Exited("trainer-actor", -9), 51.0)
    assert state.phase == "finishing"
    assert state.handle(Tick(), 52.0) == [Start("trainer-actor", 2)]
    assert state.handle(Exited("trainer-actor", 0), 55.0) == [Signal("dataflow", kill=False)]
    state.handle(Exited("dataflow", -15), 56.0)
    assert state.phase == "done" and state.succeeded


def test_a_worker_that_never_leaves_is_ended_and_the_run_is_no_success() -> None:
    state = running()
    state.handle(Finished(), 50.0)
    state.handle(Exited("node-a", 0), 51.0)
    assert state.handle(Tick(), 169.0) == []
    assert state.handle(Tick(), 170.0) == [Signal("trainer-actor", kill=False)]
    assert state.handle(Tick(), 190.0) == [Signal("trainer-actor", kill=True)]
    assert state.handle(Exited("trainer-actor", -9), 191.0) == [Signal("dataflow", kill=False)]
    state.handle(Exited("dataflow", 0), 192.0)
    assert state.phase == "done" and not state.succeeded


def test_one_interrupt_ends_cleanly_and_a_second_at_once() -> None:
    state = running()
    assert names(state.handle(Interrupted(), 10.0)) == ["trainer-actor", "node-a"]
    assert state.handle(Exited("node-a", 0), 11.0) == []
    assert state.handle(Interrupted(), 12.0) == [Signal("dataflow", kill=True), Signal("trainer-actor", kill=True)]
    state.handle(Exited("dataflow", -9), 12.1)
    state.handle(Exited("trainer-actor", -9), 12.1)
    assert state.phase == "done" and not state.succeeded and state.failure is None


def test_dataflow_that_never_answers_is_killed_and_counts_as_a_crash() -> None:
    state = Supervision(SPECS, 0.0)
    state.handle(Tick(), 0.0)
    assert state.handle(Tick(), 300.0) == []
    assert state.handle(Tick(), 300.1) == [Signal("dataflow", kill=True)]
    state.handle(Exited("dataflow", -9), 300.2)
    assert state.handle(Tick(), 301.0) == [Start("dataflow", 2)]


def test_a_failure_that_the_dataflow_service_reports_ends_the_run() -> None:
    state = running()
    assert names(state.handle(Failed("every group was dropped; use another reward"), 10.0)) == [
        "trainer-actor",
        "node-a",
    ]
    state.handle(Exited("trainer-actor", 0), 11.0)
    state.handle(Exited("node-a", 0), 11.0)
    state.handle(Exited("dataflow", 0), 11.0)
    assert state.phase == "done" and state.failure == "every group was dropped; use another reward"
    assert not state.succeeded


ACTIONS = st.sampled_from(["ready", "finished", "interrupt", "tick", "crash", "leave", "refuse"])


@given(st.lists(st.tuples(ACTIONS, st.integers(0, 3), st.floats(0.0, 40.0)), max_size=60))
def test_whatever_happens_nothing_runs_twice_and_everything_ends(script: list[tuple[str, int, float]]) -> None:
    state, now = Supervision(SPECS, 0.0), 0.0
    alive: set[str] = set()
    answered = False

    def take(event: Event) -> None:
        nonlocal answered
        answered |= isinstance(event, Ready)
        for instruction in state.handle(event, now):
            if isinstance(instruction, Start):
                assert instruction.name not in alive
                assert answered or instruction.name == "dataflow"
                alive.add(instruction.name)
            else:
                assert instruction.name in alive
        assert set(state.running()) == alive
        assert state.phase != "done" or not alive

    codes = {"crash": -9, "leave": 0, "refuse": 2}
    take(Tick())
    for action, which, pause in script:
        now += pause
        if action == "ready" and "dataflow" in alive:
            take(Ready())
        elif action == "finished" and answered:
            take(Finished())
        elif action == "interrupt":
            take(Interrupted())
        elif action in codes and alive:
            name = sorted(alive)[which % len(alive)]
            alive.discard(name)
            take(Exited(name, codes[action], "last words"))
        else:
            take(Tick())
    take(Interrupted())
    take(Interrupted())
    for name in sorted(alive):
        alive.discard(name)
        take(Exited(name, -9))
    assert state.phase == "done"


def test_limits_are_used() -> None:
    state = Supervision(SPECS, 0.0, Limits(max_crashes=0))
    state.handle(Tick(), 0.0)
    state.handle(Exited("dataflow", 1), 1.0)
    assert state.failure is not None and state.phase == "done"
