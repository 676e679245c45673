"""`python -m astraflow` is `astraflow`."""

from __future__ import annotations

import sys


def main() -> int:
    """As `astraflow.cli.app.main`; Ctrl-C while the first modules load is no traceback either."""
    try:
        from astraflow.observe.process import seldom_collected

        with seldom_collected():
            from astraflow.cli import app

            return app.main()
    except KeyboardInterrupt:
        return 130


if __name__ == "__main__":
    sys.exit(main())
