"""Write docs/openapi.json and docs/openapi-weights.json (`make openapi`)."""

from __future__ import annotations

from pathlib import Path

from astraflow.weights.app import weights_document
from astraflow.wire.describe.openapi import to_json
from astraflow.wire.describe.operations import dataflow_document

DOCUMENTS = {"openapi.json": dataflow_document, "openapi-weights.json": weights_document}


def main() -> None:
    """Both documents, from the code."""
    docs = Path(__file__).parents[1] / "docs"
    for name, make in DOCUMENTS.items():
        (docs / name).write_text(to_json(make()))


if __name__ == "__main__":
    main()
