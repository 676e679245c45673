"""Versions from one store to another, as they travel: what a relay does. Knows no tensors and loads no torch."""

from __future__ import annotations

import logging
from collections.abc import Callable
from typing import Any

import msgspec

from astraflow.weights.fetch.route import Reader, retry, way
from astraflow.weights.manifest import INDEX, FileEntry, Manifest, Part
from astraflow.weights.store import FileStore

log = logging.getLogger(__name__)


def copy_version(
    reader: Reader, store: FileStore, wanted: int, wait_s: float = 0.0, on_compared: Callable[[], None] | None = None
) -> None:
    """`wanted`, by the fewest bytes beside what `store` has, and visible there when this returns.

    Waits up to `wait_s` for a version that is newer than all that `reader` has.
    Args: on_compared: given: what `store` has may be of another past (of a trainer that lost its versions and took its
    steps again); it is compared, what is not as in `reader` goes, and this is called.
    Raises: WeightError: `reader` has no way to it, or its bytes are not those that were published.
    """
    with reader.reading(wanted) as lease:
        last = retry(lambda: reader.manifest(wanted, wait_s))
        trusted = wanted
        if on_compared is not None:
            trusted = _drop_other_past(reader, store, last)
            on_compared()
        held = max((version for version in store.infos() if version <= trusted), default=-1)
        # Not merged: a reader of `store` may hold any of the versions between.
        for manifest, delta in way(reader, held, last, merge=False):
            lease.extend()
            if delta is None:
                manifest = msgspec.structs.replace(manifest, delta=None)
            else:
                manifest = msgspec.structs.replace(_without_parts(manifest), delta=delta)
            store.adopt(manifest, _reading(reader, store, manifest.version))


def _drop_other_past(reader: Reader, store: FileStore, wanted: Manifest) -> int:
    """Remove what differs in `reader`, and what came after `wanted` and is not there: that step is taken again. The
    newest version that is the same (those before it were made before it) and at most `wanted`; -1: none.

    What is older than all that `reader` has, or left out there, may be as good: it stays, but nothing rests on it.
    """
    there, other, same = reader.infos(), list[int](), -1
    for version in reversed(store.versions()):
        if version == wanted.version or version in there:
            manifest = wanted if version == wanted.version else retry(lambda v=version: reader.manifest(v))  # type: ignore[misc]
            if store.manifest(version).same_content(manifest):
                same = min(version, wanted.version)
                break
            other.append(version)
        elif version > wanted.version:
            other.append(version)
    if other:
        log.warning("removed versions %s: they are not those of the trainer any more", other)
        store.drop(other)
    return same


def add_tensors(reader: Reader, store: FileStore, version: int) -> None:
    """The full parts of a version that `store` has as a delta only, so that what comes before it may go."""
    with reader.reading(version):
        manifest = retry(lambda: reader.manifest(version))
        store.adopt(msgspec.structs.replace(manifest, delta=None), lambda entry: reader.read(version, entry))


def _reading(reader: Reader, store: FileStore, version: int) -> Callable[[Part | FileEntry], Any]:
    """Reads what `version` is made of. Config and tokenizer files are hardly ever new: each one that `store` has is a
    round trip less."""
    newest = max(store.versions(), default=-1)
    here = {file.xxh3: file for file in store.manifest(newest).files} if newest >= 0 else {}

    def read(entry: Part | FileEntry) -> Any:
        if entry.xxh3 in here:
            return store.read(newest, here[entry.xxh3])
        return reader.read(version, entry)

    return read


def _without_parts(manifest: Manifest) -> Manifest:
    files = tuple(file for file in manifest.files if file.name != INDEX)
    return msgspec.structs.replace(manifest, parts=(), files=files)
