"""Code of a user may raise anything, and leave behind what raises later: the error names the operator all the same."""

from __future__ import annotations

from astraflow.errors import DataflowError

MEND = "mend the operator"


class blamed:
    """Around a hook and around every look at what it left. `name`: of the operator, begins the error's `thing`.

    Raises: DataflowError: whatever was raised; one that the operator raised keeps its rule and its fix.
    """

    __slots__ = ("_name", "_rule")

    def __init__(self, name: str, rule: str) -> None:
        self._name, self._rule = name, rule

    def __enter__(self) -> None:
        pass

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, trace: object) -> None:
        match error:
            case None:
                return
            case DataflowError() if not error.thing.startswith(self._name):
                raise DataflowError(f"{self._name} {error.thing}", error.value, error.rule, error.fix) from error
            case DataflowError():
                return
            case Exception() | SystemExit():  # SystemExit would end the service without a name
                raise DataflowError(self._name, f"{type(error).__name__}: {error}", self._rule, MEND) from error
