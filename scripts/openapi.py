"""Write docs/openapi.json, docs/openapi-weights.json and docs/openapi-swarm.json (`make openapi`)."""

from __future__ import annotations

from pathlib import Path

from astraflow.weights.app import weights_document
from astraflow.wire.describe.openapi import to_json
from astraflow.wire.describe.operations import dataflow_document
from astraflow.wire.describe.swarm import swarm_document

DOCUMENTS = {
    "openapi.json": dataflow_document,
    "openapi-weights.json": weights_document,
    "openapi-swarm.json": swarm_document,
}


def main() -> None:
    """All documents, from the code."""
    docs = Path(__file__).parents[1] / "docs"
    for name, make in DOCUMENTS.items():
        (docs / name).write_text(to_json(make()))


if __name__ == "__main__":
    main()
