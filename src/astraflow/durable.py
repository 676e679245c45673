"""What must be there after a power failure."""

from __future__ import annotations

import os
from pathlib import Path


def sync_path(path: Path) -> None:
    """The content of a file, or the names in a directory, are on the disk. Raises: OSError: they are not."""
    descriptor = os.open(path, os.O_RDONLY | os.O_CLOEXEC)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)
