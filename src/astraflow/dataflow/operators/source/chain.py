"""The operators of one source in the order of the run file: all must let a task through."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, Literal, NamedTuple

from astraflow.config.operators import operators_of_source
from astraflow.config.schema import SourceSection
from astraflow.contracts import Operator
from astraflow.dataflow.operators.blame import MEND, blamed
from astraflow.dataflow.operators.states import give_back, state_of
from astraflow.errors import ConfigError, DataflowError
from astraflow.types import Group, SourceView, Task

_ADVICE: Mapping[str, str] = {
    "filter_solved": "the tasks are solved (or, with `below`, out of reach): add others, raise `above` or `revisit`, "
    "or make the run shorter",
    "greso": "groups of these tasks have equal rewards: add others, or raise `floor_easy` and `floor_hard`",
    "curriculum": "no task belongs to the pools that are open: compare `levels` or `edges` with the field `by`",
    "throttle": "no batch can fill up under its limit: raise it, or lower batch.groups",
}


class Verdict(NamedTuple):
    """What the operators say of one task."""

    answer: Literal["admit", "wait", "skip"]
    operator: str = ""  # the `type` of the operator that said so; "": all agreed
    certain: bool = False  # skipped with probability 1, not by chance


class SourceChain:
    """Asks operators; one that breaks its contract is an error that names it. Empty (falsy): every task is admitted."""

    def __init__(self, where: str, operators: Sequence[tuple[str, Operator]]) -> None:
        self._where, self._operators = where, list(operators)

    def __len__(self) -> int:
        return len(self._operators)

    def admit(self, task: Task, view: SourceView, draw: float) -> Verdict:
        """Probabilities multiply, any "wait" waits. `draw`: uniform in [0, 1), decides.

        Skipped: the first operator at which the product of probabilities no longer exceeds `draw` is the one that said
        no, so that each operator is counted with its share.

        Raises: DataflowError: an operator failed or gave something that its contract does not allow.
        """
        product, refused = 1.0, ""
        for i, (name, operator) in enumerate(self._operators):
            answer = self._ask(i, name, operator, task, view)
            if answer == "wait":
                return Verdict("wait", name)
            product *= answer
            if not refused and draw >= product:
                refused = name
        return Verdict("skip", refused, product == 0.0) if refused else Verdict("admit")

    def on_result(self, group: Group) -> None:
        """Every operator learns of the group.

        Raises: DataflowError: an operator failed.
        """
        for i, (name, operator) in enumerate(self._operators):
            with blamed(self._place(i, name), f"failed on the result of group {group.group_id}"):
                operator.on_result(group)

    def advice(self, name: str) -> str:
        """What to do when operator `name` lets nothing through."""
        return _ADVICE.get(name, f"loosen its options, or take it out of {self._where}.operators")

    def state_dicts(self) -> list[dict[str, Any]]:
        """States of all operators. Raises: DataflowError: one is not JSON."""
        return [state_of(self._place(i, name), operator) for i, (name, operator) in enumerate(self._operators)]

    def load_state_dicts(self, states: list[dict[str, Any]]) -> None:
        """Inverse of `state_dicts`; an empty list leaves fresh operators as they are. Raises: DataflowError."""
        if states:
            for i, ((name, operator), state) in enumerate(zip(self._operators, states, strict=True)):
                give_back(self._place(i, name), operator, state)

    def _ask(self, i: int, name: str, operator: Operator, task: Task, view: SourceView) -> float | Literal["wait"]:
        where = self._place(i, name)
        with blamed(where, f"failed on task {task.group_id}"):
            answer = operator.admit(task, view)
            if isinstance(answer, str) and answer == "wait":
                return "wait"
            if isinstance(answer, bool) or not isinstance(answer, float | int) or not 0.0 <= answer <= 1.0:
                rule = f'must be a probability from 0 to 1 or "wait" (task {task.group_id})'
                raise DataflowError(where, answer, rule, MEND)
            return float(answer)

    def _place(self, i: int, name: str) -> str:
        return f"{self._where}.operators.{i} {name}"


def source_chain_of(name: str, source: SourceSection) -> SourceChain:
    """The chain that the run file asks for.

    Raises: ConfigError: everything that is wrong with the source's operators. DataflowError: their states.
    """
    made = operators_of_source(name, source)
    if made.problems:
        raise ConfigError(f"sources.{name}", made.problems)
    chain = SourceChain(f"sources.{name}", [(x.type, x.operator) for x in made.listed])
    chain.load_state_dicts(chain.state_dicts())  # what a restart would fail on is found at the first start
    return chain
