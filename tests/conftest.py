"""What holds for every test: fixed seeds, one thread, no settings of the developer's shell."""

from __future__ import annotations

import gc
import logging
import os
import threading
from collections.abc import Generator, Iterator
from typing import Any

import pytest
from hypothesis import settings

from astraflow.observe.logs import close_logging
from astraflow.observe.process import settle_memory

os.environ["OMP_NUM_THREADS"] = "1"  # before torch loads; two test processes share the cores
os.environ["HF_HUB_OFFLINE"] = "1"

gc.set_threshold(20_000, 20, 50)  # else a third of the time in which tests are collected is the collector's
settings.register_profile("astraflow", deadline=None, derandomize=True)
settings.load_profile("astraflow")


@pytest.fixture(autouse=True)
def _no_token_of_the_shell(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("ASTRAFLOW_TOKEN", raising=False)


@pytest.fixture(autouse=True)
def _no_logs_of_another_test() -> Iterator[None]:
    """A service that runs in this process opens its logs at the root logger, and watches threads."""
    root, hook = logging.getLogger(), threading.excepthook
    level = root.level
    yield
    threading.excepthook = hook
    close_logging()
    root.setLevel(level)
    logging.captureWarnings(False)


@pytest.hookimpl(wrapper=True)
def pytest_runtest_makereport(item: pytest.Item, call: pytest.CallInfo[None]) -> Generator[None, Any, Any]:
    """What tests log may hold half characters, which reports cannot carry from one process to another."""
    report = yield
    report.sections = [(name, text.encode("utf-8", "backslashreplace").decode()) for name, text in report.sections]
    return report


FLOW_TIMEOUT_S = 600.0  # ten seconds on two free cores; others may have them


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Whole services first: what takes long is not left to one process when everything else is done."""
    for item in items:
        if item.get_closest_marker("flow"):
            item.add_marker(pytest.mark.timeout(FLOW_TIMEOUT_S), append=False)
    items.sort(key=lambda item: not any(item.get_closest_marker(name) for name in ("flow", "slow")))


def pytest_collection_finish() -> None:
    """Modules and tests stay: nobody looks through them again."""
    settle_memory()
