"""`astraflow <verb>` as a user types it: what works, what is refused and how it is said."""

from __future__ import annotations

import json
import subprocess
import sys
from contextlib import closing
from pathlib import Path

import pytest

from astraflow import __version__
from astraflow.cli.app import main
from astraflow.cli.play import _say_reward
from astraflow.cli.run import join_pairs, open_run
from astraflow.cli.services import _engines, joining, read_token
from astraflow.config.env import token_from_env
from astraflow.config.load import resolved_json
from astraflow.config.recipes import recipe_path
from astraflow.errors import ConfigError, LaunchError, Problem
from astraflow.launch.claim import claim
from astraflow.wire.app import bind
from command_line import failing


def test_version_and_help(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["--version"]) == 0
    assert capsys.readouterr().out.strip() == f"astraflow {__version__}"
    assert main(["--help"]) == 0
    assert "trainer" in capsys.readouterr().out


def test_an_unknown_recipe_names_the_nearest(capsys: pytest.CaptureFixture[str]) -> None:
    err = failing(["run", "quikstart"], capsys, 2)
    assert "recipe=quikstart is neither a file nor a shipped recipe; did you mean 'quickstart'?" in err


def test_all_problems_of_a_run_file_at_once(capsys: pytest.CaptureFixture[str]) -> None:
    err = failing(["validate", "quickstart", "--run.stps=3", "--policies.actor.bach.groups=1"], capsys, 2)
    assert "2 problems" in err and "did you mean 'steps'?" in err and "did you mean 'batch'?" in err


def test_a_wrong_option_of_run_is_no_setting(capsys: pytest.CaptureFixture[str]) -> None:
    assert "option='--dry-rn' is neither" in failing(["run", "quickstart", "--dry-rn"], capsys, 2)


