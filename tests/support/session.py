"""This test run: its directory, names and addresses, which differ from those of other runs and lanes (``pytest
-n``).
"""

from __future__ import annotations

import itertools
import os
import secrets
from functools import cache
from pathlib import Path

TESTS = Path(__file__).resolve().parent.parent
REPOSITORY = TESTS.parent
COLLECTIONS = REPOSITORY / ".cache" / "collections"

MARK = "GROVE_TEST_RUN"
"""Environment variable that every process of the run inherits: it identifies leftovers."""

_letters = "0123456789abcdefghijklmnopqrstuvwxyz"
LANE = int(os.environ.get("PYTEST_XDIST_WORKER", "gw0").removeprefix("gw"))
LANES = 2
_GATEWAYS = len(_letters) ** 2 // LANES
_count = itertools.count()


def state_dir() -> Path:
    """Directory of everything that tests write to disk; ``cache`` below it outlives the run."""
    return Path(os.environ.get("GROVE_TEST_STATE") or f"/var/tmp/grove-test-{os.geteuid()}")


@cache
def run_id() -> str:
    """Three letters or digits of this run."""
    code = "".join(secrets.choice(_letters) for _ in range(3))
    return os.environ.setdefault(MARK, f"{os.getpid()}-{code}").rpartition("-")[2]


def run_path() -> Path:
    """The path of ``run_dir``, whether it exists or not."""
    run_id()
    return state_dir() / f"run-{os.environ[MARK]}"


def run_dir() -> Path:
    """This lane's directory, created at first use, removed at the end. Short, for unix sockets: 107 characters."""
    path = run_path() / str(LANE)
    path.mkdir(parents=True, exist_ok=True)
    return path


def cache_dir() -> Path:
    path = state_dir() / "cache"
    path.mkdir(parents=True, exist_ok=True)
    return path


def network() -> dict[str, str]:
    """``{prefix, subnet}`` for another gateway: a prefix that begins with this run's, and addresses for 256 slots."""
    if LANE >= LANES or (number := next(_count)) >= _GATEWAYS:
        raise RuntimeError(f"a test run has names for {LANES} lanes with {_GATEWAYS} gateways each")
    number += LANE * _GATEWAYS
    # Avoids 10.255: some networks have their resolver there.
    block = (int(run_id(), 36) * 7 + number) % 960
    return {
        "prefix": f"t{run_id()}{_letters[number // 36]}{_letters[number % 36]}",
        "subnet": f"10.{240 + block // 64}.{block % 64 * 4}.0/22",
    }


def link_collection() -> None:
    """Link the repository to the place where Ansible looks for the collection."""
    place = COLLECTIONS / "ansible_collections" / "grove" / "sandbox"
    if not place.is_symlink():
        place.parent.mkdir(parents=True, exist_ok=True)
        place.symlink_to("../../../..")
