"""Gateways for the clients: one with the sandboxes, and perhaps another one of its fleet, which forwards requests."""

from __future__ import annotations

import contextlib
import re
from collections.abc import Iterator
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import httpx
import pytest

from sandbox_gateway.hosts.base import Abilities
from sandbox_gateway.hosts.jail_zfs.host import JailZfsHost
from sandbox_gateway.hosts.kvm_xfs.host import KvmXfsHost
from tests.fleet.world import World, created_world, running_process
from tests.support import session
from tests.support.certificates import Authority
from tests.support.etcd import running_etcd
from tests.support.gateway import TEMPLATE, Gateway
from tests.support.session import REPOSITORY
from tests.support.waiting import wait_until
from tests.support.world_gateway import world_gateway
from tests.support.worlds import TEMPLATE as JAIL_TEMPLATE

KEY = "e2b_0123456789abcdef0123456789abcdef01234567"
DOMAIN = "sandbox.test"
ABILITIES = {"kvm_xfs": KvmXfsHost.abilities, "jail_zfs": JailZfsHost.abilities}

_FORWARDED_PATTERN = re.compile(
    r'^sandbox_gateway_request_seconds_count\{[^}]*route="fleet"[^}]*\} (\S+)', re.MULTILINE
)


@dataclass(frozen=True)
class Server:
    """A gateway as a client sees it. ``template`` is the name of a template with bash and python3.

    ``gateway`` is the gateway that has the sandboxes, or None if it runs in another process (test_clients.py).
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
    is_forwarding: bool = False
    """Whether another host of the gateway's fleet has the template."""

    @property
    def url(self) -> str:
        return f"http://127.0.0.1:{self.port}"


def build_e2b_environment(url: str, key: str) -> dict[str, str]:
    """Return the environment variables that docs/e2b.md tells users of the client to set."""
    (block,) = re.findall(r"```sh\n(export E2B_.*?)```", (REPOSITORY / "docs" / "e2b.md").read_text(), re.DOTALL)
    values = {"http://127.0.0.1:3000": url, "…": key}
    return {name: values[value] for name, value in re.findall(r"^export (\w+)=(\S+)$", block, re.MULTILINE)}


@contextlib.contextmanager
def running_server(request: pytest.FixtureRequest, kind: str, **sections: dict[str, Any]) -> Iterator[Server]:
    """Run a gateway on a host of this kind."""
    port = session.allocate_port()
    sections["server"] = _create_server_section(port)
    if kind == "kvm_xfs":
        registry_port = session.allocate_port()
        sections["kvm_xfs"] = _create_kvm_section(registry_port)
        gateway = request.getfixturevalue("seeded_gateways")(sections)
        yield Server(kind, ABILITIES[kind], gateway, port, TEMPLATE, registry_port=registry_port)
    else:
        directory = session.get_run_dir() / f"sdk-{port}"
        directory.mkdir()
        with world_gateway(request.getfixturevalue("jail_zfs_world"), directory, **sections) as gateway:
            yield Server(kind, ABILITIES[kind], gateway, port, JAIL_TEMPLATE)


@contextlib.contextmanager
def running_fleet(request: pytest.FixtureRequest, kind: str) -> Iterator[Server]:
    """Run a gateway on a host of this kind, and another one, to which the clients connect.

    Only the first one has the template, so that all sandboxes of the template are on its host.
    """
    root = session.get_run_dir() / f"sdk-fleet-{kind}"
    root.mkdir()
    authority = Authority(root / "authority")
    with running_etcd(root / "etcd", authority.get("etcd")) as etcd, created_world(root, etcd, authority) as world:
        fleet = world.create_host("back").create_section()
        with running_server(request, kind, fleet=fleet) as back, _running_front(request, world, back) as port:
            front = replace(back, port=port, is_forwarding=True)
            with httpx.Client(base_url=front.url, headers={"X-API-Key": KEY}, timeout=60) as client:
                wait_until(lambda: client.get(f"/templates/{front.template}").status_code == 200)
                # On a busy machine, a lease may end while a gateway starts.
                wait_until(lambda: _list_states(client) == ["joined", "running", "running"])
                yield front
                assert count_forwarded_requests(client.get("/metrics").text)


def _list_states(client: httpx.Client) -> list[str]:
    """Return the state of a gateway, followed by those of all hosts of its fleet."""
    fleet = client.get("/fleet").json()
    return [fleet["state"], *(host["state"] for host in fleet["hosts"])]


def count_forwarded_requests(metrics: str) -> int:
    """Return how many requests a gateway has let other hosts carry out."""
    return sum(int(float(count)) for count in _FORWARDED_PATTERN.findall(metrics))


@contextlib.contextmanager
def _running_front(request: pytest.FixtureRequest, world: World, back: Server) -> Iterator[int]:
    """Run the gateway for the clients, and yield its port. It can build templates, if the kind of host can."""
    port = session.allocate_port()
    server = _create_server_section(port)
    if back.kind == "kvm_xfs":
        fleet = world.create_host("front").create_section()
        kvm_section = _create_kvm_section(back.registry_port)
        request.getfixturevalue("make_gateway")({"server": server, "kvm_xfs": kvm_section, "fleet": fleet})
        yield port
    else:
        with running_process(world, "front", is_patient=True, server=server):
            yield port


def _create_server_section(port: int) -> dict[str, Any]:
    return {"listen": f"127.0.0.1:{port}", "key_file": str(_write_keys()), "domain": DOMAIN}


def _create_kvm_section(registry_port: int) -> dict[str, Any]:
    return {"insecure_registries": [f"127.0.0.1:{registry_port}"]}


def _write_keys() -> Path:
    path = session.get_run_dir() / "sdk-keys"
    path.write_text(f"agent admin {KEY}\n")
    path.chmod(0o600)
    return path
