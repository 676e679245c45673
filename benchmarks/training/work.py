"""The work that all sides of `bench_training` do: one model directory, the same sequences, the same optimizer step.

A side is a process of its own; it builds its step, then `measure` times updates and takes the memory above the loaded
model and its optimizer. Needs torch and transformers only, so that a peer can run it in an environment of its own.
"""

from __future__ import annotations

import argparse
import ctypes
import json
import math
import os
import random
import statistics
import sys
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

import torch
from transformers import AutoModelForCausalLM, PreTrainedModel

PROMPT_TOKENS = 8  # of every sequence; the rest is trained
SPREAD = 0.6  # of the log-normal lengths
LR, BETAS, EPS, GRAD_CLIP, CLIP = 1e-6, (0.9, 0.999), 1e-8, 1.0, 0.2


@dataclass(frozen=True)
class Work:
    """One update of the model in `directory` on `rows` sequences of `mean` tokens on average."""

    directory: str
    lengths: str  # "uneven" or "equal"
    rows: int
    mean: int
    behavior: str  # file of the logprobs before the update, which the plain loop writes
    of_rows: int = 0  # the rows are a fair part of a batch of so many, to whose longest row TRL pads; 0: they are all
    micro: int = 8  # rows of a padded microbatch
    budget: int = 1024  # tokens of a packed microbatch
    repeats: int = 3
    warm_ups: int = 1
    threads: int = 2
    seed: int = 0

    def sizes(self) -> list[int]:
        """Tokens of each sequence: mean as asked for, at most four times it."""
        whole = self._sizes_of_batch()
        if not self.of_rows:
            return whole
        # Every k-th by length, from the middle of the first k on: as long as the others on average.
        step, over = divmod(self.of_rows, self.rows)
        assert not over, f"of_rows={self.of_rows} must be a multiple of rows={self.rows}"
        return random.Random(self.seed).sample(sorted(whole)[step // 2 :: step][: self.rows], self.rows)

    def widest(self) -> int:
        """The longest row of the batch."""
        return max(self._sizes_of_batch())

    def _sizes_of_batch(self) -> list[int]:
        rows = self.of_rows or self.rows
        if self.lengths == "equal":
            return [self.mean] * rows
        rng = random.Random(self.seed)
        raw = [rng.lognormvariate(0.0, SPREAD) for _ in range(rows)]
        scale = self.mean / statistics.mean(raw)
        return [max(2 * PROMPT_TOKENS, min(4 * self.mean, round(x * scale))) for x in raw]


@dataclass(frozen=True)
class Batch:
    """Random sequences and one advantage for each."""

    sequences: list[torch.Tensor]  # int64
    advantages: torch.Tensor  # [rows] float32
    widest: int  # what TRL pads to

    @property
    def num_tokens(self) -> int:
        """Of all sequences."""
        return sum(map(len, self.sequences))

    @property
    def num_trained(self) -> int:
        """Those behind the prompts."""
        return self.num_tokens - PROMPT_TOKENS * len(self.sequences)


Step = Callable[[], float]  # one whole update; returns the norm of the gradient before it was clipped
Build = Callable[[PreTrainedModel, Batch, Work], Step]


def make_batch(work: Work, vocabulary: int) -> Batch:
    """The same numbers in every process."""
    generator = torch.Generator().manual_seed(work.seed)
    sequences = [torch.randint(3, vocabulary, (size,), generator=generator) for size in work.sizes()]
    return Batch(sequences, torch.randn(work.rows, generator=generator), work.widest())


def make_optimizer(model: PreTrainedModel) -> torch.optim.Optimizer:
    """AdamW as ours builds it, for the sides that have none."""
    optimizer = torch.optim.AdamW(model.parameters(), lr=LR, betas=BETAS, eps=EPS, weight_decay=0.0, fused=True)
    fill(optimizer)
    return optimizer


def fill(optimizer: torch.optim.Optimizer) -> None:
    """Make its state, which is there from the second update on, so that one update says what each of them needs."""
    parameters = [parameter for group in optimizer.param_groups for parameter in group["params"]]
    for parameter in parameters:
        parameter.grad = torch.zeros_like(parameter)
    optimizer.step()  # gradients of zero move nothing
    optimizer.zero_grad()


def padded(part: list[torch.Tensor], width: int) -> tuple[torch.Tensor, torch.Tensor]:
    """ids and mask [rows, width], padding on the right."""
    ids = torch.zeros(len(part), width, dtype=torch.long)
    mask = torch.zeros(len(part), width, dtype=torch.long)
    for row, sequence in enumerate(part):
        ids[row, : len(sequence)], mask[row, : len(sequence)] = sequence, 1
    return ids, mask


def measure(work: Work, build: Build, load: Callable[[str], PreTrainedModel]) -> dict[str, object]:
    """Time the updates of a side in this process. Memory: VmHWM, whole and above model and optimizer."""
    torch.manual_seed(work.seed)
    torch.set_num_threads(work.threads)
    model = load(work.directory)
    batch = make_batch(work, model.config.vocab_size)
    step = build(model, batch, work)
    torch.set_num_threads(work.threads)  # a library may have changed it
    # Files that are mapped become resident.
    assert math.isfinite(sum(float(parameter.detach().sum()) for parameter in model.parameters()))
    _give_back_free_memory()
    before = status_mb("VmRSS")
    Path("/proc/self/clear_refs").write_text("5")  # the high-water mark starts anew
    norms, times = [], []
    for _ in range(work.warm_ups + work.repeats):
        begin = time.perf_counter()
        norms.append(step())
        times.append(time.perf_counter() - begin)
    peak = status_mb("VmHWM")
    seconds = statistics.median(times[work.warm_ups :])
    return {
        "tokens": batch.num_tokens, "seconds": round(seconds, 3), "tokens_per_s": round(batch.num_tokens / seconds, 1),
        "memory_mb": round(peak - before), "peak_mb": round(peak), "grad_norm": round(norms[0], 6),
        "times": {str(i): round(t, 3) for i, t in enumerate(times)},
    }  # fmt: skip


def plain_model(directory: str) -> PreTrainedModel:
    """float32, transformers' own attention, dropout off."""
    model: PreTrainedModel = AutoModelForCausalLM.from_pretrained(directory, dtype=torch.float32)
    return model.eval()


def given_work() -> tuple[Work, list[str]]:
    """`--work` of the command line, and what else is there."""
    parser = argparse.ArgumentParser()
    parser.add_argument("--work", type=json.loads, required=True)
    known, rest = parser.parse_known_args()
    return Work(**known.work), rest


def tell(result: dict[str, object]) -> None:
    """The last line of a side."""
    sys.stdout.write(json.dumps(result) + "\n")


def status_mb(name: str) -> float:
    """A figure of this process by its name in /proc/self/status."""
    for line in Path("/proc/self/status").read_text().splitlines():
        if line.startswith(name + ":"):
            return int(line.split()[1]) / 1024
    raise OSError(f"/proc/self/status has no {name}")


def _give_back_free_memory() -> None:
    if os.uname().sysname == "Linux":
        ctypes.CDLL(None).malloc_trim(0)
