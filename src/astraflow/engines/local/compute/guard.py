"""A model whose tokens would be decoded wrongly: found at the start of an engine, not by the gap of its logprobs."""

from __future__ import annotations

import numpy as np
import torch
from transformers import PreTrainedModel

from astraflow.engines.local.caches.slots import SlotCache
from astraflow.engines.local.compute.attention import SlotLayout
from astraflow.engines.local.compute.passes import Passes, sliding_window
from astraflow.errors import ModelError

LENGTHS, READ = (9, 12, 7), (4, 6, 1)  # tokens of three rows, and how many of them are read at first
TOLERANCE = {torch.float32: 0.01}  # nats; rounding makes 1e-4, a wrong layer around 1
_ROUGH = 0.5  # of half precision, whose rounding makes up to 0.3
SHARE = 0.1  # of the tokens may differ: rounding sends one to another expert now and then
_FIX = "use a decoder whose layers mix tokens by causal attention only, as Llama, Qwen3 or Mistral, or the vllm engine"


@torch.inference_mode()
def prepared(model: PreTrainedModel) -> tuple[Passes, int]:
    """The model ready to be decoded, and the bytes of keys and values of one token.

    Three rows are read as an engine reads them, and before that as the model does by itself, alone. Recurrent and
    state-space layers, convolutions over time and position biases keep something else than keys and values, or look at
    positions that a batch of rows has not.
    Raises: ModelError: the logprobs differ, or the model cannot be called so at all.
    """
    kind, window = type(model).__name__, sliding_window(model.config)
    config = model.config.get_text_config()
    draw = np.random.default_rng(0)
    rows = [draw.integers(0, config.vocab_size, length) for length in LENGTHS]
    cache = SlotCache(config.num_hidden_layers, len(rows), max(LENGTHS))
    cache.reserve(len(rows), max(LENGTHS))
    try:
        alone = [model(input_ids=torch.from_numpy(row)[None].to(model.device), use_cache=False).logits for row in rows]
        passes = Passes(model)
        found, windows = _decoded(passes, cache, rows)
    except (TypeError, AttributeError, LookupError, ValueError, RuntimeError, ModelError) as error:
        raise ModelError("model", kind, f"cannot be decoded by the embedded engine ({error})", _FIX) from error
    if window and window not in windows:  # rows as short as these would not show it
        raise ModelError("model", kind, f"has a window of {window} tokens and does not say so to its attention", _FIX)
    gaps = torch.cat([
        _gap(row[read:], logits[0, read - 1 :], mine)
        for row, read, logits, mine in zip(rows, READ, alone, found, strict=True)
    ])  # fmt: skip
    if (gaps > TOLERANCE.get(model.dtype, _ROUGH)).float().mean() > SHARE:  # not finite weights are another fault
        raise ModelError(
            "model", kind, f"gives other logprobs decoded token by token than in one pass (by up to {gaps.max():.2g} "
            "nats): it has layers that keep more than keys and values", _FIX,
        )  # fmt: skip
    return passes, cache.num_bytes // (len(rows) * max(LENGTHS))


def _gap(following: np.ndarray, one: torch.Tensor, other: torch.Tensor) -> torch.Tensor:
    """Between the logprobs of the ids that follow, and at the last position of that of id 0."""
    ids = torch.from_numpy(np.append(following, 0))[:, None].to(one.device)
    return (one.float().log_softmax(-1) - other.float().log_softmax(-1)).gather(1, ids).abs()


def _decoded(passes: Passes, cache: SlotCache, rows: list[np.ndarray]) -> tuple[list[torch.Tensor], set[int]]:
    """Logits at the tokens of each row from the last of READ on, and the windows of the layers: the start of a row in
    one pass, then two tokens, then one by one, beside rows that are elsewhere."""
    found: list[list[torch.Tensor]] = [[] for _ in rows]
    windows: set[int] = set()
    done = np.zeros(len(rows), np.int64)
    for step in range(1 + max(LENGTHS)):
        size = np.array(READ) if step == 0 else np.where(np.array([step == 1, step == 2, False]), 2, 1)
        stops = np.minimum(done + size, LENGTHS)
        reading = np.flatnonzero(stops > done)
        if not reading.size:
            break
        counts = (stops - done)[reading]
        ids = np.concatenate([rows[row][done[row] : stops[row]] for row in reading])
        layout = SlotLayout(reading, done[reading], stops[reading], passes.device)
        logits = passes.read(cache, ids, layout, np.arange(ids.size))
        for row, mine in zip(reading.tolist(), torch.split(logits, counts.tolist()), strict=True):
            found[row].append(mine[-1:] if step == 0 else mine)
        windows |= layout.windows
        done = stops
    return [torch.cat(lines) for lines in found], windows
