"""Attention of a tree of tokens: each computed token is a query once, and no key is copied along the paths.

The keys of a query lie in parts: its own sequence, and the stretches that it reads. Each part is one call of the
kernel, which gives the output and the log-norm of its scores; with log-norms n_i the whole is

    n = log sum_i exp(n_i),   o = sum_i exp(n_i - n) o_i

In backward the kernel makes the probabilities p = exp(s - n) of the whole and their gradient p (dp - <do, o>) part by
part, and their sum is exact. Source: FlashAttention, arXiv:2205.14135 appendix B.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch

from astraflow.models.scoring.layout import Bucket, TreeLayout
from astraflow.models.scoring.trees.tokens import Stretch

_forward = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu
_backward = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu_backward


@dataclass(frozen=True, slots=True)
class Kernel:
    """The kernel and how it scores. All tensors are [B, n, H, D], norms [B, n, H] float32."""

    scaling: float | None  # None: 1 / sqrt(D)
    window: int | None  # a query sees so many tokens, itself included; None: all before it

    def forward(
        self, inputs: Sequence[torch.Tensor], mask: torch.Tensor | None, causal: bool
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """Output and norms. `mask`: [n, m] bool instead of `causal`."""
        rows = [x.transpose(1, 2) for x in inputs]
        output, norm = _forward(
            *rows, 0.0, causal and mask is None, attn_mask=_added(mask, inputs[0].dtype), scale=self.scaling
        )
        if mask is not None:  # the kernel says 0 where a query sees no key
            norm = norm.masked_fill(~mask.any(1), -torch.inf)
        return output.transpose(1, 2), norm.transpose(1, 2)

    def backward(
        self, gradient: torch.Tensor, inputs: Sequence[torch.Tensor], output: torch.Tensor, norm: torch.Tensor,
        mask: torch.Tensor | None, causal: bool,
    ) -> list[torch.Tensor]:  # fmt: skip
        """Gradients of query, key and value; `output` and `norm` are those of the whole."""
        rows = [x.transpose(1, 2) for x in (gradient, *inputs, output, norm)]
        found = _backward(*rows, 0.0, causal and mask is None, attn_mask=_added(mask, output.dtype), scale=self.scaling)
        return [x.transpose(1, 2) for x in found]

    def own_mask(self, bucket: Bucket, device: torch.device) -> torch.Tensor | None:
        """[n, n] of a sequence; None: causal."""
        if self.window is None or self.window >= bucket.length:
            return None
        position = torch.arange(bucket.length, device=device)
        return _seen(position, position, self.window)

    def stretch_mask(self, stretch: Stretch, depths: torch.Tensor) -> torch.Tensor | None:
        """[n, m]; None: all of it."""
        if self.window is None:
            return None
        return _seen(depths[stretch.readers], depths[stretch.keys], self.window)


class TreeAttention(torch.autograd.Function):
    """query [U, H, D], key and value [U, K, D], all of one dtype -> [U, H, D]."""

    @staticmethod
    def forward(
        ctx: Any, query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, tree: TreeLayout, kernel: Kernel
    ) -> torch.Tensor:
        found = [
            kernel.forward(part, kernel.own_mask(bucket, query.device), True)
            for bucket, part in zip(tree.buckets, _own_parts(tree, query, key, value), strict=True)
        ]
        outputs, norms = (torch.cat([x.flatten(0, 1) for x in column]) for column in zip(*found, strict=True))
        output, norm = outputs.index_select(0, tree.own).float(), norms.index_select(0, tree.own)
        for stretch in tree.stretches:
            part = _stretch_part(stretch, query, key, value)
            more = kernel.forward(part, kernel.stretch_mask(stretch, tree.depths), False)
            _merge(output[stretch.readers], norm[stretch.readers], more[0][0].float(), more[1][0])
        output = output.to(query.dtype)
        ctx.save_for_backward(query, key, value, output, norm)
        ctx.tree, ctx.kernel = tree, kernel
        return output

    @staticmethod
    def backward(ctx: Any, *gradients: torch.Tensor) -> tuple[torch.Tensor | None, ...]:
        tree: TreeLayout = ctx.tree
        kernel: Kernel = ctx.kernel
        query, key, value, output, norm = ctx.saved_tensors
        upstream = gradients[0].contiguous()
        # A token that its sequences repeat takes part as a key; as a query it counts where it is their own.
        repeated = upstream.new_zeros(len(tree.spread.index), *upstream.shape[1:]).index_copy_(0, tree.own, upstream)
        found = [
            kernel.backward(g, inputs, o, n, kernel.own_mask(bucket, query.device), True)
            for bucket, inputs, (g,), (o, n) in zip(
                tree.buckets, _own_parts(tree, query, key, value), _cut(tree, repeated), _own_parts(tree, output, norm),
                strict=True,
            )
        ]  # fmt: skip
        of_query, of_key, of_value = (
            torch.cat([x.flatten(0, 1) for x in column]) for column in zip(*found, strict=True)
        )
        sums = [of_query.index_select(0, tree.own), tree.spread.summed(of_key), tree.spread.summed(of_value)]
        sums = [x.float() for x in sums]
        for stretch in tree.stretches:
            inputs, readers = _stretch_part(stretch, query, key, value), stretch.readers
            parts = kernel.backward(
                upstream[None, readers], inputs, output[None, readers], norm[None, readers],
                kernel.stretch_mask(stretch, tree.depths), False,
            )  # fmt: skip
            for total, part, where in zip(sums, parts, (readers, stretch.keys, stretch.keys), strict=True):
                total[where] += part[0]
        return *(total.to(query.dtype) for total in sums), None, None


def _own_parts(tree: TreeLayout, *tensors: torch.Tensor) -> list[tuple[torch.Tensor, ...]]:
    """Of each bucket: the rows of its sequences."""
    return _cut(tree, *(x.index_select(0, tree.spread.index) for x in tensors))


def _cut(tree: TreeLayout, *tensors: torch.Tensor) -> list[tuple[torch.Tensor, ...]]:
    sizes = [bucket.sequences * bucket.length for bucket in tree.buckets]
    return [
        tuple(x.unflatten(0, tuple(bucket)) for x in parts)
        for bucket, *parts in zip(tree.buckets, *(torch.split(x, sizes) for x in tensors), strict=True)
    ]


def _stretch_part(
    stretch: Stretch, query: torch.Tensor, key: torch.Tensor, value: torch.Tensor
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    return query[None, stretch.readers], key[None, stretch.keys], value[None, stretch.keys]


def _merge(output: torch.Tensor, norm: torch.Tensor, more: torch.Tensor, more_norm: torch.Tensor) -> None:
    """Add a part [n, H, D] and its norms [n, H] to what is there."""
    whole = torch.logaddexp(norm, more_norm)
    output.mul_((norm - whole).exp_()[..., None]).addcmul_(more, (more_norm - whole).exp_()[..., None])
    norm.copy_(whole)


def _seen(queries: torch.Tensor, keys: torch.Tensor, window: int) -> torch.Tensor:
    """[n, m] bool, of positions [n] and [m]."""
    age = queries[:, None] - keys
    return (age >= 0) & (age < window)


def _added(mask: torch.Tensor | None, dtype: torch.dtype) -> torch.Tensor | None:
    """As what is added to the scores."""
    return (
        None
        if mask is None
        else torch.zeros(mask.shape, dtype=dtype, device=mask.device).masked_fill_(~mask, -torch.inf)
    )
