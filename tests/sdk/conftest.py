"""A live gateway on each kind of host, which unmodified published clients use over TCP."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import httpx
import pytest

from sandbox_gateway.hosts.base import Abilities
from sandbox_gateway.hosts.jail_zfs.host import JailZfsHost
from sandbox_gateway.hosts.kvm_xfs.host import KvmXfsHost
from tests.sdk import client_sets
from tests.support import session
from tests.support.gateway import TEMPLATE, Gateway
from tests.support.world_gateway import world_gateway
from tests.support.worlds import TEMPLATE as JAIL_TEMPLATE

KEY = "e2b_0123456789abcdef0123456789abcdef01234567"
DOMAIN = "sandbox.test"
HERE = Path(__file__).parent
HTTP = httpx.Client(timeout=60, limits=httpx.Limits(max_keepalive_connections=0))
"""A client whose timeout suffices on a busy machine. Each request has its own connection."""
_HOSTS = {"kvm_xfs": KvmXfsHost, "jail_zfs": JailZfsHost}
SHARED_FILES = ("test_clients.py", "test_cubesandbox.py", "test_load.py")


@dataclass(frozen=True)
class Server:
    """A gateway as a client sees it. ``template`` is the name of a template with bash and python3.

    ``gateway`` is None if another process runs the gateway (test_clients.py).
    """

    kind: str
    abilities: Abilities
    gateway: Gateway | None
    port: int
    template: str
    key: str = KEY
    domain: str = DOMAIN
    registry_port: int = 0
    """The port of 127.0.0.1 at which a test can run a registry without HTTPS."""

    @property
    def url(self) -> str:
        return f"http://127.0.0.1:{self.port}"


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
    if running_server := client_sets.get_running_server():
        client_sets.check_imported_releases()
        kind, port, template = running_server
        assert kind == request.param
        yield Server(kind, _HOSTS[kind].abilities, None, port, template)
        return
    port = session.allocate_port()
    server_section = {"listen": f"127.0.0.1:{port}", "key_file": str(_write_keys()), "domain": DOMAIN}
    if request.param == "kvm_xfs":
        registry_port = session.allocate_port()
        kvm_section = {"insecure_registries": [f"127.0.0.1:{registry_port}"]}
        gateway = request.getfixturevalue("seeded_gateways")({"server": server_section, "kvm_xfs": kvm_section})
        yield Server("kvm_xfs", _HOSTS["kvm_xfs"].abilities, gateway, port, TEMPLATE, registry_port=registry_port)
    else:
        world = request.getfixturevalue("jail_zfs_world")
        directory = session.get_run_dir() / "sdk"
        directory.mkdir()
        with world_gateway(world, directory, server=server_section) as gateway:
            yield Server("jail_zfs", _HOSTS["jail_zfs"].abilities, gateway, port, JAIL_TEMPLATE)


@pytest.fixture
def requires_memory(server: Server) -> None:
    """Skip the test on hosts whose snapshots do not contain memory."""
    if not server.abilities.memory:
        pytest.skip("the host's snapshots contain only the file system")


def _write_keys() -> Path:
    path = session.get_run_dir() / "sdk-keys"
    path.write_text(f"agent admin {KEY}\n")
    path.chmod(0o600)
    return path
