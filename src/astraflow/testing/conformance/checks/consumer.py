"""What the requests of a consumer must be like: a look at the exchanges of one act, in their order."""

from __future__ import annotations

from collections.abc import Sequence

from astraflow.testing.conformance.findings import Findings
from astraflow.testing.conformance.tap import Exchange, in_order

REQUESTS = ("consume", "consumer_ack")
_MOST_PER_S = 20.0  # requests that get nothing


class ConsumerCheck:
    """Puts what it reads into `findings`. `starts`: when its process was started, each time."""

    def __init__(self, findings: Findings, starts: Sequence[float]) -> None:
        self._hold, self._starts = findings.hold, list(starts)
        self._given: dict[str, int] = {}  # policy -> highest `next` of a reply, since the process was started
        self._lost: Exchange | None = None  # an acknowledgement whose answer never arrived
        self._empty: list[float] = []

    def read(self, exchanges: Sequence[Exchange]) -> None:
        """All exchanges of an act."""
        for x, answer in in_order([x for x in exchanges if x.name in REQUESTS or x.status == 401]):
            while self._starts and self._starts[0] < x.at:
                self._starts.pop(0)
                self._given.clear()
                self._lost = None
            if answer:
                self._hold("token", x.status != 401, f"{x.name} came without the token of the run")
                self._answered(x)
            else:
                self._asked(x)
        if self._empty:
            rate = (len(self._empty) - 1) / max(0.5, self._empty[-1] - self._empty[0])
            self._hold("read.wait", rate <= _MOST_PER_S, f"it asked {rate:.0f} times a second and got nothing")

    def _asked(self, x: Exchange) -> None:
        if self._lost is not None:
            same = x.name == self._lost.name and x.body == self._lost.body
            self._hold("ack.repeat", same, f"the answer to {self._lost.body} was lost; {x.name} of {x.body} came next")
            self._lost = None
        if x.name == "consumer_ack":
            policy, position = x.body.get("policy", ""), int(x.body.get("position", -1))
            given = self._given.get(policy, 0)
            self._hold(
                "ack.given", position <= given, f"it acknowledges {position}; it was given what is before {given}"
            )

    def _answered(self, x: Exchange) -> None:
        known = x.status != 404
        self._hold("read.policy", known, f"{x.name} was answered 404: {x.reply.get('error')}")
        if x.name == "consumer_ack":
            self._hold("ack.given", x.status != 409, f"an acknowledgement was answered 409: {x.reply.get('error')}")
            if x.fault == "lost":
                self._lost = x
        elif x.done:
            policy = x.reply["policy"]
            self._given[policy] = max(self._given.get(policy, 0), int(x.reply["next"]))
            if not x.reply["group_ids"] and not x.reply.get("finished"):
                self._empty.append(x.answered)
