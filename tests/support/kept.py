"""Bytes that a forward pass leaves behind for the backward pass."""

from __future__ import annotations

import weakref
from collections.abc import Callable, Mapping
from typing import Any

import torch
from torch.utils._python_dispatch import TorchDispatchMode


class Alive(TorchDispatchMode):
    """Notes the memory of what operations return, as long as it is there."""

    def __init__(self) -> None:
        super().__init__()
        self.sizes: dict[int, int] = {}

    def __torch_dispatch__(
        self, function: Any, types: Any, args: tuple[Any, ...] = (), kwargs: Mapping[str, Any] | None = None
    ) -> Any:
        result = function(*args, **(kwargs or {}))
        for tensor in result if isinstance(result, (tuple, list)) else (result,):
            if isinstance(tensor, torch.Tensor):
                storage = tensor.untyped_storage()
                if storage._cdata not in self.sizes:
                    self.sizes[storage._cdata] = storage.nbytes()
                    weakref.finalize(storage, self.sizes.pop, storage._cdata, None)
        return result


def kept_bytes(compute: Callable[[], torch.Tensor]) -> tuple[torch.Tensor, int]:
    """The result, and what there is more than before as long as it can be differentiated."""
    with Alive() as alive:
        result = compute()
        return result, sum(alive.sizes.values())
