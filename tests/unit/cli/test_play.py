"""Which model and policy `astraflow try`, `eval` and `sft` take."""

from __future__ import annotations

from pathlib import Path

import pytest

from astraflow.cli.app import main
from astraflow.cli.play import choose_policy, open_model
from astraflow.cli.run import open_run
from astraflow.config.load import resolved_json
from astraflow.errors import LaunchError
from astraflow.launch.rundir import RunDirectory


def test_a_model_without_a_run_needs_a_recipe(tmp_path: Path) -> None:
    with pytest.raises(LaunchError, match="name them with --recipe"):
        open_model(str(tmp_path), "", "", [])


def test_a_run_of_several_policies_is_played_by_all_of_them(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    config = open_run("quickstart", ["--policies.critic.model=tiny-char"])
    (tmp_path / "run.resolved.json").write_text(resolved_json(config))
    made = {"actor": tmp_path / "a"}
    monkeypatch.setattr(RunDirectory, "newest_checkpoint", lambda self, name: made.get(name))
    monkeypatch.setattr("astraflow.models.registry.model_directory", lambda name, *_: name)
    with pytest.raises(LaunchError, match="has no whole checkpoint of critic"):
        open_model(str(tmp_path), "", "", [])
    made["critic"] = tmp_path / "b"
    assert open_model(str(tmp_path), "", "", [])[1] == {"actor": str(made["actor"]), "critic": str(made["critic"])}
    with pytest.raises(LaunchError, match="--policy is one of: actor, critic"):
        open_model(str(tmp_path), "", "judge", [])


def test_the_policy_must_be_named_when_there_are_several() -> None:
    config = open_run("quickstart", ["--policies.critic.model=tiny-char"])
    with pytest.raises(LaunchError, match="one of: actor, critic"):
        choose_policy(config, "")
    assert choose_policy(config, "critic") == "critic"
    assert choose_policy(open_run("quickstart", []), "") == "actor"


def test_sft_of_several_ranks_starts_itself_for_each(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    started: list[tuple[object, ...]] = []
    monkeypatch.setattr("astraflow.cli.play.start_ranks", lambda *words: started.append(words))
    monkeypatch.setattr("astraflow.observe.logs.setup_logging", lambda *_: None)
    change = "--policies.actor.trainer.ranks=2"
    assert main(["sft", "quickstart", f"--out={tmp_path / 'base'}", "--threads=3", change]) == 0
    words = ["sft", "quickstart", f"--out={tmp_path / 'base'}", "--policy=actor", "--threads=3", change]
    assert started == [("sft of actor", 2, words, None)]
