"""The engine `sglang`: what every server must do, what is sent to this one, and which version its tokens have."""

from __future__ import annotations

import json
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any, ClassVar

import pytest
import torch

from astraflow.engines.sglang.command import LIFELINE
from astraflow.engines.sglang.engine import SglangEngine
from astraflow.errors import EngineError
from astraflow.types import Sampling
from served_suite import PROMPT, ServedSuite, check_lifeline

Start = Callable[..., Any]


class TestSglang(ServedSuite):
    kind, engine, names, updates = "sglang", SglangEngine, ("input_ids", "max_new_tokens"), ("update",)
    held: ClassVar = {"args": {"fake_held": True, "fake_spans": True}, "deterministic": True}
    tick = 12
    starts: ClassVar = {
        "memory": ("not enough memory", "mem_fraction_static"), "port": ("port is taken", "engine.port"),
        "model": ("cannot load this model", "local"), "argument": ("does not know an argument", "engine.args"),
        "gpu": ("finds no GPU", "local"),
    }  # fmt: skip
    environments: ClassVar = [
        ({"version": ""}, "has no SGLang"),
        ({"version": "0.4.9"}, "sglang=0.4.9 is not a version"),
        ({"version": "0.6.0"}, "sglang=0.6.0 is not a version"),
    ]
    abouts: ClassVar = [
        ({"dtype": "bfloat16"}, "sglang dtype=bfloat16 must be float32"),
        ({"incremental_streaming_output": False}, "--incremental-streaming-output"),
        ({"stream_interval": 8}, "--stream-interval 1"),
        ({"speculative_algorithm": "EAGLE"}, "sglang speculative_algorithm=EAGLE must be None"),
        ({"version": "0.5.10"}, "sglang=0.5.10 is not a version"),
    ]
    ours: ClassVar = ["quantization", "stream-interval", "speculative_algorithm"]

    def test_what_a_deterministic_engine_needs(self, owner: Any, attach: Any) -> None:
        with pytest.raises(EngineError, match=r"engine.deterministic=True is not what the server"):
            attach(url=owner.url, deterministic=True)


def test_every_sampling_parameter_is_sent(start: Start, eos_dir: Path) -> None:
    played = start(model_dir=eos_dir)
    sampling = Sampling(temperature=0.7, top_p=0.9, top_k=5, min_p=0.1, max_tokens=6, stop_token_ids=(11,))
    played.engine.submit("a", PROMPT, sampling).result(60)
    played.engine.submit("b", PROMPT, Sampling(temperature=1e-7, logprob_temperature=1.0)).result(60)
    first, second = played.bodies()
    assert first["input_ids"] == PROMPT and len(first["rid"]) == 32
    assert first["sampling_params"] == {
        "n": 1, "temperature": 0.7, "top_p": 0.9, "top_k": 5, "min_p": 0.1, "presence_penalty": 0.0,
        "frequency_penalty": 0.0, "repetition_penalty": 1.0, "max_new_tokens": 6, "min_new_tokens": 0,
        "ignore_eos": False, "stop_token_ids": [2, 11],
    }  # fmt: skip
    told = second["sampling_params"]
    assert (told["temperature"], told["top_k"], told["max_new_tokens"]) == (0.0, -1, 256)


def test_requests_of_a_deterministic_server_have_seeds_of_their_own(start: Start) -> None:
    played = start(deterministic=True, seed=3)
    for name, seed in (("a", None), ("b", None), ("c", 7)):
        played.engine.submit(name, PROMPT, Sampling(max_tokens=3, seed=seed)).result(60)
    seeds = [body["sampling_params"]["sampling_seed"] for body in played.bodies()]
    assert len(set(seeds)) == 3 and seeds[2] == 7, "without any, SGLang would give all of them one"


@pytest.mark.parametrize(
    ("sampling", "message"),
    [
        (Sampling(seed=5), r"sampling.seed=5 has no effect .*deterministic = true"),
        (Sampling(temperature=0.7, logprob_temperature=1.0), r"sampling.logprob_temperature=1.0 must be .* 0.7"),
        (Sampling(temperature=0.0, logprob_temperature=0.5), r"sampling.logprob_temperature=0.5 must be .* 1"),
    ],
)
def test_what_it_cannot_do_is_refused_by_name(start: Start, sampling: Sampling, message: str) -> None:
    with pytest.raises(EngineError, match=message):
        start().engine.submit("a", PROMPT, sampling).result(60)


