"""Models spread over ranks, and what ranks do with them: run by `ranks.run_ranks`."""

from __future__ import annotations

import itertools
import math
import os
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import DTensor, Partial, Replicate, Shard, distribute_tensor
from torch.distributed.tensor.placement_types import _StridedShard

from astraflow.errors import WeightError
from astraflow.training.feed.session import Share, TrainerSession
from astraflow.weights.shards.publisher import ShardedPublisher
from astraflow.weights.shards.regions import Region, region_of
from astraflow.weights.store import FileStore

SHAPES = [(), (1,), (7,), (0, 4), (5, 3), (8, 6), (2, 3, 5), (64, 48)]


def model(version: int) -> dict[str, torch.Tensor]:
    """A whole model: sparse and dense changes, none, tensors that come, go and change their shape."""
    start = torch.Generator().manual_seed(0)
    tensors = {
        "embed": torch.randn(301, 16, generator=start).to(torch.bfloat16),
        "wide": torch.randn(3, 900, generator=start).to(torch.bfloat16),
        "dense": torch.randn(50, 7, generator=start),
        "still": torch.randn(17, 3, generator=start),
        "half": torch.randn(2000, generator=start).to(torch.float16),
        "scale": torch.tensor(1.5),
        "empty": torch.empty(0, 4),
        "counts": torch.arange(12).reshape(3, 4),
        "mask": torch.arange(9) % 2 == 0,
    }
    for step in range(1, version + 1):
        random = torch.Generator().manual_seed(step)
        for name, share in (("embed", 0.02), ("wide", 0.05), ("half", 0.4), ("dense", 1.0)):
            tensor = tensors[name]
            moved = torch.rand(tensor.shape, generator=random) < share
            tensors[name] = torch.where(moved, tensor * 1.01, tensor)
        tensors["counts"] = tensors["counts"] + (torch.rand(3, 4, generator=random) < 0.2)
        if step == 2:
            tensors["new"] = torch.randn(6, 5, generator=random)
            tensors["still"] = torch.randn(5, 4, generator=random)
        if step == 3:
            del tensors["mask"]
            tensors["embed"][0, :2] = torch.tensor([float("nan"), -0.0], dtype=torch.bfloat16)
    return tensors


def spread(tensors: dict[str, torch.Tensor]) -> dict[str, torch.Tensor]:
    """As ranks hold it: rows, columns, copies, plain tensors, and a tied one."""
    mesh = init_device_mesh("cpu", (dist.get_world_size(),))
    found: dict[str, torch.Tensor] = {}
    for number, (name, tensor) in enumerate(tensors.items()):
        if name in ("scale", "mask"):
            found[name] = tensor
            continue
        placement = Replicate() if name == "still" else Shard(1 if name in ("wide", "counts") or number % 5 == 4 else 0)
        if isinstance(placement, Shard) and placement.dim >= tensor.dim():
            placement = Shard(0)
        found[name] = distribute_tensor(tensor, mesh, [placement], src_data_rank=None)
    return {**found, "head": found["embed"].detach()}


def store_at(place: Path, rank: int) -> FileStore | None:
    return None if rank else FileStore(place / "sharded", "actor", full_every=3)


def publish_versions(rank: int, place: Path, num_versions: int, on_device: bool, deltas: bool = True) -> list[int]:
    """Bytes of weights that this rank copied for each version."""
    publisher = ShardedPublisher(store_at(place, rank), on_device=on_device, deltas=deltas, timeout_s=20)
    copied = []
    for version in range(num_versions):
        publisher.submit(version, spread(model(version)))
        publisher.flush()
        base = publisher._base
        copied.append(sum(block.nbytes for block in base._blocks.values()) if base is not None else 0)
    publisher.close()
    return copied


