"""Whether the team does what it should, without a model: python -m pytest"""

from __future__ import annotations

from pathlib import Path

from astraflow.testing.episodes import RunFile

RUN = RunFile(Path(__file__).with_name("run.toml"))  # checks the whole file, as `astraflow validate` does


def test_each_policy_earns_what_it_did() -> None:
    task = RUN.task("train", 0)
    right = task["answer"]
    assert RUN.play(task, actor=[right], verifier=["y"]).reward == {"actor": 1.0, "verifier": 1.0}
    assert RUN.play(task, actor=[right], verifier=["n"]).reward == {"actor": 1.0, "verifier": 0.0}
    assert RUN.play(task, actor=["x"], verifier=["n"]).reward == {"actor": 0.0, "verifier": 1.0}
    assert RUN.play(task, actor=["x"], verifier=[""]).reward == {"actor": 0.0, "verifier": 0.0}


def test_the_verifier_sees_question_and_answer() -> None:
    task = RUN.task("train", 0)
    played = RUN.play(task, actor=["5"], verifier=["y"])
    assert played.heard["verifier"] == [[{"role": "user", "content": f"{task['question']}5="}]]


def test_no_held_out_task_is_trained() -> None:
    trained, held_out = (
        {RUN.task(source, row)["question"] for row in range(RUN.num_rows[source])} for source in ("train", "heldout")
    )
    assert not trained & held_out
