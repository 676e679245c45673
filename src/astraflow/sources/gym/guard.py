"""Scorers of reasoning-gym 0.1 pass what a model wrote to `eval`, also by way of sympy. Here they may not."""

from __future__ import annotations

import ast
import builtins
import importlib
import re
import sys
from typing import Any

_LITERALS = ("algorithmic.string_insertion", "algorithmic.spiral_matrix", "algorithmic.binary_matrix", "games.n_queens")
_EXPRESSIONS = ("games.puzzle24", "games.countdown")  # that took the function by its name; others use sympy's
_ALLOWED = re.compile(r"[\w\s+\-*/^().,=|]*", re.ASCII)
_HARMLESS = {"abs", "max", "min", "pow", "round"}
_BUILTINS = set(dir(builtins)) - _HARMLESS
_REFUSED = ("os.", "subprocess.", "socket.", "ctypes.", "shutil.", "pty.", "webbrowser.", "sqlite3.")
_HARMLESS_EVENTS = {"os.listdir", "os.scandir", "os.walk"}


def guard() -> None:
    """Of this process, for good. Their `eval` reads literals only, sympy reads arithmetic only; whatever gets by cannot
    write, connect or start anything."""
    import sympy
    import sympy.parsing.sympy_parser as parser

    plain = parser.parse_expr

    def parse_expr(text: str, *args: Any, **options: Any) -> Any:
        check(text)
        return plain(text, *args, **options)

    for name in _LITERALS:
        importlib.import_module(f"reasoning_gym.{name}").__dict__["eval"] = ast.literal_eval
    for name in _EXPRESSIONS:
        importlib.import_module(f"reasoning_gym.{name}").__dict__["parse_expr"] = parse_expr
    sympy.__dict__["parse_expr"] = parser.__dict__["parse_expr"] = parse_expr
    sys.addaudithook(_watch)


def check(text: str) -> None:
    """Raises: ValueError: it is more than arithmetic."""
    names = set(re.findall(r"[A-Za-z_]\w*", text))
    if not _ALLOWED.fullmatch(text) or "__" in text or names & _BUILTINS or re.search(r"[\w)]\s*\.\s*[A-Za-z_]", text):
        raise ValueError("the answer is no arithmetic expression")


def _watch(event: str, arguments: tuple[Any, ...]) -> None:
    writes = event == "open" and (set(str(arguments[1] or "")) & set("wax+") or int(arguments[2] or 0) & 3)
    if writes or (event.startswith(_REFUSED) and event not in _HARMLESS_EVENTS):
        raise PermissionError(f"an answer may not cause {event}")
