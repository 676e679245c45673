"""A wrong run file gets every problem at once, each with its nearest name and its fix."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

from astraflow.config.load import check_run, config_from_json, load_run, resolved_json
from astraflow.errors import ConfigError

GOOD = """
[run]
name = "calc"
steps = 3
[sources.train]
type = "calculator"
split = "train"
[workflow]
type = "tool_use"
environment = "calculator"
group_size = 4
[policies.actor]
model = "tiny-char"
"""


def write(tmp_path: Path, text: str) -> Path:
    path = tmp_path / "run.toml"
    path.write_text(text)
    return path


def problems(tmp_path: Path, text: str, *overrides: str) -> list[str]:
    with pytest.raises(ConfigError) as caught:
        load_run(write(tmp_path, text), overrides)
    assert caught.value.exit_code != 0
    return caught.value.problems


def test_a_good_file_resolves_and_survives_json(tmp_path: Path) -> None:
    config = load_run(write(tmp_path, GOOD))
    assert config.policies["actor"].batch.max_staleness == 1
    assert config.workflow.options == {"environment": "calculator"}
    assert config_from_json(resolved_json(config)) == config


def test_overrides_are_toml_values_or_plain_strings(tmp_path: Path) -> None:
    config = load_run(
        write(tmp_path, GOOD),
        ["--run.steps=7", "--run.name=other", "--policies.actor.optimizer.betas=[0.5, 0.6]", "--rollout.nodes=2",
         "--policies.actor.algorithm.loss=m2po", "--policies.actor.algorithm.loss.threshold=0.1"],
    )  # fmt: skip
    policy = config.policies["actor"]
    assert (config.run.steps, config.run.name, policy.optimizer.betas) == (7, "other", (0.5, 0.6))
    assert [n.name for n in config.rollout.nodes] == ["node0", "node1"]
    assert (policy.algorithm.loss.type, policy.algorithm.loss.options) == ("m2po", {"threshold": 0.1})


@pytest.mark.parametrize("given", [True, False])
def test_an_optional_table_is_taken_out_by_none(tmp_path: Path, given: bool) -> None:
    text = GOOD
    if given:
        text += "warm_start = { source = 'train' }\nlora = { rank = 2 }\nalgorithm = { kl = { reference = 'base' } }\n"
        text += "[evaluation]\nsource = 'train'\n[mix]\nratios = { train = 1 }\n"
    names = [f"policies.actor.{name}" for name in ("warm_start", "lora", "algorithm.kl")] + ["evaluation", "mix"]
    config = load_run(write(tmp_path, text), [f"--{name}=none" for name in names])
    policy = config.policies["actor"]
    assert (policy.warm_start, policy.lora, policy.algorithm.kl, config.evaluation, config.mix) == (None,) * 5
    assert config_from_json(resolved_json(config)) == config


def test_all_problems_come_at_once_with_near_names(tmp_path: Path) -> None:
    text = GOOD.replace("steps = 3", "steps = 0\nsede = 1").replace('model = "tiny-char"', "batch = { group = 4 }")
    found = problems(tmp_path, text)
    assert len(found) == 4
    joined = "\n".join(found)
    assert "run.sede=1 is not a setting; did you mean 'seed'?" in joined
    assert "policies.actor.batch.group=4 is not a setting; did you mean 'groups'?" in joined
    assert "policies.actor.model is missing" in joined
    assert "run.steps=0 must be greater than or equal to 1" in joined


def test_negative_staleness_says_how_to_train_synchronously(tmp_path: Path) -> None:
    found = problems(tmp_path, GOOD, "--policies.actor.batch.max_staleness=-1")
    assert found == ["policies.actor.batch.max_staleness=-1 must be >= 0; use 0 for synchronous training"]


@pytest.mark.parametrize(
    ("change", "expected"),
    [
        (
            ('type = "tool_use"', 'type = "tool_us"'),
            "workflow.type=tool_us is not a known name of workflows; did you mean",
        ),
        (
            ('type = "calculator"', 'type = "nope.module:Thing"'),
            "sources.train.type=nope.module:Thing cannot be imported",
        ),
        (
            ('split = "train"', 'splitt = "train"'),
            "sources.train.splitt='train' is not an option of this type; did you",
        ),
        (("[sources.train]", "[sources.trian]"), "train_source='train' names no source; did you mean 'trian'?"),
        (("group_size = 4", "group_size = 1"), "workflow.group_size=1 must be >= 2"),
    ],
)
def test_wrong_names_are_named_with_their_setting(tmp_path: Path, change: tuple[str, str], expected: str) -> None:
    assert any(expected in p for p in problems(tmp_path, GOOD.replace(*change)))


@pytest.mark.parametrize(
    ("override", "expected"),
    [
        ("policies.actor.engine=foo", "policies.actor.engine=foo is not a known name of engines"),
        (
            "policies.actor.algorithm.loss=m2p",
            "policies.actor.algorithm.loss=m2p is not a known name of losses; did you",
        ),
        ("policies.actor.tool_parser=foo", "policies.actor.tool_parser=foo is not a known name of tool_parsers"),
        ("policies.actor.optimizer.betas=[2, 3]", "policies.actor.optimizer.betas.0=2 must be less than 1"),
        ("workflow.timeout_s=inf", "workflow.timeout_s=inf must be a finite number"),
        ("workflow.max_turns=nan", "workflow.max_turns=nan must be a finite number"),
        ("workflow.max_turns=abc", "workflow.max_turns='abc' must be a valid integer"),
        ("sources.train.seed=abc", "sources.train.seed='abc' must be a valid integer"),
        ("sources.train.demos=1", "sources.train.demos=1 must be a valid boolean"),
        ("run.steps.x=1", "override='--run.steps.x=1' does not fit the run file (3 has no 'x' in it)"),
        ("run.steps.x.y=1", "override='--run.steps.x.y=1' does not fit the run file"),
        ("rollout.nodes.0.delay_s=1", "override='--rollout.nodes.0.delay_s=1' does not fit the run file (1 has no '0'"),
        ("observe.trackers=['wanda']", "observe.trackers.0='wanda' must be 'wandb', 'tensorboard'"),
    ],
)
def test_a_value_that_cannot_work_is_one_sentence(tmp_path: Path, override: str, expected: str) -> None:
    found = problems(tmp_path, GOOD + "[rollout]\nnodes = 1\n", f"--{override}")
    assert any(p.startswith(expected) for p in found), found


def test_torch_is_not_loaded_to_check_a_run_file(tmp_path: Path) -> None:
    script = "import sys; from astraflow.config.load import load_run; from pathlib import Path; " + (
        f"load_run(Path({str(write(tmp_path, GOOD))!r})); sys.exit('torch' in sys.modules)"
    )
    assert subprocess.run([sys.executable, "-c", script]).returncode == 0


@pytest.mark.parametrize(
    "override", ["workflow.api_key=sk-1", "policies.actor.engine.hub_token=sk-1", "workflow.environment.password=sk-1"]
)
def test_a_secret_in_a_run_file_is_refused_and_not_shown(tmp_path: Path, override: str) -> None:
    (problem,) = problems(tmp_path, GOOD, "--workflow.environment.type=calculator", f"--{override}")
    name = override.partition("=")[0]
    assert (
        problem.startswith(f"{name}=*** must not be written in a run file") and f"{name.split('.')[-1]}_env" in problem
    )
    assert "sk-1" not in problem


def test_credentials_in_a_url_are_refused_and_not_shown(tmp_path: Path) -> None:
    (problem,) = problems(tmp_path, GOOD, "--weights.url=s3://key:sk-1@bucket/prefix")
    assert problem.startswith("weights.url=s3://***@bucket/prefix must not hold a user or password")
    (problem,) = problems(tmp_path, GOOD, "--weights.url=s3://key@bucket/prefix")
    assert "must not hold a user" in problem
    load_run(write(tmp_path, GOOD), ["--weights.url=abfs://container@account.dfs.core.windows.net/prefix"])


@pytest.mark.parametrize(
    "url", ["http://host/x", "/mnt/x", "file://mnt/x", "s3://b/p?sig=1", "simplecache::s3://b/p", "s3:/b"]
)
def test_what_is_no_url_of_an_object_store_is_refused(tmp_path: Path, url: str) -> None:
    (problem,) = problems(tmp_path, GOOD, f"--weights.url={url}")
    assert problem.startswith("weights.url=") and "must be s3://bucket/prefix" in problem
    load_run(write(tmp_path, GOOD), ["--weights.url=file:///mnt/x"])


def test_a_damaged_resolved_file_is_named_with_what_is_wrong() -> None:
    with pytest.raises(ConfigError, match=r"run\.resolved\.json: 2 problems\n(.*\n)*.*workflow is missing") as caught:
        config_from_json(
            '{"run": {"name": "x", "steps": 1}, "sources": {}, "policies": {"a": {}}}', "run.resolved.json"
        )
    assert caught.value.exit_code == 2
    with pytest.raises(ConfigError, match="JSON"):
        config_from_json(b"\xff{")


@pytest.mark.parametrize("override", ["run.steps=3", "--run.steps", "--=3"])
def test_a_malformed_override_is_shown_in_full(tmp_path: Path, override: str) -> None:
    assert f"override={override!r}" in problems(tmp_path, GOOD, override)[0]


def test_two_nodes_of_one_name_are_refused(tmp_path: Path) -> None:
    text = GOOD + '[[rollout.nodes]]\nname = "a"\n[[rollout.nodes]]\nname = "a"\n'
    assert "rollout.nodes.name='a' is used twice" in problems(tmp_path, text)[0]


def test_a_missing_or_broken_file_is_named(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=r"nowhere.toml.*\n.*cannot be read"):
        load_run(tmp_path / "nowhere.toml")
    assert "is not valid TOML" in problems(tmp_path, "[run\n")[0]


def test_paths_are_relative_to_the_run_file(tmp_path: Path) -> None:
    (tmp_path / "model").mkdir()
    config = load_run(write(tmp_path, GOOD.replace('"tiny-char"', '"model"')))
    assert config.policies["actor"].model == str(tmp_path / "model")


def test_training_temperature_zero_is_refused() -> None:
    raw = {
        "run": {"name": "a", "steps": 1},
        "sources": {"train": {"type": "calculator"}},
        "workflow": {"type": "tool_use", "environment": "calculator"},
        "policies": {"actor": {"model": "tiny-char", "sampling": {"temperature": 0}}},
    }
    with pytest.raises(ConfigError, match="temperature=0 must be greater than 0"):
        check_run(raw, "raw")
