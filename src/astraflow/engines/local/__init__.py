"""The embedded engine: `engine` is the thread, `decoder` the computation, `rows`, `slots` and `shelf` its state."""

from astraflow.engines.local.engine import LocalEngine

__all__ = ["LocalEngine"]
