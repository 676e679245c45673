"""What a model directory says of itself without being loaded: shapes of its weights, and whether its parts fit.

Reads a few headers; loads neither torch nor transformers, so that `astraflow validate` can ask.
"""

from __future__ import annotations

import json
from collections.abc import Iterable, Mapping
from difflib import get_close_matches
from pathlib import Path
from typing import Any

import msgspec

from astraflow.errors import ModelError

Shapes = Mapping[str, tuple[int, ...]]

# Embeddings of text decoders. Those of other parts of a model have sizes of their own.
_EMBEDDINGS = tuple(
    f"{prefix}{name}.weight"
    for name in ("embed_tokens", "wte", "embed_in", "word_embeddings")
    for prefix in ("", "model.", "transformer.", "gpt_neox.", "model.language_model.", "language_model.model.")
)
_OTHER_WIDTH = ("word_embed_proj_dim", "embedding_size")  # embeddings need not be as wide as layers then
_PLAIN = ("llama", "mistral", "qwen2", "qwen3")  # all of their layers are the same
_WHOLE, _INDEX = "model.safetensors", "model.safetensors.index.json"
_LENGTH_BYTES = 8  # of the little-endian length before the header; https://github.com/huggingface/safetensors#format


class _Tensor(msgspec.Struct):
    shape: tuple[int, ...]
    data_offsets: tuple[int, int]


def check_model_files(directory: Path) -> None:
    """Raises: ModelError: config, weights or tokenizer cannot be read, are cut off, or do not fit each other."""
    config = _object(directory / "config.json")
    shapes = stored_shapes(directory)
    rows = _vocabulary(config)
    highest = _highest_token(directory / "tokenizer.json")
    if rows is not None and highest >= rows:
        raise ModelError(
            "tokenizer.json", str(directory), f"has tokens up to {highest}, but the model only has {rows} (config.json "
            "vocab_size)", "put the model's own tokenizer beside it, or resize its embeddings and save it again",
        )  # fmt: skip
    name = next((n for n in shapes if n.endswith(("embed_tokens.weight", "wte.weight"))), None)
    if rows is not None and name is not None and shapes[name][0] < rows:
        raise ModelError(
            "config.json vocab_size", rows, f"is more than the {shapes[name][0]} rows of {name} in {directory}",
            "put the config of these weights beside them",
        )  # fmt: skip
    _check_shapes(config, shapes, directory)


def _check_shapes(config: Mapping[str, Any], shapes: Shapes, directory: Path) -> None:
    """As far as names and sizes of a family are known here; `load_model` compares all."""
    nested = config.get("text_config")
    config = nested if isinstance(nested, dict) else config
    if config.get("quantization_config") is not None:
        return
    for name, expected in _expected(config, shapes).items():
        if name not in shapes:
            raise ModelError(
                f"tensor {name}", "missing", f"in the files of {directory}, but its config.json asks for it",
                "put the config of these weights beside them",
            )  # fmt: skip
        if shapes[name] != expected:
            raise ModelError(
                f"tensor {name}.shape", shapes[name],
                f"in the files of {directory} must be {expected} by its config.json",
                "put the config of these weights beside them",
            )  # fmt: skip


