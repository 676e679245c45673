"""Logprobs as AstraFlow records them: of `log_softmax(logits / temperature)` before top-k, min-p and top-p.

vLLM's own processed logprobs are those after them, which a trainer cannot compute. Nothing changes where none is used.
A request may ask for the logprobs of another temperature than it samples at.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from vllm.v1.sample.logits_processor import BatchUpdate, LogitsProcessor, MinPLogitsProcessor, process_dict_updates
from vllm.v1.sample.sampler import Sampler

TOLD = "astraflow_logprob_temperature"
"""Key of a request's `extra_args`."""
_GREEDY = 1e-5  # below this temperature vLLM takes the best token; its logprob is that of temperature 1


class ToldTemperatures(LogitsProcessor):
    """Which rows of the batch ask for the logprobs of another temperature. It leaves logits as they are."""

    def __init__(self, vllm_config: Any, device: torch.device, is_pin_memory: bool) -> None:
        self.rows: dict[int, float] = {}

    def apply(self, logits: torch.Tensor) -> torch.Tensor:
        """Nothing is done."""
        return logits

    def is_argmax_invariant(self) -> bool:
        """It is not even called for greedy batches."""
        return True

    def update_state(self, batch_update: BatchUpdate | None) -> None:
        """The batch has other rows."""
        process_dict_updates(self.rows, batch_update, lambda params, *_: (params.extra_args or {}).get(TOLD))


def install() -> None:
    """Let every sampler of this process say them. Twice is once."""
    original: Callable[..., Any] = Sampler.sample
    if original.__module__ == __name__:
        return

    def sample(
        self: Sampler, logits: torch.Tensor, sampling_metadata: Any, *rest: Any, **options: Any
    ) -> tuple[torch.Tensor, torch.Tensor | None]:
        said = _logprobs(self, logits, sampling_metadata)  # before: vLLM may change logits in place
        sampled, processed = original(self, logits, sampling_metadata, *rest, **options)
        return sampled, processed if said is None or processed is None else said

    Sampler.sample = sample


def _logprobs(sampler: Sampler, logits: torch.Tensor, metadata: Any) -> torch.Tensor | None:
    """None: vLLM's are the same."""
    told: dict[int, float] = {}
    cut = metadata.top_k is not None or metadata.top_p is not None
    for processor in metadata.logitsprocs.argmax_invariant:
        if isinstance(processor, ToldTemperatures):
            told = processor.rows
        elif isinstance(processor, MinPLogitsProcessor):
            cut = cut or processor.min_p_count > 0
    if metadata.max_num_logprobs is None or not (cut or told):
        return None
    temperature = torch.ones(logits.shape[0], device=logits.device)
    if metadata.temperature is not None:
        temperature = torch.where(metadata.temperature < _GREEDY, temperature, metadata.temperature)
    for row, value in told.items():
        temperature[row] = value
    said: torch.Tensor = sampler.compute_logprobs(logits / temperature[:, None])
    return said
