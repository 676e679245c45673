"""The built-in models `tiny-char` (a 0.4M-parameter Qwen3 over 61 characters), `tiny-char-small` (0.04M) and
`tiny-char-large` (1.7M), and their chat template.

One conversation is one plain sequence: `<bos>` once, user and tool contents as they are, then each assistant turn and
`<eos>`; a tool call with one argument, such as `calc(expr="3*4")`, is written `[3*4]`.
"""

from __future__ import annotations

from pathlib import Path

import torch
from tokenizers import Regex, Tokenizer, decoders, models, pre_tokenizers
from transformers import PreTrainedTokenizerFast, Qwen3Config, Qwen3ForCausalLM

PAD, BOS, EOS = 0, 1, 2
SYMBOLS = ("<pad>", "<bos>", "<eos>", *"0123456789abcdefghijklmnopqrstuvwxyz+-*=()[]<>:?. \nUDLRGSX#")
MAX_POSITIONS = 512

CHAT_TEMPLATE = (
    "{{ bos_token }}{% for m in messages %}{{ m.content }}"
    "{% for c in m.tool_calls or [] %}[{% if c.function.arguments is not mapping %}{{ c.function.arguments }}"
    "{% elif c.function.arguments | length == 1 %}{{ c.function.arguments.values() | first }}"
    "{% else %}{{ c.function.name }}{{ c.function.arguments | tojson }}{% endif %}]{% endfor %}"
    "{% if m.role == 'assistant' %}{{ eos_token }}{% endif %}{% endfor %}"
)


SIZES = {"tiny-char": (128, 2), "tiny-char-small": (64, 1), "tiny-char-large": (192, 4)}
"""Name -> width, layers."""


def make_config(size: str = "tiny-char") -> Qwen3Config:
    """`size`: of SIZES. Heads of 32 over half as many key-value heads, tied embeddings."""
    width, layers = SIZES[size]
    return Qwen3Config(
        vocab_size=len(SYMBOLS), hidden_size=width, intermediate_size=3 * width, num_hidden_layers=layers, head_dim=32,
        num_attention_heads=width // 32, num_key_value_heads=width // 64, max_position_embeddings=MAX_POSITIONS,
        tie_word_embeddings=True, pad_token_id=PAD, bos_token_id=BOS, eos_token_id=EOS,
    )  # fmt: skip


def make_tokenizer() -> PreTrainedTokenizerFast:
    """One id per character; a character outside the vocabulary becomes `<pad>`."""
    core = Tokenizer(models.WordLevel({symbol: i for i, symbol in enumerate(SYMBOLS)}, unk_token="<pad>"))
    core.pre_tokenizer = pre_tokenizers.Split(Regex(r"[\s\S]"), "isolated")
    core.decoder = decoders.Fuse()
    tokenizer = PreTrainedTokenizerFast(  # type: ignore[no-untyped-call]
        tokenizer_object=core, pad_token="<pad>", bos_token="<bos>", eos_token="<eos>", padding_side="left",
        clean_up_tokenization_spaces=False,
    )  # fmt: skip
    tokenizer.chat_template = CHAT_TEMPLATE
    return tokenizer


def write_tiny_char(directory: Path, seed: int, size: str = "tiny-char") -> None:
    """Write the model, randomly initialised from `seed`; the global random state is left as it was."""
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        model = Qwen3ForCausalLM(make_config(size))
    model.save_pretrained(directory)
    make_tokenizer().save_pretrained(directory)
