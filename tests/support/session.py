"""This test run: its directory, names and addresses, which differ from those of other runs and lanes (``pytest
-n``).
"""

from __future__ import annotations

import contextlib
import itertools
import os
import secrets
import socket
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
# Below the ports that Linux gives to clients (32768 and up): a client must not take a port between its choice and use.
_PORTS = range(20000 + LANE % LANES * 6000, 20000 + (LANE % LANES + 1) * 6000)
# Each process begins elsewhere: ansible-test starts pytest within a lane.
_next_port = itertools.count(secrets.randbelow(len(_PORTS)))


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


def free_port() -> int:
    """A TCP port of this lane on which no process listens, and that no earlier call returned."""
    for number in itertools.islice(_next_port, len(_PORTS)):
        with socket.socket() as probe, contextlib.suppress(OSError):
            probe.bind(("127.0.0.1", port := _PORTS[number % len(_PORTS)]))
            return port
    raise RuntimeError(f"ports {_PORTS.start} to {_PORTS.stop - 1} are all in use")


def link_collection() -> None:
    """Link the repository to the place where Ansible looks for the collection."""
    place = COLLECTIONS / "ansible_collections" / "grove" / "sandbox"
    if not place.is_symlink():
        place.parent.mkdir(parents=True, exist_ok=True)
        place.symlink_to("../../../..")
