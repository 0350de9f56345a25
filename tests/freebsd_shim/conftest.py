"""Provide each test with a separate shim."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.freebsd_shim.harness import Shim, is_supported, shim_in


@pytest.fixture
def shim(tmp_path: Path) -> Iterator[Shim]:
    if not is_supported():
        pytest.skip("needs root, util-linux, nftables and /usr/bin/python3")
    with shim_in(tmp_path) as shim:
        yield shim
