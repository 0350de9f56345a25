"""Test the client with a gateway that is not responding, closes connections, or sends invalid responses."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest
from ansible_collections.grove.sandbox.plugins.module_utils._client import Client
from ansible_collections.grove.sandbox.plugins.module_utils._failure import Failure

from tests.support.faulty_gateway import FaultyGateway


@pytest.fixture
def faulty_gateway(gateway: FaultyGateway) -> Iterator[FaultyGateway]:
    gateway.reset()
    yield gateway
    gateway.reset()


@pytest.fixture
def client(faulty_gateway: FaultyGateway) -> Iterator[Client]:
    client = Client(faulty_gateway.url, timeout=30)
    yield client
    client.close()


def test_a_get_request_reopens_a_closed_connection(faulty_gateway: FaultyGateway, client: Client) -> None:
    client.get("/health")
    faulty_gateway.connections_to_drop = 1
    assert client.get("/health")["status"] == "ok"


def test_a_post_request_is_not_repeated(faulty_gateway: FaultyGateway, client: Client) -> None:
    client.get("/health")
    faulty_gateway.connections_to_drop, faulty_gateway.calls = 1, []
    with pytest.raises(Failure, match="closed the connection") as error_info:
        client.post("/sandboxes", {"templateID": "base", "name": "box"})
    assert error_info.value.kind == "unreachable"
    assert not faulty_gateway.calls and not faulty_gateway.list_objects("sandboxes")


def test_a_slow_response_times_out(faulty_gateway: FaultyGateway) -> None:
    client_with_short_timeout = Client(faulty_gateway.url, timeout=0.2)
    faulty_gateway.delay_seconds = 1
    with pytest.raises(Failure, match=r"did not respond to GET /health within 0\.2 s") as error_info:
        client_with_short_timeout.get("/health")
    assert error_info.value.kind == "timeout"


@pytest.mark.parametrize(
    ("status", "data", "message"),
    [
        (502, {"detail": "Bad Gateway"}, "status 502 with unexpected JSON"),
        (404, ["nothing"], "status 404 with unexpected JSON"),
        (200, None, "version"),
    ],
)
def test_responses_of_other_services_are_rejected(
    faulty_gateway: FaultyGateway, client: Client, status: int, data: Any, message: str
) -> None:
    faulty_gateway.intercept = lambda _method, _target: (status, data)
    with pytest.raises(Failure, match=message) as error_info:
        client.require_version()
    assert error_info.value.kind == "not_a_gateway"


def test_unknown_fields_are_rejected(client: Client) -> None:
    """The fake gateway rejects fields that the real one would ignore."""
    with pytest.raises(Failure, match="unknown: colour"):
        client.post("/sandboxes", {"templateID": "base", "name": "box", "colour": "red"})
    with pytest.raises(Failure, match="unknown: shade"):
        client.post("/sandboxes", {"templateID": "base", "name": "box", "network": {"shade": 1}})
    with pytest.raises(Failure, match="unknown: flavour"):
        client.get("/sandboxes", flavour="sweet")


@pytest.mark.parametrize(
    ("status", "message", "expected"),
    [
        (
            400,
            "unknown field: setupNetwork (did you mean setup?): correct or remove it",
            "does not know setup_network:",
        ),
        (
            400,
            "unknown fields: memoryMB, network.allowOut: correct or remove them",
            "know memory_mb, network.allow_out:",
        ),
        (
            404,
            "route POST /dockerfiles not found: GET /openapi.json lists the routes",
            "does not support POST /dockerfi",
        ),
    ],
)
def test_errors_that_only_an_older_gateway_returns_say_how_to_upgrade_it(
    faulty_gateway: FaultyGateway, client: Client, status: int, message: str, expected: str
) -> None:
    kind = "invalid" if status == 400 else "not_found"
    faulty_gateway.intercept = lambda _method, _target: (status, {"message": message, "kind": kind})
    with pytest.raises(Failure, match=rf"{expected}.* upgrade .* with the grove\.sandbox\.gateway role") as error_info:
        client.post("/dockerfiles", {})
    assert error_info.value.kind == "too_old"
