"""The engine `vllm`: what every server must do, what is sent to this one, and which version its tokens have."""

from __future__ import annotations

import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any, ClassVar

import pytest
import torch

from astraflow.engines.vllm.engine import VllmEngine
from astraflow.types import Sampling
from served_suite import PROMPT, ServedSuite, changed, check_lifeline

Start = Callable[..., Any]


class TestVllm(ServedSuite):
    kind, engine, names = "vllm", VllmEngine, ("token_ids", "max_tokens")
    updates = ("start_weight_update", "update_weights", "finish_weight_update")
    starts: ClassVar = {
        "memory": ("not enough memory", "max_context"), "port": ("port is taken", "engine.port"),
        "model": ("cannot load this model", "local"), "argument": ("does not know an argument", "engine.args"),
    }  # fmt: skip
    environments: ClassVar = [
        ({"version": "", "plugin": False}, "has no vLLM"),
        ({"version": "0.9.1", "plugin": True}, "vllm=0.9.1 is not a version"),
        ({"version": "0.32.0", "plugin": False}, "has vLLM but not astraflow"),
    ]
    abouts: ClassVar = [
        ({"dtype": "bfloat16"}, r"vllm dtype=bfloat16 must be float32"),
        ({"logprobs_mode": "raw_logprobs"}, r"--logprobs-mode processed_logprobs"),
        ({"backend": ""}, r"--weight-transfer-config"),
        ({"logits_processors": []}, r"--logits-processors"),
        ({"sees_weights": False}, r"engine.share"),
    ]
    ours: ClassVar = ["logprobs_mode", "max-model-len"]


def test_every_sampling_parameter_is_sent(start: Start, eos_dir: Path) -> None:
    played = start(model_dir=eos_dir)
    sampling = Sampling(
        temperature=0.7, top_p=0.9, top_k=5, min_p=0.1, max_tokens=6, stop_token_ids=(11,), logprob_temperature=1.5,
        seed=4,
    )  # fmt: skip
    played.engine.submit("a", PROMPT, sampling).result(60)
    played.engine.submit("b", PROMPT, Sampling(temperature=0.0, logprob_temperature=1.0)).result(60)
    first, second = played.bodies()
    assert first["token_ids"] == PROMPT and "cache_salt" not in first
    assert first["sampling_params"] == {
        "n": 1, "temperature": 0.7, "top_p": 0.9, "top_k": 5, "min_p": 0.1, "presence_penalty": 0.0,
        "frequency_penalty": 0.0, "repetition_penalty": 1.0, "seed": 4, "max_tokens": 6, "min_tokens": 0,
        "ignore_eos": True, "stop_token_ids": [2, 11], "logprobs": 0, "detokenize": False,
        "extra_args": {"astraflow_logprob_temperature": 1.5},
    }  # fmt: skip
    assert second["sampling_params"]["extra_args"] is None, "of temperature 0, the logprobs are those of 1 anyway"
    assert (second["sampling_params"]["seed"], second["sampling_params"]["max_tokens"]) == (None, 256)


def test_caches_that_stay_over_a_swap_serve_no_request_of_a_later_version(
    start: Start, tensors: dict[str, torch.Tensor]
) -> None:
    played = start(kv_after_swap="keep", args={"fake_held": True})
    played.engine.load_weights(0, tensors).result(60)
    before = [played.engine.submit(name, PROMPT, Sampling(max_tokens=9)) for name in "ab"]
    played.step()
    played.engine.load_weights(1, tensors).result(60)
    after = played.engine.submit("c", PROMPT, Sampling(max_tokens=9))
    played.tell("release")
    assert [future.result(60).versions.tolist() for future in before] == [[0] * 2 + [1] * 7] * 2
    assert after.result(60).versions.tolist() == [1] * 9
    first, second, third = (body["cache_salt"] for body in played.bodies())
    assert first == second != third, "prompts are still read once for all siblings of a version"
    assert played.asked("pause")[-1] == [{"mode": "keep", "clear_cache": "false"}]


def test_tokens_that_come_after_the_swap_keep_the_version_they_were_sampled_under(
    start: Start, tensors: dict[str, torch.Tensor]
) -> None:
    played, handed = start(args={"fake_held": True}), list[int]()
    played.engine.load_weights(4, tensors).result(60)
    future = played.engine.submit(
        "a", PROMPT, Sampling(max_tokens=30), lambda ids, logprobs, versions: handed.extend(versions)
    )
    played.step(2)
    played.tell("fault", lag=3)
    played.tell("step", tokens=6, requests=1)  # eight are sampled, five have been sent
    played.until(lambda: len(handed) == 5)
    played.engine.load_weights(5, tensors).result(60)
    played.tell("step", tokens=2, requests=1)
    played.tell("release")
    expected = [4] * 8 + [5] * 22
    assert future.result(60).versions.tolist() == expected == handed


def test_a_server_that_cannot_count_is_asked_again_after_each_swap(
    start: Start, tensors: dict[str, torch.Tensor], monkeypatch: pytest.MonkeyPatch
) -> None:
    played = start(args={"fake_held": True})
    server = played.engine._keeper.server
    counting = server.pause

    async def pause() -> dict[str, int]:
        await counting()
        return {}

    monkeypatch.setattr(server, "pause", pause)
    monkeypatch.setattr(server, "counts", False)
    played.engine.load_weights(1, tensors).result(60)
    future = played.engine.submit("a", PROMPT, Sampling(max_tokens=400))
    played.step(5)
    played.engine.load_weights(2, tensors).result(60)
    played.tell("release")
    generation = future.result(60)
    assert generation.versions.tolist() == [1] * 5 + [2] * 395
    assert played.bodies()[-1]["token_ids"] == PROMPT + generation.token_ids[:5].tolist()


def test_weights_that_did_not_arrive_are_seen(start: Start, tensors: dict[str, torch.Tensor]) -> None:
    played = start()
    played.tell("fault", update_weights="torn")
    played.engine.load_weights(1, changed(tensors)).result(60)
    assert "other numbers in 1 weights (a.weight)" in played.engine.effective_weights().result(60).checksum
    played.tell("fault", compare="unknown")
    played.engine.load_weights(2, tensors).result(60)
    assert played.engine.effective_weights().result(60).checksum == "", "what cannot be looked at is not claimed"
    played.engine.load_weights(3, tensors).result(60)
    assert len(played.engine.effective_weights().result(60).checksum) == 32


def test_the_servers_lifeline(tmp_path: Path) -> None:
    """`inside.serve` ends the whole group when its standard input closes. vLLM is played by one module."""
    module = tmp_path / "vllm" / "entrypoints" / "openai"
    module.mkdir(parents=True)
    (module / "api_server.py").write_text(
        "import subprocess, sys\n"
        "child = subprocess.Popen([sys.executable, '-c', 'input()'], stdin=subprocess.PIPE)\n"
        "print(child.pid, sys.argv[1:], flush=True)\nchild.wait()\n"
    )
    source = Path(sys.modules["astraflow"].__file__ or "").parents[1]
    check_lifeline([sys.executable, "-m", "astraflow.engines.vllm.inside.serve"], f"{source}:{tmp_path}")
