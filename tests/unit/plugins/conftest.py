from __future__ import annotations

from collections.abc import Iterator

import pytest

from tests.support import faulty_gateway
from tests.support.faulty_gateway import FaultyGateway


@pytest.fixture(scope="session")
def gateway() -> Iterator[FaultyGateway]:
    with faulty_gateway.running_gateway() as gateway:
        yield gateway
