from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest

from astraflow.config.rooms import build, check_options, resolve
from astraflow.engines.scripted import Reply, ScriptedEngine
from astraflow.errors import EngineError, Problem
from astraflow.types import Sampling


def said(prompt: np.ndarray, number: int) -> list[int]:
    return [*prompt.tolist(), 90 + number]


def test_it_says_what_the_script_says_with_the_marker_logprob() -> None:
    engine = ScriptedEngine(said)
    generation = engine.submit("a", [5, 6], Sampling()).result(0)
    assert generation.token_ids.tolist() == [5, 6, 90]
    assert generation.logprobs.tolist() == [-7.25] * 3
    assert generation.versions.tolist() == [-1] * 3
    assert generation.finish_reason == "stop"
    assert engine.seen[0][0] == "a"


def test_replies_are_used_in_turn_and_one_reply_serves_all() -> None:
    several, one = ScriptedEngine([[1, 2], [3]]), ScriptedEngine([7, 8])
    assert [several.submit(str(i), [1], Sampling()).result(0).token_ids.tolist() for i in range(3)] == [
        [1, 2],
        [3],
        [1, 2],
    ]
    assert [one.submit(str(i), [1], Sampling()).result(0).token_ids.tolist() for i in range(2)] == [[7, 8]] * 2


def test_given_logprobs_stay_on_their_tokens() -> None:
    engine = ScriptedEngine(lambda ids, n: Reply([4, 5, 6], [-0.5, -7.25, -1.0]))
    assert engine.submit("a", [1], Sampling(max_tokens=2)).result(0).logprobs.tolist() == [-0.5, -7.25]


def test_a_held_generation_is_labelled_step_by_step() -> None:
    engine = ScriptedEngine([4, 5, 6, 7], held=True)
    future = engine.submit("a", [1], Sampling())
    engine.load_weights(0, {})
    engine.step(2)
    engine.load_weights(1, {})
    engine.step()
    assert not future.done()
    engine.load_weights(2, {})
    engine.release()
    assert future.result(0).versions.tolist() == [0, 0, 1, 2]
    assert engine.submit("b", [1], Sampling()).done()  # released for good
    engine.hold()
    assert not engine.submit("c", [1], Sampling()).done()


def test_a_delay_ends_requests_later() -> None:
    engine = ScriptedEngine([4], delay_s=0.01)
    assert engine.submit("a", [1], Sampling()).result(60).token_ids.tolist() == [4]


def test_a_run_file_names_a_script_and_gives_what_a_local_engine_gets(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "my_script.py").write_text("def answer(ids, number):\n    return [*ids.tolist(), 9]\n")
    monkeypatch.syspath_prepend(tmp_path)
    options = {"script": "my_script:answer"}
    given = {
        "model_dir": "nowhere", "max_concurrency": 3, "max_context": 0, "threads": 1, "seed": 0, "delay_s": 0.0,
        "dtype": "float32",
    }  # fmt: skip
    target = resolve("engines", "scripted", "engine.type")
    assert check_options(target, options, "engine", set(given)) == []
    assert "did you mean 'script'?" in check_options(target, {"skript": "x", **options}, "engine", set(given))[0]
    engine = build("engines", "scripted", options, "engine", **given)
    assert engine.submit("a", [5], Sampling()).result(0).token_ids.tolist() == [5, 9]


def test_a_script_that_cannot_be_imported_or_is_empty_is_named() -> None:
    with pytest.raises(Problem, match=r"engine\.script=nowhere:script cannot be imported"):
        ScriptedEngine("nowhere:script")
    with pytest.raises(EngineError, match="holds no reply"):
        ScriptedEngine([])
    with pytest.raises(EngineError, match="no token"):
        ScriptedEngine(lambda ids, n: []).submit("a", [1], Sampling()).result(0)


def test_it_needs_no_torch() -> None:
    code = "import sys, astraflow.engines.scripted; sys.exit('torch' in sys.modules or 'transformers' in sys.modules)"
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join(sys.path)}
    assert subprocess.run([sys.executable, "-c", code], env=environment, check=False).returncode == 0
