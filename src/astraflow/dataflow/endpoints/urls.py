"""URLs that others are told of: all nodes take them apart, so one that nobody can take apart is refused here."""

from __future__ import annotations

import re
from collections.abc import Iterable
from urllib.parse import SplitResult, urlsplit

from astraflow.config.secrets import has_credentials
from astraflow.wire.app import HttpError

_plain = re.compile(r"[!-~]+").fullmatch  # printable ASCII without spaces; `urlsplit` drops some of what is not


def check_base(url: str) -> None:
    """Raises: HttpError: 422: no HTTP server can be there, or all would read its password."""
    parts = _split(url)
    if parts is None or parts.scheme not in ("http", "https") or not parts.hostname or _plain(url) is None:
        raise HttpError(
            422, f"url={_shown(url)} must be http://host:port by which others reach it; see docs/protocol.md"
        )
    if "@" in parts.netloc or "?" in url or "#" in url:
        raise HttpError(422, f"url={_shown(url)} must have no user, query or fragment; give http://host:port")


def check_stores(urls: Iterable[str]) -> None:
    """Raises: HttpError: 422: one of them is no URL."""
    for url in urls:
        parts = _split(url)
        if parts is None or not parts.scheme:
            raise HttpError(422, f"url={_shown(url)} must be the URL of a weight store; see docs/protocol.md")
        if has_credentials(url):
            raise HttpError(
                422, f"url={_shown(url)} must hold no password, as all nodes are told; see docs/protocol.md"
            )


def _shown(url: str) -> str:
    return repr(re.sub("//.*@", "//***@", url)[:200])


def _split(url: str) -> SplitResult | None:
    try:
        parts = urlsplit(url)
        return parts if parts.port != 0 else None
    except ValueError:  # brackets that do not match, a port that is none
        return None
