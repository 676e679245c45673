"""No secret leaves a process by way of a log, a dump or a tracker."""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping
from typing import Any

from astraflow.config.secrets import NAMES, is_secret

MASK = "***"

# name=value, name: value, "name": "value"; the name may end a longer one (hub_token), never begin one (tokens).
_PAIR = re.compile(
    rf"""(?P<head>\b[\w.-]*?{NAMES}["']?\s*[=:]\s*)(?P<value>"[^"]*"|'[^']*'|(?:bearer\s+|basic\s+)?[^\s"',;&)\]}}]+)""",
    re.IGNORECASE,
)
_BEARER = re.compile(r"\b(?P<head>bearer\s+)[A-Za-z0-9._~+/=-]{6,}", re.IGNORECASE)
_URL_PASSWORD = re.compile(r"(?P<head>://[^/\s:@]+:)[^/\s@]+(?=@)")


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
        return {key: MASK if is_secret(str(key), item) else redact(item, secrets) for key, item in value.items()}
    if isinstance(value, list | tuple):
        return [redact(item, secrets) for item in value]
    if isinstance(value, str):
        return redact_text(value, secrets)
    return value
