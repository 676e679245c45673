"""How the versions of one policy lie in an object store.

```
<weights.url>/<run id>/<policy>/index.json                        whose store it is, and what can be fetched
                               <version>/{manifest.json, ...}     as in a directory or over HTTP
                               readers/<version>.<unique>.json    leases of those who read just now
```
A version can be fetched when its manifest is there, which is put last. The index spares readers the permission to list.
"""

from __future__ import annotations

from urllib.parse import parse_qs, urlsplit

import msgspec

from astraflow.errors import WeightError
from astraflow.weights.plan import VersionInfo

INDEX = "index.json"
READERS = "readers"
_KEY = "objects"  # ?objects=<id>: tells such a store from a trainer's own directory, and from one of the same name


class Index(msgspec.Struct, frozen=True):
    """Written by the trainer after each change, read by everybody else."""

    store: str  # id: tells this store from another one under the same URL (another host's disk, another endpoint)
    infos: tuple[VersionInfo, ...] = ()  # oldest first

    @property
    def newest(self) -> int:
        """-1: none."""
        return self.infos[-1].version if self.infos else -1


def store_url(base: str, store_id: str) -> str:
    """What is announced of the versions below `base`."""
    return f"{base}?{_KEY}={store_id}"


def is_object_store(url: str) -> bool:
    """Whether `url` is read through fsspec: neither our HTTP interface nor a trainer's own directory."""
    parts = urlsplit(url)
    if parts.scheme == "file":
        return _KEY in parse_qs(parts.query)
    return parts.scheme not in ("", "http", "https")


def split_store_url(url: str) -> tuple[str, str]:
    """(URL without the query, id of the store; "" when it says none)."""
    base, _, query = url.partition("?")
    return base.rstrip("/"), parse_qs(query).get(_KEY, [""])[0]


def read_index(payload: bytes, where: str) -> Index:
    """Raises: WeightError: damaged."""
    try:
        return msgspec.json.decode(payload, type=Index)
    except (msgspec.DecodeError, ValueError, RecursionError) as error:
        raise WeightError(
            "index", where, f"is not an index ({error})", "it is written again with the next version"
        ) from error
