"""What a user can name is in the docs, and what the docs link to exists."""

from __future__ import annotations

import re
from pathlib import Path

import pytest
import typer.main

from astraflow.cli.app import app
from astraflow.observe.metrics import METRICS

ROOT = Path(__file__).parents[2]
PAGES = sorted([ROOT / "README.md", ROOT / "CONTRIBUTING.md", *(ROOT / "docs").rglob("*.md")])


def test_every_verb_is_documented() -> None:
    text = (ROOT / "docs" / "operations.md").read_text()
    verbs = typer.main.get_command(app).commands  # type: ignore[attr-defined]
    assert not [verb for verb in verbs if f"`astraflow {verb}" not in text]


def test_every_verb_says_what_it_does() -> None:
    commands = typer.main.get_command(app).commands.values()  # type: ignore[attr-defined]
    assert not [c.name for c in commands if not c.help or len(c.help) < 20]


def test_every_metric_is_documented_with_its_kind() -> None:
    text = (ROOT / "docs" / "operations.md").read_text()
    rows = [f"| `{m.name}` | {m.kind}, {m.unit} | {', '.join(m.labels) or '-'} | {m.help} |" for m in METRICS]
    missing = [row for row in rows if row not in text]
    assert not missing, "docs/operations.md lacks:\n" + "\n".join(missing)
    known = {m.name for m in METRICS}
    assert not [name for name in re.findall(r"^\| `(astraflow_\w+)`", text, re.MULTILINE) if name not in known]


def test_every_command_of_the_makefile_is_real_where_the_docs_name_it() -> None:
    targets = set(re.findall(r"^([a-z0-9-]+):", (ROOT / "Makefile").read_text(), re.MULTILINE))
    named = {name for page in PAGES for name in re.findall(r"`?make ([a-z0-9-]+)`?\b", page.read_text())}
    named = {n for n in named if any(f"`make {n}" in p.read_text() or f"\nmake {n}" in p.read_text() for p in PAGES)}
    assert named and not named - targets


def test_every_dependency_has_its_reason() -> None:
    import tomllib

    project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    text = (ROOT / "docs" / "dependencies.md").read_text()
    extras = project["optional-dependencies"]
    wanted = [re.split(r"[\[<>=;, ]", d)[0] for d in project["dependencies"]]
    assert not [name for name in wanted if name not in text]
    assert not [name for name in extras if f"`{name}`" not in text]


def test_every_page_and_every_room_has_its_place_in_the_overview() -> None:
    index, readme = (ROOT / "docs" / "index.md").read_text(), (ROOT / "README.md").read_text()
    assert not [p.name for p in (ROOT / "docs").glob("*.md") if p.name != "index.md" and f"]({p.name})" not in index]
    rooms = [p.parent.name for p in (ROOT / "src" / "astraflow").glob("*/__init__.py")]
    assert rooms and not [room for room in rooms if f"{room}/`" not in readme]


@pytest.mark.parametrize("page", PAGES, ids=lambda p: str(p.relative_to(ROOT)))
def test_links_lead_somewhere(page: Path) -> None:
    links = [t.partition("#") for t in re.findall(r"\]\(([^)\s]+)\)", page.read_text()) if not t.startswith("http")]
    assert not [target for target, _, _ in links if not (page.parent / target).exists()]
    headed = [(page.parent / target if target else page, anchor) for target, _, anchor in links if anchor]
    assert not [(str(p), anchor) for p, anchor in headed if p.suffix == ".md" and anchor not in _anchors(p)]


def _anchors(page: Path) -> set[str]:
    """As GitHub makes them of headings."""
    headings = re.findall(r"^#+ (.+)$", re.sub(r"```.*?```", "", page.read_text(), flags=re.DOTALL), re.MULTILINE)
    return {re.sub(r"[^\w -]", "", heading.lower()).replace(" ", "-") for heading in headings}
