"""The worker loop against a real service: work, faults of the stage, a restart, the end."""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any, ClassVar

import pyarrow as pa
import pytest

from astraflow.config.schema import RunConfig
from astraflow.dataflow.client import DataflowClient
from astraflow.errors import ConfigError, Problem, WireError
from astraflow.stages.context import StageRun, build_stage
from astraflow.stages.worker import Worker, run_stage
from astraflow.testing.dataflow import check_law, policy_section, small_config, sources
from astraflow.testing.runs import wait_until
from astraflow.testing.services import DataflowThread, PlayingNode, made_up_episode
from astraflow.testing.stages import EchoStage
from astraflow.wire.messages import Join, Resume


@pytest.fixture(autouse=True)
def quick(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("astraflow.stages.worker.POLL_S", 0.2)


def config_of(stages: dict[str, Any], steps: int = 3, **changes: Any) -> RunConfig:
    policy = policy_section(2, 1, operators=["keep_all"])
    return small_config(run__steps=steps, policies__actor=policy, stages=stages, **changes)


ECHO = {"type": "astraflow.testing.stages:EchoStage", "lease_s": 2.0}


@contextmanager
def in_background(work: Callable[[], Any]) -> Iterator[threading.Thread]:
    """`work` in a thread that must end by itself."""
    thread = threading.Thread(target=work, daemon=True)
    thread.start()
    try:
        yield thread
    finally:
        thread.join(60)
        assert not thread.is_alive()


def train(service: DataflowThread, steps: int, first: int = 0) -> list[pa.Table]:
    """Be the trainer of "actor" for so many steps."""
    client = DataflowClient(service.url, give_up_s=5.0)
    if first == 0:
        run_id = client.run().run_id
        client.resume("actor", Resume(trainer_id="t", version=0, urls=("file:///w",), run_id=run_id))
    tables = []
    for version in range(first, first + steps):
        got = client.batch("actor", "t", version, wait_s=20)
        assert got is not None, client.status()
        client.ack(got[0], "t")
        tables.append(got[1])
    client.close()
    return tables


def check_echo(tables: list[pa.Table]) -> None:
    rows = [row for table in tables for row in table.to_pylist()]
    assert rows and all(row["echo"] == [float(i) for i in row["token_ids"]] for row in rows)
    names = [(row["episode_id"], row["branch"]) for row in rows]
    assert len(names) == len(set(names))


def test_every_row_has_its_column_and_the_worker_leaves_with_the_run(tmp_path: Path) -> None:
    stages = {"echo": ECHO, "sum": {"type": "astraflow.testing.stages:EchoSumStage"}}
    with DataflowThread(config_of(stages), tmp_path, sources=sources()) as service, PlayingNode(service.url):
        work = [in_background(lambda name=name: run_stage(service.url, name)) for name in stages]  # type: ignore[misc]
        with work[0], work[1]:
            tables = train(service, 3)
        check_echo(tables)
        assert all(row["echo_sum"] == sum(row["token_ids"]) for table in tables for row in table.to_pylist())
        state = service.call(lambda: service.shell.machine.state.stages)
        assert state["echo"].num_done >= 12 and not state["echo"].workers
        assert set(state["echo"].refused) <= {"late"}  # of a group that went stale meanwhile
        service.call(lambda: check_law(service.shell.machine))


def test_a_service_that_starts_again_is_waited_for(tmp_path: Path) -> None:
    with DataflowThread(config_of({"echo": ECHO}, 6), tmp_path, sources=sources()) as service:
        with PlayingNode(service.url), in_background(lambda: run_stage(service.url, "echo")):
            tables = train(service, 2)
            service.restart(pause_s=0.5)
            tables += train(service, 4, first=2)
        check_echo(tables)
        assert service.call(lambda: service.shell.machine.state.policies["actor"].trained) == 12
        service.call(lambda: check_law(service.shell.machine))


def work_until(service: DataflowThread, config: RunConfig, stage: Any, reached: Callable[[], bool]) -> dict[str, float]:
    """Let `stage` work until something is reached; gives what the worker counted."""
    stop = threading.Event()
    run = StageRun(config, "echo", stop=stop)
    client = DataflowClient(service.url, give_up_s=2.0)
    worker = Worker(client, run, stage)
    with in_background(lambda: worker.work(DataflowClient(service.url, give_up_s=2.0))):
        wait_until(lambda: service.call(reached), "what the stage should do", 20)
        stop.set()
    client.close()
    return worker.stats()


class FailsOn(EchoStage):
    """Fails whenever a row holds one marked token."""

    def __init__(self, marked: int) -> None:
        super().__init__()
        self.marked, self.calls = marked, list[int]()

    def run(self, rows: pa.Table) -> pa.Table:
        self.calls.append(rows.num_rows)
        if any(self.marked in row for row in rows.column("token_ids").to_pylist()):
            raise ValueError("I do not like this one")
        return super().run(rows)


def test_one_bad_entry_costs_its_group_and_no_other(tmp_path: Path) -> None:
    config = config_of({"echo": {**ECHO, "max_attempts": 2}})
    with DataflowThread(config, tmp_path, sources=sources()) as service:
        DataflowClient(service.url).resume(
            "actor", Resume(trainer_id="t", version=0, urls=(), run_id=service.shell.run_id)
        )
        state = service.shell.machine.state
        with PlayingNode(service.url):
            wait_until(lambda: service.call(lambda: len(state.staged) == 4), "four groups", 20)
            first = service.call(lambda: next(iter(state.staged.values())).group_id)
            stage = FailsOn(marked_token(service, first))
            stats = work_until(
                service, config, stage, lambda: state.policies["actor"].dropped.get("stage_echo", 0) == 1
            )
        assert stats["failed"] >= 2 and max(stage.calls) > 1
        dropped = service.call(lambda: dict(state.policies["actor"].dropped))
        assert dropped == {"stage_echo": 1}
        service.call(lambda: check_law(service.shell.machine))


def marked_token(service: DataflowThread, group_id: str) -> int:
    """A token that only this group has."""
    from astraflow.dataflow.storage.columns import staged_rows

    def read() -> dict[str, set[int]]:
        state, found = service.shell.machine.state, {}
        for group in state.staged.values():
            rows = staged_rows(list(group.entries.values()), ["token_ids"], state.puts, service.shell.segments.read)
            found[group.group_id] = {i for ids in rows.table.column("token_ids").to_pylist() for i in ids}
        return found

    tokens = service.call(read)
    others = set().union(*(ids for name, ids in tokens.items() if name != group_id))
    return min(tokens[group_id] - others)


@pytest.mark.parametrize("wrong", ["length", "nan", "raises"])
def test_a_stage_that_breaks_its_contract_stops_the_run_by_name(tmp_path: Path, wrong: str) -> None:
    policy = policy_section(2, 1, max_dropped_groups=3, operators=["keep_all"])
    config = small_config(policies__actor=policy, stages={"echo": {**ECHO, "max_attempts": 2}})
    with DataflowThread(config, tmp_path, sources=sources()) as service, PlayingNode(service.url):
        client = DataflowClient(service.url, give_up_s=2.0)
        client.resume("actor", Resume(trainer_id="t", version=0, urls=(), run_id=client.run().run_id))
        stop = threading.Event()
        worker = Worker(client, StageRun(config, "echo", stop=stop), EchoStage(wrong=wrong))
        with pytest.raises(WireError, match=r"stage_echo 3.*stages\.echo"):
            worker.work(DataflowClient(service.url, give_up_s=2.0))
        service.call(lambda: check_law(service.shell.machine))
        client.close()


@pytest.mark.parametrize(
    ("wrong", "said"),
    [
        ("dtype", r"run echo=list<item: double> must be list<item: float>; "),
        ("missing", r"run=\['ecco'\] must have the columns \['echo'\]; "),
        ("extra", r"run=\['echo', 'more'\] must have the columns \['echo'\]; "),
        ("rows", r"run=\d+ rows must be \d+; "),
        ("dict", r"run=dict must be a pyarrow.Table; return one with echo: list<item: float>"),
    ],
)
def test_a_stage_whose_code_is_wrong_for_good_ends_its_worker_and_drops_nothing(
    tmp_path: Path, wrong: str, said: str
) -> None:
    config = config_of({"echo": ECHO})
    with DataflowThread(config, tmp_path, sources=sources()) as service, PlayingNode(service.url):
        client = DataflowClient(service.url, give_up_s=2.0)
        client.resume("actor", Resume(trainer_id="t", version=0, urls=(), run_id=client.run().run_id))
        stage = EchoStage(wrong=wrong)
        worker = Worker(client, StageRun(config, "echo"), stage)
        with pytest.raises(Problem, match=rf"^stages\.echo\.{said}") as ended:
            worker.work(DataflowClient(service.url, give_up_s=2.0))
        assert ended.value.exit_code == 2, "it is not started again"
        state = service.shell.machine.state
        dropped, workers = service.call(lambda: (state.policies["actor"].dropped, len(state.stages["echo"].workers)))
        assert (dropped, workers) == ({}, 0)
        work_until(service, config, EchoStage(), lambda: state.stages["echo"].num_done > 0)
        service.call(lambda: check_law(service.shell.machine))
        client.close()


def test_rows_that_a_stage_cannot_do_are_no_fault_of_its_code(tmp_path: Path) -> None:
    """Now and then `run` gives what it should not: the entries are offered again, the worker goes on."""
    config = config_of({"echo": {**ECHO, "rows": 1, "max_attempts": 50}})
    with DataflowThread(config, tmp_path, sources=sources()) as service, PlayingNode(service.url):
        client = DataflowClient(service.url, give_up_s=2.0)
        client.resume("actor", Resume(trainer_id="t", version=0, urls=(), run_id=client.run().run_id))
        state = service.shell.machine.state.stages["echo"]
        stats = work_until(service, config, Moody(), lambda: state.num_done > 5)
        assert stats["failed"] >= 4
        client.close()


class Moody(EchoStage):
    """Every other call gives nothing."""

    calls = 0

    def run(self, rows: pa.Table) -> pa.Table:
        self.calls += 1
        return super().run(rows) if self.calls % 2 else None  # type: ignore[return-value]


class Silent(EchoStage):
    """Never comes back, until it is told to."""

    def __init__(self) -> None:
        super().__init__()
        self.released, self.calls = threading.Event(), 0

    def run(self, rows: pa.Table) -> pa.Table:
        self.calls += 1
        self.released.wait(20)
        return super().run(rows)


def test_one_lease_is_ahead_while_the_stage_works_and_a_stop_gives_all_rows_back(tmp_path: Path) -> None:
    config = config_of({"echo": {**ECHO, "lease_s": 60.0, "rows": 1}})
    with DataflowThread(config, tmp_path, sources=sources()) as service, PlayingNode(service.url):
        client = DataflowClient(service.url, give_up_s=2.0)
        client.resume("actor", Resume(trainer_id="t", version=0, urls=(), run_id=client.run().run_id))
        stop, stage = threading.Event(), Silent()
        worker = Worker(client, StageRun(config, "echo", stop=stop), stage)
        state = service.shell.machine.state.stages["echo"]

        def held() -> list[str]:
            return [entry for known in state.workers.values() for entry in known.held]

        with in_background(lambda: worker.work(DataflowClient(service.url, give_up_s=2.0))):
            wait_until(lambda: service.call(lambda: len(held()) == 2 and len(state.pending) > 1), "two leases", 20)
            before = service.call(held)
            wait_until(lambda: stage.calls == 1, "the first rows in work", 20)
            assert service.call(lambda: state.num_done) == 0
            client.stage_lease("echo", "other", 0)  # a round trip: nothing more was asked for
            assert service.call(held) == before
            stop.set()
            stage.released.set()
        assert service.call(lambda: (len(state.workers), state.num_lost, state.num_done)) == (0, 0, 0)
        service.call(lambda: check_law(service.shell.machine))
        client.close()


def test_signs_of_life_go_out_while_the_stage_works(tmp_path: Path) -> None:
    config = config_of({"echo": {**ECHO, "lease_s": 0.4}})
    with DataflowThread(config, tmp_path, sources=sources()) as service, PlayingNode(service.url):
        client = DataflowClient(service.url, give_up_s=2.0)
        client.resume("actor", Resume(trainer_id="t", version=0, urls=(), run_id=client.run().run_id))
        state = service.shell.machine.state.stages["echo"]
        work_until(service, config, EchoStage(delay_s=1.0), lambda: state.num_done > 0)
        assert state.num_lost == 0
        client.close()


class Plain:
    """No constructor, no `run`."""

    needs: ClassVar[tuple[str, ...]] = ("token_ids",)
    adds: ClassVar[dict[str, str]] = {"plain": "row"}


def test_a_stage_gets_its_options_and_the_run_only_if_it_asks() -> None:
    stages = {"echo": {**ECHO, "delay_s": 0.5}, "plain": {"type": f"{__name__}:Plain"}}
    config = config_of({"echo": stages["echo"]})
    assert build_stage(StageRun(config, "echo")).needs == ("token_ids",)
    with pytest.raises(ConfigError, match="stage='eco' is not in the run; known: echo"):
        build_stage(StageRun(config, "eco"))


class OneByOne(EchoStage):
    """Gives nothing for several entries together."""

    def __init__(self, stop: threading.Event) -> None:
        super().__init__()
        self.stop, self.num_refused = stop, 0

    def run(self, rows: pa.Table) -> pa.Table:
        if rows.num_rows == 1:
            return super().run(rows)
        self.num_refused += 1
        if self.num_refused == 3:
            self.stop.set()
        return None  # type: ignore[return-value]


def test_a_stage_that_can_do_each_entry_by_itself_is_not_wrong_for_good(tmp_path: Path) -> None:
    config = config_of({"echo": {**ECHO, "rows": 2}})
    with DataflowThread(config, tmp_path, sources=sources()) as service:
        client = DataflowClient(service.url, give_up_s=2.0)
        run_id = client.run().run_id
        client.resume("actor", Resume(trainer_id="t", version=0, urls=(), run_id=run_id))
        client.join(Join(node_id="n", name="n", capacity=8, run_id=run_id))
        client.commit([made_up_episode(lease, "n") for lease in client.lease("n", 8).leases])
        stop = threading.Event()
        stage = OneByOne(stop)
        Worker(client, StageRun(config, "echo", stop=stop), stage).work(DataflowClient(service.url, give_up_s=2.0))
        assert stage.num_refused == 3 and service.call(lambda: service.shell.machine.state.stages["echo"].num_done) == 4
        client.close()


def test_columns_of_entries_done_one_by_one_are_put_together_whatever_they_say_of_nulls(tmp_path: Path) -> None:
    class Flags(EchoStage):
        calls = 0

        def run(self, rows: pa.Table) -> pa.Table:
            self.calls += 1
            if rows.num_rows > 1:
                raise ValueError("one by one")
            (column,) = super().run(rows).columns
            return pa.Table.from_arrays([column], schema=pa.schema([pa.field("echo", column.type, self.calls % 2 > 0)]))

    config = config_of({"echo": {**ECHO, "rows": 2}})
    with DataflowThread(config, tmp_path, sources=sources()) as service, PlayingNode(service.url):
        client = DataflowClient(service.url, give_up_s=2.0)
        client.resume("actor", Resume(trainer_id="t", version=0, urls=(), run_id=client.run().run_id))
        state = service.shell.machine.state
        wait_until(lambda: service.call(lambda: len(state.staged) == 4), "four groups", 20)
        work_until(service, config, Flags(), lambda: state.stages["echo"].num_done == 8)
        client.close()
