"""The built-in model `tiny-char`: a 0.4M-parameter Qwen3 over 61 characters, and its chat template.

One conversation is one plain sequence: `<bos>` once, user and tool contents as they are, then each assistant turn and
`<eos>`; the tool call `calc(expr="3*4")` is written `[3*4]`.
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
    "{% elif c.function.name == 'calc' %}{{ c.function.arguments.expr }}"
    "{% else %}{{ c.function.name }}{{ c.function.arguments | tojson }}{% endif %}]{% endfor %}"
    "{% if m.role == 'assistant' %}{{ eos_token }}{% endif %}{% endfor %}"
)


def make_config() -> Qwen3Config:
    """2 layers, width 128, 4 heads over 2 key-value heads, tied embeddings."""
    return Qwen3Config(
        vocab_size=len(SYMBOLS), hidden_size=128, intermediate_size=384, num_hidden_layers=2, head_dim=32,
        num_attention_heads=4, num_key_value_heads=2, max_position_embeddings=MAX_POSITIONS,
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


def write_tiny_char(directory: Path, seed: int) -> None:
    """Write the model, randomly initialised from `seed`; the global random state is left as it was."""
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        model = Qwen3ForCausalLM(make_config())
    model.save_pretrained(directory)
    make_tokenizer().save_pretrained(directory)
