"""Sampled tokens per second of the embedded engine at the Qwen3-0.6B shape, and how true its logprobs are there."""

from __future__ import annotations

import os
import tempfile
import time

import numpy as np
import torch
from record import Facts, Place, config_of, random_model, run_part

from astraflow.engines.local.engine import LocalEngine
from astraflow.models.load import load_model
from astraflow.types import Generation, Sampling


def part(place: Place) -> Facts:
    """A burst of equal requests, after a short one that warms up; new weights in the middle; a few rows rescored."""
    prompts, sampled, rows = (16, 8, 4) if place.dry else (128, 128, 64)
    config = config_of("qwen3-0.6b", place.dry)
    with tempfile.TemporaryDirectory() as directory:
        random_model(config, place.device, torch.bfloat16).save_pretrained(directory)
        threads = max(1, (os.cpu_count() or 1) // 2)
        engine = LocalEngine(
            directory, dtype="bfloat16", device=place.device.type, max_concurrency=rows, threads=threads,  # type: ignore[arg-type]
            kv_cache_mb=16384, max_context=1024,
        )  # fmt: skip
        draw = np.random.default_rng(0)

        def burst(count: int, tokens: int) -> tuple[float, list[list[int]], list[Generation]]:
            sampling = Sampling(max_tokens=tokens)
            ids = [draw.integers(3, config.vocab_size, prompts).tolist() for _ in range(count)]
            begin = time.perf_counter()
            futures = [engine.submit(f"{count}-{i}", each, sampling) for i, each in enumerate(ids)]
            done = [future.result(timeout=100) for future in futures]
            return time.perf_counter() - begin, ids, done

        burst(1, 2)
        seconds, asked, got = burst(rows, sampled)
        model = load_model(directory, "bfloat16").to(place.device)  # type: ignore[arg-type]
        gap = _gap(model, asked[:4], got[:4])
        begin = time.perf_counter()
        engine.load_weights(0, dict(model.named_parameters())).result(timeout=100)
        swap_s = time.perf_counter() - begin
        stats = engine.stats()
        engine.close()
    expected = 2 + rows * sampled
    return {
        "device": place.device.type, "rows": rows, "sampled_tokens": stats["sampled_tokens"],
        "tokens_per_s": rows * sampled / seconds, "swap_s": swap_s, "gap_p50": gap[0], "gap_p99": gap[1],
        "ok": stats["sampled_tokens"] == expected and gap[0] < 0.2,
    }  # fmt: skip


@torch.inference_mode()
def _gap(model: torch.nn.Module, asked: list[list[int]], got: list[Generation]) -> tuple[float, float]:
    """p50 and p99 of the distance to a pass over the whole, both in bfloat16."""
    found = []
    for prompt, generation in zip(asked, got, strict=True):
        ids = torch.tensor([prompt + generation.token_ids.tolist()], device=next(model.parameters()).device)
        logits = model(input_ids=ids, use_cache=False).logits[0, len(prompt) - 1 : -1].float()
        own = torch.log_softmax(logits, -1).gather(1, ids[0, len(prompt) :, None])[:, 0].cpu().numpy()
        found.append(np.abs(own - generation.logprobs))
    p50, p99 = np.quantile(np.concatenate(found), [0.5, 0.99]).tolist()
    return p50, p99


if __name__ == "__main__":
    run_part("engine", part)
