"""What a node asks of the workers of a vLLM server through `/collective_rpc`."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch
from safetensors import safe_open
from torch import nn

_ROWS = 512  # of an identity matrix, at once


class WorkerExtension:
    """Becomes a base of vLLM's worker (`--worker-extension-cls`)."""

    model_runner: Any
    parallel_config: Any
    vllm_config: Any

    def astraflow_about(self, path: str) -> dict[str, Any]:
        """What the node has to know of a server before it uses it. `path`: of the file with its weights."""
        model, transfer = self.vllm_config.model_config, self.vllm_config.weight_transfer_config
        return {
            "backend": transfer.backend if transfer is not None else "",
            "logprobs_mode": str(model.logprobs_mode),
            "logits_processors": [str(each) for each in model.logits_processors or ()],
            "dtype": str(model.dtype).removeprefix("torch."),
            "sees_weights": Path(path).is_file(),
        }

    def astraflow_sampled(self) -> dict[str, int]:
        """Tokens that each unfinished request has sampled. Exact while the server is paused."""
        return {name: len(state.output_token_ids) for name, state in self.model_runner.requests.items()}

    @torch.no_grad()
    def astraflow_differences(self, path: str) -> dict[str, Any]:
        """Which weights of the file (by Hugging Face name) are other numbers than those that the forward pass uses.

        "compared": how many were looked at; "unknown": names whose place in vLLM's model is not known, so that nothing
        can be said of them.
        """
        model = self.model_runner.get_model()
        differing, unknown, compared = [], [], 0
        whole = self.parallel_config.world_size == 1  # else a worker holds a part of each
        with safe_open(path, "pt") as file:
            for name in file.keys():  # noqa: SIM118 (no mapping)
                expected = file.get_tensor(name)
                used = _used(model, name, expected.shape[0]) if whole else []
                if not used:
                    unknown.append(name)
                    continue
                compared += 1
                if not all(torch.equal(each.cpu(), expected) for each in used):
                    differing.append(name)
        return {"compared": compared, "differing": differing, "unknown": unknown}


def _used(model: nn.Module, name: str, rows: int) -> list[torch.Tensor]:
    """The numbers that the model computes with as `name`: more than one tensor where several layers use it."""
    path, _, kind = name.rpartition(".")
    parent, _, leaf = path.rpartition(".")
    modules = dict(model.named_modules(remove_duplicate=False))
    for packed, parts in (getattr(model, "packed_modules_mapping", None) or {}).items():
        module = modules.get(f"{parent}.{packed}" if parent else packed)
        if leaf in parts and module is not None:
            at = parts.index(leaf)
            start = sum(int(size) for size in module.output_sizes[:at])
            return [whole[start : start + int(module.output_sizes[at])] for whole in _of(module, kind)]
    module = modules.get(path)
    if module is None:
        return []
    users = [module]
    if (own := dict(module.named_parameters(recurse=False)).get(kind)) is not None and own.numel():
        users += [other for other in model.modules() if other is not module and _weight(other) is own]  # tied
    return [whole[:rows] for user in users for whole in _of(user, kind)]  # embeddings are padded


def _weight(module: nn.Module) -> torch.Tensor | None:
    return dict(module.named_parameters(recurse=False)).get("weight")


def _of(module: nn.Module, kind: str) -> list[torch.Tensor]:
    """A parameter, and what a kernel made of it: on CPUs linear layers compute with their own copy."""
    held = dict(module.named_parameters(recurse=False)).get(kind)
    found: list[torch.Tensor] = [held] if held is not None and held.numel() else []
    if kind == "weight" and "cpu_linear" in vars(module):
        found.append(_packed(module, held.shape[1] if found and held is not None else None))
    return found


def _packed(module: Any, width: int | None) -> torch.Tensor:
    """A weight that a kernel holds: what it makes of the rows of the identity, where each sum has one term."""
    width = int(module.input_size_per_partition) if width is None else width
    identity = torch.eye(width, dtype=module.params_dtype)
    columns = [module.quant_method.apply(module, identity[i : i + _ROWS], None) for i in range(0, width, _ROWS)]
    return torch.cat(columns).t().contiguous()
