"""Sampled tokens per second of the embedded engine at the Qwen3-0.6B shape. It computes on the CPU of this machine."""

from __future__ import annotations

import os
import tempfile
import time

import numpy as np
import torch
from record import Facts, Place, config_of, random_model, run_part

from astraflow.engines.local.engine import LocalEngine
from astraflow.types import Sampling


def part(place: Place) -> Facts:
    """A burst of equal requests, after a short one that warms up."""
    prompts, sampled, rows = (16, 8, 4) if place.dry else (128, 48, 32)
    config = config_of("qwen3-0.6b", place.dry)
    with tempfile.TemporaryDirectory() as directory:
        random_model(config, torch.device("cpu"), torch.bfloat16).save_pretrained(directory)
        threads = max(1, (os.cpu_count() or 1) // 2)
        engine = LocalEngine(directory, dtype="bfloat16", max_concurrency=rows, threads=threads)
        draw = np.random.default_rng(0)

        def burst(count: int, tokens: int) -> float:
            sampling = Sampling(max_tokens=tokens)
            ids = [draw.integers(3, config.vocab_size, prompts).tolist() for _ in range(count)]
            begin = time.perf_counter()
            for future in [engine.submit(f"{count}-{i}", each, sampling) for i, each in enumerate(ids)]:
                future.result(timeout=100)
            return time.perf_counter() - begin

        burst(1, 2)
        seconds = burst(rows, sampled)
        stats = engine.stats()
        engine.close()
    expected = 2 + rows * sampled
    return {
        "device": "cpu", "threads": threads, "rows": rows, "sampled_tokens": stats["sampled_tokens"],
        "tokens_per_s": rows * sampled / seconds, "ok": stats["sampled_tokens"] == expected,
    }  # fmt: skip


if __name__ == "__main__":
    run_part("engine", part)
