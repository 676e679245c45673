"""How much arithmetic an update is, and the share of what the device could do (MFU).

Counted is what the mathematics of forward and backward pass needs, once: neither activations and logits that are
computed again nor optimizer, reference, audit. Source: PaLM, arXiv:2204.02311 appendix B; causal attention counts only
the positions that a token sees.
"""

from __future__ import annotations

from collections.abc import Mapping

import torch
from torch import nn
from transformers import PreTrainedModel

from astraflow.models.lora.nf4 import Nf4Linear

# Dense TFLOP/s in bfloat16 or float16 as their vendors say them, without sparsity, by a part of the device's name.
_PEAKS = {
    "B200": 2250.0, "H200": 989.0, "GH200": 989.0, "H100": 989.0, "H800": 989.0, "H20": 148.0, "A100": 312.0,
    "A800": 312.0, "L40S": 362.0, "L40": 181.0, "L4": 121.0, "A10G": 70.0, "A10": 125.0, "A40": 150.0, "A6000": 155.0,
    "RTX 4090": 165.0, "RTX 3090": 71.0, "V100": 125.0, "T4": 65.0, "MI300X": 1307.0, "MI250": 362.0,
}  # fmt: skip


class StepCost:
    """The arithmetic of one model, in floating-point operations (a multiply-add is two)."""

    def __init__(self, model: PreTrainedModel) -> None:
        """Of all of `model`, before it is spread over ranks. A mixture of experts is not counted: `known` is False."""
        config = model.config.get_text_config().to_dict()
        self.known = not any(config.get(name) for name in ("num_experts", "num_local_experts", "n_routed_experts"))
        head = model.get_output_embeddings()  # type: ignore[no-untyped-call]
        tables = {id(m.weight) for m in model.modules() if isinstance(m, nn.Embedding)} | {id(head.weight)}
        dense = [p for p in model.parameters() if p.ndim >= 2 and id(p) not in tables]
        packed = sum(m.in_features * m.out_features for m in model.modules() if isinstance(m, Nf4Linear))
        size = packed + sum(p.numel() for p in dense)
        self._per_token = 2 * size
        self._per_target = 2 * head.weight.numel()
        layers = config.get("num_hidden_layers", config.get("n_layer", 0))
        heads = config.get("num_attention_heads", config.get("n_head", 0))
        width = config.get("head_dim") or config.get("hidden_size", config.get("n_embd", 0)) // max(1, heads)
        self._per_pair = 4 * layers * heads * width  # scores and values of a token and one that it sees
        frozen = packed + sum(p.numel() for p in dense if not p.requires_grad)
        # Forward, gradient of activations, gradient of weights; the last one not where weights are frozen.
        self._passes = 3.0 - frozen / max(1, size)

    def usage(self, metrics: Mapping[str, float], epochs: int, peak: float | None) -> dict[str, float]:
        """`perf/tflops` of a step by its metrics, and `perf/mfu` where the `peak` of all its devices is known."""
        tokens = metrics["computed_tokens"]
        if not self.known or not tokens:
            return {}
        dense = self._passes * (tokens * self._per_token + metrics["tokens"] * self._per_target)
        attention = 3.0 * tokens * metrics["context_tokens/mean"] * self._per_pair
        rate = epochs * (dense + attention) / metrics["perf/step_s"] / 1e12
        return {"perf/tflops": rate} if peak is None else {"perf/tflops": rate, "perf/mfu": rate / peak}


def peak_tflops(asked: float, device: torch.device, dtype: str) -> float | None:
    """TFLOP/s of one device: `asked` (policies.*.trainer.peak_tflops), or what is known of it in `dtype`; None:
    nothing."""
    if asked:
        return asked
    if device.type != "cuda" or dtype == "float32":
        return None
    name = torch.cuda.get_device_name(device).upper()
    return next((peak for part, peak in _PEAKS.items() if part in name), None)
