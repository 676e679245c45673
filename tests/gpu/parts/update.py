"""Tokens per second, share of the peak (MFU) and memory of an update at Qwen3-0.6B and 1.7B shapes.

float32 weights with bfloat16 arithmetic, 64 rows of log-normal lengths, with and without gradient checkpointing.
"""

from __future__ import annotations

import statistics
from typing import Any

import numpy as np
import torch
from record import QWEN3, Facts, Place, config_of, random_model, run_part

from astraflow.algorithms.losses.ppo_clip import PpoClip
from astraflow.config.schema import OptimizerSection
from astraflow.models.scoring.packing import rows_from_lists
from astraflow.models.scoring.recompute import recompute_activations
from astraflow.training.optimize.flops import StepCost, peak_tflops
from astraflow.training.step import Stepper, StepSettings

BUDGET, ROWS, MEAN, PROMPT, UPDATES = 16_384, 64, 1024, 128, 3


def part(place: Place) -> Facts:
    """Each shape in both ways; what runs out of memory is said and is no failure."""
    matmul = matmul_tflops(place)
    rows = []
    for name in QWEN3:
        for recomputed in (False, True):
            try:
                rows.append(update(place, name, recomputed))
            except torch.OutOfMemoryError as error:
                rows.append({"model": name, "gradient_checkpointing": recomputed, "out_of_memory": str(error)[:200]})
            torch.cuda.empty_cache()
    finite = [np.isfinite(row["loss"]) for row in rows if "loss" in row]
    return {
        "device": "cpu" if place.dry else torch.cuda.get_device_name(), "matmul_tflops": matmul, "rows": rows,
        "ok": len(finite) >= 2 and all(finite),
    }  # fmt: skip


def update(place: Place, name: str, recomputed: bool) -> dict[str, Any]:
    """One shape, one way."""
    model = random_model(config_of(name, place.dry), place.device)
    if recomputed:
        recompute_activations(model)
    budget, count, mean, prompt = (256, 8, 64, 8) if place.dry else (BUDGET, ROWS, MEAN, PROMPT)
    settings = StepSettings(OptimizerSection(lr=1e-6), 100, budget, arithmetic="bfloat16")
    stepper = Stepper(model, PpoClip(), settings)
    draw = np.random.default_rng(0)
    sizes = np.clip(draw.lognormal(np.log(mean) - 0.18, 0.6, count), prompt + 1, 4 * mean).astype(int)
    batch = rows_from_lists([
        (draw.integers(3, model.config.vocab_size, size), np.arange(size) >= prompt) for size in sizes
    ])  # fmt: skip
    cost, peak = StepCost(model), peak_tflops(0.0, place.device, "bfloat16")
    if not place.dry:
        torch.cuda.reset_peak_memory_stats()
    seconds, metrics = [], {}
    for _ in range(1 + UPDATES):
        begin = place.now()
        metrics = stepper.step(batch, 0)
        seconds.append(place.now() - begin)
    middle = statistics.median(seconds[1:])
    return {
        "model": name, "gradient_checkpointing": recomputed, "tokens": int(sizes.sum()), "seconds": middle,
        "first_s": seconds[0], "tokens_per_s": float(sizes.sum()) / middle, "loss": metrics["loss"],
        **{"perf/mfu": None, **cost.usage(metrics | {"perf/step_s": middle}, 1, peak)},
        "peak_gb": None if place.dry else torch.cuda.max_memory_allocated() / 1e9,
    }  # fmt: skip


def matmul_tflops(place: Place) -> float:
    """What a large bfloat16 product reaches here."""
    size = 256 if place.dry else 8192
    left, right = (torch.randn(size, size, device=place.device, dtype=torch.bfloat16) for _ in range(2))
    for _ in range(3):
        left @ right
    begin = place.now()
    for _ in range(10):
        left @ right
    return 10 * 2 * size**3 / (place.now() - begin) / 1e12


if __name__ == "__main__":
    run_part("update", part)
