"""Gateways for the collection's tests: one on an in-memory host with injectable faults, one with virtual machines."""

from __future__ import annotations

import os
import secrets
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from tests.collection.runner import Target
from tests.support.faulty_gateway import TEMPLATE, FaultyGateway, running_gateway
from tests.support.memory_gateway import MemoryGateway
from tests.support.samples import mark_slow_except


@pytest.fixture(scope="session")
def _faulty_gateway() -> Iterator[FaultyGateway]:
    with running_gateway() as gateway:
        yield gateway


@pytest.fixture
def faulty_gateway(_faulty_gateway: FaultyGateway) -> Iterator[FaultyGateway]:
    """A gateway that has only a template, on an in-memory host into which tests inject faults."""
    yield _faulty_gateway
    _faulty_gateway.reset()


@pytest.fixture
def memory_target(faulty_gateway: FaultyGateway, tmp_path: Path) -> Target:
    """The target that uses ``faulty_gateway``."""
    return Target(faulty_gateway.url, tmp_path, template=TEMPLATE)


@pytest.fixture(scope="session")
def _plan_gateway(tmp_path_factory: pytest.TempPathFactory) -> Iterator[MemoryGateway]:
    gateway = MemoryGateway(tmp_path_factory.mktemp("plans"), log={"level": "warning"})
    gateway.build_template("base")
    yield gateway
    gateway.end()


@pytest.fixture
def plan_gateway(_plan_gateway: MemoryGateway) -> Iterator[MemoryGateway]:
    """A gateway on an in-memory host that has only the template `base`, for whole plays."""
    yield _plan_gateway
    _plan_gateway.clear()


@pytest.fixture
def plan_target(plan_gateway: MemoryGateway, tmp_path: Path) -> Target:
    return Target(plan_gateway.unix_url, tmp_path)


_EXECUTION_KEYWORDS: dict[str, dict[str, Any]] = {"in process": {}, "as a module": {"environment": {"ANY": "thing"}}}

each_execution = pytest.mark.parametrize(
    ("target", "keywords"),
    [
        ("memory", "in process"),
        pytest.param("memory", "as a module", marks=pytest.mark.slow),
        ("real", "in process"),
    ],
    indirect=True,
)
"""Runs a test in process and as a module, but only in process on the real gateway, because the code is the same."""


@pytest.fixture(params=mark_slow_except(("in process",), _EXECUTION_KEYWORDS))
def keywords(request: pytest.FixtureRequest) -> dict[str, Any]:
    """Play keywords that make tasks run in the action plugin or, if ``environment`` is set, as a module."""
    return _EXECUTION_KEYWORDS[request.param]


@pytest.fixture(params=mark_slow_except(("memory",), ("memory", "real")))
def target(request: pytest.FixtureRequest, tmp_path: Path) -> Iterator[Target]:
    """Each of two targets in turn: a gateway backed by an in-memory host, and a gateway with real machines.

    The real gateway is the one at SANDBOX_GATEWAY_URL, with the template SANDBOX_TEST_TEMPLATE. If the URL is not set,
    the test run starts a gateway.
    """
    if request.param == "memory":
        yield request.getfixturevalue("memory_target")
        return
    prefix = f"ct{secrets.token_hex(3)}-"
    if url := os.environ.get("SANDBOX_GATEWAY_URL"):
        token = os.environ.get("SANDBOX_GATEWAY_TOKEN", "")
        template = os.environ.get("SANDBOX_TEST_TEMPLATE", TEMPLATE)
    else:
        template = request.getfixturevalue("template")
        url, token = request.getfixturevalue("shared_gateway").url, ""
    real_target = Target(url, tmp_path, token=token, template=template, prefix=prefix)
    yield real_target
    for kind, id_field in (("sandboxes", "sandboxID"), ("snapshots", "snapshotID"), ("templates", "templateID")):
        for resource in list(real_target.client.list_all(f"/{kind}")):
            names = [resource.get("name"), *(resource.get("names") or [])]
            # The list of templates may contain failed builds.
            if resource.get("buildStatus", "ready") == "ready" and any(
                name and name.startswith(prefix) for name in names
            ):
                real_target.client.delete(f"/{kind}/{resource[id_field]}")
    for volume in list(real_target.client.list_all("/volumes")):
        if volume["name"].startswith(prefix):
            real_target.client.delete(f"/volumes/{volume['name']}", withSnapshots=True)
