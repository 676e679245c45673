"""The operators of one policy as one: filters and shapes of its list, its estimator of advantages, then its weights."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

from astraflow.config.operators import operators_of_policy
from astraflow.config.schema import PolicySection
from astraflow.contracts import Operator
from astraflow.dataflow.operators.blame import blamed
from astraflow.dataflow.operators.checks import check_batch, check_result, fixed_parts
from astraflow.dataflow.operators.states import give_back, state_of
from astraflow.errors import ConfigError
from astraflow.types import Group, Tokens

ReadTokens = Callable[[], list[list[Tokens]]]


class Chain:
    """Runs the hooks of a policy's operators in order; one that breaks its contract is an error, not a drop.

    Args: where: "policies.<name>"; operators: as listed, phases rise; advantage: of phase credit.
    """

    def __init__(self, where: str, operators: Sequence[Operator], advantage: Operator) -> None:
        early = [o for o in operators if o.phase in ("filter", "shape")]
        self.operators = (*early, advantage, *operators[len(early) :])
        for operator in operators:
            operator.estimator = advantage
        self._names = [f"{where} {type(o).__name__}" for o in self.operators]
        named = zip(self._names, self.operators, strict=True)
        self._on_batch = [(n, o) for n, o in named if type(o).on_batch is not Operator.on_batch]

    def on_group(self, group: Group, read_tokens: ReadTokens | None = None) -> Group | str:
        """The group with advantages, or the reason for which it is dropped.

        Args: read_tokens: gives `Group.tokens`; called when the first operator needs them.
        Raises: DataflowError: an operator failed or gave something that its contract does not allow.
        """
        tokens: list[list[Tokens]] | None = None
        for name, operator in zip(self._names, self.operators, strict=True):
            if operator.needs_tokens and tokens is None and read_tokens is not None:
                tokens = read_tokens()
            group.tokens = tokens if operator.needs_tokens else None
            before = fixed_parts(group)
            with blamed(name, f"failed on group {group.group_id}"):
                result: object = operator.on_group(group)
            with blamed(name, f"left something in group {before.group_id} that it must not"):
                checked = check_result(operator, name, before, result)
            if isinstance(checked, str):
                return checked
            group = checked
        group.tokens = None
        return group

    def on_batch(self, groups: Sequence[Group], step: int) -> None:
        """Let operators change advantages, call_advantages and weights of the groups of the batch of `step`.

        `groups`: see `machine.serving.forming.credited`. Raises: DataflowError: as `on_group`.
        """
        for name, operator in self._on_batch:
            before = [fixed_parts(g) for g in groups]
            given = tuple(groups)
            with blamed(name, f"failed on the batch of step {step}"):
                operator.on_batch(given, step)
            for group, fixed in zip(given, before, strict=True):
                where = f"{name} group {fixed.group_id}"
                with blamed(where, "was left with something that on_batch must not leave"):
                    check_batch(where, fixed, group)

    @property
    def works_on_batches(self) -> bool:
        """Some operator has an `on_batch`."""
        return bool(self._on_batch)

    def state_dicts(self) -> list[dict[str, Any]]:
        """States of all operators in the order in which they run. Raises: DataflowError: one is not JSON."""
        return [state_of(name, operator) for name, operator in zip(self._names, self.operators, strict=True)]

    def load_state_dicts(self, states: list[dict[str, Any]]) -> None:
        """Inverse of `state_dicts`; an empty list leaves fresh operators as they are. Raises: DataflowError."""
        if states:
            for name, operator, state in zip(self._names, self.operators, states, strict=True):
                give_back(name, operator, state)


def chain_of(name: str, policy: PolicySection) -> Chain:
    """The chain that the run file asks for.

    Raises: ConfigError: everything that is wrong with the policy's operators. DataflowError: their states.
    """
    made = operators_of_policy(name, policy)
    if made.problems or made.advantage is None:
        raise ConfigError(f"policies.{name}", made.problems)
    chain = Chain(f"policies.{name}", [x.operator for x in made.listed], made.advantage.operator)
    chain.load_state_dicts(chain.state_dicts())  # what a restart would fail on is found at the first start
    return chain