def regions_are_where_torch_puts_blocks(rank: int, place: Path) -> int:
    """How many layouts were compared."""
    size = dist.get_world_size()
    flat, square = init_device_mesh("cpu", (size,)), init_device_mesh("cpu", (2, size // 2))
    one = [(p,) for p in (Replicate(), Shard(0), Shard(1), Shard(2))]
    placements: list[tuple[Any, tuple[Any, ...]]] = [(flat, p) for p in one]
    placements += [(square, (*a, *b)) for a, b in itertools.product(one, one)]
    placements += [(square, (_StridedShard(dim, split_factor=size // 2), Shard(dim))) for dim in (0, 1)]
    num_compared = 0
    for shape, (mesh, where) in itertools.product(SHAPES, placements):
        if any(not isinstance(p, Replicate) and p.dim >= len(shape) for p in where):
            continue
        numbers = torch.arange(math.prod(shape)).reshape(shape)
        tensor = distribute_tensor(numbers, mesh, where, src_data_rank=None)
        region, block = region_of("t", tensor), tensor.to_local()
        assert region is not None
        if region.num_elements or block.numel():
            assert region.shape == tuple(block.shape), (shape, where, region, block.shape)
        found = region.to_whole(torch.arange(block.numel()).numpy(), shape)
        assert found.tolist() == block.reshape(-1).tolist(), (shape, where, region)
        again = torch.full(shape, -1)
        if block.numel():
            region.put(again.numpy(), block.numpy())
            assert torch.equal(again[again >= 0], block.reshape(-1).sort().values)
        num_compared += 1
    assert Region.whole((3, 0)).num_elements == 0
    return num_compared


class Tied(torch.nn.Module):
    """A tiny language model with tied embeddings and a buffer."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.embed = torch.nn.Embedding(53, 10)
        self.middle = torch.nn.Linear(10, 10)
        self.head = torch.nn.Linear(10, 53, bias=False)
        self.head.weight = self.embed.weight
        self.register_buffer("scale", torch.tensor(2.0))

    def forward(self, ids: torch.Tensor) -> torch.Tensor:
        return self.head(torch.tanh(self.middle(self.embed(ids))) * self.scale)


def train_with_fsdp(rank: int, place: Path, steps: int) -> list[dict[str, list[int]]]:
    """The whole weights of each version as the trainer has them: bits in bfloat16, by name."""
    module = Tied()
    fully_shard(module.middle)
    fully_shard(module)
    optimizer = torch.optim.Adam(module.parameters(), lr=1e-4)
    publisher = ShardedPublisher(store_at(place, rank), dtype=torch.bfloat16, timeout_s=20)
    seen = []
    for version in range(steps):
        ids = torch.arange(rank, rank + 20) % 53
        if version:
            torch.nn.functional.cross_entropy(module(ids), ids).backward()
            optimizer.step()
            optimizer.zero_grad()
        publisher.submit(version, module.state_dict())
        whole = {n: t.full_tensor() if isinstance(t, DTensor) else t for n, t in module.state_dict().items()}
        seen.append({n: t.to(torch.bfloat16).view(torch.int16).reshape(-1).tolist() for n, t in whole.items()})
    publisher.flush()
    publisher.close()
    return seen


def publish_with(rank: int, place: Path, trouble: str) -> list[str]:
    """What each of three versions ended with on this rank: "" or the error. The second one has a trouble."""
    store = store_at(place, rank)
    publisher = ShardedPublisher(store, timeout_s=2 if trouble == "silent" else 20)
    ended = []
    for version in range(3):
        tensors = spread(model(version))
        if version == 1 and rank == 1:
            if trouble == "dies":
                os._exit(9)
            if trouble == "dtype":
                tensors["embed"] = torch.zeros(3, dtype=torch.complex64)
            if trouble == "none":
                tensors["embed"] = None
            if trouble == "partial":
                mesh = init_device_mesh("cpu", (2,))
                tensors["embed"] = DTensor.from_local(torch.zeros(3), mesh, [Partial()])
            if trouble == "shape":
                tensors["scale"] = torch.zeros(7)
            if trouble == "missing":
                del tensors["embed"], tensors["head"]
            if trouble == "silent":
                return ended
        if version == 1 and trouble == "disk" and store is not None:
            store.directory.rename(place / "away")
            store.directory.write_text("a file")
        number = 5 if version == 1 and rank == 1 and trouble == "version" else version
        try:
            publisher.submit(number, tensors)
            ended.append("")
        except (WeightError, AttributeError) as error:
            ended.append(str(error))
        try:
            publisher.flush()
        except WeightError as error:
            ended[-1] += str(error)
        if version == 1 and trouble == "disk" and store is not None:
            store.directory.unlink()
            (place / "away").rename(store.directory)
    publisher.close()
    return ended


def train_in_a_session(rank: int, place: Path, url: str, sharded: bool) -> list[int]:
    """Versions acknowledged on this rank, by two steps of the run at `url`."""
    ids, session = [""], None
    if rank == 0:
        session = TrainerSession(url, "actor", weights=place / "weights", share=Share(0, 2, "", sharded))
        ids = [session.trainer_id]
    dist.broadcast_object_list(ids)
    if session is None:
        session = TrainerSession(url, "actor", share=Share(rank, 2, ids[0], sharded))
    with session:
        session.publish(0, spread(model(0)))
        session.resume(0)
        dist.barrier()  # others ask for a batch once rank 0 has resumed, or acknowledged the one before
        done = []
        for header, _ in session.batches():
            session.publish(header.step, spread(model(header.step)))
            session.acknowledge(header)
            dist.barrier()
            done.append(header.step)
            session.checkpoint()
        session.wait_until_finished()
    return done


def publish_alone(rank: int, place: Path) -> list[str]:
    """Ranks of a subset publish, others do not take part; the lowest of them has the store."""
    ended = []
    try:
        publisher = ShardedPublisher(None if rank != 1 else store_at(place, 0), ranks=[1, 2], timeout_s=20)
    except WeightError as error:
        return [str(error)]
    if rank:
        names = ("a", "b") if rank == 1 else ("b", "c")  # as pipeline stages hold them
        publisher.submit(0, {name: torch.full((3,), float(rank)) for name in names})
        publisher.flush()
    publisher.close()
    return ended
