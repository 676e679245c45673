"""The conformance suite of the Engine contract: subclass it, give an engine, and every promise is tested.

class TestMine(EngineSuite):
    @pytest.fixture
    def case(self): ...yield EngineCase(engine=..., prompts=..., tensors=..., advance=..., finish=...)
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import partial
from typing import Any

import pytest

from astraflow.errors import EngineError
from astraflow.testing.engines.case import DEADLINE_S, EngineCase, check_generation
from astraflow.testing.engines.stress import StressSuite
from astraflow.types import Sampling

__all__ = ["EngineCase", "EngineSuite", "check_generation"]


def _hand(
    to: list[tuple[int, float, int]], ids: Sequence[int], logprobs: Sequence[float], versions: Sequence[int]
) -> None:
    to.extend(zip(ids, logprobs, versions, strict=True))


class EngineSuite(StressSuite):
    """What every Engine promises."""

    def test_starts_at_version_minus_one_and_takes_the_loaded_one(self, case: EngineCase) -> None:
        assert case.engine.version == -1
        assert case.engine.load_weights(3, case.tensors).result(DEADLINE_S) == 3
        assert case.engine.version == 3

    def test_tokens_carry_the_version_in_force(self, case: EngineCase) -> None:
        case.engine.load_weights(7, case.tensors).result(DEADLINE_S)
        case.finish()
        generation = case.engine.submit("a", case.prompt, Sampling(max_tokens=4)).result(DEADLINE_S)
        check_generation(generation)
        assert generation.versions.tolist() == [7, 7, 7, 7]

    def test_max_tokens_cuts_by_length(self, case: EngineCase) -> None:
        case.finish()
        for count in (1, 2, 5):
            generation = case.engine.submit(f"r{count}", case.prompt, Sampling(max_tokens=count)).result(DEADLINE_S)
            check_generation(generation)
            assert (len(generation.token_ids), generation.finish_reason) == (count, "length")

    def test_a_stop_id_ends_and_stays_the_last_token(self, case: EngineCase) -> None:
        case.finish()
        sampling = Sampling(max_tokens=8, temperature=0.0)
        free = case.engine.submit("free", case.prompt, sampling).result(DEADLINE_S).token_ids.tolist()
        stop = free[3]
        stopped = Sampling(max_tokens=8, temperature=0.0, stop_token_ids=(stop,))
        generation = case.engine.submit("stopped", case.prompt, stopped).result(DEADLINE_S)
        assert generation.token_ids.tolist() == free[: free.index(stop) + 1]
        assert generation.finish_reason == "stop"

    def test_a_swap_keeps_the_tokens_and_labels_each_with_its_own_version(self, case: EngineCase) -> None:
        case.engine.load_weights(0, case.tensors).result(DEADLINE_S)
        future = case.engine.submit("a", case.prompt, Sampling(max_tokens=case.long_tokens))
        case.advance()
        case.engine.load_weights(1, case.tensors).result(DEADLINE_S)
        case.finish()
        generation = future.result(DEADLINE_S)
        check_generation(generation)
        assert len(generation.token_ids) == case.long_tokens
        assert set(generation.versions.tolist()) == {0, 1}

    def test_cancel_ends_with_what_was_sampled(self, case: EngineCase) -> None:
        future = case.engine.submit("a", case.prompt, Sampling(max_tokens=case.long_tokens))
        case.advance()
        case.engine.cancel("a")
        generation = future.result(DEADLINE_S)
        check_generation(generation)
        assert generation.finish_reason == "cancelled"
        assert 2 <= len(generation.token_ids) < case.long_tokens

    def test_cancel_of_an_unknown_or_finished_request_is_nothing(self, case: EngineCase) -> None:
        case.engine.cancel("never seen")
        case.finish()
        case.engine.submit("a", case.prompt, Sampling(max_tokens=1)).result(DEADLINE_S)
        case.engine.cancel("a")
        assert len(case.engine.submit("a", case.prompt, Sampling(max_tokens=1)).result(DEADLINE_S).token_ids) == 1

    def test_a_request_id_in_use_is_refused(self, case: EngineCase) -> None:
        first = case.engine.submit("same", case.prompt, Sampling(max_tokens=case.long_tokens))
        with pytest.raises(EngineError, match="request_id=same"):
            case.engine.submit("same", case.prompt, Sampling(max_tokens=1)).result(DEADLINE_S)
        case.engine.cancel("same")
        assert first.result(DEADLINE_S).finish_reason == "cancelled"

    def test_the_context_limit_cuts_by_length_and_longer_prompts_are_refused_by_name(self, case: EngineCase) -> None:
        case.finish()
        limit = case.engine.max_context
        prompt = (case.prompt * limit)[:limit]
        generation = case.engine.submit("fits", prompt[: limit - 1], Sampling(max_tokens=9)).result(DEADLINE_S)
        assert (len(generation.token_ids), generation.finish_reason) == (1, "length")
        with pytest.raises(EngineError, match=f"max_context={limit}"):
            case.engine.submit("long", prompt, Sampling(max_tokens=9)).result(DEADLINE_S)

    @pytest.mark.parametrize(
        "sampling",
        [
            Sampling(temperature=-0.1),
            Sampling(temperature=float("nan")),
            Sampling(top_p=0.0),
            Sampling(top_p=1.5),
            Sampling(top_k=-1),
            Sampling(top_k=2**63),
            Sampling(stop_token_ids=(2**63,)),
            Sampling(stop_token_ids=(-1,)),
            Sampling(min_p=1.5),
            Sampling(max_tokens=0),
        ],
    )
    def test_sampling_out_of_range_is_refused(self, case: EngineCase, sampling: Sampling) -> None:
        with pytest.raises(EngineError, match=r"sampling\."):
            case.engine.submit("a", case.prompt, sampling).result(DEADLINE_S)

    @pytest.mark.parametrize("prompt", [[], [2**40], [2**70], [1.5], ["x"]])
    def test_what_is_no_prompt_is_refused(self, case: EngineCase, prompt: list[Any]) -> None:
        with pytest.raises(EngineError, match="prompt_ids"):
            case.engine.submit("a", prompt, Sampling()).result(DEADLINE_S)

    def test_tokens_are_handed_out_as_they_are_sampled(self, case: EngineCase) -> None:
        case.engine.load_weights(0, case.tensors).result(DEADLINE_S)
        handed: dict[str, list[tuple[int, float, int]]] = {"a": [], "b": []}
        futures = {
            name: case.engine.submit(
                name, case.prompt, Sampling(max_tokens=case.long_tokens),
                partial(_hand, to),
            )
            for name, to in handed.items()
        }  # fmt: skip
        silent = case.engine.submit("silent", case.prompt, Sampling(max_tokens=case.long_tokens))
        case.advance()
        assert all(len(tokens) >= 1 and not futures[name].done() for name, tokens in handed.items())
        case.engine.cancel("b")
        case.engine.load_weights(1, case.tensors).result(DEADLINE_S)
        case.finish()
        for name, future in futures.items():
            generation = future.result(DEADLINE_S)
            columns = (generation.token_ids, generation.logprobs, generation.versions)
            assert handed[name] == list(zip(*(column.tolist() for column in columns), strict=True))
        assert {version for _, _, version in handed["a"]} == {0, 1}
        assert len(silent.result(DEADLINE_S).token_ids) == case.long_tokens

    def test_many_requests_at_once_each_get_their_own_length(self, case: EngineCase) -> None:
        case.finish()
        lengths = {f"r{i}": 1 + i * 7 % 13 for i in range(100)}
        futures = {
            name: case.engine.submit(name, case.prompt[: 1 + i % len(case.prompt)], Sampling(max_tokens=lengths[name]))
            for i, name in enumerate(lengths)
        }
        for name, future in futures.items():
            generation = future.result(DEADLINE_S)
            check_generation(generation)
            assert len(generation.token_ids) == lengths[name]

    def test_stats_count(self, case: EngineCase) -> None:
        case.finish()
        before = case.engine.stats()
        case.engine.submit("a", case.prompt, Sampling(max_tokens=3)).result(DEADLINE_S)
        after = case.engine.stats()
        assert set(after) >= {
            "busy_s", "sampled_tokens", "prefill_tokens", "requests", "swaps", "running", "waiting",
        }  # fmt: skip
        assert after["sampled_tokens"] - before["sampled_tokens"] == 3
        assert after["requests"] - before["requests"] == 1
        assert (after["running"], after["waiting"]) == (0, 0)

    def test_close_fails_what_is_pending_and_what_comes_after(self, case: EngineCase) -> None:
        future = case.engine.submit("a", case.prompt, Sampling(max_tokens=case.long_tokens))
        case.advance()
        ended_before_failure: list[bool] = []
        future.add_done_callback(lambda _: ended_before_failure.append(case.engine.ended.done()))
        assert not case.engine.ended.done()
        case.engine.close()
        case.engine.close()
        assert "closed" in str(case.engine.ended.result(DEADLINE_S))
        assert ended_before_failure == [True]
        with pytest.raises(EngineError, match="closed"):
            future.result(DEADLINE_S)
        with pytest.raises(EngineError, match="closed"):
            case.engine.submit("b", case.prompt, Sampling(max_tokens=1)).result(DEADLINE_S)
        with pytest.raises(EngineError, match="closed"):
            case.engine.load_weights(1, case.tensors).result(DEADLINE_S)
        with pytest.raises(EngineError, match="closed"):
            case.engine.effective_weights().result(DEADLINE_S)
