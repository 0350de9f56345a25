"""Gateways for the collection's tests: above a host in memory, with faults, and above a host of virtual machines."""

from __future__ import annotations

import os
import secrets
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from tests.collection.runner import Target
from tests.support import faulty_gateway
from tests.support.faulty_gateway import TEMPLATE, FaultyGateway


@pytest.fixture(scope="session")
def _faulty() -> Iterator[FaultyGateway]:
    with faulty_gateway.serve() as gateway:
        yield gateway


@pytest.fixture
def faulty(_faulty: FaultyGateway) -> Iterator[FaultyGateway]:
    """A gateway above a host in memory with a template and nothing else; tests set its faults."""
    yield _faulty
    _faulty.reset()


@pytest.fixture
def in_memory(faulty: FaultyGateway, tmp_path: Path) -> Target:
    """``faulty`` as a target."""
    return Target(faulty.url, tmp_path, template=TEMPLATE)


_WAYS: dict[str, dict[str, Any]] = {"in process": {}, "as a module": {"environment": {"ANY": "thing"}}}

each_way = pytest.mark.parametrize(
    ("target", "way"), [("memory", "in process"), ("memory", "as a module"), ("real", "in process")], indirect=True
)
"""For behaviour that does not depend on the way: both run the same functions, so one is enough for the real gateway."""


@pytest.fixture(params=_WAYS)
def way(request: pytest.FixtureRequest) -> dict[str, Any]:
    """Keywords of a play: by the action plugin, or by the module (because of ``environment``)."""
    return _WAYS[request.param]


@pytest.fixture(params=["memory", "real"])
def target(request: pytest.FixtureRequest, tmp_path: Path) -> Iterator[Target]:
    """A gateway above a host in memory, then one with machines: SANDBOX_GATEWAY_URL, or a gateway of this run.

    SANDBOX_TEST_TEMPLATE names the template to use there.
    """
    if request.param == "memory":
        yield request.getfixturevalue("in_memory")
        return
    prefix = f"ct{secrets.token_hex(3)}-"
    if url := os.environ.get("SANDBOX_GATEWAY_URL"):
        token = os.environ.get("SANDBOX_GATEWAY_TOKEN", "")
        template = os.environ.get("SANDBOX_TEST_TEMPLATE", TEMPLATE)
    else:
        template = request.getfixturevalue("template")
        url, token = request.getfixturevalue("shared_gateway").url, ""
    real = Target(url, tmp_path, token=token, template=template, prefix=prefix)
    yield real
    for kind, ident in (("sandboxes", "sandboxID"), ("snapshots", "snapshotID"), ("templates", "templateID")):
        for thing in list(real.client.pages(f"/{kind}")):
            names = [thing.get("name"), *(thing.get("names") or [])]
            # The list of templates may contain failed builds.
            if thing.get("buildStatus", "ready") == "ready" and any(name and name.startswith(prefix) for name in names):
                real.client.delete(f"/{kind}/{thing[ident]}")
    for volume in list(real.client.pages("/volumes")):
        if volume["name"].startswith(prefix):
            real.client.delete(f"/volumes/{volume['name']}", withSnapshots=True)
