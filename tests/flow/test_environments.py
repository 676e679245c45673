"""Runs in which environments fail, and in which a reward function of another system says what is learnt."""

from __future__ import annotations

import re
from collections.abc import Callable
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import pytest
import torch
from tokenizers import Regex, Tokenizer, decoders, models, pre_tokenizers
from transformers import PreTrainedTokenizerFast, Qwen3ForCausalLM

from astraflow.models.tiny_char import CHAT_TEMPLATE, make_config

pytestmark = pytest.mark.flow
SUPPORT = Path(__file__).parents[1] / "support"
RUN = """
[run]
name = "run"
steps = 3

[sources.train]
type = "calculator"

[workflow]
{workflow}
group_size = 4

[policies.actor]
model = "tiny-char"
batch = {{ groups = 4, max_staleness = 1 }}
operators = ["keep_all"]
sampling = {{ max_tokens = 4 }}
"""


@pytest.fixture
def played(tmp_path: Path, run: Callable[..., Any], monkeypatch: pytest.MonkeyPatch) -> Callable[[str], Any]:
    """A run of a run file to its end."""
    monkeypatch.setenv("PYTHONPATH", str(SUPPORT))

    def play(text: str) -> Any:
        recipe = tmp_path / "recipe.toml"
        recipe.write_text(text)
        ended = run(tmp_path, str(recipe))
        assert ended.code == 0, ended.words()
        return ended

    return play


def test_episodes_of_failed_environments_are_played_again_and_counted(played: Callable[[str], Any]) -> None:
    workflow = """type = "tool_use"
environment = "world_faults:Flaky"
env_timeout_s = 1.0
pool = { processes = 2, seats = 2 }
max_turns = 2
max_attempts = 6"""
    run = played(RUN.format(workflow=workflow))
    summary = run.summary()
    account = summary["accounting"]
    assert account["admitted"] == account["trained"] + sum(account["dropped"].values()) + account["in_flight"]
    assert account["trained"] == 12 and set(account["dropped"]) <= {"stale"}, "each found an environment that worked"
    assert {"env_error"} <= set(summary["errors"]) <= {"env_error", "env_timeout"}, summary["errors"]
    assert "environment world_faults:Flaky: " in run.words(), "kills are in the log"


def test_a_reward_function_of_trl_drives_a_run(played: Callable[[str], Any]) -> None:
    workflow = """type = "single_turn"
prompt = "{text}"
reward = { type = "function", style = "trl", function = "foreign_rewards:trl_digits" }"""
    summary = played(RUN.format(workflow=workflow)).summary()
    assert summary["accounting"]["trained"] == 12 and not summary["errors"]
    assert 0.0 < summary["reward"]["best"] < 1.0


def model_of_words(place: Path, *words: str) -> Path:
    """A tiny model, untrained, that can say these words and nothing else."""
    known = ("<pad>", "<bos>", "<eos>", *words)
    core = Tokenizer(models.WordLevel({word: i for i, word in enumerate(known)}, unk_token="<pad>"))
    core.pre_tokenizer = pre_tokenizers.Split(Regex("|".join(map(re.escape, known))), "isolated")
    core.decoder = decoders.Fuse()
    tokenizer = PreTrainedTokenizerFast(
        tokenizer_object=core, pad_token="<pad>", bos_token="<bos>", eos_token="<eos>", chat_template=CHAT_TEMPLATE
    )
    config = make_config("tiny-char-small")
    config.vocab_size = len(known)
    torch.manual_seed(0)
    Qwen3ForCausalLM(config).save_pretrained(place)
    tokenizer.save_pretrained(place)
    return place


@pytest.mark.skipif(find_spec("trl") is None, reason="NOT TESTED: rewards of TRL; pip install --no-deps trl==1.16.0")
def test_rewards_that_ship_with_trl_drive_a_run(tmp_path: Path, played: Callable[[str], Any]) -> None:
    """Unchanged, by their names in TRL: both give rewards, and what they reward is learnt."""
    model = model_of_words(tmp_path / "model", "<think>", "</think>", r"\boxed{2}", r"\boxed{3}")
    (tmp_path / "sums.jsonl").write_text('{"question": "1+1?", "solution": "2"}\n')
    run = played(f"""
[run]
name = "run"
steps = 8

[sources.train]
type = "jsonl"
path = "{tmp_path}/sums.jsonl"

[workflow]
type = "single_turn"
group_size = 32

[workflow.reward]
type = "function"
style = "trl"
function = ["trl.rewards:think_format_reward", "trl.rewards:accuracy_reward"]
weights = [0.5, 0.5]

[policies.actor]
model = "{model}"
batch = {{ groups = 2, max_staleness = 0 }}
sampling = {{ max_tokens = 6 }}
optimizer = {{ lr = 5e-3 }}
""")
    assert not run.summary()["errors"], run.words()
    steps = run.steps()
    assert steps[-1]["reward/mean"] > steps[0]["reward/mean"] + 0.15
    assert max(row["reward/max"] for row in steps) == 1.0, "of an episode that satisfied both"
