"""Is all there that the parts need? Names what is missing, and begins summary.json. Needs nothing but Python."""

from __future__ import annotations

import argparse
import importlib.util
import json
import platform
import sys
import tomllib
from importlib import metadata
from pathlib import Path

ROOT = Path(__file__).parents[3]
MODULES = (  # as they are imported; pytest for the marked tests
    "httptools", "msgspec", "numpy", "prometheus_client", "pyarrow", "pydantic", "rich", "starlette", "typer",
    "urllib3", "uvicorn", "uvloop", "xxhash", "jinja2", "safetensors", "tokenizers", "torch", "transformers",
    "matplotlib", "pytest", "pytest_asyncio", "pytest_timeout",
)  # fmt: skip


def main() -> int:
    """0: go on. 2: it cannot run here."""
    parser = argparse.ArgumentParser()
    parser.add_argument("--out", type=Path, required=True)
    parser.add_argument("--dry-run", action="store_true")
    args = parser.parse_args()
    missing = [name for name in MODULES if importlib.util.find_spec(name) is None]
    if missing:
        needs = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
        wanted = [*needs["dependencies"], *needs["optional-dependencies"]["train"]]
        sys.stderr.write(f"not importable: {', '.join(missing)}\ninstall them, or give WHEELS=DIR: {wanted}\n")
        return 2
    import torch

    if not args.dry_run and not torch.cuda.is_available():
        sys.stderr.write("torch.cuda.is_available() is False: use a machine with a GPU, or --dry-run\n")
        return 2
    device = "cpu" if args.dry_run else torch.cuda.get_device_name()
    facts = {
        "dry_run": args.dry_run, "device": device, "python": platform.python_version(),
        "packages": {name: metadata.version(name) for name in ("torch", "transformers", "numpy")}, "parts": {},
    }  # fmt: skip
    (args.out / "summary.json").write_text(json.dumps(facts, indent=1) + "\n")
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
