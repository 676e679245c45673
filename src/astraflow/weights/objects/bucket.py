"""A folder of an object store, by any fsspec URL: whole small objects, ranges of large ones, nothing that needs a list
from those who only read.

Credentials come from the environment, as the library of the scheme finds them (for s3: AWS_*, profiles, roles), never
from the URL. fsspec caches no listings here: what another process wrote is seen at once.
"""

from __future__ import annotations

import asyncio
import logging
import uuid
from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit

from astraflow.config.secrets import has_credentials, masked_url
from astraflow.errors import WeightError
from astraflow.weights.fetch.pace import MAX_DOCUMENT_BYTES

log = logging.getLogger(__name__)
_WHOLE = frozenset({"s3", "s3a", "gs", "gcs", "az", "abfs", "abfss", "adl", "oss", "memory"})
"""Schemes under which a put is seen whole or not at all, and folders are only names."""

_EXTRAS = {"s3": "astraflow[s3]", "s3a": "astraflow[s3]"}
_LIMITS = {"connect_timeout": 10, "read_timeout": 60, "retries": {"max_attempts": 2}}
"""Of botocore. Its own would hold a reader for minutes at a store that does not answer; we try again ourselves."""

ANSWER_S = 45.0
"""From a request to the last byte of its answer, whatever the library does meanwhile: s3fs tries five times."""

_UPLOAD_BYTES_PER_S = 1000.0
"""A file may take longer by its size at this rate."""


class MissingObject(WeightError):
    """There is no such object, or (for those who may not list, some stores do not tell) we may not read it."""


def package_problem(url: str) -> str:
    """What this machine lacks for the scheme of `url`, as the end of a sentence; empty: nothing."""
    try:
        import fsspec
    except ImportError:
        return f"needs fsspec; pip install fsspec, or '{_EXTRAS['s3']}' for s3"
    scheme = urlsplit(url).scheme
    try:
        fsspec.get_filesystem_class(scheme)
    except ImportError as error:
        extra = _EXTRAS.get(scheme)
        return f"needs a package ({error}); " + (f"pip install '{extra}'" if extra else "install that package")
    except ValueError:
        return f"has a scheme ({scheme!r}) that fsspec does not know; use s3://, gs://, abfs:// or file://"
    return ""


