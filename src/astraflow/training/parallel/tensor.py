"""Linear layers in parts (tensor parallelism), as the model's own plan says; torch's styles do the work.

tokens of a member ─► [gathered] q, k, v: own heads ─► attention ─► o: partial sums ─► [summed, scattered] ─► tokens
tokens of a member ─► [gathered] gate, up: own columns ───────────► down: partial sums ─► [summed, scattered] ─►
"""

from __future__ import annotations

from collections.abc import Mapping

from torch import nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import Replicate, Shard
from torch.distributed.tensor.parallel import (
    ColwiseParallel,
    ParallelStyle,
    PrepareModuleInput,
    RowwiseParallel,
    parallelize_module,
)
from transformers import PreTrainedModel

from astraflow.errors import ModelError
from astraflow.models.linear import FastLinear

_COLUMNS, _ROWS, _WHOLE = "colwise", "rowwise", "replicated_with_grad_allreduce"
_STYLES = {
    "self_attn.q_proj": _COLUMNS, "self_attn.k_proj": _COLUMNS, "self_attn.v_proj": _COLUMNS,
    "self_attn.o_proj": _ROWS, "mlp.gate_proj": _COLUMNS, "mlp.up_proj": _COLUMNS, "mlp.down_proj": _ROWS,
}  # fmt: skip
"""Layers of a decoder whose plan is understood here, and how they are cut."""
_PREFIX = "layers.*."


def check_plan(model: PreTrainedModel) -> None:
    """Raises: ModelError: the layers of `model` are not of the kind that is cut here."""
    if different := dict(_plan(model).items() ^ _STYLES.items()):
        raise ModelError(
            "model", type(model).__name__, f"has no plan for tensor parallelism that is known here ({min(different)})",
            "use trainer.context_parallel, or more ranks without either",
        )  # fmt: skip


def split_linears(model: PreTrainedModel, mesh: DeviceMesh) -> set[nn.Module]:
    """Cut the linear layers of `model` over `mesh`, in place; returns those that hold a part now."""
    for module in model.modules():
        if type(module) is FastLinear:
            module.__class__ = nn.Linear  # type: ignore[assignment]  # its kernels know no parts
    for layer in model.modules():
        if type(layer).__name__ in (model._no_split_modules or ()):
            parallelize_module(layer, mesh, dict(_styles()))
    cut = {module for name, module in model.named_modules() if name.endswith(tuple(_STYLES))}
    for module in cut:
        module.register_forward_hook(lambda _, __, output: output.clone())  # FSDP warns of views
    return cut


def _styles() -> Mapping[str, ParallelStyle]:
    tokens, whole = Shard(1), Replicate()
    return {
        "self_attn": PrepareModuleInput(
            input_kwarg_layouts={"hidden_states": tokens}, desired_input_kwarg_layouts={"hidden_states": whole}
        ),
        "mlp": PrepareModuleInput(input_layouts=tokens, desired_input_layouts=whole),
        **{
            name: ColwiseParallel() if style == _COLUMNS else RowwiseParallel(output_layouts=tokens)
            for name, style in _STYLES.items()
        },
    }


def _plan(model: PreTrainedModel) -> Mapping[str, str]:
    """What transformers says of each layer, without the norms of heads: all ranks sum their gradients anyway."""
    plan = model.config.get_text_config().base_model_tp_plan or {}
    return {name.removeprefix(_PREFIX): style for name, style in plan.items() if style != _WHOLE}
