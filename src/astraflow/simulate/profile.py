"""What a simulation must know beside the run file: costs of engines, trainers, versions and the network, and episodes.

A TOML (or JSON) file; `[engine]`, `[trainer]` and `[weights]` hold for all policies, `[policies.<name>.engine]` and so
on for one. Seconds are those of one core that does nothing else.
"""

from __future__ import annotations

import json
import tomllib
from collections.abc import Mapping
from pathlib import Path
from typing import Annotated, Any

import msgspec

from astraflow.config.schema import RunConfig
from astraflow.errors import ConfigError

Amount = Annotated[float, msgspec.Meta(ge=0)]
Share = Annotated[float, msgspec.Meta(ge=0, le=1)]
_OF_A_POLICY = ("engine", "trainer", "weights")


class EngineCost(msgspec.Struct, frozen=True, forbid_unknown_fields=True, kw_only=True):
    """A decode step of B rows takes step_s + B * row_s. Prompts are read between steps."""

    step_s: Amount = 0.0
    row_s: Amount = 0.0
    prefill_token_s: Amount = 0.0
    swap_s: Amount = 0.0  # other weights come into force: nothing is decoded
    gather_s: Amount = 0.0  # at most waited for a burst of calls to pass
    rows: Annotated[int, msgspec.Meta(ge=0)] = 0  # decoded at once; 0: all that the node plays


class TrainerCost(msgspec.Struct, frozen=True, forbid_unknown_fields=True, kw_only=True):
    """A step on T sampled tokens takes step_s + T * token_s, everything from the batch to its acknowledgement."""

    step_s: Amount = 0.0
    token_s: Amount = 0.0


class VersionCost(msgspec.Struct, frozen=True, forbid_unknown_fields=True, kw_only=True):
    """`delta_bytes` 0: versions travel whole. publish_s: from the end of a step until readers can have it, beside the
    next step. apply_s: on the node, beside decoding."""

    full_bytes: Amount = 0.0
    delta_bytes: Amount = 0.0
    publish_s: Amount = 0.0
    apply_s: Amount = 0.0


class PolicyCost(msgspec.Struct, frozen=True, forbid_unknown_fields=True, kw_only=True):
    """`kept`: share of its complete groups that operators let through. `groups`: of a batch; 0: by the run file."""

    engine: EngineCost = EngineCost()
    trainer: TrainerCost = TrainerCost()
    weights: VersionCost = VersionCost()
    kept: Share = 1.0
    groups: Annotated[int, msgspec.Meta(ge=0)] = 0


class Call(msgspec.Struct, frozen=True, forbid_unknown_fields=True, kw_only=True):
    """`tokens` (sampled) and `delay_s` (of tools, before it) are means; `spread` and `delay_spread` are sigma of a
    log-normal distribution, 0: always the mean. `prompt_tokens`: those that are computed. `chance`: it is made."""

    policy: str
    tokens: Annotated[float, msgspec.Meta(gt=0)]
    spread: Amount = 0.0
    prompt_tokens: Amount = 0.0
    delay_s: Amount = 0.0
    delay_spread: Amount = 0.0
    chance: Share = 1.0


class EpisodeShape(msgspec.Struct, frozen=True, forbid_unknown_fields=True, kw_only=True):
    """The calls of a round in order. `rounds` 1.6: one, and a second in six of ten episodes."""

    calls: Annotated[list[Call], msgspec.Meta(min_length=1)]
    rounds: Annotated[float, msgspec.Meta(ge=1)] = 1.0


class Network(msgspec.Struct, frozen=True, forbid_unknown_fields=True, kw_only=True):
    """Between nodes and the rest. `mbit`: of each direction, shared by all nodes; 0: no limit. `trips`: of a fetch."""

    rtt_s: Amount = 0.0
    mbit: Amount = 0.0
    trips: Annotated[int, msgspec.Meta(ge=1)] = 2
    message_bytes: Amount = 400.0
    episode_bytes: Amount = 600.0
    token_bytes: Amount = 13.0


class Serving(msgspec.Struct, frozen=True, forbid_unknown_fields=True, kw_only=True):
    """What a node and the data service do. `cores`: of the one machine that all share; 0: each process has its own."""

    cores: Amount = 0.0
    call_s: Amount = 0.0  # of the node's event loop
    worker_s: Amount = 0.0  # of a worker process, each call
    request_s: Amount = 0.0  # of the data service, each lease or commit
    commit_apart_s: Amount = 0.15
    patience_s: Amount = 0.5
    start_s: Amount = 0.0  # until nodes may join


class Profile(msgspec.Struct, frozen=True, forbid_unknown_fields=True, kw_only=True):
    """All of it."""

    episode: EpisodeShape
    policies: dict[str, PolicyCost]
    network: Network = Network()
    serving: Serving = Serving()

    def cost(self, policy: str) -> PolicyCost:
        """Of one that is not named: nothing costs anything."""
        return self.policies.get(policy, PolicyCost())


def read_raw(path: Path) -> dict[str, Any]:
    """A profile file as nested tables. Raises: ConfigError."""
    try:
        text = path.read_text(encoding="utf-8")
    except (OSError, UnicodeDecodeError) as error:
        raise ConfigError(str(path), [f"cannot be read ({error}); give the path of a profile"]) from error
    try:
        raw: dict[str, Any] = json.loads(text) if path.suffix == ".json" else tomllib.loads(text)
    except ValueError as error:
        raise ConfigError(str(path), [f"is no valid TOML or JSON: {error}"]) from error
    # what `astraflow simulate --json` wrote holds a profile beside the prediction
    return dict(raw["profile"]) if isinstance(raw.get("profile"), dict) else raw


def merged(base: Mapping[str, Any], over: Mapping[str, Any]) -> dict[str, Any]:
    """Nested tables, `over` first."""
    both = dict(base)
    for key, value in over.items():
        known = both.get(key)
        both[key] = merged(known, value) if isinstance(known, Mapping) and isinstance(value, Mapping) else value
    return both


def profile_of(raw: Mapping[str, Any], config: RunConfig, origin: str) -> Profile:
    """Checked against the run file.

    Raises: ConfigError: a key that is not known, a value out of its range, a policy that the run file does not have, a
    trained policy that no call is of.
    """
    tables = dict(raw)
    common = {name: tables.pop(name) for name in _OF_A_POLICY if name in tables}
    given = dict(tables.get("policies") or {})
    tables["policies"] = {
        name: merged(common, given.get(name, {})) for name in dict.fromkeys([*config.policies, *given])
    }
    tables.setdefault("episode", {"calls": []})
    try:
        profile = msgspec.convert(tables, Profile)
    except msgspec.ValidationError as error:
        raise ConfigError(origin, [f"{error}; see docs/scaling.md for what a profile holds"]) from None
    called = {call.policy for call in profile.episode.calls if call.chance > 0}
    known = ", ".join(config.policies)
    problems = [
        f"{where}={name!r} is not a policy of the run file; use one of {known}"
        for where, names in (("episode.calls.policy", called), ("policies", profile.policies))
        for name in sorted(set(names) - set(config.policies))
    ]
    problems += [
        f"episode.calls has no call of {name!r}, which is trained; add one, or freeze the policy"
        for name in config.trained if name not in called
    ]  # fmt: skip
    problems += [
        f"policies.{name}.kept=0 lets no group through; give a share above 0"
        for name in config.trained if profile.cost(name).kept == 0
    ]  # fmt: skip
    if problems:
        raise ConfigError(origin, problems)
    return profile
