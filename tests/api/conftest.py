from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import httpx
import pytest

from tests.api.served import Served


@pytest.fixture(scope="session")
def _served(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Served]:
    served = Served(tmp_path_factory.mktemp("memory"))
    try:
        served.build_template("base", packages=["python3"], description="what tests start from")
        yield served
    finally:
        served.end()


@pytest.fixture
def served(_served: Served) -> Iterator[Served]:
    """A gateway over a host in memory, with the template `base` and nothing else."""
    yield _served
    _served.clear()


@pytest.fixture
def api(served: Served) -> Iterator[httpx.Client]:
    """Its HTTP surface, as an administrator."""
    with served.client() as client:
        yield client


@pytest.fixture
def anyone(served: Served) -> Iterator[httpx.Client]:
    """A client over TCP that sends no key."""
    with served.client("") as client:
        yield client


@pytest.fixture
def one(api: httpx.Client) -> dict[str, Any]:
    """A sandbox of the name `one`, as it was answered."""
    answer = api.post("/sandboxes", json={"templateID": "base", "name": "one"})
    assert answer.status_code == 201, answer.text
    made: dict[str, Any] = answer.json()
    return made