def test_a_wrong_option_of_try_is_said_to_be_one(capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    (tmp_path / "run.resolved.json").write_text(resolved_json(open_run("quickstart", [])))
    assert "option='--prompt' is neither" in failing(["try", str(tmp_path), "--prompt", "zz"], capsys, 2)


def test_debug_shows_where_an_error_came_from(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["validate", "nope", "--debug"]) == 2
    assert "Traceback" in capsys.readouterr().err


def test_dry_run_starts_nothing_and_names_the_processes(
    capsys: pytest.CaptureFixture[str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    assert main(["run", "two-nodes", "--dry-run"]) == 0
    out = capsys.readouterr().out
    assert "trainer-actor: 1 thread" in out and "node-slow: 1 thread, joins after 20 s" in out
    assert list(tmp_path.iterdir()) == []
    err = failing(["run", "quickstart", "--dry-run", "--workflow.environment=calculater"], capsys, 2)
    assert "calculater is not a known name of environments; did you mean 'calculator'?" in err


def test_beyond_loopback_needs_a_token(capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("ASTRAFLOW_TOKEN", raising=False)
    err = failing(["run", "quickstart", "--dataflow.host=0.0.0.0"], capsys, 1)
    assert "dataflow.host=0.0.0.0 is not loopback and there is no token; set ASTRAFLOW_TOKEN" in err
    for address, said in (("0.0.0.0:0", "--swarm=0.0.0.0 is not loopback"), ("0.0.0.0", "must be HOST:PORT")):
        err = failing(["node", "--dataflow=http://127.0.0.1:1", f"--swarm={address}"], capsys, 1)
        assert said in err and "rollout.swarm" not in err


def test_an_existing_run_is_refused_before_anything_starts(
    capsys: pytest.CaptureFixture[str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "runs" / "quickstart").mkdir(parents=True)
    (tmp_path / "runs" / "quickstart" / "run.resolved.json").write_text("{}")
    assert "--resume" in failing(["run", "quickstart"], capsys, 1)


def test_a_refused_second_launcher_leaves_the_live_run_alone(
    capsys: pytest.CaptureFixture[str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    with claim(open_run("quickstart", []), resume=False) as directory:
        directory.metrics.write_text('{"kind": "step", "step": 1}\n')
        before = directory.config_file.read_bytes()
        for words in (["run", "quickstart"], ["dataflow", "quickstart", "--port=0"]):
            assert "in use by another" in failing([*words, "--resume", "--run.steps=99"], capsys, 1)
        assert directory.config_file.read_bytes() == before
        assert not directory.report.exists()


def test_a_used_port_takes_no_run_name(
    capsys: pytest.CaptureFixture[str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    with closing(bind("127.0.0.1", 0, "test")) as taken:
        port = taken.getsockname()[1]
        assert "cannot be bound" in failing(["dataflow", "quickstart", f"--port={port}"], capsys, 1)
        for setting in ("dataflow.port", "weights.port"):
            err = failing(["run", "quickstart", f"--{setting}={port}"], capsys, 1)
            assert f"{setting}=127.0.0.1:{port} cannot be bound" in err
    assert list(tmp_path.iterdir()) == []


def test_user_code_beside_the_run_file_is_found_by_the_console_script(tmp_path: Path) -> None:
    (tmp_path / "my_agent.py").write_text("async def solve(task, llm):\n    return 0.0\n")
    sections = ["run.name = 'a'", "run.steps = 1", "sources.train.type = 'sums'", "policies.actor.model = 'tiny-char'"]
    (tmp_path / "my_agent.toml").write_text("\n".join([*sections, "workflow.type = 'my_agent:solve'"]))
    script = Path(sys.executable).with_name("astraflow")
    done = subprocess.run([script, "validate", "my_agent.toml"], cwd=tmp_path, capture_output=True, text=True)
    assert done.returncode == 0 and "is valid" in done.stdout, done.stderr


@pytest.mark.parametrize(
    ("words", "expected"),
    [
        (["--policies.actor.engine.dtypo=foo"], "policies.actor.engine.dtypo='foo' is not an option"),
        (
            ["--policies.actor.algorithm.loss={ type = 'ppo_clip', clip_low = 3 }"],
            "algorithm.loss.clip_low=3 must be between 0 and 1",
        ),
        (
            ["--policies.actor.algorithm.loss={ type = 'ppo_clip', clip_low = 'x' }"],
            "policies.actor.algorithm.loss.clip_low='x' must be",
        ),
        (["--policies.actor.engine=no.module:Engine"], "policies.actor.engine.type=no.module:Engine cannot be"),
        (["--evaluation.num_tasks=100000"], "evaluation.num_tasks=100000 is more than sources.heldout has (60)"),
        (["--policies.critic.model=tiny-char"], "workflow.policy=None must be given when a run has several"),
    ],
)
def test_what_cannot_work_is_no_valid_run_and_takes_no_name(
    words: list[str], expected: str, capsys: pytest.CaptureFixture[str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    for verb in ("validate", "run"):
        assert expected in failing([verb, "quickstart", *words], capsys, 2)
    assert list(tmp_path.iterdir()) == []


def test_files_that_cannot_be_read_or_written_are_one_sentence(
    capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    (tmp_path / "bad.json").write_text('{"run": 3}')
    assert "bad.json: 4 problems" in failing(["validate", str(tmp_path / "bad.json")], capsys, 2)
    (tmp_path / "run.resolved.json").write_text("{")
    assert "run.resolved.json: 1 problem" in failing(["status", str(tmp_path)], capsys, 2)
    target = str(tmp_path / "none" / "x.toml")
    assert f"target={target} cannot be written" in failing(["recipes", "copy", "quickstart", target], capsys, 1)
    words = ["trainer", "--dataflow", "http://127.0.0.1:9", "--policy", "actor", "--run-dir"]
    assert "cannot be written" in failing([*words, str(tmp_path / "bad.json")], capsys, 1)


def test_a_token_that_no_header_takes_is_not_shown(
    capsys: pytest.CaptureFixture[str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    file = tmp_path / "token"
    for text in ("sek\tret", "sekr\u00e9t", "two words"):
        file.write_text(text, encoding="latin-1")
        monkeypatch.setenv("ASTRAFLOW_TOKEN", text)
        err = failing(["status", "http://127.0.0.1:9"], capsys, 2)
        assert "ASTRAFLOW_TOKEN=*** must be printable ASCII" in err and text not in err
        with pytest.raises(Problem, match=r"token-file=\*\*\* must be printable ASCII"):
            read_token(file)
    monkeypatch.setenv("ASTRAFLOW_TOKEN", "  sekret\r\n")
    assert token_from_env() == "sekret"


def test_nodes_are_told_an_address_that_they_can_use() -> None:
    assert joining("http://0.0.0.0:7") == joining("http://[::]:7") == "http://<address of this host>:7"
    assert joining("http://127.0.0.1:7") == "http://127.0.0.1:7"


def test_a_missing_model_is_named_before_anything_starts(
    capsys: pytest.CaptureFixture[str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    for verb in ("run", "validate"):
        err = failing([verb, "quickstart", "--policies.actor.model=tiny-chr"], capsys, 2)
        assert "policies.actor.model=tiny-chr" in err and "did you mean 'tiny-char'?" in err
    assert list(tmp_path.iterdir()) == []


def test_a_whole_section_is_taken_out_by_none(capsys: pytest.CaptureFixture[str]) -> None:
    assert open_run("quickstart", ["--evaluation=none"]).evaluation is None
    assert "did you mean 'evaluation'?" in failing(["validate", "quickstart", "--evalution=none"], capsys, 2)


def test_modules_that_lie_beside_the_run_file_are_found_by_a_hint(
    capsys: pytest.CaptureFixture[str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "mine").mkdir()
    text = recipe_path("quickstart").read_text().replace('"calculator"', '"own_tasks_of_a_test:Tasks"')
    (tmp_path / "mine" / "run.toml").write_text(text)
    (tmp_path / "mine" / "own_tasks_of_a_test.py").touch()
    monkeypatch.chdir(tmp_path)
    assert "is not where own_tasks_of_a_test.py lies; first: cd mine" in failing(
        ["validate", "mine/run.toml"], capsys, 2
    )
    monkeypatch.chdir(tmp_path / "mine")
    assert "first: cd" not in failing(["validate", "run.toml"], capsys, 2)


def test_validate_show_prints_every_setting(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["validate", "quickstart", "--show", "--run.seed", "7"]) == 0
    shown = json.loads(capsys.readouterr().out)
    assert shown["run"]["seed"] == 7 and shown["weights"]["keep"] == 4


def test_validate_show_masks_what_an_older_run_file_holds(capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    raw = json.loads(resolved_json(open_run("quickstart", [])))
    raw["run"]["description"] = "from http://me:sekret@host"
    (tmp_path / "old.json").write_text(json.dumps(raw))
    assert main(["validate", str(tmp_path / "old.json"), "--show"]) == 0
    assert "sekret" not in capsys.readouterr().out


def test_pairs_are_joined() -> None:
    assert join_pairs(["--a.b", "1", "--c=2", "x", "--d"]) == ["--a.b=1", "--c=2", "x", "--d"]


def test_a_resolved_file_is_a_run_file_too(tmp_path: Path) -> None:
    path = tmp_path / "run.resolved.json"
    path.write_text(resolved_json(open_run("quickstart", [])))
    assert open_run(str(path), []) == open_run("quickstart", [])
    with pytest.raises(ConfigError, match="TOML"):
        open_run(str(path), ["--run.seed=1"])


def test_the_token_comes_from_a_file_or_the_environment(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("ASTRAFLOW_TOKEN", "of-the-environment")
    assert read_token(None) == "of-the-environment"
    path = tmp_path / "token"
    path.write_text("secret\n")
    assert read_token(path) == "secret"
    path.write_text("\n")
    with pytest.raises(LaunchError, match="is empty"):
        read_token(path)
    with pytest.raises(LaunchError, match="cannot be read"):
        read_token(tmp_path / "none")


def test_engines_of_a_node_by_hand() -> None:
    found = _engines(["actor.type=vllm", "actor.args.seed=3", "judge=scripted"])
    assert {name: engine.model_dump() for name, engine in found.items()} == {
        "actor": {"type": "vllm", "args": {"seed": 3}}, "judge": {"type": "scripted"},
    }  # fmt: skip
    with pytest.raises(ConfigError) as wrong:
        _engines(["actor", "judge=3"])
    assert "--actor" in str(wrong.value) and "judge=3 is no engine" in str(wrong.value)


@pytest.mark.parametrize("verb", ["node", "trainer"])
def test_a_wrong_url_is_one_sentence(verb: str, capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    more = {"node": [], "trainer": ["--policy", "actor", "--run-dir", str(tmp_path)]}[verb]
    assert "must start with http://" in failing([verb, "--dataflow", "localhost:1", *more], capsys, 1)


def test_doctor_says_ok_or_what_to_do(capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    code = main(["doctor", "--directory", str(tmp_path)])
    rows = capsys.readouterr().out.splitlines()
    assert code == int(any(row.startswith("FAIL") for row in rows))
    assert all(row.startswith("ok") or ";" in row for row in rows)
    assert {row.split()[1] for row in rows} >= {"python", "torch", "cores", "memory", "disk"}


def test_an_unscored_reward_is_said_to_be_one(capsys: pytest.CaptureFixture[str]) -> None:
    _say_reward({"actor": None, "critic": 0.5}, {})
    out, err = capsys.readouterr()
    assert out == 'reward {"actor": null, "critic": 0.5}  metrics {}\n'
    assert err.startswith("actor: unscored, so never trained on")
