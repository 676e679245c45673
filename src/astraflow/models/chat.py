"""Messages to ids and back for one model directory, fast enough to run once per call. Torch-free.

The ids of a growing conversation are made piece by piece: what a template adds after a stored prefix is tokenised alone
and appended, ids that exist are never made again. `training_example` cuts demonstrations at the same places, so
supervised and sampled sequences of one conversation have equal ids.
"""

from __future__ import annotations

import json
import logging
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import jinja2
import numpy as np
from tokenizers import Tokenizer
from tokenizers.models import BPE, WordLevel, WordPiece

from astraflow.errors import ModelError
from astraflow.models.template import compile_template, normalised
from astraflow.types import Message

log = logging.getLogger("astraflow.models")


class ChatTokenizer:
    """The tokenizer and chat template of a Hugging Face directory. Thread-safe.

    Attributes: response_template: how replies are to be read, if the tokenizer's files say so (transformers'
    `ResponseParser`); eos_ids: every id that ends a turn (may be empty); pad_id: falls back to the first EOS, then to
    0; vocab_size: ids are below it.
    Raises: ModelError: no tokenizer.json, no chat template, or a broken one.
    """

    def __init__(self, directory: Path | str) -> None:
        self.directory = Path(directory)
        config = _json(self.directory / "tokenizer_config.json")
        self._tokenizer = _tokenizer(self.directory)
        self._template = _template(self.directory, config)
        self._specials = {
            key: text
            for key in ("bos_token", "eos_token", "pad_token", "unk_token")
            if (text := _text(config.get(key)))
        }
        self.response_template: dict[str, Any] | None = config.get("response_template")
        self.eos_ids = eos_ids(self.directory, self._tokenizer)
        self.pad_id = self._pad_id()
        model = self._tokenizer.model
        self._unknown = model.unk_token if isinstance(model, BPE | WordLevel | WordPiece) else None
        self._unknown_id = self._tokenizer.token_to_id(self._unknown) if self._unknown else None
        self._tells_unknown = self._unknown_id is not None
        self.vocab_size: int = self._tokenizer.get_vocab_size(with_added_tokens=True)

    def render(
        self, messages: Sequence[Message], tools: Sequence[Mapping[str, Any]] | None, add_generation_prompt: bool
    ) -> str:
        """The text of a conversation. Raises: ModelError: the template refuses these messages."""
        try:
            return self._template.render(
                messages=normalised(messages),
                tools=list(tools) if tools else None,
                documents=None,
                add_generation_prompt=add_generation_prompt,
                **self._specials,
            )
        except jinja2.TemplateError as error:
            raise ModelError(
                "chat_template",
                str(self.directory),
                f"refuses these messages ({error})",
                "change the messages' order or roles",
            ) from error

    def encode(self, text: str) -> list[int]:
        """Ids of `text`; special tokens written in it are recognised, none is added. What the vocabulary lacks is said
        once."""
        found = self._tokenizer.encode(text, add_special_tokens=False)
        ids: list[int] = found.ids
        if self._tells_unknown and self._unknown_id in ids:
            self._tells_unknown = False
            spans = [text[a:b] for i, (a, b) in zip(ids, found.offsets, strict=True) if i == self._unknown_id]
            log.warning(
                "%s knows no %s: they become %s, and a model cannot tell them apart; write texts without them",
                self.directory.name, ", ".join(map(repr, dict.fromkeys(spans))), self._unknown,
            )  # fmt: skip
        return ids

    def decode(self, ids: Sequence[int] | np.ndarray, skip_special_tokens: bool = True) -> str:
        """The text of [T] `ids`; special tokens are left out unless asked for."""
        listed: Sequence[int] = ids.tolist() if isinstance(ids, np.ndarray) else ids
        return self._tokenizer.decode(listed, skip_special_tokens=skip_special_tokens)

    def training_example(
        self, messages: Sequence[Message], tools: Sequence[Mapping[str, Any]] | None = None
    ) -> tuple[list[int], list[bool]]:
        """Ids of a demonstration, and which of them an assistant wrote (its EOS included).

        What the template writes after the last assistant turn's EOS is left out, as it is never sampled.
        Raises: ModelError: no assistant turn, or a template that rewrites earlier turns.
        """
        ids: list[int] = []
        mask: list[bool] = []
        done = ""  # the text whose ids are in `ids`
        for index, message in enumerate(messages):
            if message["role"] != "assistant":
                continue
            prompt = self.render(messages[:index], tools, add_generation_prompt=True)
            turn = self._turn(prompt, self.render(messages[: index + 1], tools, add_generation_prompt=False))
            if not prompt.startswith(done):
                raise self._rewrites()
            for text, sampled in ((prompt[len(done) :], False), (turn, True)):
                piece = self.encode(text)
                ids += piece
                mask += [sampled] * len(piece)
            done = prompt + turn
        if not done:
            raise ModelError("messages", len(messages), "holds no assistant turn", "end the demonstration with one")
        return ids, mask

    def _turn(self, prompt: str, whole: str) -> str:
        """What the assistant wrote after `prompt`, up to and with its EOS."""
        if not whole.startswith(prompt):
            raise self._rewrites()
        turn = whole[len(prompt) :]
        ends = [at + len(text) for text in self._eos_texts() if (at := turn.rfind(text)) >= 0]
        return turn[: max(ends)] if ends else turn

    def _eos_texts(self) -> list[str]:
        return [text for i in self.eos_ids if (text := self._tokenizer.id_to_token(i))]

    def _pad_id(self) -> int:
        pad = self._specials.get("pad_token")
        pad_id = self._tokenizer.token_to_id(pad) if pad else None
        return pad_id if pad_id is not None else next(iter(self.eos_ids), 0)

    def _rewrites(self) -> ModelError:
        return ModelError(
            "chat_template", str(self.directory), "rewrites earlier turns, so this conversation is not one sequence",
            "give each assistant turn as a demonstration of its own",
        )  # fmt: skip


