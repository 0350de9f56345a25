"""The client with a gateway that hangs, hangs up, or sends invalid answers."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest
from ansible_collections.grove.sandbox.plugins.module_utils._client import Client
from ansible_collections.grove.sandbox.plugins.module_utils._failure import Failure

from tests.support.faulty_gateway import FaultyGateway


@pytest.fixture
def faulty(gateway: FaultyGateway) -> Iterator[FaultyGateway]:
    gateway.reset()
    yield gateway
    gateway.reset()


@pytest.fixture
def client(faulty: FaultyGateway) -> Iterator[Client]:
    made = Client(faulty.url, timeout=30)
    yield made
    made.close()


def test_reads_reopen_a_closed_connection(faulty: FaultyGateway, client: Client) -> None:
    client.get("/health")
    faulty.cut = 1
    assert client.get("/health")["status"] == "ok"


def test_a_change_is_not_sent_twice(faulty: FaultyGateway, client: Client) -> None:
    client.get("/health")
    faulty.cut, faulty.calls = 1, []
    with pytest.raises(Failure, match="closed the connection") as caught:
        client.post("/sandboxes", {"templateID": "base", "name": "box"})
    assert caught.value.kind == "unreachable"
    assert not faulty.calls and not faulty.list_objects("sandboxes")


def test_a_slow_gateway(faulty: FaultyGateway) -> None:
    impatient = Client(faulty.url, timeout=0.2)
    faulty.delay = 1
    with pytest.raises(Failure, match=r"did not answer GET /health within 0\.2 s") as caught:
        impatient.get("/health")
    assert caught.value.kind == "timeout"


@pytest.mark.parametrize(
    ("status", "data", "words"),
    [
        (502, {"detail": "Bad Gateway"}, "status 502 and unexpected JSON"),
        (404, ["nothing"], "status 404 and unexpected JSON"),
        (200, None, "version"),
    ],
)
def test_answers_of_other_services(faulty: FaultyGateway, client: Client, status: int, data: Any, words: str) -> None:
    faulty.intercept = lambda _method, _target: (status, data)
    with pytest.raises(Failure, match=words) as caught:
        client.require_version()
    assert caught.value.kind == "not_a_gateway"


def test_a_field_that_the_gateway_does_not_know(client: Client) -> None:
    """The gateway ignores it; the layer in front of it rejects it."""
    with pytest.raises(Failure, match="unknown: colour"):
        client.post("/sandboxes", {"templateID": "base", "name": "box", "colour": "red"})
    with pytest.raises(Failure, match="unknown: shade"):
        client.post("/sandboxes", {"templateID": "base", "name": "box", "network": {"shade": 1}})
    with pytest.raises(Failure, match="unknown: flavour"):
        client.get("/sandboxes", flavour="sweet")
