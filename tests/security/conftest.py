"""The gateway over a host in memory, as the tests of the API have it."""

from __future__ import annotations

from tests.api.conftest import _served, anyone, api, one, served

__all__ = ["_served", "anyone", "api", "one", "served"]
