"""The versions of one policy in an object store, as the one process that writes there sees them.

A version is put part by part, its manifest last, then the index: a crash at any moment leaves the versions before it as
they were, and the next writer removes what has no manifest. One that is not kept any more leaves the index first; it is
deleted with the version after the next, manifest first, unless somebody reads it then.
"""

from __future__ import annotations

import logging
import uuid
from collections.abc import Callable, Iterable

import msgspec

from astraflow.errors import WeightError
from astraflow.weights.manifest import MANIFEST, FileEntry, Manifest, read_manifest
from astraflow.weights.objects.bucket import Bucket, MissingObject
from astraflow.weights.objects.layout import INDEX, Index, read_index
from astraflow.weights.objects.leases import Readers
from astraflow.weights.plan import NO_PINS, Pins, retained
from astraflow.weights.store import FileStore

log = logging.getLogger(__name__)


class ObjectWriter:
    """Copies of the versions of a `FileStore`. Not thread-safe; one writer at a time."""

    def __init__(self, bucket: Bucket, policy: str, *, keep: int, pins: Pins = NO_PINS) -> None:
        """`keep`, `pins`: as of a FileStore."""
        self._bucket, self._policy, self._keep, self._pins = bucket, policy, keep, pins
        self._readers = Readers(bucket)
        self._there: dict[int, Manifest] = {}
        self._leaving: set[int] = set()  # not in the index any more, and deleted the next time
        self.store_id = ""  # "" before `open` has ended

    @property
    def versions(self) -> list[int]:
        """What can be fetched, oldest first."""
        return sorted(self._there.keys() - self._leaving)

    def open(self, source: FileStore) -> None:
        """Take over what an earlier writer left: what is whole and as in `source` stays, all else is removed.

        Raises: WeightError: the store fails; to be called again.
        """
        names = self._bucket.names()
        try:
            store_id = read_index(self._bucket.get(INDEX), self._bucket.url).store
        except MissingObject:
            store_id = uuid.uuid4().hex
        except WeightError as error:
            log.warning("made anew: %s", error)
            store_id = uuid.uuid4().hex
        self._there = self._usable(names, source)
        for version in sorted({_version_of(name) for name in names} - {-1} - self._there.keys()):
            self._delete(version)
        for name in names:
            if name.rpartition("/")[2].startswith(".tmp-"):
                self._bucket.remove(name)
        self._leaving = set()
        self._write_index(store_id)
        self.store_id = store_id

    def add(self, source: FileStore, version: int, on_bytes: Callable[[int], None] = lambda n: None) -> None:
        """Make `version` of `source` visible here too, as it travels there.

        Args: on_bytes: called after each object with its size; what it raises ends the copy.
        Raises: WeightError: the store fails, or `source` has no such version.
        """
        with source.reading(version) as lease:
            manifest = source.manifest(version)
            for entry in manifest.all_entries():
                if not (isinstance(entry, FileEntry) and self._copied(entry, version)):
                    self._bucket.put_file(f"{version}/{entry.name}", source.directory / str(version) / entry.name)
                    on_bytes(entry.nbytes)
                lease.extend()
            self._bucket.put(f"{version}/{MANIFEST}", msgspec.json.encode(manifest))
        self._there[version] = manifest
        self._leaving.discard(version)
        try:
            self._write_index(self.store_id)
        except WeightError:
            del self._there[version]  # to be added again: readers find it by the index only
            raise

    def retire(self, newest: int) -> None:
        """Take out what is older than the newest `keep`, is not read, and carries no other. `newest` stays."""
        if not self._keep or len(self._there) <= self._keep:
            return
        infos = {version: manifest.info for version, manifest in self._there.items()}
        stay = retained(infos, self._keep, self._readers.live() | {newest}, self._pins)
        gone = infos.keys() - stay
        for version in sorted(gone & self._leaving, reverse=True):  # what rests on others goes before them
            self._delete(version)
        leaving = gone - self._leaving
        changed = leaving | (self._leaving & stay)
        self._leaving = leaving
        if changed:
            self._write_index(self.store_id)

    def _usable(self, names: Iterable[str], source: FileStore) -> dict[int, Manifest]:
        """What was there before and still counts. A version of another content than in `source`, and all after it,
        are of a trainer whose steps were taken again."""
        held = set(names)
        newest = max(source.versions(), default=-1)
        usable: dict[int, Manifest] = {}
        for version in sorted(_version_of(name) for name in held if name.endswith(f"/{MANIFEST}")):
            manifest = self._read(version) if version >= 0 else None
            if manifest is None or not all(f"{version}/{entry.name}" in held for entry in manifest.all_entries()):
                continue
            if version > newest or not _agrees(manifest, source):
                log.warning("removed version %d and all after it: they are not those of %s", version, source.directory)
                break
            usable[version] = manifest
        return usable

    def _read(self, version: int) -> Manifest | None:
        """None: damaged, or gone."""
        name = f"{version}/{MANIFEST}"
        try:
            payload = self._bucket.get(name)
        except MissingObject:
            return None
        try:
            return read_manifest(payload, self._policy, version, f"{self._bucket.url}/{name}")
        except WeightError as error:
            log.warning("removed: %s", error)
            return None

    def _copied(self, entry: FileEntry, version: int) -> bool:
        """Config and tokenizer files hardly ever change: the store copies them from the version before."""
        before = max((v for v in self._there if v != version), default=None)
        if before is None or entry not in self._there[before].files:
            return False
        try:
            self._bucket.copy(f"{before}/{entry.name}", f"{version}/{entry.name}")
        except WeightError as error:
            log.debug("uploaded again: %s", error)
            return False
        return True

    def _delete(self, version: int) -> None:
        self._bucket.remove(f"{version}/{MANIFEST}")
        self._bucket.remove_folder(str(version))
        self._there.pop(version, None)
        self._leaving.discard(version)

    def _write_index(self, store_id: str) -> None:
        infos = tuple(self._there[version].info for version in self.versions)
        self._bucket.put(INDEX, msgspec.json.encode(Index(store_id, infos)))


def _agrees(manifest: Manifest, source: FileStore) -> bool:
    """Whether `source` has the same content under this version, or does not have it any more."""
    if manifest.version not in source.versions():
        return True
    return manifest.same_content(source.manifest(manifest.version))


def _version_of(name: str) -> int:
    """The version that an object is a part of; -1: of none."""
    folder, slash, _ = name.partition("/")
    return int(folder) if slash and folder.isascii() and folder.isdigit() else -1
