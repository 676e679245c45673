"""One policy's weight versions in a directory: publish atomically, read verified, keep the newest.

```
<root>/<policy>/<version>/{manifest.json, model*.safetensors, config.json, ...}     a version, immutable
<root>/<policy>/{.id, .lock, .readers/, .tmp-*}                                     house-keeping
```
A version is built in `.tmp-*` under the policy's lock, synced, then renamed: a crash at any moment leaves the versions
before it as they were, and the next publisher sweeps what was left behind.
"""

from __future__ import annotations

import contextlib
import fcntl
import mmap
import os
import shutil
import threading
import time
import uuid
from collections.abc import Collection, Iterable, Iterator, Mapping
from pathlib import Path
from typing import Any
from urllib.parse import quote

import msgspec

from astraflow.errors import WeightError
from astraflow.types import WeightVersion
from astraflow.weights.layout import index_json, plan_parts, sync_directory, write_file, write_part
from astraflow.weights.leases import reading, retiring
from astraflow.weights.manifest import (
    MANIFEST,
    FileEntry,
    Manifest,
    TornPart,
    is_file_name,
    is_policy_name,
    read_manifest,
)
from astraflow.weights.tensors import checksum, raw_tensors, view_part

_LOCK_WAIT_S = 30.0


class FileStore:
    """Versions of `policy` below `root`. One instance may be used by several threads; several processes may publish.

    Args: keep: newest versions that stay; older ones go at the next publish unless somebody reads them. 0: all stay.
    durable: wait for the disk before a version becomes visible. Without it a power cut (never a killed process) can
    leave a torn newest version, which readers refuse by checksum and the next publish of that version replaces.
    pinned: versions that stay as long as the store.
    """

    def __init__(
        self, root: Path, policy: str, *, keep: int = 0, durable: bool = True, pinned: Collection[int] = ()
    ) -> None:
        if not is_policy_name(policy):
            raise WeightError(
                "policy", policy, "is not a policy name", "use letters, digits, '_', '.', '-', a letter first"
            )
        self.policy, self.keep, self.durable, self._pinned = policy, keep, durable, frozenset(pinned)
        self.directory = Path(root).absolute() / policy
        self.num_kept_existing = 0  # publishes that found other content under their version and kept it
        self._thread_lock = threading.Lock()

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

    def manifest(self, version: int) -> Manifest:
        """What `version` is made of. Raises WeightError: missing or torn."""
        path = self.directory / str(version) / MANIFEST
        try:
            payload = path.read_bytes()
        except OSError as error:
            raise self._missing(version, error) from error
        return read_manifest(payload, self.policy, version, str(path))

    def files(self, version: int) -> dict[str, Path]:
        """Config and tokenizer files of `version` where they lie. Not to be changed."""
        directory = self.directory / str(version)
        return {entry.name: directory / entry.name for entry in self.manifest(version).files}

    def fetch(self, version: int) -> dict[str, Any]:
        """Verified tensors of `version`: name -> torch tensor, views of a private (copy-on-write) memory map.

        Raises: WeightError: missing, truncated or torn.
        """
        with reading(self.directory, version) as lease:
            manifest = self.manifest(version)
            entries = manifest.entries()
            tensors: dict[str, Any] = {}
            for part in manifest.parts:
                lease.extend()
                buffer = self._map(version, part.name, part.nbytes)
                tensors.update(view_part(buffer, part, entries))
        return {entry.name: tensors[entry.name] for entry in manifest.tensors}

    def read_file(self, version: int, entry: FileEntry) -> bytes:
        """One verified config or tokenizer file."""
        path = self.directory / str(version) / entry.name
        try:
            content = path.read_bytes()
        except OSError as error:
            raise self._missing(version, error) from error
        if checksum(content) != entry.xxh3:
            raise TornPart(f"checksum of {path}", checksum(content), f"must be {entry.xxh3}", "the file is torn")
        return content

    def publish(
        self, version: int, tensors: Mapping[str, Any], files: Iterable[Path] = (), *, keep_existing: bool = False
    ) -> None:
        """Make `version` visible atomically. Publishing an existing version with equal content is a no-op.

        Args: keep_existing: when other content is already there (a trainer that repeats a step after a crash), keep
        that and count it in `num_kept_existing`.
        Raises: WeightError: other content under an existing version, a full disk, a dtype that cannot be stored.
        """
        if version < 0:
            raise WeightError("version", version, "must be >= 0", "number versions from 0, one per step")
        raw = raw_tensors(tensors)
        contents = _read_files(files)
        with self._locked():
            try:
                self._sweep()
                self._publish_locked(version, raw, contents, keep_existing)
                self._retire()
            except OSError as error:
                raise WeightError(
                    f"version {version}", str(self.directory), f"cannot be written ({error.strerror})",
                    "free disk space or lower weights.keep; earlier versions are as they were",
                ) from error  # fmt: skip

    def _publish_locked(
        self, version: int, raw: Mapping[str, Any], contents: Mapping[str, bytes], keep_existing: bool
    ) -> None:
        entries = [entry for entry, _ in raw.values()]
        planned = plan_parts(entries)
        if len(planned) > 1:
            contents = {**contents, "model.safetensors.index.json": index_json(planned)}
        older = [v for v in self.versions() if v < version]
        described = Manifest(
            policy=self.policy, version=version, parent=older[-1] if older else -1, tensors=tuple(entries), parts=(),
            files=tuple(FileEntry(name, len(data), checksum(data)) for name, data in contents.items()),
        )  # fmt: skip
        if version in self.versions() and self._is_whole(version):
            if not self.manifest(version).same_content(described):
                if not keep_existing:
                    raise WeightError(
                        f"{self.policy} version", version, "already exists with other content",
                        "publish the next version, or resume from the newest checkpoint",
                    )  # fmt: skip
                self.num_kept_existing += 1
            return
        building = self._temporary(version)
        building.mkdir()
        try:
            buffers = {name: view for name, (_, view) in raw.items()}
            for file in described.files:
                self._place_file(building, file, contents[file.name], older)
            parts = tuple(write_part(building, name, group, buffers, sync=self.durable) for name, group in planned)
            manifest = msgspec.structs.replace(described, parts=parts)
            write_file(building / MANIFEST, [memoryview(msgspec.json.encode(manifest))], sync=self.durable)
            if self.durable:
                sync_directory(building)
            os.rename(building, self.directory / str(version))
        except BaseException:
            shutil.rmtree(building, ignore_errors=True)
            raise
        if self.durable:
            sync_directory(self.directory)

    def _is_whole(self, version: int) -> bool:
        """False for what a power cut left of `version`; it is then moved out of the way."""
        directory = self.directory / str(version)
        try:
            manifest = self.manifest(version)
            sizes = [(p.name, p.nbytes) for p in manifest.parts] + [(f.name, f.nbytes) for f in manifest.files]
            whole = all((directory / name).stat().st_size == nbytes for name, nbytes in sizes)
        except (WeightError, FileNotFoundError):
            whole = False
        if not whole:
            os.rename(directory, self._temporary(version))
        return whole

    def _temporary(self, version: int) -> Path:
        return self.directory / f".tmp-{version}-{uuid.uuid4().hex[:12]}"

    def _place_file(self, building: Path, file: FileEntry, content: bytes, older: list[int]) -> None:
        """Files hardly ever change, so an equal one of the version before becomes a second name, not a second copy."""
        if older:
            previous = self.directory / str(older[-1]) / file.name
            with contextlib.suppress(OSError):
                if previous.read_bytes() == content:
                    os.link(previous, building / file.name)
                    return
        write_file(building / file.name, [memoryview(content)], sync=self.durable)

    def _retire(self) -> None:
        versions = self.versions()
        if not self.keep or len(versions) <= self.keep:
            return
        gone: list[Path] = []
        with contextlib.suppress(BlockingIOError), retiring(self.directory) as read_now:
            for version in versions[: -self.keep]:
                if version not in read_now and version not in self._pinned:
                    gone.append(self._temporary(version))
                    os.rename(self.directory / str(version), gone[-1])
        for directory in gone:
            shutil.rmtree(directory, ignore_errors=True)

    def _sweep(self) -> None:
        """Remove what a publisher that died left behind. Only under the lock, so nobody is building it."""
        for name in os.listdir(self.directory):
            if name.startswith(".tmp-"):
                shutil.rmtree(self.directory / name, ignore_errors=True)

    @contextlib.contextmanager
    def _locked(self) -> Iterator[None]:
        """The publishers' lock: it dies with its process. flock has no deadline of its own, hence the polling."""
        with self._thread_lock:
            try:
                (self.directory / ".readers").mkdir(parents=True, exist_ok=True)
                fd = os.open(self.directory / ".lock", os.O_RDWR | os.O_CREAT, 0o644)
            except OSError as error:
                raise WeightError(
                    "weights directory", str(self.directory), f"cannot be written ({error.strerror})",
                    "choose another run.directory",
                ) from error  # fmt: skip
            try:
                deadline = time.monotonic() + _LOCK_WAIT_S
                while not _try_lock(fd):
                    if time.monotonic() > deadline:
                        raise WeightError(
                            "weights lock", str(self.directory / ".lock"), f"was held for {_LOCK_WAIT_S:.0f} s",
                            "another trainer of this policy is publishing or hangs; end it",
                        )  # fmt: skip
                    time.sleep(0.01)
                if not self.store_id:
                    (self.directory / ".id").write_text(uuid.uuid4().hex)
                yield
            finally:
                os.close(fd)

    def _map(self, version: int, name: str, nbytes: int) -> mmap.mmap | bytearray:
        path = self.directory / str(version) / name
        try:
            with open(path, "rb") as file:
                size = os.fstat(file.fileno()).st_size
                if size != nbytes:
                    raise TornPart(str(path), f"{size} bytes", f"must have {nbytes}", "the part is cut; fetch it again")
                return mmap.mmap(file.fileno(), size, access=mmap.ACCESS_COPY)
        except OSError as error:
            raise self._missing(version, error) from error

    def _missing(self, version: int, error: OSError) -> WeightError:
        versions = self.versions()
        have = f"it has {versions[0]} to {versions[-1]}" if versions else "it has none"
        return WeightError(
            f"{self.policy} version", version, f"is not in {self.directory} ({error.strerror})",
            f"{have}; fetch the newest, or raise weights.keep",
        )  # fmt: skip


def _try_lock(fd: int) -> bool:
    try:
        fcntl.flock(fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        return False
    return True


def _read_files(files: Iterable[Path]) -> dict[str, bytes]:
    contents: dict[str, bytes] = {}
    for path in files:
        if not is_file_name(path.name) or path.name == MANIFEST or path.name.endswith(".safetensors"):
            raise WeightError("file", str(path), "cannot lie beside weights", "give config and tokenizer files only")
        if path.name in contents:
            raise WeightError("file", str(path), "is given twice", "give each file name once")
        try:
            contents[path.name] = path.read_bytes()
        except OSError as error:
            raise WeightError(
                "file", str(path), f"cannot be read ({error.strerror})", "give an existing file"
            ) from error
    return contents
