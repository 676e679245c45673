"""One policy's weight versions in a directory: publish atomically, read verified, keep the newest.

```
<root>/<policy>/<version>/{manifest.json, model*.safetensors, delta*.bin, config.json, ...}     a version, immutable
<root>/<policy>/{.id, .lock, .readers/, .tmp-*}                                                  house-keeping
```
A version is built in `.tmp-*` under the policy's lock, synced, then renamed: a crash at any moment leaves the versions
before it as they were, and the next publisher sweeps what was left behind. Merged deltas lie beside a version's own
parts; they are made when a reader asks, and can be made again.
"""

from __future__ import annotations

import contextlib
import mmap
import os
import shutil
import threading
import time
import uuid
from collections.abc import Callable, Iterable, Iterator, Mapping
from pathlib import Path
from typing import Any
from urllib.parse import quote

import msgspec

from astraflow.durable import sync_path
from astraflow.errors import WeightError
from astraflow.types import WeightVersion
from astraflow.weights.fetch.route import bring, verified
from astraflow.weights.files.build import AnyBase, Building, merge_into, read_files
from astraflow.weights.files.layout import write_file
from astraflow.weights.files.leases import ReaderLease, publishing, reading, retiring
from astraflow.weights.manifest import (
    MANIFEST,
    Delta,
    FileEntry,
    Manifest,
    Part,
    TornPart,
    is_policy_name,
    read_manifest,
)
from astraflow.weights.plan import NO_PINS, Pins, VersionInfo, cheapest, full_is_due, retained
from astraflow.weights.tensors import raw_tensors

__all__ = ["NO_PINS", "FileStore", "Pins"]


