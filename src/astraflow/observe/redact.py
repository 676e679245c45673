"""No secret leaves a process by way of a log, a dump or a tracker."""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping
from typing import Any

MASK = "***"

_NAMES = (
    r"(?:token|api[_-]?key|apikey|access[_-]?key|private[_-]?key|password|passwd|secret|authorization|credentials?)"
)
_KEY = re.compile(rf"(?:^|.*[_\-. ]){_NAMES}$", re.IGNORECASE)
# name=value, name: value, "name": "value"; the name may end a longer one (hub_token), never begin one (tokens).
_PAIR = re.compile(
    rf"""(?P<head>\b[\w.-]*?{_NAMES}["']?\s*[=:]\s*)(?P<value>"[^"]*"|'[^']*'|(?:bearer\s+|basic\s+)?[^\s"',;&)\]}}]+)""",
    re.IGNORECASE,
)
_BEARER = re.compile(r"\b(?P<head>bearer\s+)[A-Za-z0-9._~+/=-]{6,}", re.IGNORECASE)
_URL_PASSWORD = re.compile(r"(?P<head>://[^/\s:@]+:)[^/\s@]+(?=@)")
_SPECIAL = re.compile(r"^[<\[]")  # tokenizer settings such as eos_token="<|im_end|>" are no secrets


def is_secret_name(name: str) -> bool:
    """Whether a value under this name must not be shown: `token`, `hub_token`, `API-Key`, but not `max_tokens`."""
    return _KEY.match(name) is not None


def redact_text(text: str, secrets: Iterable[str] = ()) -> str:
    """`text` with key-like values, bearer tokens and every given secret masked."""
    for secret in secrets:
        if secret:
            text = text.replace(secret, MASK)
    text = _PAIR.sub(lambda found: found["head"] + MASK, text)
    for pattern in (_BEARER, _URL_PASSWORD):
        text = pattern.sub(lambda found: found["head"] + MASK, text)
    return text


def redact(value: Any, secrets: Iterable[str] = ()) -> Any:
    """A copy of nested mappings and lists with secrets masked. Numbers under a key-like name are settings and stay."""
    secrets = tuple(secrets)
    if isinstance(value, Mapping):
        return {
            key: MASK if _hides(str(key), item) else redact(item, secrets) for key, item in value.items()
        }  # fmt: skip
    if isinstance(value, list | tuple):
        return [redact(item, secrets) for item in value]
    if isinstance(value, str):
        return redact_text(value, secrets)
    return value


def _hides(key: str, value: Any) -> bool:
    return is_secret_name(key) and isinstance(value, str | bytes) and bool(value) and not _is_special(value)


def _is_special(value: str | bytes) -> bool:
    return isinstance(value, str) and _SPECIAL.match(value) is not None
