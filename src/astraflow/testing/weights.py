"""Small tensors and a weights server in a thread, for tests of anything that publishes or fetches."""

from __future__ import annotations

import asyncio
import threading
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path

import torch

from astraflow.errors import LaunchError
from astraflow.weights.app import create_weights_app
from astraflow.wire.app import bind, serve


def make_tensors(seed: int = 0) -> dict[str, torch.Tensor]:
    """Four small tensors of three dtypes, one of them a scalar; the same for the same seed."""
    generator = torch.Generator().manual_seed(seed)
    return {
        "embed.weight": torch.randn(61, 16, generator=generator).to(torch.bfloat16),
        "layer.0.weight": torch.randn(16, 16, generator=generator),
        "layer.0.bias": torch.randn(16, generator=generator).to(torch.float16),
        "scale": torch.tensor(1.5),
    }


def same_bits(left: Mapping[str, torch.Tensor], right: Mapping[str, torch.Tensor]) -> bool:
    """Equal names, dtypes, shapes and bytes (so NaN equals itself)."""
    return left.keys() == right.keys() and all(
        a.dtype == b.dtype
        and a.shape == b.shape
        and torch.equal(a.contiguous().reshape(-1).view(torch.uint8), b.contiguous().reshape(-1).view(torch.uint8))
        for a, b in ((left[name], right[name]) for name in left)
    )


@contextmanager
def serving_weights(root: Path, token: str | None = None) -> Iterator[str]:
    """The weights app over `root` on a free port, in a thread of this process; yields its URL."""
    loop = asyncio.new_event_loop()
    stop = asyncio.Event()
    ready: list[str] = []
    answered = threading.Event()
    sock = bind("127.0.0.1", 0, "weights.port")

    def on_ready(url: str) -> None:
        ready.append(url)
        answered.set()

    def run() -> None:
        loop.run_until_complete(serve(create_weights_app(root, token), sock, on_ready, stop, grace_s=0.1))
        loop.run_until_complete(loop.shutdown_asyncgens())
        loop.run_until_complete(loop.shutdown_default_executor())
        loop.close()

    thread = threading.Thread(target=run)
    thread.start()
    try:
        if not answered.wait(10):
            raise LaunchError("weights server", str(root), "gave no answer in 10 s", "see the log")
        yield ready[0]
    finally:
        loop.call_soon_threadsafe(stop.set)
        thread.join(10)
        sock.close()
