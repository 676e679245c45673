"""Whether the agent does what it should, without a model: python -m pytest"""

from __future__ import annotations

from pathlib import Path

from astraflow.testing.episodes import RunFile

RUN = RunFile(Path(__file__).with_name("run.toml"))  # checks the whole file, as `astraflow validate` does


def test_a_right_answer_earns_one_and_others_nothing() -> None:
    task = RUN.task("train", 0)
    assert RUN.play(task, actor=[task["answer"]]).reward == 1.0
    assert RUN.play(task, actor=["x"]).reward == RUN.play(task, actor=[""]).reward == 0.0


def test_the_policy_is_asked_the_question_of_the_task() -> None:
    task = RUN.task("heldout", 3)
    assert RUN.play(task, actor=["1"]).heard["actor"] == [[{"role": "user", "content": task["question"]}]]


def test_no_held_out_task_is_trained() -> None:
    trained, held_out = (
        {RUN.task(source, row)["question"] for row in range(RUN.num_rows[source])} for source in ("train", "heldout")
    )
    assert not trained & held_out