@pytest.mark.parametrize("spans", [True, False])
def test_a_generation_ends_at_a_swap_and_goes_on_after_it(
    start: Start, tensors: dict[str, torch.Tensor], spans: bool
) -> None:
    """With what the server says of each token, and with one version for all of an answer."""
    played, handed = start(args={"fake_held": True, "fake_spans": spans}), list[int]()
    played.engine.load_weights(4, tensors).result(60)
    future = played.engine.submit(
        "a", PROMPT, Sampling(max_tokens=30), lambda ids, logprobs, versions: handed.extend(versions)
    )
    played.step(8)
    for version in range(5, 12):  # more often than a server may be lost
        played.engine.load_weights(version, tensors).result(60)
        played.step(2)
    played.tell("release")
    generation = future.result(60)
    assert generation.versions.tolist() == handed
    assert handed == [4] * 8 + [v for v in range(5, 11) for _ in range(2)] + [11] * 10
    bodies = played.bodies()
    assert [len(body["input_ids"]) for body in bodies] == [3 + n for n in (0, 8, 10, 12, 14, 16, 18, 20)]
    assert bodies[1]["input_ids"] == PROMPT + generation.token_ids[:8].tolist()
    assert bodies[1]["sampling_params"]["max_new_tokens"] == 22
    assert played.engine.stats()["restarts"] == 0
    assert generation.logprobs.tolist() == (-generation.token_ids / 64).tolist(), "nothing is there twice"


def test_an_update_is_paused_flushed_and_named(start: Start, tensors: dict[str, torch.Tensor]) -> None:
    played = start()
    before = len(played.tell("seen"))
    played.engine.load_weights(4, tensors).result(60)
    steps = played.tell("seen")[before:]
    assert [step for step in steps if step[0] != "ended"] == [
        ["pause", {"mode": "retract"}], ["abort", {"abort_all": True}],
        ["update", {
            "model_path": str(played.engine._shadow.directory), "load_format": "safetensors", "weight_version": "4",
            "flush_cache": True, "abort_all_requests": False,
        }],
        ["resume", {}],
    ]  # fmt: skip
    assert played.tell("fault")["loaded"] == played.engine._shadow.path.stat().st_size
    assert played.engine.effective_weights().result(60).checksum == "", "what cannot be looked at is not claimed"


def test_versions_that_the_server_does_not_confirm_fail_the_request_token_by_token_too(start: Start) -> None:
    played = start(args={"fake_spans": True})
    played.tell("fault", spans="wrong")
    with pytest.raises(EngineError, match=r"weight versions=.*77"):
        played.engine.submit("a", PROMPT, Sampling(max_tokens=9)).result(60)


@pytest.mark.parametrize(
    ("fault", "message"),
    [
        ({"error": "now"}, "400 refused the request: no such thing"),
        ({"finish": json.dumps({"type": "abort", "message": "too long", "status_code": 400})}, "too long"),
        ({"finish": json.dumps({"type": "stop", "matched": 39})}, "ended a request at nothing"),
        ({"finish": json.dumps({"type": "stop", "matched": "NaN happened"})}, "ended a request at nothing"),
    ],
)
def test_an_end_that_was_not_asked_for_fails_the_request_alone(
    start: Start, fault: dict[str, str], message: str
) -> None:
    played = start()
    played.tell("fault", **fault)
    with pytest.raises(EngineError, match=message):
        played.engine.submit("a", PROMPT, Sampling()).result(60)
    assert len(played.engine.submit("other", PROMPT, Sampling(max_tokens=4)).result(60).token_ids) == 4
    assert played.engine.stats()["restarts"] == 0


def test_cancelling_is_said_to_the_server(start: Start) -> None:
    """It notices a closed connection two seconds later."""
    played = start(args={"fake_held": True})
    played.engine.submit("a", PROMPT, Sampling(max_tokens=30))
    played.step(3)
    played.engine.cancel("a")
    (body,) = played.bodies()
    played.until(lambda: [{"rid": body["rid"]}] in played.asked("abort"))


@pytest.mark.parametrize(
    ("said", "message"),
    [
        ("-0.7", r"sglang logprobs=.*must be near -3.69"),  # of the policy at temperature 1
        ("0.0", r"sglang logprobs=.*before top-k"),  # of what top-k left
    ],
)
def test_a_server_with_other_logprobs_is_refused(start: Start, said: str, message: str) -> None:
    with pytest.raises(EngineError, match=message):
        start(args={"fake_probe": said})


def test_a_variable_that_makes_it_say_other_logprobs_does_not_reach_it(
    start: Start, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("SGLANG_RETURN_ORIGINAL_LOGPROB", "1")
    start()  # the fake ends at once where it has it


def test_the_servers_lifeline(tmp_path: Path) -> None:
    """The whole group ends when its standard input closes, processes that it spawns too. SGLang is played by one
    module."""
    (tmp_path / "sglang").mkdir()
    (tmp_path / "sglang" / "launch_server.py").write_text(
        "import multiprocessing, sys, time\n"
        "def work(queue):\n    queue.put(sys.argv[1:])\n    time.sleep(600)\n"
        "if __name__ == '__main__':\n"
        "    context = multiprocessing.get_context('spawn')\n    queue = context.Queue()\n"
        "    child = context.Process(target=work, args=(queue,))\n    child.start()\n"
        "    print(child.pid, queue.get(), flush=True)\n    child.join()\n"
    )
    check_lifeline([sys.executable, "-c", LIFELINE, "sglang.launch_server"], str(tmp_path))
