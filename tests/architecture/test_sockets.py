"""Every port of ours is opened at one place, by an app that refuses what it does not know, on loopback unless told."""

from __future__ import annotations

import re
from pathlib import Path

SRC = Path(__file__).parents[2] / "src" / "astraflow"
OPENS = re.compile(
    r"\.listen\(\d|\.bind\(\(|create_server\(|asyncio\.start_(unix_)?server\(|socketserver|http\.server|\.connect_ex\("
)
DOOR = "wire/app.py"  # bind(); tests/unit/wire/test_http_refusals.py sends pickles there
PROBES = {"engines/served/process.py", "launch/checks.py"}  # look whether a port is free, and close it again


def test_ports_are_opened_at_one_place() -> None:
    modules = sorted(str(path.relative_to(SRC)) for path in SRC.rglob("*.py") if "testing/" not in str(path))
    found = {module for module in modules if OPENS.search((SRC / module).read_text())}
    assert found - PROBES == {DOOR}
    assert not [module for module in PROBES if ".listen(" in (SRC / module).read_text()]


def test_apps_that_answer_are_those_that_are_known_to_refuse() -> None:
    """The tests of each send it what it must not take."""
    apps = {DOOR: "wire", "rollout/gateway/app.py": "rollout/gateway", "rollout/swarm/door.py": "rollout/swarm"}
    made = {str(p.relative_to(SRC)) for p in SRC.rglob("*.py") if re.search(r"\bStarlette\(", p.read_text())}
    assert {place for place in made if not place.startswith("testing/")} == set(apps)
    tests = SRC.parents[1] / "tests" / "unit"
    for folder in apps.values():
        assert any("pickle" in path.read_text() for path in (tests / folder).glob("test_*.py")), folder


def test_hosts_are_loopback_unless_told_otherwise(settings: dict[str, str]) -> None:
    hosts = {where: default for where, default in settings.items() if where.endswith("host")}
    assert len(hosts) >= 3 and set(hosts.values()) == {'`"127.0.0.1"`'}
    written = [
        (path, host) for path in SRC.rglob("*.py") for host in re.findall(r'host: [^=\n]*= "([^"]*)"', path.read_text())
    ]
    assert len(written) >= 3
    assert not [(path, host) for path, host in written if host not in ("127.0.0.1", "localhost", "")]
