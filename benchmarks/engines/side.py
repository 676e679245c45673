"""One engine behind AstraFlow's contract, in a process of its own: tokens per second, weight updates, logprob gap.

python -m benchmarks.engines.side --work '{...}'
"""

from __future__ import annotations

import argparse
import itertools
import json
import statistics
import sys
import threading
import time
from collections.abc import Callable, Sequence
from concurrent.futures import Future
from contextlib import closing
from typing import Any, Literal

import numpy as np
import torch
from transformers import PreTrainedModel

from astraflow.contracts import Engine
from astraflow.engines.local import LocalEngine
from astraflow.models.load import load_model, state_tensors
from astraflow.types import Generation, Sampling
from benchmarks.engines.work import GAP_TOKENS, KINDS, Asked, Work, requests

_NUMBERS = itertools.count()
_WAIT_S = 600.0
_DTYPES: dict[str, Literal["float32", "bfloat16"]] = {"float32": "float32", "bfloat16": "bfloat16"}


def start(work: Work) -> Engine:
    """The engine of this side."""
    rows = max(work.batches)
    if work.side == "embedded":
        return LocalEngine(work.directory, dtype=work.dtype, threads=work.threads, max_concurrency=rows, device="cpu")
    from astraflow.engines.vllm.engine import VllmEngine

    return VllmEngine(
        work.directory, python=work.vllm, dtype=_DTYPES[work.dtype], threads=work.threads, max_concurrency=rows,
        max_context=1024, args={"enforce_eager": True}, env={"VLLM_CPU_KVCACHE_SPACE": "1"},
    )  # fmt: skip


def play(engine: Engine, asked: Sequence[Asked], at_once: int) -> list[Generation]:
    """All of them, never more than `at_once` in the engine."""
    free, futures = threading.Semaphore(at_once), list[Future[Generation]]()
    for prompt, tokens in asked:
        free.acquire(timeout=_WAIT_S)
        futures.append(engine.submit(f"r{next(_NUMBERS)}", prompt, Sampling(max_tokens=tokens)))
        futures[-1].add_done_callback(lambda _: free.release())
    return [future.result(_WAIT_S) for future in futures]


def speeds(
    work: Work, vocabulary: int, play_all: Callable[[Sequence[Asked], int], int]
) -> list[dict[str, Any]]:  # fmt: skip
    """Rows of tokens per second; `play_all` plays requests, so many at once, and gives the tokens asked for."""
    rows = []
    for kind, batch in itertools.product(KINDS, work.batches):
        asked = requests(kind, batch, work.longest, vocabulary)
        play_all([(prompt[:8], 2) for prompt, _ in asked[:batch]], batch)  # kernels of these shapes
        seconds = []
        for _ in range(work.repeats):
            begin = time.perf_counter()
            tokens = play_all(asked, batch)
            seconds.append(time.perf_counter() - begin)
        rows.append({
            "side": work.side, "dtype": work.dtype, "kind": kind, "batch": batch, "requests": len(asked),
            "tokens": tokens, "seconds": (median := statistics.median(seconds)), "tokens_per_s": tokens / median,
        })  # fmt: skip
        print(json.dumps(rows[-1]), file=sys.stderr, flush=True)
    return rows


def updates(work: Work, engine: Engine, model: PreTrainedModel, vocabulary: int) -> dict[str, float]:
    """Seconds until new weights are in force, with nothing running and in the middle of as many as run at once."""
    tensors, version = state_tensors(model), itertools.count()

    def update() -> float:
        begin = time.perf_counter()
        engine.load_weights(next(version), tensors).result(_WAIT_S)
        return time.perf_counter() - begin

    idle = [update() for _ in range(3)]
    asked = requests("uneven", max(work.batches), work.longest, vocabulary)[: max(work.batches)]
    futures = [engine.submit(f"r{next(_NUMBERS)}", prompt, Sampling(max_tokens=work.longest)) for prompt, _ in asked]
    before = engine.stats()["sampled_tokens"]
    while engine.stats()["sampled_tokens"] < before + len(asked):
        threading.Event().wait(0.01)
    running = [update() for _ in range(3)]
    for future in futures:
        future.result(_WAIT_S)
    return {"idle_s": statistics.median(idle), "running_s": statistics.median(running)}


@torch.inference_mode()
def gaps(model: PreTrainedModel, asked: Sequence[Asked], got: Sequence[Generation]) -> dict[str, float]:
    """Percentiles of the distance between an engine's logprobs and those of a forward pass over the whole, float32."""
    found, count = [], 0
    for (prompt, _), generation in zip(asked, got, strict=True):
        ids = torch.tensor([prompt + generation.token_ids.tolist()])
        logits = model(input_ids=ids, use_cache=False).logits[0, len(prompt) - 1 : -1].float()
        own = torch.log_softmax(logits, -1).gather(1, ids[0, len(prompt) :, None])[:, 0].numpy()
        found.append(np.abs(own - generation.logprobs))
        count += len(own)
        if count >= GAP_TOKENS:
            break
    p50, p99, most = np.quantile(np.concatenate(found), [0.5, 0.99, 1.0]).tolist()
    return {"p50": p50, "p99": p99, "max": most, "tokens": count}


def run(work: Work) -> dict[str, Any]:
    """Everything that is measured of one engine."""
    model = load_model(work.directory)
    vocabulary = model.config.vocab_size
    begin = time.perf_counter()
    with closing(start(work)) as engine:
        ready_s = time.perf_counter() - begin
        rows = speeds(
            work, vocabulary, lambda asked, batch: sum(len(g.token_ids) for g in play(engine, asked, batch))
        )  # fmt: skip
        asked = requests("uneven", max(work.batches), work.longest, vocabulary)
        gap = gaps(model, asked, play(engine, asked, max(work.batches)))
        update = updates(work, engine, model, vocabulary)
    return {"rows": rows, "gap": gap, "update": update, "ready_s": ready_s}


def main() -> None:
    """The last line is the result."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--work", required=True)
    given = json.loads(parser.parse_args().work)
    work = Work(**given | {"batches": tuple(given["batches"])})
    if work.side == "generate":
        from benchmarks.engines.plain import run_plain

        print(json.dumps({"rows": run_plain(work)}))
    else:
        print(json.dumps(run(work)))


if __name__ == "__main__":
    main()
