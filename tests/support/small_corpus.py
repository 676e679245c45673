"""A corpus of seven passages, in files of every kind."""

from __future__ import annotations

import gzip
import json
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

ROWS: list[dict[str, Any]] = [
    {"id": "a", "title": "Red Harbor", "text": "Red Harbor is a 1950 film directed by Ana Cole."},
    {"id": "b", "title": "Ana Cole", "text": "Ana Cole (born 3 May 1901) was a director of films."},
    {"id": "c", "title": "Blue Harbor", "text": "Blue Harbor is a 1960 film directed by Bo Dahl."},
    {"id": "d", "title": "Bo Dahl", "text": "Bo Dahl (born 1 April 1920) is a Swedish director."},
    {"id": "e", "title": "Twin", "text": "the same words"},
    {"id": "f", "title": "Twin", "text": "the same words"},
    {"id": "g", "title": "Café", "text": "Crème brûlée and naïve rôles"},
]
TASK: dict[str, Any] = {
    "question": "When was the director of Red Harbor born?",
    "answers": ["1901-05-03", "3 May 1901"],
    "support": ["a", "b"],
}


def write_corpus(path: Path, rows: Sequence[Mapping[str, Any]] = ROWS) -> Path:
    """JSON Lines, packed if the name ends in .gz."""
    data = "".join(json.dumps(row, ensure_ascii=False) + "\n" for row in rows).encode()
    path.write_bytes(gzip.compress(data) if path.suffix == ".gz" else data)
    return path
