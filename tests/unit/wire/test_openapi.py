"""The OpenAPI documents: valid, complete, as the code is, and true of what a service answers."""

from __future__ import annotations

import json
import runpy
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import jsonschema
import msgspec
import pytest
import urllib3
from openapi_spec_validator import validate
from starlette.routing import Route

from astraflow.dataflow.service import create_dataflow_app
from astraflow.testing.dataflow import small_config, sources
from astraflow.testing.services import DataflowThread
from astraflow.weights.app import OPERATIONS as WEIGHTS
from astraflow.weights.app import create_weights_app, weights_document
from astraflow.wire import messages
from astraflow.wire.codec import TRAINING_SCHEMA
from astraflow.wire.describe.openapi import STATUSES, Operation, to_json
from astraflow.wire.describe.operations import OPERATIONS, dataflow_document

ROOT = Path(__file__).parents[3]
DOCUMENTS = runpy.run_path(str(ROOT / "scripts" / "openapi.py"))["DOCUMENTS"]


@pytest.mark.parametrize("name", list(DOCUMENTS))
def test_the_document_in_docs_is_what_the_code_says(name: str) -> None:
    assert (ROOT / "docs" / name).read_text() == to_json(DOCUMENTS[name]()), "run `make openapi`"


@pytest.mark.parametrize("name", list(DOCUMENTS))
def test_the_document_is_valid(name: str) -> None:
    validate(json.loads((ROOT / "docs" / name).read_text()))


def described(operations: Sequence[Operation]) -> set[tuple[str, str]]:
    return {(o.method, o.path) for o in operations}


def routed(app: Any) -> Iterator[tuple[str, str]]:
    for route in app.routes:
        assert isinstance(route, Route) and route.methods is not None
        for method in route.methods - {"HEAD"}:
            yield method, route.path


def test_every_route_is_described_and_no_other(tmp_path: Path) -> None:
    app = create_dataflow_app(small_config(), tmp_path, None, sources())
    try:
        assert set(routed(app)) == described(OPERATIONS)
    finally:
        app.state.shell.close()
    manifest = ("GET", "/weights/{policy}/{version:int}/manifest.json")  # served by the route of all files
    assert set(routed(create_weights_app(tmp_path, None))) == described(WEIGHTS) - {manifest}


def test_every_message_is_described_field_by_field() -> None:
    schemas = dataflow_document()["components"]["schemas"]
    own = {n: s for n, s in vars(messages).items() if isinstance(s, type) and issubclass(s, msgspec.Struct)}
    used = set(own) - {"EpisodeLease", "WeightVersion"}
    assert not used - set(schemas)
    for name in used:
        assert set(schemas[name].get("properties", {})) == {f.name for f in msgspec.structs.fields(own[name])}
        assert schemas[name]["description"]
    described_fields = [
        f["description"] for s in schemas.values() for f in s.get("properties", {}).values() if "description" in f
    ]
    assert len(described_fields) > 40


def test_arrow_bodies_name_their_columns() -> None:
    answer = dataflow_document()["paths"]["/policies/{policy}/batches"]["post"]["responses"]["200"]
    (content,) = answer["content"].values()
    columns = {c["name"]: c for c in content["schema"]["x-arrow-columns"]}
    assert list(columns) == TRAINING_SCHEMA.names
    assert columns["token_ids"] == {"name": "token_ids", "type": "list<int32>", "nullable": False}
    assert columns["reward"]["nullable"]


def test_every_refusal_has_its_meaning() -> None:
    for document in (dataflow_document(), weights_document()):
        for path in document["paths"].values():
            for operation in path.values():
                refusals = {int(status) for status in operation["responses"] if int(status) >= 400}
                assert refusals <= set(STATUSES) and {401, 426} <= refusals


def test_a_service_answers_as_its_document_says(tmp_path: Path) -> None:
    with DataflowThread(small_config(), tmp_path, sources=sources()) as service:
        http = urllib3.PoolManager()

        def ask(method: str, path: str, route: str, body: Any = None) -> Any:
            data = None if body is None else json.dumps(body).encode()
            headers = {"content-type": "application/json", messages.PROTOCOL_HEADER: "1"}
            answer = http.request(method, service.url + path, body=data, headers=headers, retries=False)
            operation = document["paths"][route][method.lower()]
            content = operation["responses"][str(answer.status)]["content"]["application/json"]["schema"]
            jsonschema.validate(answer.json(), {**content, "components": document["components"]})
            return answer.status, answer.json()

        answer = http.request("GET", service.url + "/openapi.json", retries=False)
        document = answer.json()
        assert document == json.loads(to_json(dataflow_document()))
        run_id = ask("GET", "/run", "/run")[1]["run_id"]
        resume = {"trainer_id": "t", "version": 0, "urls": ["file:///w"], "run_id": run_id}
        assert ask("POST", "/policies/actor/resume", "/policies/{policy}/resume", resume)[0] == 200
        join = {"node_id": "n", "name": "n", "capacity": 4, "run_id": run_id}
        assert ask("POST", "/nodes", "/nodes", join)[0] == 200
        assert ask("POST", "/nodes/n/heartbeat", "/nodes/{node_id}/heartbeat", {})[0] == 200
        lease = {"node_id": "n", "request_id": "r", "n": 2}
        status, leased = ask("POST", "/leases", "/leases", lease)
        assert status == 200 and len(leased["leases"]) == 2
        assert ask("POST", "/leases", "/leases", lease | {"node_id": "x"})[0] == 404
        assert ask("POST", "/leases", "/leases", {"n": "two"})[0] == 422
        assert ask("POST", "/nodes", "/nodes", join | {"run_id": "other"})[0] == 409
        batch, route = "/policies/actor/batches", "/policies/{policy}/batches"
        assert ask("POST", batch, route, {"trainer_id": "other", "version": 0})[0] == 409
        assert ask("POST", batch, route, {"trainer_id": "t", "version": 99})[0] == 410
        assert ask("POST", "/episodes", "/episodes", {})[0] == 415
        assert ask("GET", "/health", "/health")[0] == 200
