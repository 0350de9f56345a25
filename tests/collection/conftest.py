"""Gateways for the collection's tests: a stand-in with a state in memory, and a real one."""

from __future__ import annotations

import os
import secrets
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from tests.collection.double_gateway import DoubleGateway, serve
from tests.collection.runner import Target

TEMPLATE = "base"


def seeded(**options: str) -> DoubleGateway:
    """A stand-in that has a template."""
    gateway = DoubleGateway(**options)
    _, started, _ = gateway.answer("POST", "/templates", {"name": TEMPLATE}, gateway.token)
    for _ in range(2):
        gateway.answer("GET", f"/templates/x/builds/{started['buildID']}/status", None, gateway.token)
    return gateway


@pytest.fixture
def double() -> DoubleGateway:
    return seeded()


@pytest.fixture
def doubled(double: DoubleGateway, tmp_path: Path) -> Iterator[Target]:
    """A target whose state the test can reach into, as ``double``."""
    with serve(double) as url:
        yield Target(url, tmp_path, template=TEMPLATE)


_WAYS: dict[str, dict[str, Any]] = {"in process": {}, "as a module": {"environment": {"ANY": "thing"}}}

each_way = pytest.mark.parametrize(
    ("target", "way"), [("double", "in process"), ("double", "as a module"), ("real", "in process")], indirect=True
)
"""For tests of what both ways do alike: they run the same functions, so one of them is enough for the real gateway."""


@pytest.fixture(params=_WAYS)
def way(request: pytest.FixtureRequest) -> dict[str, Any]:
    """Keywords of a play: by the action plugin alone, or (``environment`` needs it) by the module."""
    return _WAYS[request.param]


@pytest.fixture(params=["double", "real"])
def target(request: pytest.FixtureRequest, tmp_path: Path) -> Iterator[Target]:
    """The stand-in, then a real gateway: the one SANDBOX_GATEWAY_URL names, or else one of this run's own.

    SANDBOX_TEST_TEMPLATE names the template to use there.
    """
    if request.param == "double":
        yield request.getfixturevalue("doubled")
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
            # What is listed as a template may be a build that failed.
            if thing.get("buildStatus", "ready") == "ready" and any(name and name.startswith(prefix) for name in names):
                real.client.delete(f"/{kind}/{thing[ident]}")
    for volume in list(real.client.pages("/volumes")):
        if volume["name"].startswith(prefix):
            real.client.delete(f"/volumes/{volume['name']}", withSnapshots=True)
