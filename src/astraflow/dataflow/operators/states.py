"""States of operators on their way into a snapshot and back: JSON, or an error that names the operator."""

from __future__ import annotations

import json
from collections.abc import Mapping
from typing import Any

import msgspec
import numpy as np

from astraflow.contracts import Operator
from astraflow.dataflow.operators.blame import blamed
from astraflow.errors import DataflowError

_FIX = "give texts, finite numbers, booleans, None, lists and dicts of them"


def state_of(name: str, operator: Operator) -> dict[str, Any]:
    """The state as a snapshot will give it back; numbers and arrays of numpy have become plain ones.

    Raises: DataflowError: `state_dict` failed, or gave what JSON cannot say.
    """
    with blamed(name, "failed in state_dict"):
        state = operator.state_dict()
    with blamed(name, f"state_dict must be JSON: {_FIX}"):
        encoded = _encode(state)
        if b"null" in encoded:  # a None, or a number that is not finite
            json.dumps(msgspec.to_builtins(state, enc_hook=_plain), allow_nan=False)
        plain = msgspec.json.decode(encoded)
    if not isinstance(plain, dict):
        raise DataflowError(name, state, "state_dict must give a dict", _FIX)
    return plain


def give_back(name: str, operator: Operator, state: Mapping[str, Any]) -> None:
    """Raises: DataflowError: `load_state_dict` failed."""
    with blamed(name, "failed in load_state_dict"):
        operator.load_state_dict(state)


def _plain(value: Any) -> Any:
    if isinstance(value, np.generic | np.ndarray):
        return value.tolist()
    if isinstance(value, set | frozenset | tuple):
        return list(value)
    raise TypeError(f"{type(value).__name__} {value!r} is not JSON")


_encode = msgspec.json.Encoder(enc_hook=_plain).encode
