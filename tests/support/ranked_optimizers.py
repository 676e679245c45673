"""Optimizers over tensors that ranks divide: run by `ranks.run_ranks`."""

from __future__ import annotations

from pathlib import Path

import torch
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import Shard, distribute_tensor

from astraflow.config.schema import OptimizerSection
from astraflow.training.optimize.optimizers import build_optimizer
from astraflow.training.parallel.sharding import whole

SHAPES = ((41, 300), (3, 2000), (2, 1500, 3), (70, 3), (5000,))


def parameters() -> list[nn.Parameter]:
    draw = torch.Generator().manual_seed(0)
    return [nn.Parameter(torch.randn(shape, generator=draw)) for shape in SHAPES]


def updated(rank: int, place: Path, kind: str) -> list[str]:
    """What three steps on equal gradients make different from one rank, bit for bit."""
    mesh = init_device_mesh("cpu", (torch.distributed.get_world_size(),))
    models = [nn.ParameterList(parameters()), nn.ParameterList()]
    for parameter in models[0]:
        models[1].append(nn.Parameter(distribute_tensor(parameter.detach(), mesh, [Shard(0)])))
    section = OptimizerSection(type=kind, lr=1e-2, weight_decay=0.1)
    optimizers = [build_optimizer(model, section) for model in models]
    for step in range(3):
        for i, (one, part) in enumerate(zip(*models, strict=True)):
            one.grad = torch.randn(one.shape, generator=torch.Generator().manual_seed(10 * step + i)) ** 3
            part.grad = distribute_tensor(one.grad, mesh, [Shard(0)])
        for optimizer in optimizers:
            optimizer.step()
    different = []
    for one, part in zip(*models, strict=True):
        pairs = {"weights": (one, part)} | {
            name: (value, optimizers[1].state[part][name]) for name, value in optimizers[0].state[one].items()
        }
        different += [name for name, (a, b) in pairs.items() if not torch.equal(a, whole(b))]
    return different
