"""`python -m astraflow` is `astraflow`."""

from __future__ import annotations

import sys

from astraflow.cli.app import main

if __name__ == "__main__":
    sys.exit(main())
