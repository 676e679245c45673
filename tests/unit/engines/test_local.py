from __future__ import annotations

import threading
from collections.abc import Iterator
from concurrent.futures import Future
from pathlib import Path

import numpy as np
import pytest
import torch

from astraflow.engines.local import LocalEngine
from astraflow.engines.local.inbox import Inbox
from astraflow.engines.local.rows import Request
from astraflow.errors import EngineError, ModelError
from astraflow.models.load import load_model, state_tensors
from astraflow.types import Generation, Sampling


@pytest.fixture
def engine(endless_dir: Path) -> Iterator[LocalEngine]:
    made = LocalEngine(endless_dir, max_concurrency=4)
    yield made
    made.close()


def test_a_seeded_request_repeats_itself_in_any_company(engine: LocalEngine) -> None:
    sampling = Sampling(max_tokens=20, seed=11)
    alone = engine.submit("alone", [1, 2, 3], sampling).result(60)
    futures = [engine.submit(f"r{i}", [4] * (i + 1), Sampling(max_tokens=9)) for i in range(6)]
    crowd = engine.submit("crowd", [1, 2, 3], sampling).result(60)
    other = engine.submit("other", [1, 2, 3], Sampling(max_tokens=20, seed=12)).result(60)
    assert [f.result(60).finish_reason for f in futures] == ["length"] * 6
    np.testing.assert_array_equal(alone.token_ids, crowd.token_ids)
    assert alone.token_ids.tolist() != other.token_ids.tolist()


def test_requests_without_a_seed_differ_and_an_engine_of_equal_seed_repeats_them(endless_dir: Path) -> None:
    runs = []
    for seed in (5, 5, 6):
        engine = LocalEngine(endless_dir, seed=seed)
        futures = [engine.submit(f"r{i}", [1, 2, 3], Sampling(max_tokens=12)) for i in range(4)]
        runs.append([f.result(60).token_ids.tolist() for f in futures])
        engine.close()
    assert runs[0] == runs[1] != runs[2]
    assert len({tuple(ids) for ids in runs[0]}) == 4


@pytest.mark.parametrize("speed", [1.0, 0.3])
def test_a_slow_engine_rests_for_its_share_of_the_time(
    endless_dir: Path, monkeypatch: pytest.MonkeyPatch, speed: float
) -> None:
    rests: list[float] = []
    monkeypatch.setattr(Inbox, "rest", lambda inbox, seconds: rests.append(seconds))
    engine = LocalEngine(endless_dir, speed=speed)
    engine.submit("a", [1, 2, 3], Sampling(max_tokens=9)).result(60)
    engine.close()
    assert sum(rests) == pytest.approx((1 - speed) * engine.stats()["busy_s"])
    assert len(rests) >= 9 if speed < 1 else not rests


def test_an_engine_that_rests_ends_at_once(endless_dir: Path) -> None:
    engine = LocalEngine(endless_dir, speed=1e-6)  # a step of a millisecond is followed by a rest of minutes
    future = engine.submit("a", [1, 2, 3], Sampling(max_tokens=9))
    engine.close()
    assert not engine._core._thread.is_alive()
    with pytest.raises(EngineError, match="closed"):
        future.result(0)


def test_weights_that_do_not_fit_are_refused_and_the_rows_go_on(engine: LocalEngine, endless_dir: Path) -> None:
    tensors = state_tensors(load_model(endless_dir))
    engine.load_weights(4, tensors).result(60)
    future = engine.submit("long", [1, 2], Sampling(max_tokens=200))
    name = next(iter(tensors))
    for bad in ({k: v for k, v in tensors.items() if k != name}, {**tensors, name: tensors[name][:-1]}):
        with pytest.raises(ModelError):
            engine.load_weights(5, bad).result(60)
    generation = future.result(60)
    assert (set(generation.versions.tolist()), len(generation.token_ids)) == ({4}, 200)
    assert engine.stats()["swaps"] == 1


def test_weights_that_are_not_finite_end_the_engine_by_name(engine: LocalEngine, endless_dir: Path) -> None:
    tensors = {n: torch.full_like(t, torch.nan) for n, t in state_tensors(load_model(endless_dir)).items()}
    engine.load_weights(1, tensors).result(60)
    with pytest.raises(EngineError, match="not finite"):
        engine.submit("a", [1, 2], Sampling(max_tokens=3)).result(60)
    for future in (engine.submit("b", [1, 2], Sampling()), engine.load_weights(2, tensors)):
        with pytest.raises(EngineError, match="not finite"):
            future.result(0)  # at once


def test_any_error_in_the_thread_fails_all_that_is_pending(
    engine: LocalEngine, monkeypatch: pytest.MonkeyPatch
) -> None:
    def broken() -> None:
        raise ZeroDivisionError("planted")

    futures = [engine.submit(f"r{i}", [1, 2], Sampling(max_tokens=400)) for i in range(9)]  # five of them wait
    monkeypatch.setattr(engine._core.decoder, "step", broken)
    for future in futures:
        with pytest.raises(EngineError, match=r"ZeroDivisionError.*planted"):
            future.result(60)
    with pytest.raises(EngineError, match="ZeroDivisionError"):
        engine.submit("later", [1], Sampling()).result(0)
    assert "planted" in str(engine.ended.result(0))


