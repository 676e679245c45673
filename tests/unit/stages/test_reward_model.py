"""The judge against a small local server: what it is asked, what its answers become, and every way to fail."""

from __future__ import annotations

import json
import threading
from collections.abc import Callable, Iterator
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any

import pyarrow as pa
import pytest

from astraflow.errors import Problem
from astraflow.models.tiny_char import make_tokenizer
from astraflow.stages.context import StageRun, build_stage
from astraflow.testing.dataflow import small_config

Answer = Callable[[dict[str, Any], int], tuple[int, bytes]]


class Judge:
    """A server of chat completions on port 0."""

    def __init__(self) -> None:
        self.asked: list[dict[str, Any]] = []
        self.keys: list[str | None] = []
        self.answer: Answer = lambda body, number: (200, text(f"Score: {len(self.content(body))}"))
        judge = self

        class Handler(BaseHTTPRequestHandler):
            def do_POST(self) -> None:
                body = json.loads(self.rfile.read(int(self.headers["content-length"])))
                judge.asked.append(body)
                judge.keys.append(self.headers["authorization"])
                status, reply = judge.answer(body, len(judge.asked))
                self.send_response(status)
                self.send_header("content-length", str(len(reply)))
                self.end_headers()
                self.wfile.write(reply)

            def log_message(self, *args: Any) -> None:
                pass

        self._server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
        self.url = f"http://127.0.0.1:{self._server.server_port}/v1"
        self._thread = threading.Thread(target=self._server.serve_forever, args=(0.01,), daemon=True)
        self._thread.start()

    @staticmethod
    def content(body: dict[str, Any]) -> str:
        content: str = body["messages"][0]["content"]
        return content

    def close(self) -> None:
        self._server.shutdown()
        self._server.server_close()
        self._thread.join(60)


def text(content: object) -> bytes:
    return json.dumps({"choices": [{"message": {"role": "assistant", "content": content}}]}).encode()


@pytest.fixture
def judge() -> Iterator[Judge]:
    server = Judge()
    yield server
    server.close()


def stage_of(url: str, **options: Any) -> tuple[Any, StageRun]:
    options = {"prompt": "{question}|{prompt}|{completion}", **options}
    section = {"type": "reward_model", "url": url, "model": "judge", **options}
    run = StageRun(small_config(stages={"judge": section}), "judge")
    return build_stage(run), run


def rows_of(*conversations: tuple[str, str], branches: tuple[int, ...] = ()) -> pa.Table:
    """(given, sampled) per row; `branches`: calls of the rows when all belong to one episode."""
    tokenizer = make_tokenizer()
    given = [tokenizer(x, add_special_tokens=False)["input_ids"] for x, _ in conversations]
    sampled = [tokenizer(x, add_special_tokens=False)["input_ids"] for _, x in conversations]
    count = len(conversations)
    calls = branches or (0,) * count
    return pa.table(
        {
            "episode_id": [f"e{0 if branches else i}" for i in range(count)],
            "policy": ["actor"] * count,
            "branch": pa.array(range(count) if branches else [0] * count, pa.int32()),
            "parent_branch": pa.array([-1] * count, pa.int32()),
            "fork_at": pa.array([0] * count, pa.int32()),
            "token_ids": pa.array([a + b for a, b in zip(given, sampled, strict=True)], pa.list_(pa.int32())),
            "loss_mask": pa.array([[False] * len(a) + [True] * len(b) for a, b in zip(given, sampled, strict=True)]),
            "call_index": pa.array(
                [[-1] * len(a) + [c] * len(b) for a, b, c in zip(given, sampled, calls, strict=True)],
                pa.list_(pa.int16()),
            ),
            "task": [json.dumps({"question": f"q{i}"}) for i in range(count)],
        }
    )


def rewards_of(stage: Any, rows: pa.Table) -> list[float | None]:
    values: list[float | None] = stage.run(rows).column("reward").to_pylist()
    stage.close()
    return values


