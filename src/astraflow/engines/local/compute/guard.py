"""A model whose tokens would be decoded wrongly: found at the start of an engine, not by the gap of its logprobs."""

from __future__ import annotations

import numpy as np
import torch

from astraflow.engines.local.caches.slots import SlotCache
from astraflow.engines.local.compute.passes import Passes
from astraflow.errors import ModelError

LENGTHS, READ = (9, 12, 7), (5, 6, 3)  # tokens of three rows, and how many of them are read before single ones
TOLERANCE = {torch.float32: 0.01}  # nats; rounding makes 1e-4, a wrong layer around 1
_ROUGH = 0.5  # of half precision, whose rounding makes up to 0.3
SHARE = 0.1  # of the tokens may differ: rounding sends one to another expert now and then
_FIX = "use a decoder whose layers mix tokens by causal attention only, as Llama, Qwen3 or Mistral, or the vllm engine"


@torch.inference_mode()
def position_bytes(passes: Passes) -> int:
    """Bytes of keys and values of one token. Three rows are read as an engine reads them, and as the model does alone.

    Recurrent and state-space layers, convolutions over time and position biases keep something else than keys and
    values, or look at positions that a ragged batch has not.
    Raises: ModelError: the logprobs differ, or the model cannot be called so at all.
    """
    model, kind = passes.model, type(passes.model).__name__
    rows = _examples(model.config.get_text_config().vocab_size)
    cache = SlotCache(model.config.get_text_config().num_hidden_layers, len(rows), max(LENGTHS))
    cache.reserve(len(rows), max(LENGTHS))
    try:
        alone = [model(input_ids=torch.from_numpy(row)[None].to(passes.device), use_cache=False).logits for row in rows]
        found = _decoded(passes, cache, rows)
    except (TypeError, AttributeError, LookupError, ValueError, RuntimeError) as error:
        raise ModelError("model", kind, f"cannot be decoded by the embedded engine ({error})", _FIX) from error
    gaps = torch.cat([
        (logits[0, read:].float().log_softmax(-1) - mine.float().log_softmax(-1)).gather(1, _next(row, read, logits))
        for row, read, logits, mine in zip(rows, READ, alone, found, strict=True)
    ]).abs()  # fmt: skip
    if (gaps > TOLERANCE.get(model.dtype, _ROUGH)).float().mean() > SHARE:  # not finite weights are another fault
        raise ModelError(
            "model", kind, f"gives other logprobs decoded token by token than in one pass (by up to {gaps.max():.2g} "
            "nats): it has layers that keep more than keys and values", _FIX,
        )  # fmt: skip
    return cache.num_bytes // (len(rows) * max(LENGTHS))


def _examples(vocabulary: int) -> list[np.ndarray]:
    draw = np.random.default_rng(0)
    return [draw.integers(0, vocabulary, length) for length in LENGTHS]


def _next(row: np.ndarray, read: int, logits: torch.Tensor) -> torch.Tensor:
    """What is compared at each position: the id that follows it, of the last one its own."""
    return torch.from_numpy(np.append(row[read + 1 :], row[-1]))[:, None].to(logits.device)


def _decoded(passes: Passes, cache: SlotCache, rows: list[np.ndarray]) -> list[torch.Tensor]:
    """Logits at the tokens of each row from READ on, read singly, after a prompt and two tokens in one pass."""
    prompt, count = [read - 2 for read in READ], len(rows)
    padded = np.zeros((count, max(prompt)), np.int64)
    for line, row, read in zip(padded, rows, prompt, strict=True):
        line[:read] = row[:read]
    passes.prompts(cache, padded, np.arange(count), None)
    at = np.array(prompt)[:, None] + np.arange(2)
    passes.tokens(cache, np.stack([row[some] for row, some in zip(rows, at, strict=True)]), 0, at, max(READ))
    found: list[list[torch.Tensor]] = [[] for _ in rows]
    last = np.array(LENGTHS) - 1
    for step in range(max(length - read for length, read in zip(LENGTHS, READ, strict=True))):
        at = np.minimum(np.array(READ) + step, last)[:, None]  # a row at its end reads its last token again
        ids = np.array([row[position] for row, position in zip(rows, at[:, 0], strict=True)])[:, None]
        logits = passes.logits(cache, ids, 0, at, int(at.max()) + 1)
        for number in np.flatnonzero(np.array(READ) + step <= last).tolist():
            found[number].append(logits[number])
    return [torch.stack(lines) for lines in found]
