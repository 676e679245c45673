"""A command of `astraflow` in this process."""

from __future__ import annotations

import pytest

from astraflow.cli.app import main


def failing(words: list[str], capsys: pytest.CaptureFixture[str], code: int) -> str:
    """The one message of a command that must end with `code`, without a traceback."""
    assert main(words) == code
    err = capsys.readouterr().err
    assert "Traceback" not in err
    return err
