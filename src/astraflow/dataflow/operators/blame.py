"""Code of a user may raise anything, and leave behind what raises later: the error names the operator all the same."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

from astraflow.errors import DataflowError

MEND = "mend the operator"


@contextmanager
def blamed(name: str, rule: str) -> Iterator[None]:
    """Around a hook and around every look at what it left. `name`: of the operator, begins the error's `thing`.

    Raises: DataflowError: whatever was raised; one that the operator raised keeps its rule and its fix.
    """
    try:
        yield
    except DataflowError as error:
        if error.thing.startswith(name):
            raise
        raise DataflowError(f"{name} {error.thing}", error.value, error.rule, error.fix) from error
    except (Exception, SystemExit) as error:  # SystemExit would end the service without a name
        raise DataflowError(name, f"{type(error).__name__}: {error}", rule, MEND) from error
