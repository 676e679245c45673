"""`astraflow retriever` as a process: it answers, is closed to strangers, and ends when told."""

from __future__ import annotations

import signal
import subprocess
import sys
from pathlib import Path

import pytest

from astraflow.cli.app import main
from astraflow.config.env import child_environment
from astraflow.launch.rundir import read_ready
from astraflow.retrieval.serving.client import RemoteRetriever
from astraflow.testing.runs import wait_until
from small_corpus import write_corpus

pytestmark = pytest.mark.flow


def start(tmp_path: Path, *words: str, token: str | None = None) -> subprocess.Popen[str]:
    command = [sys.executable, "-m", "astraflow", "retriever", *words]
    env = child_environment(token, {"ASTRAFLOW_CACHE": str(tmp_path / "cache")})
    return subprocess.Popen(command, env=env, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True)


def test_it_answers_until_it_is_told_to_end(tmp_path):
    corpus, ready = write_corpus(tmp_path / "c.jsonl.gz"), tmp_path / "ready"
    process = start(tmp_path, f"--corpus={corpus}", f"--ready-file={ready}", "--window-ms=1", token="secret")
    try:
        wait_until(lambda: read_ready(ready, process.pid) is not None, "the retriever answers", 300)
        client = RemoteRetriever(read_ready(ready, process.pid) or "", "secret")
        assert [hit.passage.id for hit in client.search(["ana cole born"], 1)[0]] == ["b"]
    finally:
        process.send_signal(signal.SIGTERM)
        out, err = process.communicate(timeout=60)
    assert process.returncode == 0, err
    assert "retriever answers at http://127.0.0.1:" in out


@pytest.mark.parametrize(
    ("words", "said"),
    [
        (["--host=0.0.0.0"], "--host=0.0.0.0 is not loopback and there is no token"),
        (["--corpus=nowhere.jsonl"], "corpus=nowhere.jsonl is neither a file nor a corpus that ships"),
        (["--corpus=CORPUS", "--id-key=url"], "row 0: url=None is missing"),
        (["--vectors=v.npy"], "encoder= goes with vectors"),
        (["--window-ms=-1"], "--window-ms=-1"),
    ],
)
def test_what_cannot_work_is_said_at_once(tmp_path, monkeypatch, capsys, words, said):
    monkeypatch.setenv("ASTRAFLOW_CACHE", str(tmp_path / "cache"))
    corpus = write_corpus(tmp_path / "c.jsonl")
    assert main(["retriever", *(word.replace("CORPUS", str(corpus)) for word in words)]) in (1, 2)
    assert said in capsys.readouterr().err
