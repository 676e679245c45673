"""Logs of one process: lines for people on stderr, the same as JSON lines in `<run_dir>/logs/<process>.jsonl`.

The launcher collects stderr in `<run_dir>/logs/<process>.log`. Modules log through `logging.getLogger(__name__)`;
fields for machines go into `extra={...}`. Everything passes `observe.redact`.
"""

from __future__ import annotations

import logging
import sys
import time
from collections.abc import Iterable
from pathlib import Path
from typing import Any

from astraflow.config.secrets import is_secret_name
from astraflow.errors import LaunchError
from astraflow.observe.jsonl import JsonlWriter
from astraflow.observe.redact import MASK, redact, redact_text

_STANDARD = frozenset(vars(logging.makeLogRecord({}))) | {"message", "asctime", "taskName", "color_message"}
_NOISY = ("urllib3", "uvicorn", "asyncio", "matplotlib", "filelock", "httpx")


def setup_logging(
    process: str,
    run_dir: Path | None = None,
    *,
    level: int = logging.INFO,
    secrets: Iterable[str | None] = (),
) -> None:
    """Set up the root logger of this process; calling it again replaces what it set up before.

    Args: process: name in every line (dataflow, node0, trainer-actor). secrets: literal values, such as the run's
    token, that are masked wherever they appear.
    Raises: LaunchError: the log cannot be written.
    """
    hidden = tuple(secret for secret in secrets if secret)
    handlers: list[logging.Handler] = [_LineHandler(process, hidden)]
    if run_dir is not None:
        path = run_dir / "logs" / f"{process}.jsonl"
        try:
            handlers.append(_JsonHandler(process, JsonlWriter(path), hidden))
        except OSError as error:
            raise LaunchError(
                "log", str(path), f"cannot be written ({error.strerror})", "name a run directory that can be written"
            ) from error
    close_logging()
    root = logging.getLogger()
    for handler in handlers:
        root.addHandler(handler)
    root.setLevel(level)
    for name in _NOISY:
        logging.getLogger(name).setLevel(max(level, logging.WARNING))
    logging.captureWarnings(True)


def close_logging() -> None:
    """Take back what `setup_logging` added to the root logger."""
    root = logging.getLogger()
    for handler in [h for h in root.handlers if isinstance(h, _LineHandler | _JsonHandler)]:
        root.removeHandler(handler)
        handler.close()


class _LineHandler(logging.StreamHandler[Any]):
    """`21:04:05.123 INFO  node0 | joined the pool nodes=2`"""

    def __init__(self, process: str, secrets: tuple[str, ...]) -> None:
        super().__init__(sys.stderr)
        self._process, self._secrets = process, secrets

    def format(self, record: logging.LogRecord) -> str:
        clock = time.strftime("%H:%M:%S", time.localtime(record.created))
        fields = "".join(f" {key}={MASK if is_secret_name(key) else value}" for key, value in _fields(record).items())
        text = f"{clock}.{int(record.msecs):03d} {record.levelname:<7} {self._process} | {record.getMessage()}{fields}"
        if trace := _trace(record):
            text += "\n" + trace
        return redact_text(text, self._secrets).encode("utf-8", "backslashreplace").decode()  # half characters


class _JsonHandler(logging.Handler):
    def __init__(self, process: str, writer: JsonlWriter, secrets: tuple[str, ...]) -> None:
        super().__init__()
        self._process, self._writer, self._secrets = process, writer, secrets

    def emit(self, record: logging.LogRecord) -> None:
        try:
            row: dict[str, Any] = {
                "time": record.created,
                "level": record.levelname,
                "process": self._process,
                "logger": record.name,
                "message": record.getMessage(),
                **_fields(record),
            }
            if trace := _trace(record):
                row["trace"] = trace
            self._writer.append(redact(row, self._secrets))
        except Exception:  # neither a full disk nor what cannot be written may end a run by way of its logs
            self.handleError(record)

    def close(self) -> None:
        self._writer.close()
        super().close()


def _fields(record: logging.LogRecord) -> dict[str, Any]:
    return {key: value for key, value in vars(record).items() if key not in _STANDARD}


def _trace(record: logging.LogRecord) -> str:
    return logging.Formatter().formatException(record.exc_info) if record.exc_info else ""
