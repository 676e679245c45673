"""What no run file may hold: it is saved, journaled and served to nodes as JSON, and anyone may read it there."""

from __future__ import annotations

import math
import re
from collections.abc import Iterator, Mapping
from typing import Any

NAMES = r"(?:token|api[_-]?key|apikey|access[_-]?key|private[_-]?key|password|passwd|secret|authorization|credentials?)"
LARGEST = 2**63  # torch, Arrow and SQLite keep no larger whole numbers
_NAME = re.compile(rf"(?:|.*[_\-. ]){NAMES}", re.IGNORECASE)  # may end a longer one, never begin one (tokens)
_OF_TEXT = re.compile(r"(?:bos|eos|pad|unk|sep|cls|mask|stop)_token", re.IGNORECASE)
_SPECIAL = re.compile(r"[<\[]")  # image_token = "<image>"
_USER = re.compile(r"([A-Za-z][A-Za-z0-9+.-]*)://([^/\s?#]*)@")  # up to the last @, as a password may have one
_CONTAINERS = frozenset({"abfs", "abfss", "wasb", "wasbs"})  # container@account, which is no secret


def is_secret_name(name: str) -> bool:
    """Whether a value under this name must not be shown: `token`, `hub_token`, `API-Key`, but not `max_tokens`."""
    return _NAME.fullmatch(name) is not None and _OF_TEXT.fullmatch(name) is None


def is_secret(name: str, value: object) -> bool:
    """Whether this value under this name is a secret itself. Numbers and special tokens are settings."""
    if not is_secret_name(name) or not isinstance(value, str | bytes) or not value:
        return False
    return isinstance(value, bytes) or _SPECIAL.match(value) is None


def has_credentials(url: str) -> bool:
    """Whether a URL names a user or a password."""
    found = _USER.match(url)
    return found is not None and (":" in found[2] or found[1].lower() not in _CONTAINERS)


def masked_url(url: str) -> str:
    """`url` as it may be shown."""
    return _USER.sub(r"\1://***@", url, count=1) if has_credentials(url) else url


def _has_half_characters(text: str) -> bool:
    """As the words of a command line have where the locale has no UTF-8."""
    return any("\ud800" <= character <= "\udfff" for character in text)


def unfit_to_save(raw: object, where: str = "") -> Iterator[str]:
    """A sentence for each secret in a run file, which is not shown, and for each number or text that JSON does not
    have."""
    items: Iterator[tuple[Any, Any]] = iter(())
    if isinstance(raw, Mapping):
        items = iter(raw.items())
    elif isinstance(raw, list):
        items = iter(enumerate(raw))
    for key, value in items:
        path = f"{where}.{key}" if where else str(key)
        if is_secret(str(key), value):
            yield (
                f"{path}=*** must not be written in a run file, which is saved and sent as it is; give the name of an "
                f"environment variable under another key, such as {key}_env, and read it with "
                "astraflow.config.env.secret_from_env"
            )
        elif isinstance(value, str) and has_credentials(value):
            yield (
                f"{path}={masked_url(value)} must not hold a user or password, as a run file is saved and sent as it "
                "is; give them to the processes by the environment, as the library of that scheme reads them"
            )
        elif isinstance(value, str) and _has_half_characters(value):
            yield f"{path}={value!r} is not text in UTF-8; give the processes a UTF-8 locale, as LC_ALL=C.UTF-8"
        elif isinstance(value, float) and not math.isfinite(value):
            yield f"{path}={value} must be a finite number; give a large one, or leave it out for the default"
        elif isinstance(value, int) and abs(value) >= LARGEST:
            yield f"{path}={value} must be between -2^63 and 2^63; give one that services can keep in 64 bits"
        else:
            yield from unfit_to_save(value, path)
