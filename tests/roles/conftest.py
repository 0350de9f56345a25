"""Fixtures for the tests of the roles."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.roles import upgrade
from tests.support import session


@pytest.fixture(scope="session")
def newer_collections() -> Path:
    """A collections path that contains this collection with a newer gateway."""
    path = session.get_run_dir() / "newer"
    upgrade.make_newer_collection(path)
    return path