def _expected(config: Mapping[str, Any], shapes: Shapes) -> dict[str, tuple[int, ...]]:
    width = _number(config, "hidden_size", "n_embd")
    name = next((name for name in _EMBEDDINGS if name in shapes), None)
    if name is None or not width or any(config.get(other) for other in _OTHER_WIDTH):
        return {}
    expected: dict[str, tuple[int, ...]] = {name: (shapes[name][0], width)}
    heads, groups, inner, layers = (
        _number(config, key)
        for key in ("num_attention_heads", "num_key_value_heads", "intermediate_size", "num_hidden_layers")
    )
    # Config classes have defaults of their own for what a file does not say.
    if config.get("model_type") not in _PLAIN or 0 in (heads, groups, inner):
        return expected
    size = _number(config, "head_dim") or (0 if config.get("model_type") == "qwen3" else width // heads)
    if size:
        asked = {
            "self_attn.q_proj": (heads * size, width), "self_attn.k_proj": (groups * size, width),
            "self_attn.v_proj": (groups * size, width), "self_attn.o_proj": (width, heads * size),
            "mlp.gate_proj": (inner, width), "mlp.up_proj": (inner, width), "mlp.down_proj": (width, inner),
        }  # fmt: skip
        prefix = name.removesuffix("embed_tokens.weight")
        for layer in range(layers):
            expected |= {f"{prefix}layers.{layer}.{part}.weight": shape for part, shape in asked.items()}
    return expected


def stored_shapes(directory: Path) -> dict[str, tuple[int, ...]]:
    """Shapes of the weights that transformers would load, by name.

    Raises: ModelError: there are none, or a file is missing, cut off or no safetensors.
    """
    shapes: dict[str, tuple[int, ...]] = {}
    for path in _weight_files(directory):
        shapes.update(_shapes_of(path))
    return shapes


def difference(one: Shapes, other: Shapes) -> str | None:
    """In what two models differ, as "<name> is <shape>, not <shape>"; None: in nothing. Output layers that only one has
    may be tied."""
    for name in sorted(one.keys() | other.keys()):
        here, there = one.get(name), other.get(name)
        if here != there and not (None in (here, there) and name.endswith("lm_head.weight")):
            return f"{name} is {here or 'missing'}, not {there or 'missing'}"
    return None


def in_part(part: str, names: Iterable[str]) -> list[str]:
    """Those of the weights `names` that lie in `part` of a model: whole steps of their dotted names, as "embed_tokens",
    "layers.0" or "mlp".

    Raises: ModelError: none.
    """
    names = list(names)
    found = [name for name in names if f".{part}." in f".{name}."]
    if not found:
        known = sorted({step for name in names for step in name.split(".") if not step.isdigit()})
        near = get_close_matches(part, known, n=1)
        hint = f"did you mean '{near[0]}'? " if near else ""
        raise ModelError(
            "trainer.frozen", part, "is no part of this model",
            f"{hint}give steps of the names of its weights, as {names[0].rpartition('.')[0] if names else 'layers.0'}",
        )  # fmt: skip
    return found


def check_parts(config: Mapping[str, Any], tensor: int, context: int) -> None:
    """Raises: ModelError: a model of `config` (config.json) cannot be cut into `tensor` parts of each linear layer and
    `context` parts of a pack."""
    nested = config.get("text_config")
    config = nested if isinstance(nested, dict) else config
    heads = _number(config, "num_attention_heads", "n_head")
    groups = _number(config, "num_key_value_heads") or heads
    inner = _number(config, "intermediate_size")
    if heads % (tensor * context):
        raise ModelError(
            "trainer.tensor_parallel * trainer.context_parallel", tensor * context,
            f"does not divide the {heads} attention heads of the model", "use numbers whose product does, or 1 and 1",
        )  # fmt: skip
    if groups % tensor or inner % tensor:
        raise ModelError(
            "trainer.tensor_parallel", tensor, f"does not divide the {groups} key-value heads and the MLP's {inner} "
            "columns of the model", "use a number that divides both, or trainer.context_parallel instead",
        )  # fmt: skip
    groups //= tensor
    if groups % context and context % groups:
        raise ModelError(
            "trainer.context_parallel", context, f"neither divides the {groups} key-value heads that a rank has nor is "
            "a multiple of them", "use a number that is",
        )  # fmt: skip


def _number(config: Mapping[str, Any], *names: str) -> int:
    """0: it says nothing of that."""
    found = next((config[name] for name in names if config.get(name) is not None), 0)
    return found if isinstance(found, int) else 0


def _weight_files(directory: Path) -> list[Path]:
    if (whole := directory / _WHOLE).is_file():
        return [whole]
    if not (index := directory / _INDEX).is_file():
        raise ModelError(
            "model", str(directory), f"holds neither {_WHOLE} nor {_INDEX}",
            "save the model with save_pretrained, which names them so",
        )  # fmt: skip
    weight_map = _object(index).get("weight_map")
    if not isinstance(weight_map, dict) or not weight_map:
        raise ModelError("model file", str(index), "has no weight_map", "copy the model directory again")
    return [directory / str(name) for name in sorted(set(weight_map.values()))]


def _shapes_of(path: Path) -> dict[str, tuple[int, ...]]:
    try:
        size = path.stat().st_size
        with path.open("rb") as file:
            length = int.from_bytes(file.read(_LENGTH_BYTES), "little")
            if size < _LENGTH_BYTES + length:
                raise _cut(path, size, _LENGTH_BYTES + length)
            header = msgspec.json.decode(file.read(length), type=dict[str, dict[str, Any]])
        header.pop("__metadata__", None)
        tensors = msgspec.convert(header, dict[str, _Tensor])
    except OSError as error:
        raise ModelError("model file", str(path), f"cannot be read ({error.strerror})", "copy it again") from error
    except (msgspec.DecodeError, UnicodeDecodeError) as error:
        raise ModelError("model file", str(path), f"is no safetensors file ({error})", "copy it again") from error
    needed = _LENGTH_BYTES + length + max((t.data_offsets[1] for t in tensors.values()), default=0)
    if size < needed:
        raise _cut(path, size, needed)
    return {name: tensor.shape for name, tensor in tensors.items()}


def _cut(path: Path, size: int, needed: int) -> ModelError:
    return ModelError("model file", str(path), f"has {size} of {needed} bytes", "copy it again")


def _vocabulary(config: Mapping[str, Any]) -> int | None:
    nested = config.get("text_config")
    size = config.get("vocab_size", nested.get("vocab_size") if isinstance(nested, dict) else None)
    return size if isinstance(size, int) else None


def _highest_token(path: Path) -> int:
    content = _object(path)
    model = content.get("model")
    vocabulary = model.get("vocab") if isinstance(model, dict) else None
    ids = list(vocabulary.values()) if isinstance(vocabulary, dict) else [len(vocabulary or ()) - 1]
    ids += [added.get("id") for added in content.get("added_tokens") or [] if isinstance(added, dict)]
    return max((i for i in ids if isinstance(i, int)), default=-1)


def _object(path: Path) -> dict[str, Any]:
    try:
        content = json.loads(path.read_bytes())
    except OSError as error:
        raise ModelError("model file", str(path), f"cannot be read ({error.strerror})", "copy it again") from error
    except ValueError as error:
        raise ModelError("model file", str(path), f"is not JSON ({error})", "copy it again") from error
    if not isinstance(content, dict):
        raise ModelError("model file", str(path), "holds no JSON object", "copy it again")
    return content
