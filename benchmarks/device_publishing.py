"""What does publishing cost a trainer whose weights lie on a device, and is it exact? For a machine with a GPU.

Three ways: the snapshot on the device (only changes cross to the host), the snapshot in pinned host memory, and a plain
copy to the host within the step. Every version is fetched again and compared with what the device had when it was
given, while the tensors are already being changed. `--device cpu` shows that the script itself works.

    python -m benchmarks.device_publishing [--device cuda] [--elements 1000000000] [--share 0.01] [--versions 5]
"""

from __future__ import annotations

import argparse
import statistics
import tempfile
import time
from pathlib import Path
from typing import Any

import torch

from astraflow.weights.delta.encode import encode
from astraflow.weights.publisher import Publisher
from astraflow.weights.shards.publisher import ShardedPublisher
from astraflow.weights.store import FileStore
from benchmarks.harness import Result

TENSORS = 16


def model(device: str, elements: int) -> dict[str, torch.Tensor]:
    """Normal bf16 weights."""
    return {f"layer.{at}": torch.randn(elements // TENSORS, device=device).bfloat16() for at in range(TENSORS)}


def step(tensors: dict[str, torch.Tensor], share: float) -> None:
    """Move some of the weights by about one unit in the last place, in place."""
    for tensor in tensors.values():
        tensor.mul_(torch.where(torch.rand(tensor.shape, device=tensor.device) < share, 1.008, 1.0).to(tensor.dtype))


def synchronized(device: str) -> float:
    """The time once the device has nothing left to do."""
    if device != "cpu":
        torch.accelerator.synchronize()
    return time.perf_counter()


def codec_row(device: str, elements: int, share: float) -> dict[str, Any]:
    """Encoding alone: on the device and on the host, with the same bytes."""
    old = model(device, elements)
    new = {name: tensor.clone() for name, tensor in old.items()}
    step(new, share)
    on_host = [{name: tensor.cpu() for name, tensor in tensors.items()} for tensors in (old, new)]
    begin = synchronized(device)
    parts = list(encode(old, new, base=0, version=1))
    middle = synchronized(device)
    same = parts == list(encode(*on_host, base=0, version=1))
    seconds = [middle - begin, time.perf_counter() - middle]
    nbytes = 2 * elements
    return {
        "what": "encode", "same_bytes": same, "device_gb_s": nbytes / seconds[0] / 1e9,
        "host_gb_s": nbytes / seconds[1] / 1e9, "delta_share": sum(map(len, parts)) / nbytes,
    }  # fmt: skip


def publish_row(way: str, device: str, elements: int, share: float, versions: int) -> dict[str, Any]:
    """Seconds within the step and until the version is visible; whether what was published is what was given."""
    tensors = model(device, elements)
    submitted, visible, exact = [], [], True
    with tempfile.TemporaryDirectory() as place:
        store = FileStore(Path(place), "actor", durable=False)
        plain = Publisher(store) if way == "copy within the step" else None
        publisher = plain or ShardedPublisher(store, on_device=way == "snapshot on the device")
        for version in range(versions):
            expected = {name: tensor.to("cpu", copy=True) for name, tensor in tensors.items()}
            begin = synchronized(device)
            given = tensors if plain is None else {name: t.to("cpu", copy=True) for name, t in tensors.items()}
            publisher.submit(version, given)
            handed = time.perf_counter()
            step(tensors, share)  # at once, as a trainer does
            publisher.flush()
            done = time.perf_counter()
            fetched = store.fetch(version)
            exact &= all(torch.equal(fetched[name], expected[name]) for name in expected)
            if version:
                submitted.append(handed - begin)
                visible.append(done - begin)
        publisher.close()
    return {
        "what": way, "same_bytes": exact, "in_step_s": statistics.median(submitted),
        "visible_s": statistics.median(visible),
    }  # fmt: skip


def main() -> None:
    """Print the table and write results/device_publishing.json."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--device", default="cuda")
    parser.add_argument("--elements", type=int, default=1_000_000_000)
    parser.add_argument("--share", type=float, default=0.01)
    parser.add_argument("--versions", type=int, default=5)
    options = parser.parse_args()
    result = Result("device_publishing", vars(options))
    size = (options.device, options.elements, options.share)
    result.rows.append(codec_row(*size))
    for way in ("snapshot on the device", "snapshot in host memory", "copy within the step"):
        result.rows.append(publish_row(way, *size, options.versions))
    result.show()
    if options.device != "cpu":
        result.write()


if __name__ == "__main__":
    main()