class Bucket:
    """The objects below `url`. Thread-safe, as far as the library of the scheme is."""

    def __init__(self, url: str) -> None:
        """Asks the store for nothing. Raises: WeightError: a package is missing, or the URL is of no store."""
        self.url = masked_url(url).rstrip("/")
        if has_credentials(url):
            raise WeightError("url", self.url, "must not hold credentials", "give them by the environment")
        if problem := package_problem(url):
            rule, _, fix = problem.partition("; ")
            raise WeightError("weights.url", self.url, rule, fix)
        import fsspec

        self._scheme = urlsplit(url).scheme
        options: dict[str, Any] = {"use_listings_cache": False}
        if self._scheme in ("file", "local"):
            options["auto_mkdir"] = True
        if self._scheme in ("s3", "s3a") and "config_kwargs" not in fsspec.config.conf.get("s3", {}):
            options["config_kwargs"] = _LIMITS
        with self._named("open"):
            self._fs, root = fsspec.core.url_to_fs(url, **options)
        self._root = root.rstrip("/")
        self._in_time = {"timeout": ANSWER_S} if self._fs.async_impl else {}  # fsspec cancels what takes longer

    def get(self, name: str) -> bytes:
        """A small object. Raises: MissingObject. WeightError: the store fails."""
        with self._named("read", name):
            # With a range s3fs asks for the object only, else also for its size, which may need permission to list.
            content: bytes = self._fs.cat_file(self._path(name), start=0, end=MAX_DOCUMENT_BYTES, **self._in_time)
        return content

    def ranges(self, name: str, spans: Sequence[tuple[int, int]]) -> list[bytes | WeightError]:
        """For each span (first byte, end) of one object its bytes, or why they did not come. At once, where the
        library can."""
        try:
            with self._named("read", name):
                found = self._together(name, spans) if self._in_time else self._in_turn(name, spans)
        except WeightError as error:
            return [error]
        return [self._failed("read", name, f) if isinstance(f, Exception) else bytes(f) for f in found]

    def _in_turn(self, name: str, spans: Sequence[tuple[int, int]]) -> Any:
        starts, ends = [start for start, _ in spans], [end for _, end in spans]
        return self._fs.cat_ranges([self._path(name)] * len(spans), starts, ends, on_error="return")

    def _together(self, name: str, spans: Sequence[tuple[int, int]]) -> Any:
        """Not by `cat_ranges`: with a time limit that keeps nothing of what came, and its requests go on after it."""
        from fsspec.asyn import sync

        async def each() -> list[Any]:
            reads = [self._fs._cat_file(self._path(name), start=start, end=end) for start, end in spans]
            return await asyncio.gather(*(asyncio.wait_for(r, ANSWER_S) for r in reads), return_exceptions=True)

        return sync(self._fs.loop, each)

    def put(self, name: str, content: bytes) -> None:
        """A small object, seen whole or not at all. Raises: WeightError: the store fails."""
        with self._named("write", name):
            if self._scheme in _WHOLE:
                self._fs.pipe_file(self._path(name), content, **self._in_time)
                return
            self._make_parent(name)
            temporary = self._path(f".tmp-{uuid.uuid4().hex[:12]}")
            self._fs.pipe_file(temporary, content, **self._in_time)
            self._fs.mv(temporary, self._path(name), **self._in_time)

    def put_file(self, name: str, file: Path) -> None:
        """A file as an object, in pieces where it is large. Raises: WeightError: the store fails."""
        with self._named("write", name):
            self._make_parent(name)
            in_time = {"timeout": ANSWER_S + file.stat().st_size / _UPLOAD_BYTES_PER_S} if self._in_time else {}
            self._fs.put_file(str(file), self._path(name), **in_time)

    def copy(self, name: str, to: str) -> None:
        """An object under a second name, without its bytes coming here where the store can. Raises: WeightError."""
        with self._named("copy", name):
            self._make_parent(to)
            self._fs.cp_file(self._path(name), self._path(to), **self._in_time)

    def remove(self, name: str) -> None:
        """One object, or none if it is gone. Raises: WeightError: the store fails."""
        with suppress(MissingObject), self._named("delete", name):
            self._fs.rm_file(self._path(name), **self._in_time)

    def remove_folder(self, name: str) -> None:
        """All objects below a name. Raises: WeightError: the store fails."""
        with suppress(MissingObject), self._named("delete", name):
            self._fs.rm(self._path(name), recursive=True, **self._in_time)

    def names(self, folder: str = "") -> list[str]:
        """Names of all objects below a folder, relative to this one. Raises: WeightError: the store fails."""
        found: Iterable[str] = ()
        with self._named("list", folder), suppress(FileNotFoundError):
            self._fs.invalidate_cache()
            found = self._fs.find(self._path(folder), **self._in_time)
        return sorted(path.removeprefix(f"{self._root}/") for path in found)

    def _path(self, name: str) -> str:
        return f"{self._root}/{name}" if name else self._root

    def _make_parent(self, name: str) -> None:
        if self._scheme not in _WHOLE:
            self._fs.makedirs(self._path(name).rpartition("/")[0], exist_ok=True, **self._in_time)

    @contextmanager
    def _named(self, what: str, name: str = "") -> Iterator[None]:
        """What a library of the scheme raises, which is what it likes, as an error of ours."""
        try:
            yield
        except Exception as error:
            raise self._failed(what, name, error) from error

    def _failed(self, what: str, name: str, error: Exception) -> WeightError:
        where = f"{self.url}/{name}" if name else self.url
        said = f"{type(error).__name__}: {error}" if str(error) else type(error).__name__
        if isinstance(error, TimeoutError) and self._in_time:
            said = f"{said}; {ANSWER_S:g} s are allowed"
        if isinstance(error, FileNotFoundError | NotADirectoryError) and what in ("read", "delete"):
            return MissingObject("object", where, "is not there", "fetch the newest version")
        if isinstance(error, PermissionError) and what == "read":
            return MissingObject("object", where, f"is not there or not ours to read ({said})", "check the credentials")
        return WeightError(
            "object", where, f"could not be {_PAST[what]} ({said})", "check the store and the credentials"
        )


_PAST = {"open": "opened", "read": "read", "write": "written", "copy": "copied", "delete": "deleted", "list": "listed"}
