from __future__ import annotations

import asyncio
import logging

import pytest

from astraflow.errors import AstraFlowError, LaunchError
from astraflow.rollout.loop import Guarded


@pytest.mark.parametrize(
    ("error", "traced"), [(LaunchError("x", "1", "is wrong", "fix it"), False), (KeyError("unexpected"), True)]
)
def test_only_an_unexpected_error_is_logged_with_its_traceback(
    error: Exception, traced: bool, caplog: pytest.LogCaptureFixture
) -> None:
    async def fail() -> None:
        raise error

    async def run() -> None:
        await Guarded("node x").run(fail(), asyncio.Event())

    with caplog.at_level(logging.ERROR), pytest.raises(AstraFlowError):
        asyncio.run(run())
    (record,) = caplog.records
    assert (record.exc_info is not None) == traced
    assert "the main of node x ended" in record.getMessage()
