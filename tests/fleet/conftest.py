"""Fixtures of the fleet: etcd servers and certificates."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from types import ModuleType

import pytest

from sandbox_gateway.api.fleet import merging
from sandbox_gateway.fleet import membership, peers, store
from tests.fleet.world import FleetHost, World, created_world
from tests.support.certificates import Authority
from tests.support.etcd import Etcd, running_etcd

_PATIENT_TIMES = {
    (membership, "LEASE_SECONDS"): 60,
    (store, "_REQUEST_SECONDS"): 15.0,
    (store, "_TOTAL_SECONDS"): 30.0,
    (peers, "_CONNECT_SECONDS"): 15.0,
    (merging, "_LIST_SECONDS"): 30.0,
}
_REAL_TIMES = {(module, name): getattr(module, name) for module, name in _PATIENT_TIMES}


def _set_times(times: dict[tuple[ModuleType, str], float], monkeypatch: pytest.MonkeyPatch) -> None:
    for (module, name), value in times.items():
        monkeypatch.setattr(module, name, value)


@pytest.fixture(scope="session", autouse=True)
def patient_times() -> Iterator[None]:
    """On a busy machine, a gateway or etcd may pause for seconds. That must neither end a lease nor fail a request."""
    with pytest.MonkeyPatch.context() as monkeypatch:
        _set_times(_PATIENT_TIMES, monkeypatch)
        yield


@pytest.fixture
def real_times(patient_times: None, monkeypatch: pytest.MonkeyPatch) -> None:
    """For tests of what happens when a lease ends, or a request gets no answer: gateways start with the real times.

    Request it before all other fixtures.
    """
    _set_times(_REAL_TIMES, monkeypatch)


@pytest.fixture
def etcd(tmp_path: Path) -> Iterator[Etcd]:
    """An etcd server of its own, which the test may stop."""
    with running_etcd(tmp_path / "etcd") as server:
        yield server


@pytest.fixture(scope="session")
def authority(tmp_path_factory: pytest.TempPathFactory) -> Authority:
    return Authority(tmp_path_factory.mktemp("authority"))


@pytest.fixture
def world(tmp_path: Path, etcd: Etcd, authority: Authority) -> Iterator[World]:
    """A fleet without hosts yet, on an etcd of its own."""
    with created_world(tmp_path, etcd, authority) as instance:
        yield instance


@pytest.fixture(scope="module")
def pair(tmp_path_factory: pytest.TempPathFactory, authority: Authority) -> Iterator[tuple[FleetHost, FleetHost]]:
    """Two hosts of a fleet, h1 and h2, for all tests of a module. Both have the template `base`."""
    root = tmp_path_factory.mktemp("pair")
    with running_etcd(root / "etcd") as server, created_world(root, server, authority) as instance:
        one, two = instance.start("h1", "h2")
        for host in (one, two):
            host.gateway.build_template()
        yield one, two