class FileStore:
    """Versions of `policy` below `root`. One instance may be used by several threads; several processes may publish.

    Args: keep: newest versions that stay; older ones go at the next publish unless somebody reads them or a newer one
    is a delta on them. 0: all stay. full_every: one version in so many carries all its tensors, the others may be
    deltas only. durable: wait for the disk before a version becomes visible. Without it a power cut (never a killed
    process) can leave a torn newest version, which readers refuse by checksum and the next publish of that version
    replaces. pins: versions that stay for longer.
    """

    def __init__(
        self, root: Path, policy: str, *, keep: int = 0, full_every: int = 50, durable: bool = True,
        pins: Pins = NO_PINS,
    ) -> None:  # fmt: skip
        if not is_policy_name(policy):
            raise WeightError(
                "policy", policy, "is not a policy name", "use letters, digits, '_', '.', '-', a letter first"
            )
        self.policy, self.keep, self.full_every, self.durable = policy, keep, full_every, durable
        self.pins = pins
        self.directory = Path(root).absolute() / policy
        self.num_kept_existing = 0  # publishes that found other content under their version and kept it
        self._thread_lock = threading.Lock()
        self._known: dict[int, tuple[tuple[int, int], VersionInfo]] = {}  # with the manifest that says it

    @property
    def store_id(self) -> str:
        """Tells this directory from one with the same path on another host; "" before the first publish."""
        try:
            return (self.directory / ".id").read_text().strip()
        except (FileNotFoundError, NotADirectoryError):
            return ""

    @property
    def url(self) -> str:
        """file:// URL of this policy; readers on other hosts see by its id that it is not theirs."""
        identity = self.store_id
        return f"file://{quote(str(self.directory))}" + (f"?store={identity}" if identity else "")

    def versions(self) -> list[int]:
        """Visible versions, oldest first."""
        try:
            names = os.listdir(self.directory)
        except (FileNotFoundError, NotADirectoryError):
            return []
        return sorted(int(name) for name in names if name.isascii() and name.isdigit())

    def latest(self) -> WeightVersion:
        """The newest visible version (-1: none)."""
        versions = self.versions()
        return WeightVersion(self.policy, versions[-1] if versions else -1, (self.url,) if versions else ())

    def manifest(self, version: int, wait_s: float = 0.0) -> Manifest:
        """What `version` is made of; waits up to `wait_s` when it would be the newest. Raises WeightError: missing or
        torn."""
        path = self.directory / str(version) / MANIFEST
        deadline = time.monotonic() + wait_s
        while time.monotonic() < deadline and not path.exists() and version > max(self.versions(), default=-1):
            time.sleep(0.01)
        try:
            payload = path.read_bytes()
        except OSError as error:
            raise self._missing(version, error) from error
        return read_manifest(payload, self.policy, version, str(path))

    def files(self, version: int) -> dict[str, Path]:
        """Config and tokenizer files of `version` where they lie. Not to be changed."""
        directory = self.directory / str(version)
        return {entry.name: directory / entry.name for entry in self.manifest(version).files}

    def infos(self) -> dict[int, VersionInfo]:
        """How each visible version can travel, oldest first."""
        known: dict[int, tuple[tuple[int, int], VersionInfo]] = {}
        for version in self.versions():
            with contextlib.suppress(WeightError, OSError):  # torn, or retired meanwhile: it cannot be fetched
                # A relay gives a version its tensors later, or takes it anew: its manifest is another file then.
                status = (self.directory / str(version) / MANIFEST).stat()
                file, before = (status.st_ino, status.st_mtime_ns), self._known.get(version)
                known[version] = (
                    before if before is not None and before[0] == file else (file, self.manifest(version).info)
                )
        self._known = known
        return {version: info for version, (_, info) in known.items()}

    def fetch(self, version: int) -> dict[str, Any]:
        """Verified tensors of `version`: name -> torch tensor, views of a private (copy-on-write) memory map.

        Raises: WeightError: missing, truncated or torn.
        """
        return bring(self, None, version).tensors

    def reading(self, version: int) -> contextlib.AbstractContextManager[ReaderLease]:
        """Keep `version`, and what it rests on, while the block runs."""
        return reading(self.directory, version)

    def read(self, version: int, entry: Part | FileEntry) -> Any:
        """One part or file, as a private (copy-on-write) memory map; not verified.

        Raises: WeightError: missing. TornPart: of another size.
        """
        path = self.directory / str(version) / entry.name
        try:
            with open(path, "rb") as file:
                size = os.fstat(file.fileno()).st_size
                if size != entry.nbytes:
                    raise TornPart(
                        str(path), f"{size} bytes", f"must have {entry.nbytes}", "the part is cut; fetch it again"
                    )
                return mmap.mmap(file.fileno(), size, access=mmap.ACCESS_COPY) if size else bytearray()
        except OSError as error:
            raise self._missing(version, error) from error

    def merged(self, version: int, base: int) -> Delta | None:
        """One delta from `base` to `version`, its parts lying beside those of `version`; None: no chain leads there.

        It is made when it is first asked for, of the deltas between, without their models.
        """
        with self.reading(version) as lease:
            route = cheapest(self.infos(), base, version)
            if route is None or not route.hops or route.hops[0].kind == "full":
                return None
            deltas = [(hop.version, self.manifest(hop.version).delta) for hop in route.hops]
            if len(deltas) == 1:
                return deltas[0][1]
            lease.extend()
            parts = [[self.read(at, part) for part in delta.parts] for at, delta in deltas if delta is not None]
            return merge_into(self.directory / str(version), base, parts)

    def publish(
        self, version: int, tensors: Mapping[str, Any], files: Iterable[Path] = (), *, keep_existing: bool = False,
        base: AnyBase | None = None,
    ) -> Manifest:  # fmt: skip
        """Make `version` visible atomically. Publishing an existing version with equal content is a no-op.

        Returns what was given, as a manifest without parts. It stays at least until the next publish, however old.
        Args: keep_existing: when other content is already there (a trainer that repeats a step after a crash), keep
        that and count it in `num_kept_existing`. base: an earlier version as it was published; the new one then travels
        as its changes when they are fewer bytes, and whole only when that is due.
        Raises: WeightError: other content under an existing version, a full disk, a dtype that cannot be stored.
        """
        if version < 0:
            raise WeightError("version", version, "must be >= 0", "number versions from 0, one per step")
        raw = raw_tensors(tensors)
        contents = read_files(files)
        with self._locked():
            try:
                self._sweep()
                building = Building(self.policy, version, raw, contents, sync=self.durable)
                if not self._exists(building.content, keep_existing):
                    self._build(building, tensors, base)
                self._retire(version)
            except OSError as error:
                raise self._unwritable(version, error) from error
        return building.content

    def adopt(self, manifest: Manifest, read: Callable[[Part | FileEntry], Any]) -> None:
        """Make a version of another store visible here too, with the parts that `manifest` names; `read` gives their
        bytes. A version that is here already gets the parts that it lacks; one of other content goes, and all after it.

        Raises: WeightError: a full disk. TornPart: bytes that are not those that were published.
        """
        version = manifest.version
        with self._locked():
            try:
                self._sweep()
                here = self.manifest(version) if version in self.versions() and self._is_whole(version) else None
                if here is not None and not here.same_content(manifest):
                    self._remove(at for at in self.versions() if at >= version)
                    here = None
                place = self._temporary(version)
                place.mkdir()
                for entry in _new_entries(manifest, here):
                    write_file(place / entry.name, [memoryview(verified(read(entry), entry))], sync=self.durable)
                if here is not None:
                    manifest = msgspec.structs.replace(
                        manifest, parts=manifest.parts or here.parts, delta=manifest.delta or here.delta
                    )
                write_file(place / MANIFEST, [memoryview(msgspec.json.encode(manifest))], sync=self.durable)
                self._show(place, version, merge=here is not None)
                self._retire(version)
            except OSError as error:
                raise self._unwritable(version, error) from error

    def drop(self, versions: Iterable[int]) -> None:
        """Remove `versions`, which should not be here, also while they are read."""
        with self._locked():
            self._remove(versions)

    def _show(self, place: Path, version: int, *, merge: bool) -> None:
        """What was built becomes visible at once: as a version, or as further parts of one by its new manifest."""
        target = self.directory / str(version)
        if merge:
            for item in sorted(place.iterdir(), key=lambda path: path.name == MANIFEST):
                os.rename(item, target / item.name)
            place.rmdir()
        else:
            os.rename(place, target)
        if self.durable:
            sync_path(self.directory)

    def _exists(self, content: Manifest, keep_existing: bool) -> bool:
        version = content.version
        if version not in self.versions() or not self._is_whole(version):
            return False
        if not self.manifest(version).same_content(content):
            if not keep_existing:
                raise WeightError(
                    f"{self.policy} version", version, "already exists with other content",
                    "publish the next version, or resume from the newest checkpoint",
                )  # fmt: skip
            self.num_kept_existing += 1
        return True

    def _build(self, building: Building, tensors: Mapping[str, Any], base: AnyBase | None) -> None:
        version, infos = building.content.version, self.infos()
        older = [v for v in infos if v < version]
        place = self._temporary(version)
        place.mkdir()
        try:
            delta = None
            # Between the base and this version nothing may lie: who holds that would have no delta from it.
            if base is not None and older and base.version == older[-1] and self._holds(base):
                delta = building.write_delta(place, base, tensors)
            chain = [] if delta is None else since_full(infos, delta.base)
            if delta is None or full_is_due(chain, delta.nbytes, building.nbytes, self.full_every):
                building.write_full(place)
            previous = self.directory / str(older[-1]) if older else None
            building.close(place, previous, older[-1] if older else -1, delta)
            self._show(place, version, merge=False)
        except BaseException:
            shutil.rmtree(place, ignore_errors=True)
            raise

    def _holds(self, base: AnyBase) -> bool:
        """Whether the store has exactly this content under its version (after a crash it may have an earlier one)."""
        known = self.manifest(base.version).entries()
        return base.checksums == {name: entry.xxh3 for name, entry in known.items()}

    def _is_whole(self, version: int) -> bool:
        """False for what a power cut left of `version`; it is then moved out of the way."""
        directory = self.directory / str(version)
        try:
            manifest = self.manifest(version)
            whole = all((directory / e.name).stat().st_size == e.nbytes for e in manifest.all_entries())
        except (WeightError, FileNotFoundError):
            whole = False
        if not whole:
            os.rename(directory, self._temporary(version))
        return whole

    def _temporary(self, version: int) -> Path:
        return self.directory / f".tmp-{version}-{uuid.uuid4().hex[:12]}"

    def _retire(self, newest: int) -> None:
        """`newest`: the one that just came; of a trainer that trains again, it is an old one."""
        infos, gone = self.infos(), list[Path]()
        with contextlib.suppress(BlockingIOError), retiring(self.directory) as read_now:  # leases that ran out go, too
            stay = retained(infos, self.keep, read_now | {newest}, self.pins)
            gone = self._out_of_sight(version for version in self.versions() if version not in stay)
        for directory in gone:
            shutil.rmtree(directory, ignore_errors=True)

    def _remove(self, versions: Iterable[int]) -> None:
        for directory in self._out_of_sight(versions):
            shutil.rmtree(directory, ignore_errors=True)

    def _out_of_sight(self, versions: Iterable[int]) -> list[Path]:
        gone: list[Path] = []
        for version in sorted(versions, reverse=True):  # what rests on others goes before them
            gone.append(self._temporary(version))
            os.rename(self.directory / str(version), gone[-1])
        return gone

    def _sweep(self) -> None:
        """Remove what a publisher that died left behind. Only under the lock, so nobody is building it."""
        for name in os.listdir(self.directory):
            if name.startswith(".tmp-"):
                shutil.rmtree(self.directory / name, ignore_errors=True)

    @contextlib.contextmanager
    def _locked(self) -> Iterator[None]:
        with self._thread_lock, publishing(self.directory):
            if not self.store_id:
                (self.directory / ".id").write_text(uuid.uuid4().hex)
            yield

    def _unwritable(self, version: int, error: OSError) -> WeightError:
        return WeightError(
            f"version {version}", str(self.directory), f"cannot be written ({error.strerror})",
            "free disk space or lower weights.keep; earlier versions are as they were",
        )  # fmt: skip

    def _missing(self, version: int, error: OSError) -> WeightError:
        versions = self.versions()
        have = f"it has {versions[0]} to {versions[-1]}" if versions else "it has none"
        return WeightError(
            f"{self.policy} version", version, f"is not in {self.directory} ({error.strerror})",
            f"{have}; fetch the newest, or raise weights.keep",
        )  # fmt: skip


def _new_entries(manifest: Manifest, here: Manifest | None) -> list[Part | FileEntry]:
    have: set[str] = set()
    if here is not None:
        have = {entry.name for entry in here.all_entries()}
    return [entry for entry in manifest.all_entries() if entry.name not in have]


def since_full(infos: Mapping[int, VersionInfo], version: int) -> list[VersionInfo]:
    """The chain that `version` ends, from its full version on; empty: it is broken."""
    chain: list[VersionInfo] = []
    while (info := infos.get(version)) is not None:
        chain.insert(0, info)
        if info.full_nbytes >= 0:
            return chain
        version = info.base
    return []
