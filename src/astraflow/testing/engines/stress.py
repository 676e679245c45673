"""Seeds, numbers, and what happens to an engine under load, at random and when it breaks."""

from __future__ import annotations

from concurrent.futures import Future
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import pytest

from astraflow.errors import EngineError
from astraflow.testing.engines.case import DEADLINE_S, EngineCase, check_generation
from astraflow.types import Generation, Sampling

TRUTH = (
    Sampling(temperature=0.6, max_tokens=24),
    Sampling(max_tokens=24),
    Sampling(temperature=1.4, max_tokens=24),
    Sampling(temperature=0.0, max_tokens=24),
    Sampling(top_p=0.7, max_tokens=24),
    Sampling(top_k=3, max_tokens=24),
    Sampling(min_p=0.2, max_tokens=24),
    Sampling(temperature=0.7, logprob_temperature=1.0, max_tokens=24),
)
"""Sampling of which the logprobs must be those before top-p, top-k and min-p."""


@dataclass
class _Asked:
    name: str
    sampling: Sampling
    future: Future[Generation]
    version: int  # the newest that was loaded or asked for before it
    handed: list[tuple[int, float, int]] = field(default_factory=list)
    cancelled: bool = False


class StressSuite:
    """A part of `EngineSuite`."""

    @pytest.fixture
    def case(self) -> Any:
        """Override: yields an EngineCase, closes its engine afterwards."""
        raise NotImplementedError

    def test_a_seed_repeats_itself_in_any_company(self, case: EngineCase) -> None:
        case.engine.load_weights(0, case.tensors).result(DEADLINE_S)
        case.finish()
        sampling = Sampling(max_tokens=16, seed=11)
        alone, again = (_ask(case, name, sampling) for name in ("alone", "again"))
        company = [case.engine.submit(f"c{i}", case.prompt[: 1 + i % 3], Sampling(max_tokens=9)) for i in range(7)]
        crowd, other = _ask(case, "crowd", sampling), _ask(case, "other", Sampling(max_tokens=16, seed=12))
        assert all(future.result(DEADLINE_S) for future in company)
        np.testing.assert_array_equal(alone.token_ids, again.token_ids)
        np.testing.assert_allclose(alone.logprobs, again.logprobs, atol=case.gap[1])  # a cache may hold the prompt
        if case.gap[1] <= 1e-3:  # coarser numbers change a little with the size of the batch, and with them tokens
            np.testing.assert_array_equal(alone.token_ids, crowd.token_ids)
        if case.score is not None:
            assert alone.token_ids.tolist() != other.token_ids.tolist()

    def test_logprobs_are_those_of_teacher_forcing(self, case: EngineCase, record_property: Any) -> None:
        case.finish()
        if case.score is None:
            return
        futures = []
        for number, sampling in enumerate(TRUTH * 4):
            prompt = (case.prompt * (1 + number % 5))[: 3 * number + 1]  # ragged, and some of them siblings
            futures.append((prompt, sampling, case.engine.submit(f"r{number}", prompt, sampling)))
        gaps = []
        for prompt, sampling, future in futures:
            generation = future.result(DEADLINE_S)
            check_generation(generation, sampling)
            expected = case.score(prompt, generation, sampling.logprob_temperature or sampling.temperature or 1.0)
            gaps.append(np.abs(generation.logprobs - expected))
        p50, p99 = np.quantile(np.concatenate(gaps), [0.5, 0.99])
        record_property("logprob_gap", {"p50": float(p50), "p99": float(p99)})
        assert p50 < case.gap[0] and p99 < case.gap[1]

    def test_random_submits_cancels_swaps_and_pauses_lose_nothing(self, case: EngineCase) -> None:
        draw = np.random.default_rng(0)
        case.engine.load_weights(0, case.tensors).result(DEADLINE_S)
        if case.tick is None:
            case.finish()
        asked: list[_Asked] = []
        swaps: list[Future[int]] = []
        paused = False
        for _ in range(case.num_events):
            event = draw.choice(["submit", "cancel", "swap", "pause", "tick"], p=[0.6, 0.15, 0.08, 0.12, 0.05])
            if event == "submit":
                asked.append(_submit(case, len(asked), len(swaps), draw))
            elif event == "cancel" and asked:
                one = asked[-int(draw.integers(1, min(12, len(asked)) + 1))]
                one.cancelled = True
                case.engine.cancel(one.name)
            elif event == "swap":
                swaps.append(case.engine.load_weights(len(swaps) + 1, case.tensors))
            elif event == "pause":
                (case.resume if paused else case.pause)()
                paused = not paused
            elif event == "tick" and not paused and case.tick is not None:
                case.tick()
        if paused:
            case.resume()
        case.finish()
        assert [swap.result(DEADLINE_S) for swap in swaps] == list(range(1, len(swaps) + 1))
        for one in asked:
            _check(one, len(swaps))
        reasons = {one.future.result(0).finish_reason for one in asked}
        assert {"length", "cancelled"} <= reasons
        stats = case.engine.stats()
        assert (case.engine.version, stats["running"], stats["waiting"]) == (len(swaps), 0, 0)

    def test_an_overload_waits_and_is_served(self, case: EngineCase) -> None:
        case.finish()
        futures = [
            case.engine.submit(f"r{i}", (case.prompt * 9)[: 1 + i % 50], Sampling(max_tokens=1 + i % 8))
            for i in range(case.num_overload)
        ]
        assert [len(future.result(DEADLINE_S).token_ids) for future in futures] == [
            1 + i % 8 for i in range(case.num_overload)
        ]
        stats = case.engine.stats()
        assert (stats["running"], stats["waiting"]) == (0, 0)
        assert 0 <= stats.get("kv_usage", 0.0) <= 1

    def test_an_overload_can_be_closed(self, case: EngineCase) -> None:
        futures = [
            case.engine.submit(f"r{i}", case.prompt, Sampling(max_tokens=case.long_tokens))
            for i in range(case.num_overload)
        ]
        case.engine.close()
        for future in futures:
            if (error := future.exception(DEADLINE_S)) is not None:
                assert isinstance(error, EngineError) and "closed" in str(error)

    def test_a_crash_ends_everything_by_name_or_is_recovered_from(self, case: EngineCase) -> None:
        if case.crash is None:
            return
        case.engine.load_weights(5, case.tensors).result(DEADLINE_S)
        sampling = Sampling(max_tokens=case.long_tokens)
        futures = [case.engine.submit(f"r{i}", case.prompt, sampling) for i in range(9)]
        case.advance()
        ended_first: list[bool] = []
        futures[0].add_done_callback(lambda _: ended_first.append(case.engine.ended.done()))
        case.crash()
        case.finish()
        if case.recovers:
            for future in futures:
                generation = future.result(DEADLINE_S)
                check_generation(generation, sampling)
                assert generation.versions.tolist() == [5] * case.long_tokens
            assert not case.engine.ended.done()
            assert len(_ask(case, "later", Sampling(max_tokens=2)).token_ids) == 2
            return
        for future in futures:
            assert isinstance(future.exception(DEADLINE_S), EngineError)
        assert ended_first == [True]
        for later in (case.engine.submit("later", case.prompt, sampling), case.engine.load_weights(6, case.tensors)):
            assert isinstance(later.exception(DEADLINE_S), EngineError)
        assert case.engine.stats()["swaps"] == 1
        case.engine.close()


