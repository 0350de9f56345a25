"""The OpenAPI document, and the gateway's responses to valid and invalid requests."""

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

from sandbox_gateway.server.serving import build_openapi_document
from tests.support.memory_gateway import ADMIN_KEY, MemoryGateway

EXAMPLES_PER_ROUTE = 8
"""Number of requests that the test sends to each route."""
REFS = ("base", "one", "vol", "nothing")


@pytest.fixture(scope="module")
def fuzzed_gateway(tmp_path_factory: pytest.TempPathFactory) -> Iterator[MemoryGateway]:
    """A separate gateway, because the requests may rename or remove anything on it."""
    gateway = MemoryGateway(tmp_path_factory.mktemp("fuzzed"), limits={"sandboxes": 20})
    try:
        gateway.build_template("base")
        with gateway.client() as client:
            client.post("/sandboxes", json={"templateID": "base", "name": "one"})
            client.post("/volumes", json={"name": "vol"})
        yield gateway
    finally:
        gateway.end()


def list_operations() -> list[Any]:
    """Return every operation of the document except the one with an endless response."""
    schema = build_openapi_document()
    del schema["paths"]["/events"]
    return [operation.ok() for operation in schemathesis.openapi.from_dict(schema).get_all_operations()]


@pytest.mark.parametrize(
    "operation", list_operations(), ids=lambda operation: f"{operation.method.upper()} {operation.path}"
)
def test_responses_match_the_document(fuzzed_gateway: MemoryGateway, operation: Any) -> None:
    checks = [not_a_server_error, status_code_conformance, content_type_conformance, response_schema_conformance]

    @settings(max_examples=EXAMPLES_PER_ROUTE, deadline=None, suppress_health_check=list(HealthCheck), database=None)
    @given(case=operation.as_strategy())
    @seed(20_26)
    def try_request(case: Any) -> None:
        if "ref" in case.path_parameters and case.path_parameters["ref"] not in ("", ".", ".."):
            case.path_parameters["ref"] = REFS[len(case.path_parameters["ref"]) % len(REFS)]
        response = case.call(base_url=fuzzed_gateway.url, headers={"X-API-Key": ADMIN_KEY}, timeout=20)
        case.validate_response(response, checks=checks)

    try_request()


def test_the_document_is_complete(fuzzed_gateway: MemoryGateway) -> None:
    with fuzzed_gateway.client(ADMIN_KEY) as client:
        schema = client.get("/openapi.json").json()
    assert schema["components"]["securitySchemes"].keys() == {"key", "bearer"}
    for path, item in schema["paths"].items():
        for method, operation in item.items():
            assert operation["summary"], (path, method)
            assert "422" not in operation["responses"]
            assert operation["responses"]["400"]["content"]["application/json"]["schema"]["$ref"].endswith("ErrorShape")
    assert schema["paths"]["/health"]["get"]["security"] == []


def test_metrics_contain_the_room_on_the_host(fuzzed_gateway: MemoryGateway) -> None:
    with fuzzed_gateway.client() as client:
        text = client.get("/metrics").text
    room = fuzzed_gateway.host.available_room
    metrics = dict(line.rsplit(" ", 1) for line in text.splitlines() if not line.startswith("#"))
    assert float(metrics['sandbox_gateway_host_free_bytes{resource="disk"}']) == room.disk_free
    assert float(metrics['sandbox_gateway_host_total_bytes{resource="memory"}']) == room.memory_total
    assert 'sandbox_gateway_host_promised_bytes{resource="memory"}' in metrics
    assert metrics["sandbox_gateway_sandboxes_stalled"] == "0.0"


def test_metrics_count_sandboxes_and_requests(fuzzed_gateway: MemoryGateway) -> None:
    with fuzzed_gateway.client(ADMIN_KEY) as client:
        client.get("/sandboxes/nothing")
        text = client.get("/metrics").text
    assert 'sandbox_gateway_sandboxes{state="running"}' in text
    assert 'route="/sandboxes/{ref}",status="404"' in text


def test_health_needs_no_key(fuzzed_gateway: MemoryGateway) -> None:
    response = httpx.get(f"{fuzzed_gateway.url}/health")
    assert response.status_code == 200
    assert response.json().keys() == {"status", "sandboxes", "version", "backend"}
