"""A wrong run file gets every problem at once, each with its nearest name and its fix."""

from __future__ import annotations

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