def test_more_requests_than_rows_wait_their_turn(engine: LocalEngine) -> None:
    futures = [engine.submit(f"r{i}", [1, 2], Sampling(max_tokens=10)) for i in range(25)]
    assert all(len(f.result(60).token_ids) == 10 for f in futures)
    assert engine.stats()["requests"] == 25


def test_a_waiting_request_can_be_cancelled(engine: LocalEngine) -> None:
    running = [engine.submit(f"r{i}", [1, 2], Sampling(max_tokens=400)) for i in range(4)]
    waiting = engine.submit("waiting", [1, 2], Sampling(max_tokens=400))
    engine.cancel("waiting")
    generation = waiting.result(60)
    assert (generation.finish_reason, len(generation.token_ids)) == ("cancelled", 0)
    for i in range(4):
        engine.cancel(f"r{i}")
    assert {f.result(60).finish_reason for f in running} <= {"cancelled", "length"}


def test_a_caller_that_cancels_its_future_breaks_nothing(engine: LocalEngine) -> None:
    future = engine.submit("a", [1, 2], Sampling(max_tokens=50))
    assert not future.cancel()
    assert len(future.result(60).token_ids) == 50


def test_a_prompt_with_foreign_ids_is_refused(engine: LocalEngine) -> None:
    for ids in ([1, 40], [-1]):
        with pytest.raises(EngineError, match=r"0\.\.39"):
            engine.submit("a", ids, Sampling()).result(60)


def test_threads_that_submit_cancel_and_swap_at_once_all_get_answers(endless_dir: Path) -> None:
    engine = LocalEngine(endless_dir, max_concurrency=16)
    tensors = state_tensors(load_model(endless_dir))
    engine.load_weights(0, tensors).result(60)
    results: list[Generation] = []
    lock = threading.Lock()

    def agent(number: int) -> None:
        rng = np.random.default_rng(number)
        for i in range(15):
            name = f"{number}/{i}"
            future = engine.submit(name, rng.integers(0, 40, 1 + i), Sampling(max_tokens=int(rng.integers(1, 30))))
            if rng.random() < 0.2:
                engine.cancel(name)
            with lock:
                results.append(future.result(60))

    threads = [threading.Thread(target=agent, args=(n,)) for n in range(8)]
    for thread in threads:
        thread.start()
    for version in range(1, 8):
        engine.load_weights(version, tensors).result(60)
    for thread in threads:
        thread.join(60)
    assert len(results) == 8 * 15
    assert engine.stats()["swaps"] == 8
    assert sum(len(g.token_ids) for g in results) == engine.stats()["sampled_tokens"]
    engine.close()


def test_a_delayed_request_is_not_admitted_before_its_time() -> None:
    inbox = Inbox()
    prompt = np.array([1], np.int32)
    inbox.add(Request("later", prompt, Sampling(), Future(), 0, float("inf")))
    work = inbox.take(room=4, busy=True)
    assert work is not None and work.admitted == []
    inbox.fail(EngineError("engine", "closed", "serves no more requests", "start a new one"))
    assert inbox.take(room=4, busy=False) is None


def test_delay_changes_when_not_what(endless_dir: Path) -> None:
    answers = []
    for delay_s in (0.0, 0.05):
        engine = LocalEngine(endless_dir, delay_s=delay_s)
        answers.append(engine.submit("a", [1, 2], Sampling(max_tokens=5)).result(60).token_ids.tolist())
        engine.close()
    assert answers[0] == answers[1]


def test_max_context_can_be_lowered_not_raised(endless_dir: Path) -> None:
    engine = LocalEngine(endless_dir, max_context=20)
    assert engine.max_context == 20
    assert len(engine.submit("a", [1] * 15, Sampling(max_tokens=50)).result(60).token_ids) == 5
    engine.close()
    with pytest.raises(ModelError, match="max_context=513"):
        LocalEngine(endless_dir, max_context=513)


@pytest.mark.parametrize(
    "setting",
    [
        {"max_concurrency": 0},
        {"max_context": 1},
        {"threads": 0},
        {"delay_s": -1.0},
        {"speed": 0.0},
        {"speed": 1.1},
        {"prefix_cache_mb": -1},
        {"kv_cache_mb": 0},
        {"prefill_chunk": 0},
    ],
)
def test_settings_out_of_range_are_refused_by_name(endless_dir: Path, setting: dict[str, float]) -> None:
    with pytest.raises(EngineError, match=f"engine.{next(iter(setting))}="):
        LocalEngine(endless_dir, **setting)  # type: ignore[arg-type]


def test_the_engine_thread_has_the_threads_it_was_given(endless_dir: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    before = torch.get_num_threads()
    engine = LocalEngine(endless_dir, threads=2)
    seen: list[int] = []
    step = engine._core.decoder.step
    monkeypatch.setattr(engine._core.decoder, "step", lambda: (seen.append(torch.get_num_threads()), step())[1])
    engine.submit("a", [1], Sampling(max_tokens=1)).result(60)
    engine.close()
    torch.set_num_threads(before)
    assert seen == [2]


def test_an_unknown_dtype_is_refused(endless_dir: Path) -> None:
    with pytest.raises(ModelError, match="dtype=float8"):
        LocalEngine(endless_dir, dtype="float8")
