"""Plain batched `generate` of transformers: a batch at a time, padded on the left, until its longest reply is there."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from transformers import AutoModelForCausalLM, GenerationConfig

from benchmarks.engines.side import speeds
from benchmarks.engines.work import Asked, Work


def run_plain(work: Work) -> list[dict[str, Any]]:
    """Rows of tokens per second; only tokens that were asked for count."""
    torch.set_num_threads(work.threads)
    model: Any = AutoModelForCausalLM.from_pretrained(
        work.directory, dtype=getattr(torch, work.dtype), attn_implementation="sdpa", local_files_only=True
    )
    model.eval()

    @torch.inference_mode()
    def play_all(asked: Sequence[Asked], at_once: int) -> int:
        for first in range(0, len(asked), at_once):
            batch = asked[first : first + at_once]
            width = max(len(prompt) for prompt, _ in batch)
            ids = torch.tensor([[0] * (width - len(prompt)) + prompt for prompt, _ in batch])
            mask = torch.tensor([[0] * (width - len(prompt)) + [1] * len(prompt) for prompt, _ in batch])
            settings = GenerationConfig(
                do_sample=True, temperature=1.0, top_k=0, top_p=1.0, max_new_tokens=max(tokens for _, tokens in batch),
                pad_token_id=0, eos_token_id=None,
            )  # fmt: skip
            model.generate(input_ids=ids, attention_mask=mask, generation_config=settings)
        return sum(tokens for _, tokens in asked)

    return speeds(work, model.config.vocab_size, play_all)
