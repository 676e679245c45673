from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from astraflow.errors import ModelError
from astraflow.models.chat import ChatTokenizer, eos_ids
from astraflow.models.registry import model_directory
from astraflow.models.template import compile_template, normalised

CALL = {"id": "c0", "type": "function", "function": {"name": "calc", "arguments": '{"expr": "3*4"}'}}
EPISODE = [
    {"role": "user", "content": "3*4?"},
    {"role": "assistant", "content": None, "tool_calls": [CALL]},
    {"role": "tool", "tool_call_id": "c0", "content": "<12>"},
    {"role": "assistant", "content": "12."},
]
TOOLS = [{"type": "function", "function": {"name": "calc", "description": "d", "parameters": {"type": "object"}}}]
CHATML = (
    "{% for m in messages %}<|im_start|>{{ m.role }}\n{{ m.content }}<|im_end|>\n{% endfor %}"
    "{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)
# Removes what an assistant thought as soon as a later message exists, as several published templates do.
THINKING = (
    "{% for m in messages %}{{ m.role }}:"
    "{{ m.content if loop.last else m.content.split('-')[-1] }}<eos>{% endfor %}"
    "{% if add_generation_prompt %}assistant:{% endif %}"
)


@pytest.fixture(scope="module")
def tiny_dir(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return model_directory("tiny-char", tmp_path_factory.mktemp("cache"), 0)


@pytest.fixture(scope="module")
def tiny(tiny_dir: Path) -> ChatTokenizer:
    return ChatTokenizer(tiny_dir)


def with_template(tiny_dir: Path, directory: Path, template: str, **config: Any) -> ChatTokenizer:
    for name in ("tokenizer.json", "tokenizer_config.json", "config.json"):
        (directory / name).write_text((tiny_dir / name).read_text())
    if config:
        settings = json.loads((directory / "tokenizer_config.json").read_text())
        (directory / "tokenizer_config.json").write_text(json.dumps(settings | config))
    if template:
        (directory / "chat_template.jinja").write_text(template)
    return ChatTokenizer(directory)


def test_the_tiny_template_is_one_plain_sequence(tiny: ChatTokenizer) -> None:
    assert tiny.render(EPISODE, TOOLS, False) == "<bos>3*4?[3*4]<eos><12>12.<eos>"
    assert tiny.render(EPISODE[:1], TOOLS, True) == "<bos>3*4?"
    assert tiny.eos_ids == (2,)
    assert tiny.pad_id == 0


def test_tool_arguments_may_be_text_or_objects(tiny: ChatTokenizer) -> None:
    for arguments, written in (
        ('{"expr": "3*4"}', "[3*4]"),
        ({"expr": "3*4"}, "[3*4]"),
        ("not json", "[not json]"),
        ("[1]", "[[1]]"),
    ):
        call = {"function": {"name": "calc", "arguments": arguments}}
        assert tiny.render([{"role": "assistant", "tool_calls": [call]}], None, False) == f"<bos>{written}<eos>"
    for arguments, written in (({"q": "fig"}, "[fig]"), ({"q": 1, "n": 2}, '[find{"q": 1, "n": 2}]')):
        other = {"function": {"name": "find", "arguments": arguments}}
        assert tiny.render([{"role": "assistant", "tool_calls": [other]}], None, False) == f"<bos>{written}<eos>"


def test_characters_that_a_model_does_not_know_are_said_once(
    tmp_path_factory: pytest.TempPathFactory, caplog: pytest.LogCaptureFixture
) -> None:
    chat = ChatTokenizer(model_directory("tiny-char", tmp_path_factory.mktemp("models"), 0))
    chat.encode("3*4?")
    assert not caplog.records
    chat.encode("Take 3!")
    chat.encode("Again")
    (said,) = caplog.messages
    assert "knows no 'T', '!': they become <pad>" in said


def test_normalising_leaves_the_callers_messages_alone() -> None:
    message = {"role": "assistant", "content": None, "tool_calls": [CALL]}
    before = json.dumps(message)
    assert normalised([message])[0]["tool_calls"][0]["function"]["arguments"] == {"expr": "3*4"}
    assert json.dumps(message) == before


def test_text_parts_are_joined() -> None:
    parts = [{"type": "text", "text": "a"}, {"type": "text", "text": "b"}]
    assert normalised([{"role": "user", "content": parts}]) == [{"role": "user", "content": "ab"}]


def test_rendering_equals_transformers(tiny_dir: Path, tmp_path: Path) -> None:
    from transformers import AutoTokenizer

    template = (
        "{{ bos_token }}\n{% for t in tools or [] %}\n    {{ t | tojson(indent=1) }}\n{% endfor %}\n"
        "{% for m in messages %}\n"
        "{% if m.role == 'system' %}{% continue %}{% endif %}{% generation %}{{ m.role }}<é&{% endgeneration %}\n"
        "{% for c in m.tool_calls or [] %}{{ c.function.arguments | tojson }}{% endfor %}\n{{ m.content }}\n"
        "{% endfor %}{{ strftime_now('%Y') }}{% if add_generation_prompt %}>>{% endif %}"
    )
    ours = with_template(tiny_dir, tmp_path, template)
    theirs = AutoTokenizer.from_pretrained(str(tmp_path))
    plain = normalised(EPISODE)
    for prompt in (True, False):
        expected = theirs.apply_chat_template(plain, tools=TOOLS, tokenize=False, add_generation_prompt=prompt)
        assert ours.render(EPISODE, TOOLS, prompt) == expected


def test_a_demonstration_has_the_ids_of_the_incremental_conversation(tiny: ChatTokenizer) -> None:
    ids, mask = tiny.training_example(EPISODE, TOOLS)
    pieces = [("<bos>3*4?", False), ("[3*4]<eos>", True), ("<12>", False), ("12.<eos>", True)]
    assert ids == [i for text, _ in pieces for i in tiny.encode(text)]
    assert mask == [sampled for text, sampled in pieces for _ in tiny.encode(text)]


def test_what_follows_the_last_eos_is_not_in_the_demonstration(tiny_dir: Path, tmp_path: Path) -> None:
    chat = with_template(tiny_dir, tmp_path, CHATML.replace("<|im_end|>", "<eos>").replace("<|im_start|>", "#"))
    turns = [
        {"role": r, "content": c} for r, c in (("user", "a"), ("assistant", "b"), ("user", "c"), ("assistant", "d"))
    ]
    ids, mask = chat.training_example(turns)
    assert (
        chat.decode(ids, skip_special_tokens=False)
        == "#user\na<eos>\n#assistant\nb<eos>\n#user\nc<eos>\n#assistant\nd<eos>"
    )
    assert "".join(chat.decode([i], False) for i, sampled in zip(ids, mask, strict=True) if sampled) == "b<eos>d<eos>"


def test_a_template_that_rewrites_history_is_refused_for_several_turns_only(tiny_dir: Path, tmp_path: Path) -> None:
    chat = with_template(tiny_dir, tmp_path, THINKING)
    one = [{"role": "user", "content": "a"}, {"role": "assistant", "content": "hm-b"}]
    ids, mask = chat.training_example(one)
    assert chat.decode([i for i, sampled in zip(ids, mask, strict=True) if sampled], False) == "hm-b<eos>"
    with pytest.raises(ModelError, match="rewrites earlier turns"):
        chat.training_example([*one, {"role": "user", "content": "c"}, {"role": "assistant", "content": "d"}])


def test_a_demonstration_without_an_assistant_is_refused(tiny: ChatTokenizer) -> None:
    with pytest.raises(ModelError, match="no assistant turn"):
        tiny.training_example(EPISODE[:1])


@given(text=st.text(alphabet="0123456789abcxyz+-*=()[]<>:?. \nUDLRGSX#", max_size=50))
def test_decoding_inverts_encoding(text: str, tiny: ChatTokenizer) -> None:
    ids = tiny.encode(text)
    assert len(ids) == len(text)
    assert tiny.decode(ids) == text


def test_special_tokens_are_left_out_unless_asked_for(tiny: ChatTokenizer) -> None:
    ids = tiny.encode("<bos>12<eos>")
    assert ids[0] == 1 and ids[-1] == 2
    assert tiny.decode(ids) == "12"
    assert tiny.decode(ids, skip_special_tokens=False) == "<bos>12<eos>"


def test_eos_ids_come_from_every_file_once(tiny_dir: Path, tmp_path: Path) -> None:
    for name in ("tokenizer.json", "tokenizer_config.json"):
        (tmp_path / name).write_text((tiny_dir / name).read_text())
    (tmp_path / "generation_config.json").write_text('{"eos_token_id": [9, 5]}')
    (tmp_path / "config.json").write_text('{"eos_token_id": 5}')
    assert eos_ids(tmp_path) == (9, 5, 2)


def test_older_forms_of_a_tokenizer_config_are_read(tiny_dir: Path, tmp_path: Path) -> None:
    named = [{"name": "tool_use", "template": "no"}, {"name": "default", "template": "{{ bos_token }}yes"}]
    bos = {"content": "<bos>", "lstrip": False}
    assert (
        with_template(tiny_dir, tmp_path, "", chat_template=named, bos_token=bos).render([], None, False) == "<bos>yes"
    )


def test_a_template_may_refuse_messages_and_cannot_reach_out(tiny_dir: Path, tmp_path: Path) -> None:
    chat = with_template(tiny_dir, tmp_path, "{{ raise_exception('roles must alternate') }}")
    with pytest.raises(ModelError, match="roles must alternate"):
        chat.render(EPISODE, None, False)
    escape = "{{ ''.__class__.__mro__[1].__subclasses__() }}"
    (tmp_path / "chat_template.jinja").write_text(escape)
    with pytest.raises(ModelError, match="unsafe"):
        ChatTokenizer(tmp_path).render(EPISODE, None, False)


def test_what_is_missing_or_broken_is_named(tiny_dir: Path, tmp_path: Path) -> None:
    with pytest.raises(ModelError, match=r"tokenizer\.json does not exist"):
        ChatTokenizer(tmp_path)
    with pytest.raises(ModelError, match=r"chat_template=.* has none"):
        with_template(tiny_dir, tmp_path, "")
    with pytest.raises(ModelError, match="is not valid"):
        with_template(tiny_dir, tmp_path, "{% for %}")
    (tmp_path / "tokenizer_config.json").write_text("{")
    with pytest.raises(ModelError, match="is not JSON"):
        ChatTokenizer(tmp_path)


def test_templates_are_compiled_once() -> None:
    assert compile_template("{{ messages }}") is compile_template("{{ messages }}")


def test_it_needs_no_torch() -> None:
    code = "import sys, astraflow.models.chat; sys.exit('torch' in sys.modules or 'transformers' in sys.modules)"
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join(sys.path)}
    assert subprocess.run([sys.executable, "-c", code], env=environment, check=False).returncode == 0
