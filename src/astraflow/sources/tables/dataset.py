"""The source `dataset`."""

from __future__ import annotations

import logging
from collections.abc import Mapping
from pathlib import Path
from typing import Any, Literal

from astraflow.config.env import user_path
from astraflow.errors import SourceError
from astraflow.sources.splits import check_row, digest
from astraflow.sources.tables.fields import ANSWER_FORMS, AnswerForm, answer_of, picked
from astraflow.sources.tables.reading import Table, files_of, read

log = logging.getLogger(__name__)
WHERE = "sources.dataset"
_KINDS = (str, float, bool, list, dict)


class DatasetSource:
    """Rows of a data set on this machine: a file (JSON Lines, JSON, Parquet, Arrow; the first two also packed), or a
    directory of them, as Hugging Face's `datasets` saves one or a repository of data holds it.

    All rows are read and checked when the source is made.
    """

    def __init__(
        self, *, path: str, split: str = "", fields: Mapping[str, str] | None = None, answer: AnswerForm = "text",
        id: str = "", duplicates: Literal["refuse", "first"] = "refuse", max_chars: int = 0,
        overlong: Literal["refuse", "drop"] = "refuse", limit: int = 0,
    ) -> None:  # fmt: skip
        r"""`split`: of a directory. `fields`: field of the task -> where a row has it, as `prompt.0.content`; none: the
        keys of the rows. `answer`: how the field `answer` is written: as text or number; in the last `\boxed{}` of a
        solution; behind the last `####` (the whole is then the field `solution`). `id`: where a row has what is its
        own; `duplicates`: what to do where two have the same. `max_chars`: of the field `question`; 0: any;
        `overlong`: what to do with longer ones. `limit`: first rows only; 0: all."""
        self._fields, self._answer, self._id = dict(fields or {}), answer, id
        self._max_chars, self._duplicates, self._overlong = max_chars, duplicates, overlong
        self._check_options(limit)
        self._tables = self._read(files_of(user_path(path), split), limit)
        self._rows = self._checked(limit)
        if not self._rows:
            raise SourceError("path", path, "holds no row", "give a data set that holds some")

    def __len__(self) -> int:
        return len(self._rows)

    def row(self, index: int) -> dict[str, Any]:
        check_row(WHERE, index, len(self._rows))
        place, number = self._rows[index]
        table = self._tables[place]
        return self._mapped(table[number], f"{table.path} row {number}")

    def fingerprint(self) -> str:
        options = sorted(self._fields.items()), self._answer, self._id, self._max_chars
        return digest("dataset", 1, [table.fingerprint for table in self._tables], len(self._rows), options)

    def _check_options(self, limit: int) -> None:
        for name, value, known in (
            ("answer", self._answer, ANSWER_FORMS), ("duplicates", self._duplicates, ("refuse", "first")),
            ("overlong", self._overlong, ("refuse", "drop")),
        ):  # fmt: skip
            if value not in known:
                raise SourceError(f"{WHERE}.{name}", value, f"must be one of {', '.join(known)}", f"use '{known[0]}'")
        for name, size in (("limit", limit), ("max_chars", self._max_chars)):
            if size < 0:
                raise SourceError(f"{WHERE}.{name}", size, "must be >= 0", "use 0 for all")

    def _read(self, paths: list[Path], limit: int) -> list[Table]:
        wanted = {path for path in (*self._fields.values(), self._id) if path} if self._fields else set()
        columns = sorted(wanted | {path.partition(".")[0] for path in wanted})
        tables: list[Table] = []
        for path in paths:
            tables.append(read(path, columns))
            if limit and not self._id and self._overlong == "refuse" and sum(map(len, tables)) >= limit:
                break
        return tables

    def _checked(self, limit: int) -> list[tuple[int, int]]:
        """(table, row in it) of each row of the source."""
        chosen: list[tuple[int, int]] = []
        known: dict[str, str] = {}
        kinds: dict[str, tuple[type, str]] = {}
        left_out = {"overlong": 0, "duplicates": 0}
        for place, table in enumerate(self._tables):
            for number, row in enumerate(table):
                if limit and len(chosen) >= limit:
                    return chosen
                where = f"{table.path} row {number}"
                mapped = self._mapped(row, where)
                self._check_kinds(mapped, where, kinds)
                if self._is_overlong(mapped, where):
                    left_out["overlong"] += 1
                elif self._id and self._is_known(picked(row, self._id, where, "id"), where, known):
                    left_out["duplicates"] += 1
                else:
                    chosen.append((place, number))
        if left_out["overlong"] and not chosen:
            raise SourceError(
                "max_chars", self._max_chars, f"leaves out all {left_out['overlong']} rows of {self._tables[0].path}",
                "raise it, or leave it out",
            )  # fmt: skip
        if any(left_out.values()):
            log.info("%s: %d rows, left out: %s", self._tables[0].path, len(chosen), left_out)
        return chosen

    def _mapped(self, row: dict[str, Any], where: str) -> dict[str, Any]:
        if self._fields:
            made = {field: picked(row, path, where, field) for field, path in self._fields.items()}
        else:
            made = dict(row)
        if "answer" in made:
            whole = made["answer"]
            made["answer"] = answer_of(whole, self._answer, where, self._fields.get("answer", "answer"))
            if self._answer in ("boxed", "hashes"):
                made.setdefault("solution", whole)
        for field in self._fields or [name for name in ("question", "answer") if name in made]:
            if made[field] is None or (isinstance(made[field], str) and not made[field].strip()):
                path = self._fields.get(field, field)
                raise SourceError(f"{where}: {path}", made[field], "is empty", "fill it in or remove the row")
        return made

    def _check_kinds(self, mapped: dict[str, Any], where: str, kinds: dict[str, tuple[type, str]]) -> None:
        for field in ("question", "answer"):
            if kinds and (field in mapped) != (field in kinds):
                lacks = where if field in kinds else next(iter(kinds.values()))[1]
                raise SourceError(f"{lacks}: {field}", None, "is missing", "fill it in, or remove the row")
        for field in self._fields or mapped:
            value = mapped[field]
            if value is None:
                continue
            kind = float if type(value) is int else type(value)
            if kind not in _KINDS:
                raise SourceError(
                    f"{where}: {self._fields.get(field, field)}", str(value)[:80], f"is a {kind.__name__}",
                    "map only texts, numbers, lists and objects by `fields`",
                )  # fmt: skip
            first = kinds.setdefault(field, (kind, where))
            if first[0] is not kind:
                raise SourceError(
                    f"{where}: {self._fields.get(field, field)}", str(value)[:80],
                    f"is a {kind.__name__} where {first[1]} holds a {first[0].__name__}", "use one type for one field",
                )  # fmt: skip

    def _is_overlong(self, mapped: dict[str, Any], where: str) -> bool:
        size = len(str(mapped.get("question", "")))
        if not self._max_chars or size <= self._max_chars:
            return False
        if self._overlong == "refuse":
            raise SourceError(
                f"{where}: question", f"{size} characters", f"must be at most max_chars = {self._max_chars}",
                "raise it, shorten the row, or leave such rows out by overlong = 'drop'",
            )  # fmt: skip
        return True

    def _is_known(self, own: Any, where: str, known: dict[str, str]) -> bool:
        if own is None:
            raise SourceError(f"{where}: {self._id}", own, "is empty", "fill it in or remove the row")
        first = known.setdefault(str(own), where)
        if first is where:
            return False
        if self._duplicates == "refuse":
            raise SourceError(
                f"{where}: {self._id}", own, f"is that of {first} too",
                "remove one of them, or keep the first by duplicates = 'first'",
            )  # fmt: skip
        return True
