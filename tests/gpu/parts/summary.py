"""Adds what a part left to summary.json: `summary.py --out DIR PART EXIT_CODE SECONDS [--dry-run]`."""

from __future__ import annotations

import argparse
import json
from pathlib import Path


def main() -> None:
    """A part without a record did not end, or not well."""
    parser = argparse.ArgumentParser()
    parser.add_argument("--out", type=Path, required=True)
    parser.add_argument("--dry-run", action="store_true")
    parser.add_argument("part")
    parser.add_argument("exit_code", type=int)
    parser.add_argument("seconds", type=int)
    args = parser.parse_args()
    path, record = args.out / "summary.json", args.out / f"{args.part}.json"
    summary = json.loads(path.read_text())
    facts = json.loads(record.read_text()) if record.is_file() else {}
    good = args.exit_code == 0 and facts.get("ok") is True
    summary["parts"][args.part] = {"seconds": args.seconds, **facts, "exit_code": args.exit_code, "ok": good}
    path.write_text(json.dumps(summary, indent=1) + "\n")


if __name__ == "__main__":
    main()
