from __future__ import annotations

import logging
import subprocess
import sys
from pathlib import Path

import pytest

from astraflow.config.secrets import is_secret_name
from astraflow.observe.jsonl import read_jsonl
from astraflow.observe.logs import setup_logging
from astraflow.observe.redact import redact, redact_text

SECRET = "s3cr3t-of-the-run"


def test_a_line_for_people_and_a_row_for_machines(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    setup_logging("node0", tmp_path)
    logging.getLogger("astraflow.rollout").info("joined the pool of %d", 3, extra={"nodes": 3})
    logging.getLogger("astraflow.rollout").debug("not shown")
    line = capsys.readouterr().err
    assert "INFO    node0 | joined the pool of 3 nodes=3\n" in line
    (row,) = read_jsonl(tmp_path / "logs" / "node0.jsonl")
    assert (row["level"], row["process"], row["logger"]) == ("INFO", "node0", "astraflow.rollout")
    assert (row["message"], row["nodes"]) == ("joined the pool of 3", 3)


def test_an_exception_is_logged_with_its_trace(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    setup_logging("trainer", tmp_path)
    try:
        raise ValueError(f"token={SECRET}")
    except ValueError:
        logging.getLogger("x").exception("step failed")
    assert "ValueError" in capsys.readouterr().err
    assert "ValueError" in read_jsonl(tmp_path / "logs" / "trainer.jsonl")[0]["trace"]


def test_setting_up_again_replaces(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    setup_logging("a")
    setup_logging("b", tmp_path)
    logging.getLogger("x").warning("once")
    assert capsys.readouterr().err.count("once") == 1


def test_a_log_that_cannot_be_written_is_one_sentence_and_the_process_ends_well(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    script = (
        "from pathlib import Path; from astraflow.observe.logs import setup_logging\n"
        f"try: setup_logging('a', Path({str(tmp_path / 'file')!r}))\n"
        "except Exception as error: print(error)"
    )
    done = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True)
    assert "cannot be written (Not a directory); name a run directory" in done.stdout and not done.stderr


def test_no_secret_is_ever_written(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    setup_logging("dataflow", tmp_path, secrets=(SECRET, None))
    log = logging.getLogger("x")
    log.warning("called with %s", {"authorization": f"Bearer {SECRET}", "n": 1})
    log.warning("plain %s", SECRET)
    log.warning("fields", extra={"api_key": "sk-12345678", "settings": {"password": "hunter2"}})
    try:
        raise RuntimeError(f"GET http://user:hunter2@host/?token=abcdef failed, {SECRET}")
    except RuntimeError:
        log.exception("failed")
    text = capsys.readouterr().err + (tmp_path / "logs" / "dataflow.jsonl").read_text()
    for secret in (SECRET, "sk-12345678", "hunter2", "abcdef"):
        assert secret not in text
    assert "***" in text


@pytest.mark.parametrize(
    ("text", "shown"),
    [
        ("token=abc next", "token=*** next"),
        ("hub_token: 'a b', x=1", "hub_token: ***, x=1"),
        ('{"api_key": "k", "b": 2}', '{"api_key": ***, "b": 2}'),
        ("Authorization: Bearer abcdefgh.123", "Authorization: ***"),
        ("sent Bearer abcdefgh.123 there", "sent Bearer *** there"),
        ("OPENAI_API_KEY=sk-1", "OPENAI_API_KEY=***"),
        ("http://h/?token=abc&x=1", "http://h/?token=***&x=1"),
        ("max_tokens=5 tokens/sampled=7 tokenizer=fast", "max_tokens=5 tokens/sampled=7 tokenizer=fast"),
        ("the secret of the token economy", "the secret of the token economy"),
    ],
)
def test_key_like_values_are_masked_in_text(text: str, shown: str) -> None:
    assert redact_text(text) == shown


def test_key_like_values_are_masked_in_nested_settings() -> None:
    settings = {
        "token": "a",
        "max_tokens": 5,
        "stop_token_ids": [1],
        "eos_token": "<|im_end|>",
        "empty": {"password": "", "secret": None},
        "list": [{"hub_token": "x"}, "token=y", ("api-key=z",)],
    }
    assert redact(settings) == {
        "token": "***",
        "max_tokens": 5,
        "stop_token_ids": [1],
        "eos_token": "<|im_end|>",
        "empty": {"password": "", "secret": None},
        "list": [{"hub_token": "***"}, "token=***", ["api-key=***"]],
    }
    assert settings["token"] == "a"


@pytest.mark.parametrize(
    "name", ["token", "HF_TOKEN", "api_key", "x-api-key", "apiKey", "Authorization", "db.password"]
)
def test_secret_names(name: str) -> None:
    assert is_secret_name(name)


@pytest.mark.parametrize(
    "name", ["tokens", "max_tokens", "token_ids", "tokenizer", "keyword", "passwordless", "stop_token", "key_env"]
)
def test_names_that_only_look_secret(name: str) -> None:
    assert not is_secret_name(name)


def test_what_cannot_be_written_ends_nothing(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    setup_logging("dataflow", tmp_path)
    log = logging.getLogger("x")
    log.error("half a character: \udc80", extra={"given": "\ud83d"})
    log.error("after")
    rows = list(read_jsonl(tmp_path / "logs" / "dataflow.jsonl"))
    assert [row["message"] for row in rows] == ["half a character: \\udc80", "after"]
    assert rows[0]["given"] == "\\ud83d"
    assert "half a character: \\udc80" in capsys.readouterr().err