def eos_ids(directory: Path, tokenizer: Tokenizer | None = None) -> tuple[int, ...]:
    """Every id that ends a turn: of generation_config.json, config.json and the tokenizer, in this order, once each."""
    found: dict[int, None] = {}
    for name in ("generation_config.json", "config.json"):
        value = _json(directory / name).get("eos_token_id")
        for i in value if isinstance(value, list) else [value]:
            if isinstance(i, int):
                found[i] = None
    eos = _text(_json(directory / "tokenizer_config.json").get("eos_token"))
    if eos and (directory / "tokenizer.json").is_file():
        eos_id = (tokenizer or _tokenizer(directory)).token_to_id(eos)
        if eos_id is not None:
            found[eos_id] = None
    return tuple(found)


def _json(path: Path) -> dict[str, Any]:
    """The object in `path`; empty when there is no such file. Raises: ModelError: not JSON."""
    try:
        value = json.loads(path.read_text(encoding="utf-8"))
    except FileNotFoundError:
        return {}
    except ValueError as error:
        raise ModelError("model file", str(path), f"is not JSON ({error})", "copy the model directory again") from error
    return value if isinstance(value, dict) else {}


def _text(token: Any) -> str | None:
    """A special token's text: tokenizer configs hold it plain or as an object with `content`."""
    return token.get("content") if isinstance(token, dict) else token


def _tokenizer(directory: Path) -> Tokenizer:
    path = directory / "tokenizer.json"
    if not path.is_file():
        raise ModelError("tokenizer", str(path), "does not exist", "save the model's fast tokenizer beside its weights")
    tokenizer = Tokenizer.from_file(str(path))
    tokenizer.no_padding()
    tokenizer.no_truncation()
    return tokenizer


def _template(directory: Path, config: Mapping[str, Any]) -> jinja2.Template:
    path = directory / "chat_template.jinja"
    source = path.read_text(encoding="utf-8") if path.is_file() else config.get("chat_template")
    if isinstance(source, list):  # the older form: named templates
        source = next((entry["template"] for entry in source if entry["name"] == "default"), None)
    if not source:
        raise ModelError(
            "chat_template",
            str(directory),
            "has none",
            "add chat_template.jinja, or use the instruct form of this model",
        )
    try:
        return compile_template(source)
    except jinja2.TemplateSyntaxError as error:
        raise ModelError("chat_template", str(path), f"is not valid ({error})", "correct the template") from error
