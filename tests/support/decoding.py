"""Requests to a decoder without its thread, and what a plain forward pass says of the result."""

from __future__ import annotations

from concurrent.futures import Future
from pathlib import Path

import numpy as np
import torch
from transformers import PreTrainedModel

from astraflow.config.schema import LoraSection
from astraflow.engines.local.compute.passes import Passes
from astraflow.engines.local.compute.sampler import row_key
from astraflow.engines.local.decoder import Decoder, Room
from astraflow.engines.local.rows import Request
from astraflow.models.load import load_model, state_tensors
from astraflow.models.lora.layers import add_lora, lora_tensors, peft_names
from astraflow.types import Generation, Sampling

TOLERANCE = 1e-4


def ask(name: str, prompt: list[int], max_tokens: int = 8, **sampling: object) -> Request:
    settings = Sampling(max_tokens=max_tokens, **sampling)  # type: ignore[arg-type]
    return Request(name, np.array(prompt, np.int32), settings, Future(), row_key(0, hash(name) % 1000), 0.0)


def decoder_of(
    model: PreTrainedModel, rows: int = 64, context: int = 512, shelf: int = 0, keep: bool = False, **room: int
) -> Decoder:
    return Decoder(Passes(model), (), Room(rows, context, shelf_bytes=shelf, **room), keep)


def start(decoder: Decoder, requests: list[Request]) -> None:
    """They become rows, as far as there is room."""
    with torch.inference_mode():
        decoder.admit(requests)
        decoder.join()


def run(decoder: Decoder) -> dict[str, Generation]:
    done: dict[str, Generation] = {}
    with torch.inference_mode():
        while len(decoder):
            decoder.join()
            done.update({request.request_id: generation for request, generation in decoder.step()})
    return done


def follow_up(prompt: list[int], generation: Generation, new: list[int]) -> list[int]:
    return prompt + generation.token_ids.tolist() + new


@torch.no_grad()
def fresh_logprobs(model: PreTrainedModel, prompt: list[int], generation: Generation, temperature: float) -> np.ndarray:
    """[T] of one row alone, without any cache."""
    ids = torch.tensor([prompt + generation.token_ids.tolist()])
    logits = model(input_ids=ids, use_cache=False).logits[0, len(prompt) - 1 : -1].float() / temperature
    chosen = torch.log_softmax(logits, -1).gather(1, ids[0, len(prompt) :, None])[:, 0]
    return chosen.numpy()


def other_weights(directory: Path, seed: int) -> dict[str, torch.Tensor]:
    """Weights clearly unlike those of `directory`."""
    generator = torch.Generator().manual_seed(seed)
    tensors = state_tensors(load_model(directory))
    return {n: t + 0.3 * t.std() * torch.randn(t.shape, generator=generator) for n, t in tensors.items()}


def adapter_of(directory: Path, lora: LoraSection, seed: int, size: float = 0.4) -> dict[str, torch.Tensor]:
    """Clearly not zero."""
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        model = load_model(directory)
        add_lora(model, lora)
        return {name: torch.randn_like(t) * size for name, t in peft_names(lora_tensors(model)).items()}
