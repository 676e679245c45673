from __future__ import annotations

from astraflow.config.schema import RunConfig
from astraflow.launch.plan import automatic_threads, plan_processes


def config(**rollout: object) -> RunConfig:
    return RunConfig.model_validate(
        {
            "run": {"name": "x", "steps": 1},
            "sources": {"train": "calculator"},
            "workflow": {"type": "tool_use"},
            "policies": {
                "actor": {"model": "tiny-char"},
                "verifier": {"model": "tiny-char", "trainer": {"threads": 3}},
            },
            "rollout": rollout or {"nodes": 2},
        }
    )


def test_one_process_for_each_service_policy_and_node() -> None:
    specs = plan_processes(config(), cores=2)
    assert [s.name for s in specs] == ["dataflow", "trainer-actor", "trainer-verifier", "node-node0", "node-node1"]
    assert [s.subject for s in specs[1:]] == ["actor", "verifier", "node0", "node1"]


def test_threads_are_the_cores_of_each_torch_process_unless_given() -> None:
    specs = {s.name: s for s in plan_processes(config(), cores=8)}
    assert specs["trainer-actor"].threads == 2
    assert specs["trainer-verifier"].threads == 3
    assert automatic_threads(config(), cores=1) == 1


def test_moments_of_nodes_are_kept() -> None:
    nodes = [{"name": "a", "start_after_s": 5.0, "kill_after_s": 7.0, "threads": 4}]
    spec = plan_processes(config(nodes=nodes), cores=2)[-1]
    assert (spec.start_after_s, spec.kill_after_s, spec.threads) == (5.0, 7.0, 4)


def test_policies_that_name_one_process_are_trained_by_it() -> None:
    made = config()
    raw = made.model_dump()
    raw["policies"] = {name: {"model": "tiny-char", "trainer": {"process": "both"}} for name in ("actor", "verifier")}
    raw["policies"]["judge"] = {"model": "tiny-char"}
    shared = RunConfig.model_validate(raw)
    trainers = [spec for spec in plan_processes(shared, cores=8) if spec.role == "trainer"]
    assert [(spec.name, spec.subject) for spec in trainers] == [
        ("trainer-both", "actor,verifier"), ("trainer-judge", "judge"),
    ]  # fmt: skip
    assert [spec.threads for spec in trainers] == [2, 2], "cores are divided by processes: two trainers, two nodes"