def test_it_shows_the_conversation_and_reads_the_number(judge: Judge, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("JUDGE_KEY", "sesame")
    stage, run = stage_of(judge.url + "/", key_env="JUDGE_KEY", max_tokens=7, scale=0.5)
    judge.answer = lambda body, number: (200, text("first 3, but then 8.5"))
    assert rewards_of(stage, rows_of(("2+2=", "4"))) == [4.25]
    body = judge.asked[0]
    assert body["messages"] == [{"role": "user", "content": "q0|2+2=|4"}]
    assert (body["model"], body["max_tokens"], body["temperature"]) == ("judge", 7, 0)
    assert judge.keys == ["Bearer sesame"] and run.stats["scored"] == 1.0


def test_many_rows_are_judged_at_once_each_its_own(judge: Judge) -> None:
    stage, _ = stage_of(judge.url)
    rows = rows_of(*[("1+1=", "7" * (i + 1)) for i in range(20)])
    assert rewards_of(stage, rows) == [float(len(f"q{i}|1+1=|") + i + 1) for i in range(20)]


def test_an_episode_is_judged_once_at_its_last_call(judge: Judge) -> None:
    stage, _ = stage_of(judge.url)
    rows = rows_of(("1", "22"), ("3", "4444"), ("5", "6"), branches=(0, 2, 1))
    assert rewards_of(stage, rows) == [None, float(len("q1|3|4444")), None]
    assert len(judge.asked) == 1


@pytest.mark.parametrize(
    ("kind", "status", "reply", "times"),
    [
        ("no_number", 200, text("I cannot say"), 3),
        ("no_text", 200, text(None), 3),
        ("no_text", 200, b"<html>", 3),
        ("busy", 503, b"later", 3),
        ("busy", 429, b"later", 3),
        ("refused", 401, b"who are you", 1),
    ],
)
def test_a_failure_is_unscored_and_counted_never_zero(
    judge: Judge, kind: str, status: int, reply: bytes, times: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("astraflow.stages.reward_model._PAUSE_S", 0.0)
    judge.answer = lambda body, number: (status, reply)
    stage, run = stage_of(judge.url)
    assert rewards_of(stage, rows_of(("1", "2"))) == [None]
    assert run.stats == {"scored": 0.0, f"unscored/{kind}": 1.0}
    assert len(judge.asked) == (1 if kind == "no_number" else times)


def test_a_judge_that_recovers_is_asked_again(judge: Judge, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("astraflow.stages.reward_model._PAUSE_S", 0.0)
    judge.answer = lambda body, number: (500, b"") if number < 3 else (200, text("1"))
    stage, _ = stage_of(judge.url)
    assert rewards_of(stage, rows_of(("1", "2"))) == [1.0]


def test_one_that_never_answers_is_given_up(judge: Judge) -> None:
    released = threading.Event()

    def hang(body: dict[str, Any], number: int) -> tuple[int, bytes]:
        released.wait(20)
        return 200, text("1")

    judge.answer = hang
    stage, run = stage_of(judge.url, timeout_s=0.2, retries=0)
    assert rewards_of(stage, rows_of(("1", "2"))) == [None]
    assert run.stats["unscored/timeout"] == 1.0
    released.set()


def test_nobody_at_the_url_is_unscored_too() -> None:
    stage, run = stage_of("http://127.0.0.1:9/v1", retries=0)
    assert rewards_of(stage, rows_of(("1", "2"))) == [None]
    assert run.stats["unscored/unreachable"] == 1.0


def test_a_field_that_tasks_lack_is_an_error_by_name(judge: Judge) -> None:
    stage, _ = stage_of(judge.url, prompt="{answer} {completion}")
    with pytest.raises(Problem, match=r"stages\.judge\.prompt=answer is no field of the task; known: question"):
        stage.run(rows_of(("1", "2")))
    stage.close()


@pytest.mark.parametrize(
    ("options", "words"),
    [
        ({"pattern": "("}, r"stages\.judge\.pattern=\( is no regular expression"),
        ({"pattern": r"\d"}, "must have exactly one group"),
        ({"prompt": "{question}"}, "does not show the {completion}"),
        ({"prompt": "{completion"}, "is not a template"),
        ({"url": "judge.example"}, r"must start with http:// or https://"),
        ({"timeout_s": 0.0}, "must be >= 0.001"),
        ({"concurrency": 0}, "must be >= 1"),
        ({"key_env": "NO_SUCH_VARIABLE"}, "key_env=NO_SUCH_VARIABLE is not set"),
    ],
)
def test_options_are_refused_by_name(options: dict[str, Any], words: str) -> None:
    with pytest.raises(Problem, match=words):
        stage_of(options.pop("url", "http://127.0.0.1:9/v1"), **options)
