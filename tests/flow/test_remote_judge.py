"""A run whose judge is a model of a service elsewhere."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from astraflow.config.load import load_run
from astraflow.launch.play import PlayOptions, conversation, play, tasks_of
from astraflow.observe.summary import law_holds
from fake_service import FakeService

pytestmark = [pytest.mark.flow, pytest.mark.slow]
KEY = "sk-only-in-the-environment-0123456789"
RUN_FILE = """
[run]
name = "judged"
steps = 2
[sources.train]
type = "sums"
largest = 9
[workflow]
type = "best_of_n"
reward = "sums"
n = 2
group_size = 4
[policies.actor]
model = "tiny-char-small"
batch = {{ groups = 2 }}
operators = ["keep_all"]
sampling = {{ max_tokens = 8 }}
[policies.judge]
model = "judge-large"
frozen = true
sampling = {{ temperature = 0, max_tokens = 16 }}
engine = {{ type = "remote", url = "{url}", key_env = "JUDGE_KEY" }}
"""


@pytest.fixture
def service(monkeypatch: pytest.MonkeyPatch) -> Iterator[FakeService]:
    made = FakeService(KEY)
    made.reply = lambda body: {"content": "I say 7."}
    monkeypatch.setenv("JUDGE_KEY", KEY)
    yield made
    made.close()


def test_a_judge_elsewhere_is_asked_and_never_trained(
    service: FakeService, tmp_path: Path, run: Callable[..., Any]
) -> None:
    path = tmp_path / "judged.toml"
    path.write_text(RUN_FILE.format(url=service.url))
    ended = run(tmp_path, str(path), "--dataflow.heartbeat_s=0.2")
    assert ended.code == 0, ended.words()
    summary = ended.summary()
    assert law_holds(summary["accounting"]) and summary["versions"] == {"actor": 2}
    assert {body["model"] for body in service.seen} == {"judge-large"}
    assert {body["temperature"] for body in service.seen} == {0}
    told = [json.loads(line) for line in (ended.directory / "metrics.jsonl").read_text().splitlines()]
    assert max(row.get("nodes/remote_tokens", 0) for row in told) > 0
    for file in ended.directory.rglob("*"):
        assert not file.is_file() or KEY.encode() not in file.read_bytes(), file


def test_what_it_said_is_kept_with_the_episode(service: FakeService, tmp_path: Path) -> None:
    path = tmp_path / "judged.toml"
    path.write_text(RUN_FILE.format(url=service.url))
    config = load_run(path)
    (episode,) = play(config, {}, tasks_of(config, "train", 1), PlayOptions(1, 0.0, 1))
    assert episode.error is None
    said = [text for sampled, text in conversation(None, episode, "judge") if sampled]
    assert said == ["I say 7.\x1e"]
