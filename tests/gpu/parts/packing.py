"""Is a pack on this device scored as its sequences alone, in float32 and in bfloat16, gradients included?

The reference is transformers' own forward pass over each sequence alone in float32. In bfloat16 the error of a pack
must be like that of the sequences alone in bfloat16: rounding, nothing more.
"""

from __future__ import annotations

from contextlib import AbstractContextManager, nullcontext
from dataclasses import replace

import numpy as np
import torch
from record import Facts, Place, config_of, random_model, run_part
from transformers import PreTrainedModel

from astraflow.models.scoring.forward import packed_logprobs, prepare_model
from astraflow.models.scoring.layout import pack_layout
from astraflow.models.scoring.packing import Pack, TokenRows, pack_rows, rows_from_lists

MAX_FLOAT32, MAX_OVER_ALONE, MIN_COSINE = 1e-3, 2.0, 0.99
LAYERS = 4


def part(place: Place) -> Facts:
    """All comparisons on one model."""
    torch.backends.cuda.matmul.allow_tf32 = False
    config = config_of("qwen3-0.6b", place.dry)
    config.num_hidden_layers = min(LAYERS, config.num_hidden_layers)
    config.layer_types = config.layer_types[: config.num_hidden_layers]
    plain = random_model(config, place.device)
    with torch.no_grad():
        for parameter in plain.parameters():  # logits far from flat, so that positions matter
            if parameter.ndim == 2:
                parameter.mul_(3.0)
    rows = _rows(config.vocab_size, 8 if place.dry else 24, 64 if place.dry else 1024)
    truth, slope = _alone(plain, rows, nullcontext())
    half = torch.autocast(place.device.type, torch.bfloat16)
    rounded, _ = _alone(plain, rows, half)
    packed = prepare_model(plain)
    (pack,) = pack_rows(rows, 10**9)
    exact, exact_slope = _packed(packed, pack, len(truth), nullcontext())
    low, low_slope = _packed(packed, pack, len(truth), half)
    trained = rows.trained
    float32 = float(np.abs(exact - truth)[trained].max())
    error, alone = (float(np.abs(found - truth)[trained].mean()) for found in (low, rounded))
    cosines = [float(torch.nn.functional.cosine_similarity(found, slope, 0)) for found in (exact_slope, low_slope)]
    layout = pack_layout(pack.cu_lengths, pack.places, place.device, torch.bfloat16)
    return {
        "tokens": int(pack.num_tokens), "computed_tokens": int(pack.num_computed),
        "kernel": "tree" if layout.tree is not None else "buckets" if layout.buckets else "varlen",
        "float32_max_error": float32,
        "bfloat16_mean_error": error, "bfloat16_mean_error_alone": alone,
        "bfloat16_p99_error": float(np.percentile(np.abs(low - truth)[trained], 99)),
        "float32_gradient_cosine": cosines[0], "bfloat16_gradient_cosine": cosines[1],
        "ok": float32 <= MAX_FLOAT32 and error <= MAX_OVER_ALONE * alone and min(cosines) >= MIN_COSINE,
    }  # fmt: skip


def _rows(vocabulary: int, count: int, mean: int) -> TokenRows:
    """Uneven rows in fours with a common prompt; `versions` holds the place of each token."""
    draw = np.random.default_rng(0)
    examples = []
    for row in range(count):
        if row % 4 == 0:
            prompt = draw.integers(3, vocabulary, mean // 4)
        own = draw.integers(3, vocabulary, max(4, int(draw.lognormal(np.log(mean / 2), 0.6))))
        ids = np.concatenate([prompt, own])
        examples.append((ids, np.arange(len(ids)) >= len(prompt)))
    rows = rows_from_lists(examples)
    return replace(rows, versions=np.arange(len(rows.token_ids), dtype=np.int32))


def _alone(
    model: PreTrainedModel, rows: TokenRows, arithmetic: AbstractContextManager[object]
) -> tuple[np.ndarray, torch.Tensor]:
    """Logprobs [T] of the trained tokens and the gradient of their sum."""
    model.zero_grad()
    found = np.zeros(len(rows.token_ids), dtype=np.float32)
    for start, stop in zip(rows.starts, rows.starts[1:], strict=False):
        ids = torch.from_numpy(rows.token_ids[start:stop].astype(np.int64)).to(model.device)
        with arithmetic:
            logits = model(input_ids=ids[None], use_cache=False).logits[0, :-1].float()
        logprobs = logits.log_softmax(-1).gather(1, ids[1:, None])[:, 0]
        trained = rows.trained[start + 1 : stop]
        (logprobs * torch.from_numpy(trained).to(model.device)).sum().backward()
        found[start + 1 : stop] = logprobs.detach().float().cpu().numpy()
    return found, _gradient(model)


def _packed(
    model: PreTrainedModel, pack: Pack, size: int, arithmetic: AbstractContextManager[object]
) -> tuple[np.ndarray, torch.Tensor]:
    """The same of a pack."""
    model.zero_grad()
    with arithmetic:
        logprobs = packed_logprobs(model, pack, 1.0).logprobs
    logprobs.sum().backward()
    found = np.zeros(size, dtype=np.float32)
    found[pack.versions] = logprobs.detach().float().cpu().numpy()
    return found, _gradient(model)


def _gradient(model: PreTrainedModel) -> torch.Tensor:
    return torch.cat([p.grad.detach().flatten() for p in model.parameters() if p.grad is not None]).double()


if __name__ == "__main__":
    run_part("packing", part)
