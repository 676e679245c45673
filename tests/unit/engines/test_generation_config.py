"""Sampling is what the run file says: what a model's own generation_config.json would like has no part in it."""

from __future__ import annotations

import json
import shutil
from pathlib import Path

from astraflow.engines.local import LocalEngine
from astraflow.types import Sampling

LIKES = {
    "do_sample": True, "temperature": 0.1, "top_k": 1, "top_p": 0.1, "min_p": 0.9, "repetition_penalty": 5.0,
    "max_new_tokens": 2, "max_length": 4,
}  # fmt: skip


def test_what_the_model_would_like_changes_nothing(endless_dir: Path, tmp_path: Path) -> None:
    said = []
    for likes in ({}, LIKES):
        place = tmp_path / f"model{len(said)}"
        shutil.copytree(endless_dir, place)
        path = place / "generation_config.json"
        own = json.loads(path.read_text()) if path.exists() else {}
        path.write_text(json.dumps({**own, **likes}))
        engine = LocalEngine(place)
        generation = engine.submit("a", [1, 5, 9], Sampling(max_tokens=30, seed=4)).result(60)
        said.append((generation.token_ids.tolist(), generation.logprobs.tolist()))
        engine.close()
    assert said[0] == said[1]
    assert len(set(said[0][0])) > 5, "a greedy model says the same again"
