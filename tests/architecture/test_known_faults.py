"""docs/known-faults.md: every test that it names exists, and every kind of the shared list has a row."""

from __future__ import annotations

import ast
import re
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
TABLE, SHARED = ROOT / "docs" / "known-faults.md", ROOT.parent / "shared" / "known-faults.md"
NAMED = re.compile(r"`(tests/[\w/]+\.py)::(\w+)`( \(make [a-z-]+\))?")
ELSEWHERE = {"tests/faults/": " (make faults)", "tests/vllm/": " (make test-vllm)"}


def rows_by_group(path: Path) -> dict[str, list[list[str]]]:
    """Heading -> the cells of each row of its table, without the heads."""
    groups: dict[str, list[list[str]]] = {}
    for line in path.read_text().splitlines():
        if line.startswith("## "):
            groups[line.removeprefix("## ")] = []
        elif line.startswith("|") and not re.match(r"\|[-| ]+\|$|\| kind \|", line):
            groups[next(reversed(groups))].append([cell.strip() for cell in line.strip("|").split("|")])
    return groups


ROWS = [(group, *row) for group, rows in rows_by_group(TABLE).items() for row in rows]


@pytest.mark.parametrize("row", ROWS, ids=lambda row: row[1])
def test_every_kind_has_tests_that_were_seen_to_fail(row: tuple[str, ...]) -> None:
    _, kind, holds, tests, seen = row
    named = NAMED.findall(tests)
    assert kind and holds and named
    for file, name, target in named:
        tree = ast.parse((ROOT / file).read_text())
        functions = {n.name for n in ast.walk(tree) if isinstance(n, ast.FunctionDef | ast.AsyncFunctionDef)}
        assert name in functions, f"{file} has no {name}"
        where = next((said for place, said in ELSEWHERE.items() if file.startswith(place)), "")
        assert target == where, f"{file}: say{where or ' nothing, it runs with make test'}"
    changed = re.findall(r"`([\w/.-]+\.(?:py|toml))`", seen)
    assert changed, "say which change to the code was noticed"
    assert not [
        path for path in changed if not (ROOT / "src" / "astraflow" / path).exists() and not (ROOT / path).exists()
    ]


def test_kinds_are_named_once() -> None:
    kinds = [row[1] for row in ROWS]
    assert len(set(kinds)) == len(kinds) >= 46


@pytest.mark.skipif(not SHARED.exists(), reason="NO LIST OF FAULTS beside the project: its rows are not compared")
def test_every_kind_of_the_shared_list_is_here() -> None:
    ours = {group: len(rows) for group, rows in rows_by_group(TABLE).items()}
    theirs = {group: len(rows) for group, rows in rows_by_group(SHARED).items()}
    assert ours == theirs
