"""The OpenAPI document, and the gateway's answers to valid and invalid requests."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import httpx
import pytest
import schemathesis
from hypothesis import HealthCheck, given, seed, settings
from schemathesis.checks import not_a_server_error
from schemathesis.specs.openapi.checks import (
    content_type_conformance,
    response_schema_conformance,
    status_code_conformance,
)

from sandbox_gateway.server.serving import document
from tests.api.memory_gateway import ADMIN_KEY, MemoryGateway

EXAMPLES = 8
"""Requests of each route."""
REFS = ("base", "one", "vol", "nothing")


@pytest.fixture(scope="module")
def own(tmp_path_factory: pytest.TempPathFactory) -> Iterator[MemoryGateway]:
    """A separate gateway: the requests may rename or remove anything on it."""
    gateway = MemoryGateway(tmp_path_factory.mktemp("fuzzed"), limits={"sandboxes": 20})
    try:
        gateway.build_template("base")
        with gateway.client() as client:
            client.post("/sandboxes", json={"templateID": "base", "name": "one"})
            client.post("/volumes", json={"name": "vol"})
        yield gateway
    finally:
        gateway.end()


def operations() -> list[Any]:
    """Every route of the document except the one with an endless answer."""
    raw = document()
    del raw["paths"]["/events"]
    return [operation.ok() for operation in schemathesis.openapi.from_dict(raw).get_all_operations()]


@pytest.mark.parametrize("operation", operations(), ids=lambda one: f"{one.method.upper()} {one.path}")
def test_answers_match_the_document(own: MemoryGateway, operation: Any) -> None:
    checks = [not_a_server_error, status_code_conformance, content_type_conformance, response_schema_conformance]

    @settings(max_examples=EXAMPLES, deadline=None, suppress_health_check=list(HealthCheck), database=None)
    @given(case=operation.as_strategy())
    @seed(20_26)
    def try_request(case: Any) -> None:
        if "ref" in case.path_parameters and case.path_parameters["ref"] not in ("", ".", ".."):
            case.path_parameters["ref"] = REFS[len(case.path_parameters["ref"]) % len(REFS)]
        response = case.call(base_url=own.url, headers={"X-API-Key": ADMIN_KEY}, timeout=20)
        case.validate_response(response, checks=checks)

    try_request()


def test_the_document_is_complete(own: MemoryGateway) -> None:
    with own.client(ADMIN_KEY) as client:
        raw = client.get("/openapi.json").json()
    assert raw["components"]["securitySchemes"].keys() == {"key", "bearer"}
    for path, item in raw["paths"].items():
        for method, operation in item.items():
            assert operation["summary"], (path, method)
            assert "422" not in operation["responses"]
            assert operation["responses"]["400"]["content"]["application/json"]["schema"]["$ref"].endswith("ErrorShape")
    assert raw["paths"]["/health"]["get"]["security"] == []


def test_metrics(own: MemoryGateway) -> None:
    with own.client(ADMIN_KEY) as client:
        client.get("/sandboxes/nothing")
        text = client.get("/metrics").text
    assert 'sandbox_gateway_sandboxes{state="running"}' in text
    assert 'route="/sandboxes/{ref}",status="404"' in text


def test_health_needs_no_key(own: MemoryGateway) -> None:
    answer = httpx.get(f"{own.url}/health")
    assert answer.status_code == 200
    assert answer.json().keys() == {"status", "sandboxes", "version", "backend"}
