"""What the requests of a stage's worker must be like: a look at the exchanges of one act, in their order."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from astraflow.testing.conformance.findings import Findings
from astraflow.testing.conformance.tap import Exchange, in_order

Key = tuple[str, str, int]  # worker, entry id, attempt
REQUESTS = ("stage_lease", "stage_columns", "stage_leave")
_MOST_PER_S = 20.0  # requests that get nothing


class StageCheck:
    """Puts what it reads into `findings`."""

    def __init__(self, findings: Findings) -> None:
        self._hold = findings.hold
        self._row_ids: dict[Key, list[str]] = {}  # as leased
        self._settled: set[Key] = set()
        self._asked_for: dict[tuple[str, str], str] = {}  # worker, request id -> "asked", "answered" or "lost"
        self._lost_columns: Exchange | None = None
        self._empty: list[float] = []

    def read(self, exchanges: Sequence[Exchange]) -> None:
        """All exchanges of an act."""
        for x, answer in in_order([x for x in exchanges if x.name in REQUESTS or x.status == 401]):
            if answer:
                self._hold("token", x.status != 401, f"{x.name} came without the token of the run")
                self._answered(x)
            elif x.name == "stage_lease" and x.body.get("n", 0) > 0:
                self._lease(x.body.get("worker_id", ""), x.body.get("request_id", ""))
            elif x.name == "stage_columns":
                self._columns(x)
        if self._empty:
            rate = (len(self._empty) - 1) / max(0.5, self._empty[-1] - self._empty[0])
            self._hold("lease.wait", rate <= _MOST_PER_S, f"it asked {rate:.0f} times a second and got nothing")

    def _lease(self, worker: str, request_id: str) -> None:
        used = self._asked_for.get((worker, request_id)) == "answered"
        self._hold("lease.fresh", not used, f"request_id={request_id} was answered, and is used again")
        for key in [k for k, state in self._asked_for.items() if state == "lost" and k[0] == worker]:
            same = key[1] == request_id
            self._hold("lease.repeat", same, f"the answer to request_id={key[1]} was lost; it asks with another one")
            del self._asked_for[key]
        self._asked_for[worker, request_id] = "asked"

    def _columns(self, x: Exchange) -> None:
        worker, lost = x.body.get("worker_id", ""), self._lost_columns
        if lost is not None:
            keys = ("request_id", "leases", "row_ids")
            same = all(x.body.get(k) == lost.body.get(k) for k in keys)
            self._hold("columns.repeat", same, "the answer to columns was lost; other ones came next")
            self._lost_columns = None
        leases = [(e, int(a)) for e, a in x.body.get("leases", ())]
        keys_of = [(worker, *lease) for lease in (*leases, *((e, int(a)) for e, a, _ in x.body.get("failed", ())))]
        for key in keys_of:
            name = f"{key[1]}, attempt {key[2]},"
            self._hold("columns.rows", key in self._row_ids, f"columns for {name} which this worker did not lease")
            again = key in self._settled
            self._hold("columns.once", not again, f"{name} was answered, and is handed in again")
        wanted = [row for lease in leases for row in self._row_ids.get((worker, *lease), ())]
        right = x.body.get("row_ids", []) == wanted
        self._hold("columns.rows", right, f"row_ids={x.body.get('row_ids')} are not those of the leases, {wanted}")

    def _answered(self, x: Exchange) -> None:
        worker = x.body.get("worker_id", "")
        match x.name:
            case "stage_lease" if x.body.get("n", 0) > 0:
                lost = x.fault == "lost" or x.status in (503, 507)
                self._asked_for[worker, x.body.get("request_id", "")] = "lost" if lost else "answered"
                for lease in x.reply.get("leases", ()):
                    key = (worker, lease["entry_id"], int(lease["attempt"]))
                    own = [row for row in x.reply["row_ids"] if row.rpartition(":")[0] == lease["entry_id"]]
                    self._row_ids[key] = own
                if x.done and not x.reply.get("leases") and not x.reply.get("finished"):
                    self._empty.append(x.answered)
            case "stage_columns":
                error = x.reply.get("error")
                self._hold("columns.shape", x.status not in (413, 415, 422), f"answered {x.status}: {error}")
                self._results(x, worker)

    def _results(self, x: Exchange, worker: str) -> None:
        if x.fault == "lost":
            self._lost_columns = x
        attempts = {e: int(a) for e, a, *_ in (*x.body.get("leases", ()), *x.body.get("failed", ()))}
        for entry_id, result in x.reply.get("results", {}).items():
            attempt = attempts.get(entry_id, 0)
            if x.done:
                self._settled.add((worker, entry_id, attempt))
            if result == "accepted":
                self._hold("columns.shape", True, "")

    def refused(self, reasons: Mapping[str, int], last: str) -> None:
        """How many entries the service refused, by reason: to be late is no fault, the group may have been dropped."""
        wrong = {reason: count for reason, count in reasons.items() if reason != "late"}
        self._hold("columns.shape", not wrong, f"refused {wrong}; the last one: {last}")
