"""Liger's kernels (Triton) for the norms and MLPs of a prepared model: one launch where torch needs several.

Of Liger only these are used. Its fused output layer and cross entropy have their part in `HeadLogprobs`, which gives
entropies and normalisers too; its rotary embedding replaces a function of transformers for the whole process.
Source: Hsu et al. 2024, arXiv:2410.10989.
"""

from __future__ import annotations

import torch
from transformers import PreTrainedModel

from astraflow.errors import ModelError
from astraflow.models.scoring.lean.layers import LeanMlp, LeanNorm

_SETTING = "trainer.kernels"


def use_liger(model: PreTrainedModel) -> None:
    """Raises: ModelError: without the package, on another device than a GPU, or with layers that it does not know."""
    if model.device.type != "cuda":
        raise ModelError(_SETTING, "liger", f"needs a GPU, not the device {model.device}", "use kernels = 'torch'")
    try:
        from liger_kernel.ops.rms_norm import LigerRMSNormFunction
        from liger_kernel.ops.swiglu import LigerSiLUMulFunction
    except ImportError as error:
        raise ModelError(
            _SETTING, "liger", f"cannot load liger-kernel ({error})", "pip install 'astraflow[liger]', or use 'torch'"
        ) from error

    def rms_norm(x: torch.Tensor, weight: torch.Tensor, eps: float) -> torch.Tensor:
        # Not in place: the gradient that comes in is also that of the residual.
        normed: torch.Tensor = LigerRMSNormFunction.apply(x, weight, eps, 0.0, "llama", False)
        return normed

    def gated(gate: torch.Tensor, up: torch.Tensor) -> torch.Tensor:
        product: torch.Tensor = LigerSiLUMulFunction.apply(gate, up)
        return product

    found = False
    for module in model.modules():
        if isinstance(module, LeanNorm):
            module.kernel, found = rms_norm, True
        elif isinstance(module, LeanMlp):
            module.kernel, found = gated, True
    if not found:
        raise ModelError(
            _SETTING, "liger", f"finds no norm or MLP that it knows in {type(model).__name__}", "use kernels = 'torch'"
        )
