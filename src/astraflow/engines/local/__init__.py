"""The embedded engine: `engine` is the thread, `decoder` what runs, `compute` the model, `caches` its memory."""

from astraflow.engines.local.engine import LocalEngine

__all__ = ["LocalEngine"]
