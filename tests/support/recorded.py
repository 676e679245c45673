"""What policies without a model earn, as docs/workloads.md records it; tests hold the figures."""

from __future__ import annotations

from pathlib import Path

PAGE = Path(__file__).parents[2] / "docs" / "workloads.md"
HEAD = "| environment or reward | tasks | oracle | null | random |"


def lines() -> list[str]:
    """The rows of the table."""
    text = PAGE.read_text()
    return text[text.index(HEAD) :].split("\n\n")[0].splitlines()[2:]


def recorded(what: str, tasks: str, *, oracle: float | None, null: float, random: float) -> None:
    """Holds the row of `what` to these mean rewards (None: there is no oracle)."""
    figures = ["-" if value is None else f"{round(value, 3) + 0.0:.3g}" for value in (oracle, null, random)]
    row = f"| {' | '.join([what, tasks, *figures])} |"
    assert row in lines(), f"{PAGE.name} does not record: {row}"
