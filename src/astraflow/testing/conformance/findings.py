"""What was found about each rule: kept, broken (and how), or not seen."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field

_MOST = 3  # problems told of one rule


@dataclass
class Findings:
    """Rules by name, and what was seen of them."""

    rules: Mapping[str, str]  # name -> the sentence of docs/protocol.md
    kept: dict[str, int] = field(default_factory=dict)  # how often it was seen
    broken: dict[str, list[str]] = field(default_factory=dict)

    def hold(self, rule: str, ok: bool, problem: str) -> None:
        """The rule was put to the test; `problem` is told when not `ok`."""
        assert rule in self.rules, rule
        if ok:
            self.kept[rule] = self.kept.get(rule, 0) + 1
        elif problem not in self.broken.setdefault(rule, []):
            self.broken[rule].append(problem)

    @property
    def ok(self) -> bool:
        """No rule was seen broken."""
        return not self.broken

    def add(self, other: Findings) -> None:
        """Those of another act."""
        for rule, count in other.kept.items():
            self.kept[rule] = self.kept.get(rule, 0) + count
        for rule, problems in other.broken.items():
            self.broken.setdefault(rule, []).extend(problems)

    def result(self, rule: str) -> str:
        """ "broken", "kept" or "not seen"."""
        return "broken" if rule in self.broken else "kept" if rule in self.kept else "not seen"

    def table(self) -> str:
        """One line per rule, and below a broken one what the protocol says and what was seen."""
        width = max(map(len, self.rules))
        lines = []
        for rule, sentence in self.rules.items():
            lines.append(f"{rule:<{width}}  {self.result(rule)}")
            if rule in self.broken:
                lines.append(f"    the protocol says: {sentence}")
                lines += [f"    seen: {problem}" for problem in self.broken[rule][:_MOST]]
        counts = [sum(self.result(rule) == word for rule in self.rules) for word in ("kept", "broken", "not seen")]
        lines.append("{} rules kept, {} broken, {} not seen".format(*counts))
        return "\n".join(lines)
