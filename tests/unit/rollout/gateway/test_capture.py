"""From an agent's messages to trajectories: random agents, and the built-in model's own tokenizer and template."""

from __future__ import annotations

import asyncio
import json
from pathlib import Path
from typing import Any

import msgspec
import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from astraflow.models.chat import ChatTokenizer
from astraflow.rollout.context.trie import full_sequence, trajectories
from astraflow.rollout.gateway.core import Gateway
from astraflow.rollout.gateway.dialect import ChatRequest
from astraflow.rollout.gateway.endpoint import PolicyEndpoint
from astraflow.rollout.gateway.tools import BracketParser, HermesParser, NoParser, parser_for

PIECES = st.lists(st.sampled_from(["hello", "he", "llo", "a", " ", "\n", "<think>x</think>"]), max_size=4)
TURNS = st.lists(
    st.tuples(PIECES, st.booleans(), st.sampled_from(["go on", "retry", "rewrite", "drop"])), min_size=1, max_size=6
)


@given(TURNS, st.sampled_from(["plain", "thinking", "trimmed", "counted"]))
def test_any_agent_trains_each_sampled_token_once_on_the_prompt_it_saw(
    make_world: Any, fakes: Any, turns: list[Any], style: str
) -> None:
    world = make_world(style)

    async def play() -> list[str]:
        messages: list[dict[str, Any]] = [{"role": "user", "content": "hi"}]
        rendered = []
        for pieces, cut, then in turns:
            ids = [i for piece in pieces for i in _ids(fakes, piece)]
            ids, finish = (ids or [fakes.IDS["a"]], "length") if cut else ([*ids, fakes.EOS], "stop")
            world.engine.script.append((ids, finish))
            rendered.append(world.chat.render(messages, None, add_generation_prompt=True))
            reply = (await world.ask(messages)).choices[0].message
            if then == "retry":
                continue
            messages = [*messages, msgspec.to_builtins(reply), {"role": "user", "content": "more"}]
            if then == "rewrite":
                messages[-2] = {"role": "assistant", "content": "rewritten"}
            if then == "drop":
                messages = [messages[0], *messages[-2:]]
        return rendered

    rendered = asyncio.run(play())
    calls = world.close()
    branches = trajectories(calls, "actor", 1.0)
    assert sum(int(b.loss_mask.sum()) for b in branches) == sum(len(c.generation.token_ids) for c in calls)
    for call, text in zip(calls, rendered, strict=True):
        (branch,) = [b for b in branches if (b.call_index == call.index).any()]
        path = full_sequence(branches, branch.branch)
        own = np.concatenate((call.prompt_ids, call.generation.token_ids))
        assert np.array_equal(path[: len(own)], own)
        at = branch.call_index == call.index
        assert branch.behavior_logprobs[at].tolist() == call.generation.logprobs.tolist()
        if style != "trimmed":  # there the template writes less than was emitted
            assert world.chat.decode(call.prompt_ids, skip_special_tokens=False) == text
        else:
            assert world.chat.decode(call.prompt_ids).replace(" ", "").split() == _bare(text).replace(" ", "").split()


def _ids(fakes: Any, piece: str) -> list[int]:
    return [fakes.IDS[piece]] if piece in fakes.IDS else [fakes.IDS[c] for c in piece]


def _bare(text: str) -> str:
    for special in ("<s>", "</s>", "<|user|>", "<|assistant|>"):
        text = text.replace(special, "")
    return text


@pytest.fixture(scope="module")
def tiny_char(tmp_path_factory: pytest.TempPathFactory) -> ChatTokenizer:
    pytest.importorskip("torch", reason="the built-in model is written with torch")
    from astraflow.models.tiny_char import make_tokenizer

    directory = tmp_path_factory.mktemp("tiny")
    make_tokenizer().save_pretrained(directory)
    return ChatTokenizer(directory)


async def test_the_built_in_model_calls_its_tool_and_becomes_one_branch(tiny_char: ChatTokenizer, fakes: Any) -> None:
    parser = parser_for("auto", tiny_char)
    assert isinstance(parser, BracketParser)
    engine = fakes.FakeEngine(tiny_char)
    gateway = Gateway({"actor": PolicyEndpoint(engine, tiny_char, parser)})
    key = gateway.open_episode(fakes.lease())
    for text in ("[3*4]", "12."):
        engine.script.append((tiny_char.encode(text + "<eos>"), "stop"))
    tools = [fakes.tool("calc", expr="string")]
    messages: list[dict[str, Any]] = [{"role": "user", "content": "3*4?"}]
    reply = (await gateway.chat(key, ChatRequest(model="actor", messages=messages, tools=tools))).choices[0]
    (call,) = reply.message.tool_calls
    assert json.loads(call.function.arguments) == {"expr": "3*4"}
    messages += [msgspec.to_builtins(reply.message), {"role": "tool", "tool_call_id": call.id, "content": "<12>"}]
    reply = (await gateway.chat(key, ChatRequest(model="actor", messages=messages, tools=tools))).choices[0]
    assert (reply.message.content, reply.finish_reason) == ("12.", "stop")
    (branch,) = trajectories(gateway.close_episode(key).calls["actor"], "actor", 1.0)
    assert branch.token_ids.tolist() == tiny_char.encode("<bos>3*4?[3*4]<eos><12>12.<eos>")
    ids, mask = tiny_char.training_example([*messages, msgspec.to_builtins(reply.message)], tools)
    assert (branch.token_ids.tolist(), branch.loss_mask.tolist()) == (ids, mask)  # as the warm start writes it


