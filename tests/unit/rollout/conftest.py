"""Makes `rollout_scripts` importable, here and in the worker processes that the tests start."""

from __future__ import annotations

import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parent))
