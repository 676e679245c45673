"""Sees when the files of a workflow were edited. Polls: it works on every file system, and few files are watched."""

from __future__ import annotations

import os
from collections.abc import Iterable

from astraflow.rollout.loop import in_thread
from astraflow.rollout.worker.code import SourceFile, stamp_of

Stamp = tuple[int, int]


class Edits:
    """Files and the stamps with which they were loaded. An edit counts once it has stayed as it is for two polls: an
    editor may be in the middle of writing."""

    def __init__(self) -> None:
        self._loaded: dict[str, Stamp] = {}
        self._texts: dict[str, bytes] = {}
        self._before: dict[str, Stamp] = {}  # at the last poll

    def add(self, files: Iterable[SourceFile]) -> None:
        """These were loaded."""
        for file in files:
            self._loaded[file.path], self._texts[file.path] = file.stamp, file.text

    def replace(self, files: Iterable[SourceFile]) -> None:
        """These are all that is loaded now."""
        self._loaded.clear()
        self._texts.clear()
        self.add(files)

    def refused(self, files: Iterable[SourceFile]) -> None:
        """These were tried in vain. What is missing may be a new file, so their folders are watched, too."""
        self.add(files)
        for folder in {os.path.dirname(path) for path in self._loaded}:
            self._loaded.setdefault(folder, stamp_of(folder))

    async def found(self) -> bool:
        """Poll: an edit is there that was not found before."""
        paths = list(self._loaded)
        now = await in_thread(lambda: {path: stamp_of(path) for path in paths}, "edits")
        edited = [path for path in paths if now[path] != self._loaded.get(path)]
        settled = all(now[path] == self._before.get(path) for path in edited)
        self._before = now
        if not edited or not settled:
            return False
        self._loaded.update({path: now[path] for path in edited})
        texts = await in_thread(lambda: {path: _text(path) for path in edited}, "edits")
        return any(text is None or text != self._texts.get(path) for path, text in texts.items())


def _text(path: str) -> bytes | None:
    """None: a folder, or no file any more."""
    try:
        with open(path, "rb") as file:
            return file.read()
    except OSError:
        return None
