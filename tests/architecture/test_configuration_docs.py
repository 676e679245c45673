"""Every leaf of the run file is in docs/configuration.md with its default, and nothing else is."""

from __future__ import annotations

from pathlib import Path

from astraflow.config.rooms import ROOMS
from astraflow.config.schema import RunConfig

TEXT = (Path(__file__).parents[2] / "docs" / "configuration.md").read_text()


def test_every_setting_is_documented_with_its_default(settings: dict[str, str]) -> None:
    rows = [f"| `{where}` | {default} |" for where, default in settings.items()]
    missing = [row for row in rows if row not in TEXT]
    assert not missing, "docs/configuration.md lacks or has another default for:\n" + "\n".join(missing)


def test_no_setting_is_documented_that_does_not_exist(settings: dict[str, str]) -> None:
    rows = [line.split("`")[1] for line in TEXT.splitlines() if line.startswith("| `") and "." in line.split("`")[1]]
    named = {row for row in rows if row.split(".")[0].split("[")[0] in RunConfig.model_fields}
    assert named and not named - set(settings)


def test_every_name_of_every_room_is_documented() -> None:
    assert not [f"{room}: {name}" for room, table in ROOMS.items() for name in table if f"`{name}`" not in TEXT]
