"""What is sent to the server, and which version each token that comes back has."""

from __future__ import annotations

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


def bodies(played: Any) -> list[dict[str, Any]]:
    return [entry[1] for entry in played.tell("seen") if entry[0] == "generate"]


def test_every_sampling_parameter_is_sent(start: Start, eos_dir: Path) -> None:
    played = start(model_dir=eos_dir)
    sampling = Sampling(
        temperature=0.7,
        top_p=0.9,
        top_k=5,
        min_p=0.1,
        max_tokens=6,
        stop_token_ids=(11,),
        logprob_temperature=1.5,
        seed=4,
    )
    played.engine.submit("a", PROMPT, sampling).result(60)
    played.engine.submit("b", PROMPT, Sampling(temperature=0.0, logprob_temperature=1.0)).result(60)
    first, second = bodies(played)
    assert first["token_ids"] == PROMPT
    assert first["sampling_params"] == {
        "n": 1, "temperature": 0.7, "top_p": 0.9, "top_k": 5, "min_p": 0.1, "presence_penalty": 0.0,
        "frequency_penalty": 0.0, "repetition_penalty": 1.0, "seed": 4, "max_tokens": 6, "min_tokens": 0,
        "ignore_eos": True, "stop_token_ids": [2, 11], "logprobs": 0, "detokenize": False,
        "extra_args": {"astraflow_logprob_temperature": 1.5},
    }  # fmt: skip
    assert second["sampling_params"]["extra_args"] is None, "of temperature 0, the logprobs are those of 1 anyway"
    assert (second["sampling_params"]["seed"], second["sampling_params"]["max_tokens"]) == (None, 256)


def test_logprobs_are_those_of_their_tokens(start: Start) -> None:
    generation = start().engine.submit("a", PROMPT, Sampling(max_tokens=40)).result(60)
    assert generation.logprobs.tolist() == (-generation.token_ids / 64).tolist()


def test_tokens_that_come_after_the_swap_keep_the_version_they_were_sampled_under(
    start: Start, tensors: dict[str, torch.Tensor]
) -> None:
    played, handed = start(args={"fake_held": True}), []
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


def test_a_request_that_starts_within_a_swap_is_of_the_new_version(
    start: Start, tensors: dict[str, torch.Tensor]
) -> None:
    played = start()
    swaps = [played.engine.load_weights(version, tensors) for version in range(6)]
    futures = [played.engine.submit(str(number), PROMPT, Sampling(max_tokens=9)) for number in range(40)]
    assert [swap.result(60) for swap in swaps] == list(range(6))
    for future in futures:
        check_generation(future.result(60))


def test_versions_that_the_server_does_not_confirm_fail_the_request(start: Start) -> None:
    played = start()
    played.tell("fault", spans="wrong")
    with pytest.raises(EngineError, match=r"weight versions=.*77"):
        played.engine.submit("a", PROMPT, Sampling(max_tokens=9)).result(60)
    assert len(played.engine.submit("b", PROMPT, Sampling(max_tokens=9)).result(60).token_ids) == 9


def test_a_request_that_the_server_refuses_fails_alone_and_says_why(start: Start) -> None:
    played = start(args={"fake_held": True})
    other = played.engine.submit("other", PROMPT, Sampling(max_tokens=4))
    played.step()
    played.tell("fault", generate="refuse")
    with pytest.raises(EngineError, match="not now"):
        played.engine.submit("a", PROMPT, Sampling()).result(60)
    played.tell("release")
    assert len(other.result(60).token_ids) == 4
    assert played.engine.stats()["restarts"] == 0


def test_a_connection_that_is_cut_is_asked_for_the_rest(start: Start) -> None:
    played = start()
    played.tell("fault", cut="now")
    handed: list[int] = []
    generation = played.engine.submit("a", PROMPT, Sampling(max_tokens=30), lambda ids, *_: handed.extend(ids)).result(
        60
    )
    _, second = bodies(played)
    assert second["token_ids"] == PROMPT + generation.token_ids[:7].tolist()
    assert second["sampling_params"]["max_tokens"] == 23
    assert generation.token_ids.tolist() == handed and len(handed) == 30
    assert played.engine.stats()["restarts"] == 0


def test_cancelling_ends_it_at_the_server_too(start: Start) -> None:
    played = start(args={"fake_held": True})
    future = played.engine.submit("a", PROMPT, Sampling(max_tokens=30))
    played.step(3)
    played.engine.cancel("a")
    assert len(future.result(60).token_ids) == 3
    played.until(lambda: any(entry[0] == "ended" and entry[2] == "aborted" for entry in played.tell("seen")))


def test_weights_that_do_not_fit_change_nothing(start: Start, tensors: dict[str, torch.Tensor]) -> None:
    engine = start().engine
    engine.load_weights(0, tensors).result(60)
    before = engine.effective_weights().result(60)
    missing = dict(list(tensors.items())[:-1])
    with pytest.raises(ModelError, match="are missing"):
        engine.load_weights(1, missing).result(60)
    assert engine.version == 0
    assert engine.effective_weights().result(60) == before


def test_a_thousand_interleavings(start: Start, tensors: dict[str, torch.Tensor]) -> None:
    """Submitting, sampling, late arrival, cancelling, swapping: ids, logprobs and versions stay together."""
    played, draw, version = start(args={"fake_held": True}), random.Random(5), 0
    engine = played.engine
    engine.load_weights(0, tensors).result(60)
    live: dict[str, tuple[Future[Generation], list[tuple[int, float, int]]]] = {}
    for number in range(1000):
        act = draw.choices(["submit", "step", "lag", "cancel", "swap"], [5, 5, 1, 2, 1])[0]
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
        elif act == "lag":
            played.tell("fault", lag=draw.randrange(4))
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
    assert bodies(played)[-1]["token_ids"] == PROMPT + generation.token_ids[:5].tolist()
