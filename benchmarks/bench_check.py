"""Lists the figures of `results/*.json` that fall short of their bound. `make bench-check`.

    python -m benchmarks.bench_check [--strict]

Exits 0 whatever it finds, or 1 with --strict when a figure falls short.
"""

from __future__ import annotations

import argparse
import json

from rich.console import Console

from benchmarks.harness import RESULTS, table


def main() -> int:
    """Print what falls short."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--strict", action="store_true", help="exit 1 when a figure falls short")
    strict = parser.parse_args().strict
    console, short, total = Console(), [], 0
    for path in sorted(RESULTS.glob("*.json")):
        result = json.loads(path.read_text())
        total += len(result["checks"])
        short += [
            {"question": path.stem, "commit": result["commit"], **check}
            for check in result["checks"]
            if not check["ok"]
        ]
    if short:
        console.print(table("falls short", short))
    console.print(f"{total - len(short)} of {total} figures hold")
    return 1 if short and strict else 0


if __name__ == "__main__":
    raise SystemExit(main())
