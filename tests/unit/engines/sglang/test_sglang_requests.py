"""What is sent to the server, and which version each token that comes back has."""

from __future__ import annotations

import json
import random
from collections.abc import Callable
from concurrent.futures import Future
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from astraflow.errors import EngineError, ModelError
from astraflow.models.load import load_model, state_tensors
from astraflow.testing.engines.suite import check_generation
from astraflow.types import Generation, Sampling

PROMPT = [1, 5, 9]
Start = Callable[..., Any]


@pytest.fixture
def tensors(endless_dir: Path) -> dict[str, torch.Tensor]:
    return state_tensors(load_model(endless_dir))


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


def test_logprobs_are_those_of_their_tokens(start: Start) -> None:
    generation = start().engine.submit("a", PROMPT, Sampling(max_tokens=40)).result(60)
    assert generation.logprobs.tolist() == (-generation.token_ids / 64).tolist()


@pytest.mark.parametrize("spans", [True, False])
def test_a_generation_ends_at_a_swap_and_goes_on_after_it(
    start: Start, tensors: dict[str, torch.Tensor], spans: bool
) -> None:
    """With what the server says of each token, and with one version for all of an answer."""
    played, handed = start(args={"fake_held": True, "fake_spans": spans}), []
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


def test_a_request_that_starts_within_a_swap_is_of_the_new_version(
    start: Start, tensors: dict[str, torch.Tensor]
) -> None:
    played = start()
    swaps = [played.engine.load_weights(version, tensors) for version in range(6)]
    futures = [played.engine.submit(str(number), PROMPT, Sampling(max_tokens=9)) for number in range(40)]
    assert [swap.result(60) for swap in swaps] == list(range(6))
    for future in futures:
        check_generation(future.result(60))


@pytest.mark.parametrize("spans", [True, False])
def test_versions_that_the_server_does_not_confirm_fail_the_request(start: Start, spans: bool) -> None:
    played = start(args={"fake_spans": spans})
    played.tell("fault", spans="wrong")
    with pytest.raises(EngineError, match=r"weight versions=.*77"):
        played.engine.submit("a", PROMPT, Sampling(max_tokens=9)).result(60)
    assert len(played.engine.submit("b", PROMPT, Sampling(max_tokens=9)).result(60).token_ids) == 9


@pytest.mark.parametrize(
    ("fault", "message"),
    [
        ({"generate": "refuse"}, "not now"),
        ({"error": "now"}, "400 refused the request: no such thing"),
        ({"finish": json.dumps({"type": "abort", "message": "too long", "status_code": 400})}, "too long"),
        ({"finish": json.dumps({"type": "stop", "matched": 39})}, "ended a request at nothing"),
        ({"finish": json.dumps({"type": "stop", "matched": "NaN happened"})}, "ended a request at nothing"),
    ],
)
def test_a_request_that_the_server_refuses_fails_alone_and_says_why(
    start: Start, fault: dict[str, str], message: str
) -> None:
    played = start()
    played.tell("fault", **fault)
    with pytest.raises(EngineError, match=message):
        played.engine.submit("a", PROMPT, Sampling()).result(60)
    assert len(played.engine.submit("other", PROMPT, Sampling(max_tokens=4)).result(60).token_ids) == 4
    assert played.engine.stats()["restarts"] == 0


def test_a_connection_that_is_cut_is_asked_for_the_rest(start: Start) -> None:
    played = start()
    played.tell("fault", cut="now")
    handed: list[int] = []
    future = played.engine.submit("a", PROMPT, Sampling(max_tokens=30), lambda ids, *_: handed.extend(ids))
    generation = future.result(60)
    _, second = played.bodies()
    assert second["input_ids"] == PROMPT + generation.token_ids[:7].tolist()
    assert second["sampling_params"]["max_new_tokens"] == 23
    assert generation.token_ids.tolist() == handed and len(handed) == 30
    assert played.engine.stats()["restarts"] == 0


def test_cancelling_ends_it_at_the_server_too(start: Start) -> None:
    played = start(args={"fake_held": True})
    future = played.engine.submit("a", PROMPT, Sampling(max_tokens=30))
    played.step(3)
    played.engine.cancel("a")
    assert len(future.result(60).token_ids) == 3
    (body,) = played.bodies()
    played.until(lambda: [{"rid": body["rid"]}] in played.asked("abort"))


def test_weights_that_do_not_fit_change_nothing(start: Start, tensors: dict[str, torch.Tensor]) -> None:
    played = start()
    played.engine.load_weights(0, tensors).result(60)
    missing = dict(list(tensors.items())[:-1])
    with pytest.raises(ModelError, match="are missing"):
        played.engine.load_weights(1, missing).result(60)
    assert played.engine.version == 0 and len(played.asked("update")) == 1


def test_the_load_of_the_server_is_read(start: Start) -> None:
    played = start(args={"fake_held": True})
    future = played.engine.submit("a", PROMPT, Sampling(max_tokens=30))
    played.step(3)
    played.until(lambda: played.engine.stats().get("server_running") == 1)
    stats = played.engine.stats()
    assert (stats["server_waiting"], stats["kv_usage"]) == (1, 0.25)
    played.tell("release")
    future.result(60)


def test_a_thousand_interleavings(start: Start, tensors: dict[str, torch.Tensor]) -> None:
    """Submitting, sampling, cancelling, swapping: ids, logprobs and versions stay together."""
    played, draw, version = start(args={"fake_held": True, "fake_spans": True}), random.Random(5), 0
    engine = played.engine
    engine.load_weights(0, tensors).result(60)
    live: dict[str, tuple[Future[Generation], list[tuple[int, float, int]]]] = {}
    for number in range(1000):
        act = draw.choices(["submit", "step", "cancel", "swap"], [5, 5, 2, 1])[0]
        if act == "submit" and len(live) < 12:
            handed: list[tuple[int, float, int]] = []
            prompt = [draw.randrange(3, 40) for _ in range(draw.randrange(1, 9))]
            future = engine.submit(
                str(number), prompt, Sampling(max_tokens=draw.randrange(1, 40)),
                lambda *columns, to=handed: to.extend(zip(*columns, strict=True)),
            )  # fmt: skip
            live[str(number)] = (future, handed)
        elif act == "step":
            played.tell("step", tokens=draw.randrange(1, 6), requests=0)
        elif act == "cancel" and live:
            engine.cancel(draw.choice(sorted(live)))
        elif act == "swap":
            version += 1
            engine.load_weights(version, tensors).result(60)
        for name in [name for name, (future, _) in live.items() if future.done()]:
            check(*live.pop(name))
    played.tell("release")
    for future, handed in live.values():
        future.result(60)
        check(future, handed)
    assert engine.stats()["restarts"] == 0


def check(future: Future[Generation], handed: list[tuple[int, float, int]]) -> None:
    generation = future.result(60)
    check_generation(generation)
    columns = (generation.token_ids, generation.logprobs, generation.versions)
    assert handed == list(zip(*(column.tolist() for column in columns), strict=True))
    assert np.all(generation.logprobs == -generation.token_ids / 64)
