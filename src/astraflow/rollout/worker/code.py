"""The version of the code that a worker plays: what it imported of yours, read once and remembered.

Yours is every Python source file that belongs neither to Python, nor to an installed package, nor to AstraFlow. Such
files are never taken from byte code, which would hide an edit within the same second; and a worker that is given
sources runs those, whatever the files say by now.
"""

from __future__ import annotations

import hashlib
import os
import sys
import sysconfig
from collections.abc import Iterable, Sequence
from importlib.abc import MetaPathFinder
from importlib.machinery import ModuleSpec, SourceFileLoader
from importlib.util import spec_from_file_location
from pathlib import Path
from types import CodeType, ModuleType

import msgspec

import astraflow

_LIBRARIES = {sysconfig.get_path(name) for name in ("stdlib", "platstdlib", "purelib", "platlib")}
_NOT_YOURS = (*(f"{place}{os.sep}" for place in _LIBRARIES), f"{Path(astraflow.__file__).parent}{os.sep}")


class SourceFile(msgspec.Struct, frozen=True, array_like=True):
    """One imported file as it was read."""

    module: str
    path: str
    text: bytes
    stamp: tuple[int, int]  # of the file: time of its change in ns, bytes


class Code(MetaPathFinder):
    """Watches the imports of this process. `files`: module -> what was read of yours."""

    def __init__(self, given: Iterable[SourceFile] = ()) -> None:
        """`given`: run these in place of the files."""
        self._given = {file.module: file for file in given}
        self.files: dict[str, SourceFile] = {}
        self._version = (0, "")

    def begin(self) -> None:
        """From now on."""
        sys.meta_path.insert(0, self)

    def end(self) -> None:
        """Look away again."""
        sys.meta_path.remove(self)

    @property
    def version(self) -> str:
        """A hash of names and contents of `files`; where nothing is yours, that of AstraFlow."""
        if self._version[0] != len(self.files):
            self._version = (len(self.files), version_of(self.files.values()))
        return self._version[1] or f"astraflow-{astraflow.__version__}"

    def find_spec(
        self, name: str, path: Sequence[str] | None = None, target: ModuleType | None = None
    ) -> ModuleSpec | None:
        """As the other finders, but with a loader that remembers what it reads."""
        if (given := self._given.get(name)) is not None:
            return spec_from_file_location(name, given.path, loader=_Loader(self, name, given.path, given))
        for finder in sys.meta_path:
            spec = None if finder is self else finder.find_spec(name, path, target)
            if spec is not None:
                if type(spec.loader) is SourceFileLoader and _is_yours(spec.loader.path):
                    spec.loader = _Loader(self, name, spec.loader.path)
                return spec
        return None


class _Loader(SourceFileLoader):
    def __init__(self, code: Code, name: str, path: str, given: SourceFile | None = None) -> None:
        super().__init__(name, path)
        self._code, self._given = code, given

    def get_code(self, fullname: str) -> CodeType | None:
        file = self._given or _read(fullname, self.path)
        self._code.files[fullname] = file  # also when it cannot be compiled: its next edit may mend it
        compiled: CodeType = self.source_to_code(file.text, self.path)
        return compiled


def version_of(files: Iterable[SourceFile]) -> str:
    """The same wherever the files lie; "": there are none."""
    digest, ordered = hashlib.sha256(), sorted(files, key=lambda f: f.module)
    for file in ordered:
        digest.update(f"{file.module}\0{len(file.text)}\0".encode() + file.text)
    return digest.hexdigest()[:12] if ordered else ""


def stamp_of(path: str) -> tuple[int, int]:
    """Changes when the file does; (0, 0): there is none."""
    try:
        found = os.stat(path)
    except OSError:
        return 0, 0
    return found.st_mtime_ns, found.st_size


def _read(module: str, path: str) -> SourceFile:
    with open(path, "rb") as file:
        found = os.fstat(file.fileno())
        return SourceFile(module, path, file.read(), (found.st_mtime_ns, found.st_size))


def _is_yours(path: str) -> bool:
    path = os.path.abspath(path)
    parts = path.split(os.sep)
    return not path.startswith(_NOT_YOURS) and "site-packages" not in parts and "dist-packages" not in parts
