"""`astraflow sft`, `eval`, `try`: one model without a run around it."""

from __future__ import annotations

import typer


def sft(ctx: typer.Context) -> None:
    """..."""


def evaluate(ctx: typer.Context) -> None:
    """..."""


def try_out(ctx: typer.Context) -> None:
    """..."""
