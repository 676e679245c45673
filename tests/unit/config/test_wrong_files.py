"""Run files as people save them: other encodings, broken TOML, other types. Each gets one sentence that helps."""

from __future__ import annotations

from pathlib import Path

import pytest

from astraflow.config.load import load_run
from astraflow.config.recipes import recipe_path
from astraflow.errors import ConfigError

GOOD = recipe_path("quickstart").read_text(encoding="utf-8")


def refused(tmp_path: Path, content: bytes, *overrides: str) -> list[str]:
    file = tmp_path / "run.toml"
    file.write_bytes(content)
    with pytest.raises(ConfigError) as caught:
        load_run(file, overrides)
    assert caught.value.exit_code == 2
    return caught.value.problems


@pytest.mark.parametrize("change", [lambda text: "\ufeff" + text, lambda text: text.replace("\n", "\r\n")])
def test_marks_and_line_ends_of_other_systems_are_taken(tmp_path, change):
    file = tmp_path / "run.toml"
    file.write_bytes(change(GOOD).encode())
    assert load_run(file) == load_run(recipe_path("quickstart"))


@pytest.mark.parametrize(
    ("content", "said"),
    [
        (GOOD.encode("utf-16"), "is not text in UTF-8 (byte 0: invalid start byte); save it as UTF-8"),
        (GOOD.encode() + b"\n# \xe4\n", "is not text in UTF-8"),
        (bytes(range(256)), "is not text in UTF-8"),
        (GOOD.encode() + b"\0", "is not valid TOML: Invalid statement (at line "),
        (b"run:\n  name: x\n", "(at line 1, column 4): run:; how TOML is written"),
        (GOOD.replace("steps = 300", "steps = 300\nsteps = 3").encode(), "(at line 6, column 10): steps = 3; how TOML"),
        (GOOD.encode() + b"[policies.actor]\n", "Cannot declare ('policies', 'actor') twice"),
        (b"[run]\nname = ", "is not valid TOML: Invalid value (at end of document); how TOML is written"),
    ],
)
def test_what_is_no_toml_is_shown_with_its_line(tmp_path, content, said):
    (problem,) = refused(tmp_path, content)
    assert said in problem


def test_a_broken_line_that_holds_a_secret_is_not_shown(tmp_path):
    (problem,) = refused(tmp_path, b"[run]\napi_key = sk-1\n")
    assert "at line 2" in problem and "sk-1" not in problem


def test_an_empty_file_is_told_what_a_run_file_has(tmp_path):
    assert [problem.partition("=")[0].split()[0] for problem in refused(tmp_path, b"")] == [
        "run", "sources", "workflow", "policies",
    ]  # fmt: skip
    assert all("astraflow recipes show quickstart" in problem for problem in refused(tmp_path, b""))


@pytest.mark.parametrize(
    ("override", "said"),
    [
        ("run.steps=true", "run.steps=True must be a number"),
        ("policies.actor.batch.groups=false", "policies.actor.batch.groups=False must be a number"),
        ("run.steps=9223372036854775808", "run.steps=9223372036854775808 must be between -2^63 and 2^63"),
        ("run.name=a b", "run.name='a b' must be a name: a letter, then"),
        ("policies.a b.model=tiny-char", "policies.a b='a b' must be a name: a letter, then"),
        ("sources.train=[]", "sources.train=[] must be a table; write [sources.train]"),
        ("rollout.nodes=-1", "rollout.nodes=-1 must be 0 to 1000 nodes"),
        ("rollout.nodes=1000000000", "rollout.nodes=1000000000 must be 0 to 1000 nodes"),
        ("rollout.nodes=true", "rollout.nodes=True must be 0 to 1000 nodes"),
        ("workflow.group_size=9000000000", "workflow.group_size=9000000000 must be less than or equal to 65536"),
        (
            f"run.directory={chr(0xDCC3)}",
            "run.directory='\\udcc3' is not text in UTF-8; give the processes a UTF-8 locale",
        ),
        ("run=5", "run=5 must be a table; write [run]"),
        ("evaluation=5", "evaluation=5 must be a table; write [evaluation]"),
    ],
)
def test_other_types_are_named(tmp_path, override, said):
    found = refused(tmp_path, GOOD.encode(), f"--{override}")
    assert any(problem.startswith(said) for problem in found), found


def test_an_unknown_setting_hides_nothing_else(tmp_path):
    words = ["--run.stesp=3", "--policies.actor.optimizer.leraning_rate=1", "--workflow.type=no_such"]
    problems = refused(tmp_path, GOOD.encode(), *words, "--policies.actor.engine=nowhere")
    unknown = ["run.stesp", "policies.actor.optimizer.leraning_rate"]
    assert [problem.partition("=")[0] for problem in problems[:2]] == unknown
    assert [any(name in problem for problem in problems[2:]) for name in ("no_such", "nowhere")] == [True, True]


def test_a_misspelt_setting_of_a_section_with_options_is_recognised(tmp_path):
    (problem,) = refused(tmp_path, GOOD.encode(), "--workflow.grup_size=4")
    assert problem.endswith("is not an option of this type; did you mean 'group_size'?")
