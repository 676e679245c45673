"""What the parts of `run.sh` share: the command line, the record that each leaves, small models made on the spot."""

from __future__ import annotations

import argparse
import json
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from transformers import PreTrainedModel, Qwen3Config, Qwen3ForCausalLM

Facts = dict[str, Any]

TINY = {"hidden_size": 64, "intermediate_size": 128, "num_hidden_layers": 2, "head_dim": 16, "vocab_size": 512}
QWEN3 = {  # the published shapes; the weights are random
    "qwen3-0.6b": {"hidden_size": 1024, "intermediate_size": 3072, "num_hidden_layers": 28},
    "qwen3-1.7b": {"hidden_size": 2048, "intermediate_size": 6144, "num_hidden_layers": 28},
}


@dataclass(frozen=True)
class Place:
    """Where a part runs. `dry`: tiny shapes on the CPU, to see that the script itself works."""

    out: Path
    dry: bool

    @property
    def device(self) -> torch.device:
        """The GPU, or the CPU of a dry run."""
        return torch.device("cpu" if self.dry else "cuda")

    def now(self) -> float:
        """The time once the device has nothing left to do."""
        if not self.dry:
            torch.cuda.synchronize()
        return time.perf_counter()


def config_of(name: str, dry: bool) -> Qwen3Config:
    """Qwen3 as published, or tiny."""
    heads = {"num_attention_heads": 16, "num_key_value_heads": 8, "head_dim": 128, "vocab_size": 151_936}
    shape = QWEN3[name] | heads
    if dry:
        shape |= TINY | {"num_attention_heads": 4, "num_key_value_heads": 2}
    return Qwen3Config(
        **shape, max_position_embeddings=40_960, rope_theta=1e6, tie_word_embeddings=True, bos_token_id=None,
        eos_token_id=None, pad_token_id=0,
    )  # fmt: skip


def random_model(config: Qwen3Config, device: torch.device, dtype: torch.dtype = torch.float32) -> PreTrainedModel:
    """Random weights, made on the device itself."""
    torch.manual_seed(0)
    with torch.device(device):
        model: PreTrainedModel = Qwen3ForCausalLM(config).to(dtype)
    return model.eval()


def run_part(name: str, part: Callable[[Place], Facts]) -> None:
    """The main function of a part: writes OUT/<name>.json. Exit code 1: `ok` is false in it."""
    parser = argparse.ArgumentParser()
    parser.add_argument("--out", type=Path, required=True)
    parser.add_argument("--dry-run", action="store_true")
    args = parser.parse_args()
    begin = time.perf_counter()
    facts = {"ok": True, **part(Place(args.out, args.dry_run))}
    facts["seconds"] = round(time.perf_counter() - begin, 1)
    (args.out / f"{name}.json").write_text(json.dumps(facts, indent=1) + "\n")
    if not facts["ok"]:
        raise SystemExit(1)
