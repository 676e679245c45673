"""Text piece by piece equals the text decoded at once, for every kind of tokenizer that models come with."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st
from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers

from astraflow.rollout.gateway.reading.decoding import TextStream

CORPUS = [
    "the quick brown fox, jumps over the lazy dog.", "naïve café €5 東京 𝄞 👩‍👩‍👧", "x = y + 1\n\n  if (a): b", "don't",
]  # fmt: skip
EOS = "<eos>"


class Chat:
    """As `models.chat.ChatTokenizer` decodes."""

    def __init__(self, tokenizer: Tokenizer) -> None:
        self.tokenizer = tokenizer

    def decode(self, ids: Sequence[int], skip_special_tokens: bool = True) -> str:
        return self.tokenizer.decode(list(ids), skip_special_tokens=skip_special_tokens)


def byte_level() -> Tokenizer:
    """GPT-2, Llama 3, Qwen."""
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    alphabet = pre_tokenizers.ByteLevel.alphabet()
    trainer = trainers.BpeTrainer(vocab_size=400, special_tokens=[EOS], initial_alphabet=alphabet, show_progress=False)
    tokenizer.train_from_iterator(CORPUS, trainer)
    return tokenizer


def sentencepiece() -> Tokenizer:
    """Llama 2, Mistral, Gemma: a space before the text, bytes for what is not in the vocabulary."""
    tokenizer = Tokenizer(models.BPE(byte_fallback=True))
    tokenizer.pre_tokenizer = pre_tokenizers.Metaspace(replacement="▁", prepend_scheme="first")
    tokenizer.decoder = decoders.Sequence([
        decoders.Replace("▁", " "), decoders.ByteFallback(), decoders.Fuse(), decoders.Strip(" ", 1, 0)
    ])  # fmt: skip
    bytes_ = [f"<0x{i:02X}>" for i in range(256)]
    trainer = trainers.BpeTrainer(vocab_size=600, special_tokens=[EOS, *bytes_], show_progress=False)
    tokenizer.train_from_iterator(CORPUS, trainer)
    return _with_plain_bytes(tokenizer, bytes_)


def _with_plain_bytes(tokenizer: Tokenizer, bytes_: list[str]) -> Tokenizer:
    """The tokens of bytes are tokens as any other, not special ones."""
    import json

    state = json.loads(tokenizer.to_str())
    state["added_tokens"] = [token for token in state["added_tokens"] if token["content"] not in bytes_]
    return Tokenizer.from_str(json.dumps(state))


def word_pieces() -> Tokenizer:
    """Spaces are written by the decoder."""
    tokenizer = Tokenizer(models.WordPiece(unk_token="[UNK]"))  # type: ignore[call-arg]
    tokenizer.pre_tokenizer = pre_tokenizers.Whitespace()
    tokenizer.decoder = decoders.WordPiece(cleanup=False)
    trainer = trainers.WordPieceTrainer(vocab_size=200, special_tokens=["[UNK]", EOS], show_progress=False)
    tokenizer.train_from_iterator(CORPUS, trainer)
    return tokenizer


TOKENIZERS = {made.__name__: Chat(made()) for made in (byte_level, sentencepiece, word_pieces)}


@pytest.mark.parametrize("kind", TOKENIZERS)
@given(data=st.data())
def test_pieces_joined_are_the_text(kind: str, data: Any) -> None:
    chat = TOKENIZERS[kind]
    size = chat.tokenizer.get_vocab_size()
    text = data.draw(st.one_of(st.sampled_from(CORPUS), st.text(max_size=12)))
    ids = data.draw(st.one_of(
        st.just(chat.tokenizer.encode(text).ids), st.lists(st.integers(0, size - 1), max_size=12)
    ))  # fmt: skip
    eos = chat.tokenizer.token_to_id(EOS)
    stream = TextStream(chat, frozenset({eos}), skip_special_tokens=True)
    pieces = [stream.feed(token) for token in ids]
    whole = chat.decode(ids)
    if "�" not in whole:  # a byte that fits to no character may change how a decoder writes those before it
        assert not any("�" in piece for piece in pieces)
        assert "".join(pieces) + stream.end() == whole
    else:
        assert len("".join(pieces) + stream.end()) > 0


def test_the_work_for_a_token_does_not_grow_with_the_reply() -> None:
    class Counting(Chat):
        most = 0

        def decode(self, ids: Sequence[int], skip_special_tokens: bool = True) -> str:
            self.most = max(self.most, len(ids))
            return super().decode(ids, skip_special_tokens)

    chat = Counting(TOKENIZERS["byte_level"].tokenizer)
    ids = chat.tokenizer.encode(CORPUS[0] * 50).ids
    stream = TextStream(chat, frozenset(), skip_special_tokens=True)
    assert "".join(map(stream.feed, ids)) + stream.end() == CORPUS[0] * 50
    assert chat.most < 10 < len(ids)
