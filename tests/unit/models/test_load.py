from __future__ import annotations

from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

from astraflow.models.load import effective_checksum, load_model, state_tensors
from astraflow.testing.engines.effective import write_model


def test_models_are_loaded_by_several_threads_at_once(tmp_path: Path) -> None:
    """A node may compare the weights of two policies at the same time, and starts engines meanwhile."""
    directories = [write_model(tmp_path / name, tied=name == "tied") for name in ("tied", "untied")]
    with ThreadPoolExecutor(4) as threads:
        found = list(
            threads.map(lambda n: effective_checksum(state_tensors(load_model(directories[n % 2]))), range(24))
        )
    assert len(set(found[::2])) == len(set(found[1::2])) == 1
