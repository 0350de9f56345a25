"""The lists of pinned packages of the gateway fit each other."""

from __future__ import annotations

import re

from tests.support import session


def read_pins(name: str) -> set[str]:
    return set(re.findall(r"(?m)^[a-z0-9_.-]+==\S+", (session.REPOSITORY / "gateway" / name).read_text()))


def test_a_member_of_a_fleet_gets_all_packages_of_a_gateway() -> None:
    """The role installs the list of the fleet instead of the other one."""
    assert read_pins("requirements.txt") < read_pins("requirements-fleet.txt")
