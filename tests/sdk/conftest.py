"""A live gateway on each kind of host, which unmodified published clients use over TCP."""

from __future__ import annotations

import os
from collections.abc import Iterator
from pathlib import Path

import httpx
import pytest

from tests.sdk import client_sets
from tests.sdk.servers import ABILITIES, Server, running_fleet, running_server

HERE = Path(__file__).parent
HTTP = httpx.Client(timeout=60, limits=httpx.Limits(max_keepalive_connections=0))
"""A client whose timeout suffices on a busy machine. Each request has its own connection."""
SHARED_FILES = ("test_clients.py", "test_cubesandbox.py", "test_load.py")
_FLEET_VARIABLE = "GROVE_TEST_FLEET"
"""If this variable is set, the clients connect to another gateway than the one that has their sandboxes."""


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Test one client on jail hosts in complete runs, and its oldest release. The engine suite runs on both hosts."""
    for item in items:
        if item.path.parent != HERE:
            continue
        parameters = getattr(getattr(item, "callspec", None), "params", {})
        if item.path.name == "test_clients.py":
            # The other tests run with the newest releases.
            is_slow = parameters != {"server": "jail_zfs", "name": client_sets.OLDEST}
        else:
            is_slow = parameters.get("server") == "jail_zfs" and item.path.name not in SHARED_FILES
        if is_slow:
            item.add_marker(pytest.mark.slow)


@pytest.fixture(scope="session", params=["kvm_xfs", "jail_zfs"])
def server(request: pytest.FixtureRequest) -> Iterator[Server]:
    if running_gateway := client_sets.get_running_server():
        client_sets.check_imported_releases()
        kind, port, template = running_gateway
        assert kind == request.param
        yield Server(kind, ABILITIES[kind], None, port, template)
        return
    run = running_fleet if os.environ.get(_FLEET_VARIABLE) else running_server
    with run(request, request.param) as instance:
        yield instance


@pytest.fixture
def requires_memory(server: Server) -> None:
    """Skip the test on hosts whose snapshots do not contain memory."""
    if not server.abilities.memory:
        pytest.skip("the host's snapshots contain only the file system")


@pytest.fixture
def requires_one_host(server: Server) -> None:
    """Skip the test if the gateway would create objects on another host than that of the objects that need them."""
    if server.is_forwarding:
        pytest.skip("new volumes and templates are on the host of the gateway that receives the request")
