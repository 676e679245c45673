"""Raw prompts keep the ids of what they repeat."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from astraflow.errors import GatewayError
from astraflow.rollout.gateway.dialects.raw import RawContexts
from astraflow.rollout.gateway.endpoint import PolicyEndpoint
from astraflow.rollout.gateway.tools import NoParser


@pytest.fixture
def raw(fakes: Any) -> Any:
    return make(fakes)


def make(fakes: Any) -> RawContexts:
    chat = fakes.FakeChat()
    return RawContexts(PolicyEndpoint(fakes.FakeEngine(chat), chat, NoParser()))


def ids(fakes: Any, *pieces: str) -> np.ndarray:
    return np.asarray([fakes.IDS[piece] for piece in pieces], np.int32)


def say(raw: RawContexts, fakes: Any, prompt: str, *pieces: str) -> list[int]:
    """One call: the whole of its ids."""
    asked = raw.prompt(prompt)
    sampled = ids(fakes, *pieces)
    raw.remember(asked, sampled)
    return [*asked.ids.tolist(), *sampled.tolist()]


def test_a_prompt_that_goes_on_keeps_what_was_sampled_and_encodes_the_rest(raw: Any, fakes: Any) -> None:
    first = say(raw, fakes, "hello ", "he", "llo", "</s>")
    then = raw.prompt("hello hello!")
    assert then.ids.tolist() == [*first[:-1], fakes.IDS["!"]] and then.encoded == 1  # the agent never saw the EOS
    with_eos = raw.prompt("hello hello</s>!")
    assert with_eos.ids.tolist() == [*first, fakes.IDS["!"]]


def test_only_the_tokens_that_the_text_still_has_are_kept(raw: Any, fakes: Any) -> None:
    first = say(raw, fakes, "a", "he", "llo", " ", "hello", "</s>")
    cut = raw.prompt("ahello he!")  # in the middle of the last token
    assert cut.ids.tolist() == [*first[:4], fakes.IDS["he"], fakes.IDS["!"]] and cut.encoded == 2
    rewritten = raw.prompt("aHELLO")
    assert rewritten.ids.tolist() == raw._endpoint.encode("aHELLO").tolist() and rewritten.encoded == 6


def test_a_shared_start_alone_is_encoded_as_any_model_reads_it(raw: Any, fakes: Any) -> None:
    say(raw, fakes, "he", "a", "</s>")
    assert raw.prompt("hello").ids.tolist() == [fakes.IDS["hello"]]
    assert raw.prompt("he").encoded == 0  # the same prompt again


def test_the_call_that_reaches_furthest_gives_the_ids(raw: Any, fakes: Any) -> None:
    first = say(raw, fakes, "a", "he", "llo", "</s>")
    second = say(raw, fakes, "ahello b", "he", "llo", "</s>")
    third = raw.prompt("ahello bhello c")
    assert third.ids.tolist() == [*second[:-1], fakes.IDS[" "], fakes.IDS["c"]]
    fork = raw.prompt("ahello bX")  # nothing of the second reply: the first call's ids are kept
    assert fork.ids.tolist() == [*first[:-1], *map(fakes.IDS.get, " bX")]


def test_ids_are_taken_as_they_are(raw: Any, fakes: Any) -> None:
    prompt = raw.prompt([fakes.IDS["he"], fakes.IDS["llo"]])
    assert prompt.ids.tolist() == [fakes.IDS["he"], fakes.IDS["llo"]] and prompt.ids.dtype == np.int32
    raw.remember(prompt, ids(fakes, "a"))
    assert raw.prompt("helloab").ids.tolist() == raw._endpoint.encode("helloab").tolist()


@pytest.mark.parametrize("given", ["", [], [-1], [10_000], [2**40]])
def test_no_token_and_ids_that_are_none_are_refused(raw: Any, given: Any) -> None:
    with pytest.raises(GatewayError, match="prompt"):
        raw.prompt(given)


WORDS = st.sampled_from(["he", "llo", "hello", "a", " ", "</s>"])


@given(st.lists(st.tuples(st.lists(WORDS, min_size=1, max_size=5), st.integers(0, 12), st.lists(WORDS, max_size=3))))
def test_the_ids_of_a_prompt_say_its_text_and_begin_as_an_earlier_call_did(fakes: Any, turns: list[Any]) -> None:
    raw = make(fakes)
    chat = raw._endpoint.chat
    text, calls = "a", []
    for sampled, cut, added in turns:
        prompt = raw.prompt(text)
        assert chat.decode(prompt.ids, skip_special_tokens=False) == text
        kept = len(prompt.ids) - prompt.encoded
        starts = [call for call in calls if np.array_equal(call[:kept], prompt.ids[:kept])]
        assert not kept or starts
        raw.remember(prompt, ids(fakes, *sampled))
        calls.append(np.concatenate((prompt.ids, ids(fakes, *sampled))))
        text = (text + "".join(sampled))[: len(text) + cut] + "".join(added)