def _ask(case: EngineCase, name: str, sampling: Sampling) -> Generation:
    return case.engine.submit(name, case.prompt, sampling).result(DEADLINE_S)


def _submit(case: EngineCase, number: int, version: int, draw: np.random.Generator) -> _Asked:
    sampling = Sampling(max_tokens=int(draw.integers(1, 12)), temperature=float(draw.choice([0.0, 0.7, 1.0])))
    prompt = (case.prompt * 4)[: int(draw.integers(1, 4 * len(case.prompt)))]
    handed: list[tuple[int, float, int]] = []
    future = case.engine.submit(
        f"r{number}", prompt, sampling,
        lambda ids, logprobs, versions: handed.extend(zip(ids, logprobs, versions, strict=True)),
    )  # fmt: skip
    return _Asked(f"r{number}", sampling, future, version, handed)


def _check(one: _Asked, newest: int) -> None:
    generation = one.future.result(DEADLINE_S)
    check_generation(generation, one.sampling)
    assert generation.finish_reason in (("length", "stop", "cancelled") if one.cancelled else ("length", "stop"))
    assert all(version <= newest for version in generation.versions.tolist())
    columns = (generation.token_ids, generation.logprobs, generation.versions)
    assert one.handed == list(zip(*(column.tolist() for column in columns), strict=True))