CHATML = (
    "{% for m in messages %}{{ '<|im_start|>' + m.role + '\\n' + m.content }}"
    "{% for c in m.tool_calls or [] %}{{ '\\n<tool_call>\\n' + c.function | tojson + '\\n</tool_call>' }}{% endfor %}"
    "{{ '<|im_end|>\\n' }}{% endfor %}{% if add_generation_prompt %}{{ '<|im_start|>assistant\\n' }}{% endif %}"
)


@pytest.fixture(scope="module")
def chatml(tmp_path_factory: pytest.TempPathFactory) -> ChatTokenizer:
    from tokenizers import AddedToken, Tokenizer, decoders, models, pre_tokenizers

    symbols = sorted(pre_tokenizers.ByteLevel.alphabet())
    core = Tokenizer(models.BPE({s: i for i, s in enumerate(symbols)}, []))
    core.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    core.decoder = decoders.ByteLevel()
    core.add_special_tokens([AddedToken(t, special=True) for t in ("<|im_start|>", "<|im_end|>", "<|endoftext|>")])
    directory: Path = tmp_path_factory.mktemp("chatml")
    core.save(str(directory / "tokenizer.json"))
    (directory / "chat_template.jinja").write_text(CHATML)
    (directory / "tokenizer_config.json").write_text(json.dumps({"eos_token": "<|im_end|>"}))
    eos = [core.token_to_id("<|im_end|>"), core.token_to_id("<|endoftext|>")]
    (directory / "config.json").write_text(json.dumps({"eos_token_id": eos}))
    return ChatTokenizer(directory)


@pytest.mark.parametrize("end", ["<|im_end|>", "<|endoftext|>", ""])
async def test_a_chatml_agent_keeps_its_ids_whatever_ended_the_turn(
    chatml: ChatTokenizer, fakes: Any, end: str
) -> None:
    parser = parser_for("auto", chatml)
    assert isinstance(parser, HermesParser)
    engine = fakes.FakeEngine(chatml)
    gateway = Gateway({"actor": PolicyEndpoint(engine, chatml, parser)})
    key = gateway.open_episode(fakes.lease())
    written = '<tool_call>{"name":"f","arguments":{"x":1}}</tool_call>'
    engine.script = [
        (chatml.encode("é" + written + end), "stop" if end else "length"),
        (chatml.encode("done<|im_end|>"), "stop"),
    ]
    tools = [fakes.tool("f", x="integer")]
    messages: list[dict[str, Any]] = [{"role": "user", "content": "go"}]
    reply = (await gateway.chat(key, ChatRequest(model="actor", messages=messages, tools=tools))).choices[0]
    assert reply.message.content == "é"
    messages += [msgspec.to_builtins(reply.message), {"role": "tool", "tool_call_id": "call_0_0", "content": "2"}]
    await gateway.chat(key, ChatRequest(model="actor", messages=messages, tools=tools))
    prompt = chatml.decode(engine.requests[1][1], skip_special_tokens=False)
    assert prompt == (
        "<|im_start|>user\ngo<|im_end|>\n<|im_start|>assistant\né" + written + (end or "<|im_end|>")
        + "\n<|im_start|>tool\n2<|im_end|>\n<|im_start|>assistant\n"
    )  # fmt: skip
    (branch,) = trajectories(gateway.close_episode(key).calls["actor"], "actor", 1.0)
    trained = chatml.decode(branch.token_ids[branch.loss_mask], skip_special_tokens=False)
    assert trained == "é" + written + end + "done<|im_end|>"


async def test_special_tokens_inside_a_reply_are_hidden_from_the_agent_and_kept_in_the_ids(
    chatml: ChatTokenizer, fakes: Any
) -> None:
    engine = fakes.FakeEngine(chatml)
    gateway = Gateway({"actor": PolicyEndpoint(engine, chatml, NoParser())})
    key = gateway.open_episode(fakes.lease())
    emitted = chatml.encode("a<|im_start|>b<|im_end|>")
    engine.script = [(emitted, "stop"), (chatml.encode("c<|im_end|>"), "stop")]
    user = {"role": "user", "content": "go"}
    reply = (await gateway.chat(key, ChatRequest(model="actor", messages=[user]))).choices[0].message
    assert reply.content == "ab"
    await gateway.chat(key, ChatRequest(model="actor", messages=[user, msgspec.to_builtins(reply), user]))
    first, second = gateway.close_episode(key).calls["actor"]
    start = len(first.prompt_ids)
    assert second.prompt_ids[start : start + len(emitted)].tolist() == emitted and not second.forked
