"""What the requests of a trainer must be like: a look at the exchanges of one act, in their order."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any
from urllib.parse import unquote, urlsplit

from astraflow.errors import WeightError, WireError
from astraflow.testing.conformance.findings import Findings
from astraflow.testing.conformance.tap import Exchange, in_order
from astraflow.weights.manifest import MANIFEST, read_manifest
from astraflow.wire.client import HttpClient

REQUESTS = ("resume", "trainer_heartbeat", "batch", "ack", "checkpoint")
INTRUDER = "conformance-intruder"
_MOST_PER_S = 20.0  # requests that get nothing


_UNDER_WAY = 2  # versions that may be acknowledged and not visible yet


class StoreLook:
    """Looks into the weight stores of a policy whenever a request says that a version is there."""

    def __init__(self, policy: str, token: str) -> None:
        self._policy, self._token = policy, token
        self._urls: tuple[str, ...] = ()

    def __call__(self, x: Exchange) -> None:
        """Notes `seen` (version -> the manifest's bytes) of those versions that must be visible now, newest first, up
        to the first one that is."""
        if x.name not in ("resume", "ack", "checkpoint"):
            return
        if x.name == "resume":
            self._urls = tuple(x.body.get("urls", ()))
        version = x.body.get("version", -1)
        # Two acknowledged steps may still be under way. Versions become visible in order and the store need not keep
        # more than it must, so of a checkpoint that is reported late a later version may be what is left.
        under_way = x.name == "ack"
        candidates = range(version, max(-1, version - 1 - _UNDER_WAY), -1) if under_way else range(version, version + 8)
        for candidate in candidates:
            for url in self._urls:
                if (payload := self._manifest(url, candidate)) is not None:
                    x.noted = {"seen": {candidate: payload}, "urls": self._urls}
                    return
        x.noted = {"seen": {}, "urls": self._urls}

    def _manifest(self, url: str, version: int) -> bytes | None:
        parts = urlsplit(url)
        try:
            if parts.scheme == "file":
                payload = (Path(unquote(parts.path)) / str(version) / MANIFEST).read_bytes()
            else:
                client = HttpClient(f"{parts.scheme}://{parts.netloc}", self._token, give_up_s=1.0)
                payload = bytes(client.get_bytes("GET", f"{parts.path.rstrip('/')}/{version}/{MANIFEST}")[1])
                client.close()
            read_manifest(payload, self._policy, version, url)
        except (OSError, WireError, WeightError):
            return None
        return payload


class TrainerCheck:
    """Puts what it reads into `findings`. `steps`: of the run."""

    def __init__(self, findings: Findings, run_id: str, steps: int) -> None:
        self._hold, self._run_id, self._steps = findings.hold, run_id, steps
        self._id = ""  # of the trainer now
        self._ids: set[str] = set()
        self._version = -1  # acknowledged or resumed at, and it knows
        self._latest, self._covered = 0, 0  # as the service knows
        self._taken: dict[str, Any] | None = None  # header of the batch that it holds
        self._shares: list[tuple[int, int]] = []  # rank and number of ranks of each part of it that arrived
        self._lost: Exchange | None = None  # the answer to this one never arrived
        self._contents: dict[int, bytes] = {}
        self._over = self._replaced = False
        self._empty: list[float] = []  # answers 204

    def read(self, exchanges: Sequence[Exchange]) -> None:
        """All exchanges of an act."""
        own = [x for x in exchanges if x.name in REQUESTS and x.body.get("trainer_id") != INTRUDER]
        own += [x for x in exchanges if x.name not in REQUESTS and x.status == 401]
        for x, answer in in_order(own):
            if answer:
                self._hold("token", x.status != 401, f"{x.name} came without the token of the run")
                self._answered(x)
            else:
                self._asked(x)
        if self._empty:
            rate = (len(self._empty) - 1) / max(0.5, self._empty[-1] - self._empty[0])
            self._hold("batch.wait", rate <= _MOST_PER_S, f"it asked {rate:.0f} times a second and got nothing")

    def _asked(self, x: Exchange) -> None:
        if x.status == 401:
            return
        repeated = self._lost is not None and x.name == self._lost.name and _share(x) == _share(self._lost)
        if self._lost is not None and repeated:
            self._again(x, self._lost)
            self._lost = None
        if x.name == "resume":
            self._resumes(x, repeated)
            return
        known = bool(self._id) and x.body.get("trainer_id") == self._id
        if not self._replaced:
            self._hold("resume.first", known, f"{x.name} of trainer_id={x.body.get('trainer_id')!r} before it resumed")
        match x.name:
            case "batch":
                if self._over:
                    self._hold("over", False, "it asked for a batch after it was answered 410")
                asked, version = x.body.get("version"), self._version
                if known and not self._replaced:
                    self._hold("batch.version", asked == version, f"it asks with version={asked}; it is at {version}")
            case "ack":
                self._acks(x)
            case "checkpoint":
                version = x.body.get("version", -1)
                self._hold(
                    "checkpoint", version <= self._latest, f"it reports checkpoint {version} and acknowledged only "
                    f"{self._latest}",
                )  # fmt: skip
                self._visible(
                    "publish.ack", x, f"checkpoint {version} is reported and {version} not in {self._urls(x)}"
                )

    def _resumes(self, x: Exchange, repeated: bool) -> None:
        body, version = x.body, x.body.get("version", -1)
        if self._replaced:
            self._hold("replaced", False, "it resumed again after a newer trainer had taken over")
        same = body.get("run_id") == self._run_id
        self._hold("resume.first", same, f"it resumes run_id={body.get('run_id')!r}; GET /run says {self._run_id!r}")
        self._visible("publish.resume", x, f"version {version}, at which it resumes, is not in {self._urls(x)}")
        fresh = body.get("trainer_id") not in self._ids
        if not self._ids or repeated:
            self._hold("resume.fresh", version == 0, f"it starts without a checkpoint at version {version}")
        else:
            right = self._covered <= version <= self._latest + 1
            self._hold(
                "resume.version", right and fresh, f"it resumes as {body.get('trainer_id')} at {version}; covered is "
                f"{self._covered}, acknowledged {self._latest}, known ids {sorted(self._ids)}",
            )  # fmt: skip

    def _acks(self, x: Exchange) -> None:
        version, batch_id = x.body.get("version", -1), x.params["batch_id"]
        held = self._taken
        repeated = held is None and version == self._version
        self._hold("ack.once", not repeated, f"{batch_id} was acknowledged, and is acknowledged again")
        if not repeated:
            wanted = (held["batch_id"], held["step"]) if held is not None else ("none", -1)
            got = (batch_id, version)
            self._hold("ack.batch", got == wanted, f"it acknowledges {got}; it holds {wanted}")
            if held is not None:
                all_of_them = [(rank, self._shares[0][1]) for rank in range(self._shares[0][1])]
                whole = sorted(set(self._shares)) == all_of_them
                self._hold("batch.share", whole, f"it acknowledges {batch_id} and took (rank, ranks) {self._shares}")
            if held is not None and held.get("replay"):
                self._hold("replay", got == wanted, f"it acknowledges {got}; {wanted} was served again")
        if version > _UNDER_WAY:
            rule = f"is acknowledged, and nothing from {version - _UNDER_WAY} on is in {self._urls(x)}"
            self._visible("publish.ack", x, f"version {version} {rule}")

    @staticmethod
    def _urls(x: Exchange) -> tuple[str, ...]:
        urls: tuple[str, ...] = x.noted.get("urls", ())
        return urls

    def _visible(self, rule: str, x: Exchange, problem: str) -> None:
        seen: dict[int, bytes] = x.noted.get("seen", {})
        self._hold(rule, bool(seen), problem)
        for version, content in seen.items():
            before = self._contents.setdefault(version, content)
            self._hold("publish.immutable", before == content, f"version {version} changed after it was visible")

    def _again(self, x: Exchange, lost: Exchange) -> None:
        rule = {"resume": "resume.repeat", "batch": "batch.repeat", "ack": "ack.repeat"}.get(lost.name)
        if rule is not None:
            keys = ("trainer_id", "version")
            same = x.params == lost.params and all(x.body.get(k) == lost.body.get(k) for k in keys)
            self._hold(rule, same, f"the answer to {lost.params | lost.body} was lost; it sent {x.params | x.body}")

    def _answered(self, x: Exchange) -> None:
        if x.fault == "lost":
            self._lost = x
        if x.status == 410:
            self._over = True
        if x.status == 409 and "was replaced by" in x.reply.get("error", ""):
            self._replaced = True
        version = x.body.get("version", -1)
        match x.name:
            case "resume" if x.status == 200:
                self._id = x.body["trainer_id"]
                self._ids.add(self._id)
                self._version, self._taken, self._shares = version, None, []
                self._over = self._replaced = False
            case "batch" if x.status == 204:
                self._empty.append(x.answered)
            case "batch" if x.done:
                self._taken = x.reply
                self._shares.append(_share(x))
            case "ack":
                self._hold("ack.batch", x.status != 404, f"answered 404: {x.reply.get('error')}")
                if x.status == 200:
                    self._latest = max(self._latest, version)
                if x.done:
                    self._version, self._taken, self._shares = version, None, []
            case "checkpoint" if x.status == 200:
                self._covered = max(self._covered, version)
                self._hold("checkpoint", True, "")


def _share(x: Exchange) -> tuple[int, int]:
    """Which part of a batch is asked for, of how many."""
    return x.body.get("rank", 0), x.body.get("ranks", 1)
