"""What a workflow returned, as an Outcome; what it raised, as the episode's error. Never a silent zero."""

from __future__ import annotations

import inspect
import math
from collections.abc import Iterable, Mapping

from astraflow.errors import EpisodeError
from astraflow.types import Outcome

MAX_ERROR_CHARS = 2000
_FLOAT32_MAX = 3.4e38
_FIX = "return a float, a dict of floats by policy, an Outcome, or None for unscored"
_CONTROLS = {code: f"\\x{code:02x}" for code in (*range(32), *range(127, 160)) if chr(code) not in "\t\n"}


def outcome_of(value: object) -> Outcome:
    """A float, a dict of floats by policy, an Outcome, or None (unscored), as an Outcome of plain floats.

    Raises: EpisodeError: "reward: ..." for anything else, and for NaN and infinities.
    """
    given = value if isinstance(value, Outcome) else Outcome(reward=value)  # type: ignore[arg-type]
    reward: float | dict[str, float | None] | None
    if isinstance(given.reward, Mapping):
        reward = {plain_text(policy): _number(str(policy), number) for policy, number in given.reward.items()}
    else:
        reward = _number("reward", given.reward)
    per_call: dict[str, list[float]] | list[float]
    if isinstance(given.rewards_per_call, list | tuple):
        per_call = [_known("rewards_per_call", number) for number in given.rewards_per_call]
    else:
        per_call = {plain_text(p): _per_call(p, numbers) for p, numbers in _items("rewards_per_call", given)}
    metrics = {plain_text(name): _known(f"metrics[{name!r}]", metric) for name, metric in _items("metrics", given)}
    return Outcome(reward=reward, rewards_per_call=per_call, metrics=metrics)


def plain_text(value: object, limit: int = MAX_ERROR_CHARS) -> str:
    """`str(value)`, cut, as text that every encoding and terminal can carry; also of objects whose `str` fails."""
    try:
        text = str(value)
    except Exception as error:  # user code
        text = f"(its text cannot be read: {type(error).__name__})"
    text = text if len(text) <= limit else text[: limit - 3] + "..."
    return text.translate(_CONTROLS).encode("utf-8", "backslashreplace").decode()


def _items(field: str, given: Outcome) -> Iterable[tuple[object, object]]:
    table = given.metrics if field == "metrics" else given.rewards_per_call
    if not isinstance(table, Mapping):
        other = " or a list" if field == "rewards_per_call" else ""
        raise EpisodeError(f"reward: {field}={table!r:.80} is not a dict{other}")
    return table.items()


def _per_call(policy: object, rewards: object) -> list[float]:
    name = f"rewards_per_call[{policy!r}]"
    if not isinstance(rewards, Iterable):
        raise EpisodeError(f"reward: {name}={rewards!r:.80} must be a list of numbers, one per call")
    return [_known(name, reward) for reward in rewards]


def _known(name: str, value: object) -> float:
    number = _number(name, value)
    if number is None:
        raise EpisodeError(f"reward: {name}=None must be a finite number")
    return number


def _number(name: str, value: object) -> float | None:
    if value is None:
        return None
    try:  # numpy scalars and the like
        number = float(value.__float__())  # type: ignore[attr-defined]
    except (AttributeError, TypeError, ValueError):
        what = "" if name == "reward" else f"{name}="
        raise EpisodeError(
            f"reward: {what}{type(value).__name__} {value!r:.80} is not a number; "
            + ("await it" if inspect.isawaitable(value) else _FIX)
        ) from None
    except OverflowError:
        number = math.inf
    if not abs(number) <= _FLOAT32_MAX:  # also NaN; rewards travel as float32
        raise EpisodeError(f"reward: {name}={number} is not finite in 32 bits; return None for unscored")
    return number
