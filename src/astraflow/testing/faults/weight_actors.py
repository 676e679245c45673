"""Processes that a drill of the weight plane kills: `python -m astraflow.testing.faults.weight_actors ROLE ...`.

`read URL VERSION SPOOL RESULT`: fetch a version as a node does and write what came, as JSON.
`publish ROOT FROM TO LOG`: publish versions of `model` one after the other, the number of each to a line before it.
"""

from __future__ import annotations

import json
import sys
from pathlib import Path

import torch

from astraflow.types import WeightVersion
from astraflow.weights.client import WeightClient
from astraflow.weights.files.build import Base
from astraflow.weights.manifest import TensorEntry
from astraflow.weights.store import FileStore

POLICY = "actor"
KEEP = 3


def model(version: int, elements: int = 1 << 19) -> dict[str, torch.Tensor]:
    """The same tensors for the same version; one in a hundred elements differs from version to version."""
    tensors = {"w": torch.randn(elements, generator=torch.Generator().manual_seed(0)).to(torch.bfloat16)}
    for step in range(1, version + 1):
        chosen = torch.randint(elements, (elements // 100,), generator=torch.Generator().manual_seed(step))
        tensors["w"].view(torch.int16)[chosen] += 1
    return tensors


def known(entries: tuple[TensorEntry, ...]) -> dict[str, str]:
    """Checksums by name."""
    return {entry.name: entry.xxh3 for entry in entries}


def read(url: str, version: int, spool: Path, result: Path) -> None:
    """One fetch."""
    client = WeightClient(spool=spool)
    fetched = client.fetch(WeightVersion(POLICY, version, (url,)))
    found = {"checksums": known(fetched.held.manifest.tensors), "counts": client.counts}
    client.close()
    result.write_text(json.dumps(found))


def publish(root: Path, first: int, last: int, log: Path) -> None:
    """Each version as the changes since the one before; the first one of a process has none to compare with."""
    store, base = FileStore(root, POLICY, keep=KEEP, full_every=5, durable=False), None
    for version in range(first, last + 1):
        tensors = model(version)
        with log.open("a") as out:
            out.write(f"{version}\n")
        content = store.publish(version, tensors, keep_existing=True, base=base)
        base = Base(version, tensors, known(content.tensors))


def main(words: list[str]) -> int:
    """0."""
    if words[0] == "read":
        read(words[1], int(words[2]), Path(words[3]), Path(words[4]))
    else:
        publish(Path(words[1]), int(words[2]), int(words[3]), Path(words[4]))
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
