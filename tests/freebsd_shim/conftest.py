"""Provide each test with a separate shim, and with a pool."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.freebsd_shim.harness import Shim, created_shim, is_supported
from tests.support import pools, session


@pytest.fixture
def shim(tmp_path: Path) -> Iterator[Shim]:
    if not is_supported():
        pytest.skip("needs root, util-linux, nftables and /usr/bin/python3")
    with created_shim(tmp_path) as shim:
        yield shim


@pytest.fixture
def pool(requires_root: None, tmp_path_factory: pytest.TempPathFactory) -> Iterator[pools.Pool]:
    with pools.pool(f"t{session.get_run_id()}s", tmp_path_factory.mktemp("pool"), megabytes=256) as pool:
        yield pool
