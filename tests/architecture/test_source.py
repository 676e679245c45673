"""Sizes, and what the source must not hold; layers are held by `make lint`."""

from __future__ import annotations

import ast
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
SRC = ROOT / "src" / "astraflow"
FILES = sorted(SRC.rglob("*.py"))
TREES = {path: ast.parse(path.read_text()) for path in FILES}

MAX_FILE_LINES = 400
MAX_FUNCTION_LINES = 60
MAX_MODULES = 9
ALLOWED_CALLS = {
    "src/astraflow/weights/files/leases.py time.sleep",
    "src/astraflow/weights/store.py time.sleep",
    # these two poll a lock or a file of another process, with a deadline; the next is called by a thread that died; the
    # others are programs inside boxes
    "src/astraflow/observe/process.py os._exit",
    "src/astraflow/sandbox/inside/candidate.py exec",
    "src/astraflow/sandbox/inside/candidate.py os._exit",
    "src/astraflow/sandbox/inside/driver.py exec",
    "src/astraflow/sandbox/inside/driver.py os._exit",
}
OTHER_ENVIRONMENTS = {"src/astraflow/workflows/foreign/inside.py"}  # a program of a Python that has no astraflow
TORCH_FREE = ["cli.app", "launch.supervisor", "dataflow.service", "sources.calculator", "workflows.tool_use", "swarm"]


def named(path: Path) -> str:
    return str(path.relative_to(ROOT))


def calls(tree: ast.AST) -> Iterator[tuple[str, int]]:
    for node in ast.walk(tree):
        if isinstance(node, ast.Call):
            yield ast.unparse(node.func), node.lineno


def test_no_file_is_too_long() -> None:
    sizes = {named(p): len(p.read_text().splitlines()) for p in FILES}
    assert not {name: size for name, size in sizes.items() if size > MAX_FILE_LINES}


def test_no_function_is_too_long() -> None:
    long = {}
    for path, tree in TREES.items():
        for node in ast.walk(tree):
            if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef):
                size = (node.end_lineno or node.lineno) - node.lineno + 1
                if size > MAX_FUNCTION_LINES:
                    long[f"{named(path)}:{node.name}"] = size
    assert not long


def test_no_folder_holds_too_many_modules() -> None:
    folders = {p.parent for p in FILES}
    counts = {named(f): len([p for p in f.glob("*.py") if not p.name.startswith("__")]) for f in folders}
    assert not {name: count for name, count in counts.items() if count > MAX_MODULES and name != "src/astraflow"}


def test_no_module_has_an_empty_name() -> None:
    assert not [
        named(p) for p in FILES if p.stem in {"utils", "util", "helpers", "helper", "manager", "misc", "common"}
    ]


def test_nothing_is_printed_evaluated_unpickled_or_slept() -> None:
    refused = {
        "print",
        "eval",
        "exec",
        "breakpoint",
        "pickle.loads",
        "pickle.load",
        "time.sleep",
        "os._exit",
        "os.system",
    }
    found = {f"{named(p)} {name}" for p, tree in TREES.items() for name, _ in calls(tree) if name in refused}
    assert found <= ALLOWED_CALLS


def test_pickle_is_never_imported() -> None:
    found = []
    for path, tree in TREES.items():
        for node in ast.walk(tree):
            names = [a.name for a in node.names] if isinstance(node, ast.Import) else []
            names += [node.module or ""] if isinstance(node, ast.ImportFrom) else []
            found += [named(path) for n in names if n.split(".")[0] in {"pickle", "cloudpickle", "dill", "marshal"}]
    assert not found


def test_only_config_reads_the_environment() -> None:
    found = [
        f"{named(path)}:{node.lineno}"
        for path, tree in TREES.items()
        if path.parent.name != "config" and named(path) not in OTHER_ENVIRONMENTS
        for node in ast.walk(tree)
        if isinstance(node, ast.Attribute) and ast.unparse(node) in {"os.environ", "os.getenv", "os.environb"}
    ]
    assert not found


def test_every_module_says_what_it_is_for() -> None:
    assert not [named(p) for p, tree in TREES.items() if p.name != "__init__.py" and not ast.get_docstring(tree)]


@pytest.mark.parametrize("module", TORCH_FREE)
def test_torch_does_not_load_where_it_must_not(module: str) -> None:
    heavy = ("torch", "transformers", "vllm", "ray", "matplotlib")
    code = f"import sys, astraflow.{module}; sys.exit(' '.join(m for m in {heavy} if m in sys.modules) or 0)"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=60, check=False)
    assert done.returncode == 0, done.stderr


def test_help_loads_no_heavy_package() -> None:
    code = (
        "import sys; from astraflow.cli.app import main; code = main(['--help'])\n"
        "heavy = ('torch', 'transformers', 'pyarrow', 'numpy', 'uvicorn', 'matplotlib')\n"
        "sys.exit(code or ' '.join(m for m in heavy if m in sys.modules) or 0)"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=60, check=False)
    assert done.returncode == 0, done.stderr
