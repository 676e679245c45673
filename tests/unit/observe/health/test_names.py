"""docs/metrics.md lists every number of a row and every warning, and nothing else."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

from astraflow.observe.health.names import ALL, metric_of
from astraflow.observe.health.rules import RULES

TEXT = (Path(__file__).parents[4] / "docs" / "metrics.md").read_text()


def test_every_metric_is_documented_as_the_code_says() -> None:
    rows = [f"| `{m.name}` | {m.unit} | {m.meaning} | {m.healthy} |" for m in ALL]
    missing = [row for row in rows if row not in TEXT]
    assert not missing, "docs/metrics.md lacks:\n" + "\n".join(missing)


def test_nothing_is_documented_that_does_not_exist() -> None:
    named = re.findall(r"^\| `([^`]+)` \|", TEXT, re.MULTILINE)
    known = {m.name for m in ALL} | set(RULES)
    assert set(named) == known and len(named) == len(known)


def test_names_are_known_with_their_placeholders_only() -> None:
    found = metric_of("groups/dropped/my_ops:EvenRows")
    assert found is not None and found.name == "groups/dropped/<reason>"
    assert metric_of("eval/pass@8") and metric_of("sources/a.b/skipped/greso") and metric_of("staleness/count/16")
    assert metric_of("groups/dropped") and metric_of("groups/dropped/") is None and metric_of("lrs") is None


@pytest.mark.parametrize("name", sorted(m.name for m in ALL))
def test_names_do_not_hide_each_other(name: str) -> None:
    example = re.sub(r"<\w+>", "7", name)
    assert (found := metric_of(example)) is not None and found.name == name
