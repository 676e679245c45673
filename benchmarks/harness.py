"""What every benchmark leaves: `results/<question>.json` and a table on the terminal.

A figure is a fact: a bound that does not hold is written down, it does not fail the run. `bench_check` lists them.
"""

from __future__ import annotations

import json
import os
import platform
import subprocess
import sys
from collections.abc import Iterable, Mapping
from dataclasses import asdict, dataclass, field
from importlib import metadata
from pathlib import Path
from typing import Any

from rich.console import Console
from rich.table import Table

from astraflow.config.env import child_environment

TOP = Path(__file__).parents[1]
RESULTS = Path(__file__).parent / "results"
PACKAGES = ("astraflow", "torch", "transformers", "numpy", "pyarrow", "trl")


@dataclass(frozen=True)
class Check:
    """One figure that must be reached."""

    name: str
    value: float | None  # None: not measured, which is not ok
    unit: str
    bound: str  # "<= 0.05", ">= 1.3"
    ok: bool

    @classmethod
    def at_most(cls, name: str, value: float | None, bound: float, unit: str = "") -> Check:
        """`value <= bound`."""
        return cls(name, value, unit, f"<= {bound:g}", value is not None and value <= bound)

    @classmethod
    def at_least(cls, name: str, value: float | None, bound: float, unit: str = "") -> Check:
        """`value >= bound`."""
        return cls(name, value, unit, f">= {bound:g}", value is not None and value >= bound)


@dataclass
class Result:
    """The answer to one question; `question` names the file."""

    question: str
    settings: Mapping[str, Any]
    rows: list[dict[str, Any]] = field(default_factory=list)
    checks: list[Check] = field(default_factory=list)

    def write(self, folder: Path = RESULTS) -> Path:
        """Save as `<question>.json` in `folder`."""
        folder.mkdir(parents=True, exist_ok=True)
        path = folder / f"{self.question}.json"
        text = json.dumps({
            "commit": commit(), "machine": machine(), "settings": dict(self.settings), "rows": self.rows,
            "checks": [asdict(check) for check in self.checks],
        }, indent=1)  # fmt: skip
        path.write_text(text + "\n")
        return path

    def show(self) -> None:
        """Print rows, those of the same columns together, and checks as tables."""
        console = Console(width=None if os.isatty(1) else 160)
        alike: dict[tuple[str, ...], list[dict[str, Any]]] = {}
        for row in self.rows:
            alike.setdefault(tuple(_columns(row)), []).append(row)
        for rows in alike.values():
            console.print(table(self.question, rows))
        if self.checks:
            console.print(table("checks", [asdict(check) for check in self.checks]))


def run_side(
    module: str, *words: str, python: str = sys.executable, threads: int = 1, limit_s: float = 600.0,
    env: Mapping[str, str] | None = None,
) -> list[dict[str, Any]]:  # fmt: skip
    """The JSON lines of a side, `python -m module` in a process of its own; the last is its result."""
    environment = child_environment(None, {"OMP_NUM_THREADS": str(threads), **(env or {})})
    done = subprocess.run(
        [python, "-m", module, *words], capture_output=True, text=True, env=environment, cwd=TOP, timeout=limit_s,
    )  # fmt: skip
    if done.returncode:
        raise SystemExit(f"{module} {' '.join(words)} ended with exit code {done.returncode}:\n{done.stderr[-3000:]}")
    return [json.loads(line) for line in done.stdout.splitlines() if line.startswith('{"')]


def table(title: str, rows: Iterable[Mapping[str, Any]]) -> Table:
    """A table over the union of the rows' keys, in order of appearance; nested values are in the file only."""
    rows = list(rows)
    columns = list(dict.fromkeys(key for row in rows for key in _columns(row)))
    shown = Table(title=title)
    for column in columns:
        shown.add_column(column, overflow="fold")
    for row in rows:
        shown.add_row(*[_cell(row.get(column)) for column in columns])
    return shown


def _columns(row: Mapping[str, Any]) -> list[str]:
    return [key for key, value in row.items() if not isinstance(value, dict)]


def _cell(value: Any) -> str:
    if value is None:
        return "-"
    if isinstance(value, bool):
        return "yes" if value else "NO"
    return f"{value:.4g}" if isinstance(value, float) else str(value)


def commit() -> str:
    """The commit that was measured; `-dirty` when tracked files differ from it, `unknown` outside a checkout."""
    top = Path(__file__).parent
    head = subprocess.run(["git", "rev-parse", "--short=12", "HEAD"], cwd=top, capture_output=True, text=True)
    if head.returncode:
        return "unknown"
    changed = subprocess.run(
        ["git", "status", "--porcelain", "--untracked-files=no", "--", ".", ":!benchmarks/results"],
        cwd=top.parent, capture_output=True, text=True,
    )  # fmt: skip
    return head.stdout.strip() + ("-dirty" if changed.stdout.strip() else "")


def machine() -> dict[str, Any]:
    """What the figures depend on."""
    versions = {}
    for name in PACKAGES:
        try:
            versions[name] = metadata.version(name)
        except metadata.PackageNotFoundError:
            continue
    return {
        "system": f"{platform.system()} {platform.machine()}", "cpu": _cpu(), "cores": os.cpu_count(),
        "memory_gb": round(os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES") / 2**30, 1),
        "python": platform.python_version(), "packages": versions,
    }  # fmt: skip


def _cpu() -> str:
    try:
        lines = Path("/proc/cpuinfo").read_text().splitlines()
    except OSError:
        return platform.processor()
    names = [line.partition(":")[2].strip() for line in lines if line.startswith("model name")]
    return names[0] if names else platform.processor()
