"""`python -m astraflow.testing.environments.again`: plays what standard input says, and tells the digest."""

from __future__ import annotations

import asyncio
import sys
from typing import Any

import msgspec

from astraflow.environments.worlds import Worlds
from astraflow.testing.environments.playing import Played, digest, replay


class Asked(msgspec.Struct):
    """What is to be played again."""

    spec: str | dict[str, Any]
    sides: int
    played: list[Played]


def main() -> None:
    """Reads one `Asked` as JSON."""
    asked = msgspec.json.decode(sys.stdin.buffer.read(), type=Asked)
    worlds = Worlds(asked.spec, sides=asked.sides)
    steps = asyncio.run(replay(worlds, asked.played))
    worlds.close()
    sys.stdout.write(digest(steps))


if __name__ == "__main__":
    main()
