from __future__ import annotations

import pytest

from astraflow.types import Task


def test_a_field_that_a_task_lacks_is_said_with_those_that_it_has() -> None:
    task = Task("train", 0, 0, {"text": "1+1", "answer": "2"})
    assert task["text"] == "1+1" and task.get("question") is None
    with pytest.raises(KeyError, match=r"question \(this task has: text, answer\)"):
        task["question"]
