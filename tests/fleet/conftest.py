"""Fixtures of the fleet: etcd servers and certificates."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.fleet.times import PATIENT_TIMES, REAL_TIMES, set_times
from tests.fleet.world import FleetHost, World, created_world
from tests.support.certificates import Authority
from tests.support.etcd import Etcd, running_etcd


@pytest.fixture(scope="session", autouse=True)
def patient_times() -> Iterator[None]:
    with pytest.MonkeyPatch.context() as monkeypatch:
        set_times(PATIENT_TIMES, monkeypatch.setattr)
        yield


@pytest.fixture
def real_times(patient_times: None, monkeypatch: pytest.MonkeyPatch) -> None:
    """For tests of what happens when a lease ends, or a request gets no answer: gateways start with the real times.

    Request it before all other fixtures.
    """
    set_times(REAL_TIMES, monkeypatch.setattr)


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
