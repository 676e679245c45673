"""What all sides of `bench_engines` are asked for, and models whose replies end by their length only."""

from __future__ import annotations

import json
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

BATCHES = (1, 8, 32)
KINDS = ("uneven", "shared")
GAP_TOKENS = 1500  # at least so many are compared with teacher forcing


@dataclass(frozen=True)
class Work:
    """One side, in a process of its own."""

    side: str  # embedded, generate, vllm
    directory: str
    dtype: str
    longest: int  # tokens of the longest reply
    batches: tuple[int, ...]
    repeats: int
    threads: int
    vllm: str = ""  # the interpreter that has it


Asked = tuple[list[int], int]
"""Prompt ids, tokens of the reply."""


def requests(kind: str, batch: int, longest: int, vocabulary: int) -> list[Asked]:
    """uneven: prompts of 16 to 64 tokens, replies from a twentieth of the longest to it, more than run at once;
    shared: siblings of one prompt of 256 tokens, short replies."""
    draw = np.random.default_rng(batch)
    if kind == "shared":
        prompt = draw.integers(3, vocabulary, 256).tolist()
        return [(prompt, max(4, longest // 5))] * max(4, batch)
    lengths = np.geomspace(max(1, longest // 20), longest, max(4, 2 * batch)).round().astype(int)
    return [
        (draw.integers(3, vocabulary, int(draw.integers(16, 65))).tolist(), int(length))
        for length in draw.permutation(lengths)
    ]


def endless(directory: Path, place: Path) -> Path:
    """The same model without an EOS."""
    place.mkdir()
    for path in directory.iterdir():
        (place / path.name).symlink_to(path.resolve())
    for name in ("config.json", "generation_config.json", "tokenizer_config.json", "special_tokens_map.json"):
        if (directory / name).is_file():
            (place / name).unlink()
            (place / name).write_text(json.dumps(_without_eos(json.loads((directory / name).read_text()))))
    return place


def _without_eos(settings: dict[str, Any]) -> dict[str, Any]:
    return {key: None if key == "eos_token_id" else value for key, value in settings.items() if key != "eos_token"}
