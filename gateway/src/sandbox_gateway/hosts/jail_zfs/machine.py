"""A sandbox's machine on a jail host."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

from sandbox_gateway.hosts.jail_zfs.epair import Cable


@dataclass
class Machine:
    """A jail that is there, or was and is not ended by us yet."""

    jail: str
    cable: Cable
    root: Path
    running: bool = False
    answered: bool = False
    """Its agent listened when we looked; one that is still starting does not."""
    ended: bool = False
