"""Directories, names and addresses of this test run that no other run or lane (``pytest -n``) uses."""

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

RUN_VARIABLE = "GROVE_TEST_RUN"
"""Environment variable that every process of the run inherits, so that leftover processes can be identified."""
STARTED_BY_RUN = RUN_VARIABLE in os.environ
"""Whether another process of the run started this one."""

_ID_CHARACTERS = "0123456789abcdefghijklmnopqrstuvwxyz"
LANE = int(os.environ.get("PYTEST_XDIST_WORKER", "gw0").removeprefix("gw"))
LANE_COUNT = 2
# Avoid 10.255, because some networks have their resolver there.
_SUBNETS = [f"10.{second}.{third}.0/22" for second in range(236, 255) for third in range(0, 256, 4)]
_claimed_networks: list[socket.socket] = []
# Below the ephemeral ports of Linux (32768 and up), so that no client takes a port between its choice and its use.
_PORTS = range(20000 + LANE % LANE_COUNT * 6000, 20000 + (LANE % LANE_COUNT + 1) * 6000)
# Each process starts at a random port, because ansible-test starts further pytest processes within a lane.
_port_numbers = itertools.count(secrets.randbelow(len(_PORTS)))


def get_state_dir() -> Path:
    """Return the directory for all files that tests write to disk. Only its subdirectory ``cache`` outlives the run."""
    return Path(os.environ.get("GROVE_TEST_STATE") or f"/var/tmp/grove-test-{os.geteuid()}")


@cache
def get_run_id() -> str:
    """Return the code that identifies this run: three letters or digits."""
    code = "".join(secrets.choice(_ID_CHARACTERS) for _ in range(3))
    return os.environ.setdefault(RUN_VARIABLE, f"{os.getpid()}-{code}").rpartition("-")[2]


def get_run_path() -> Path:
    """Return the path of this run's directory, which may not exist yet."""
    get_run_id()
    return get_state_dir() / f"run-{os.environ[RUN_VARIABLE]}"


def get_run_dir() -> Path:
    """Return this lane's directory under ``get_run_path``. It is created on first use and removed after the run.

    The path is short, because the path of a unix socket may have at most 107 characters.
    """
    path = get_run_path() / str(LANE)
    path.mkdir(parents=True, exist_ok=True)
    return path


def get_cache_dir() -> Path:
    path = get_state_dir() / "cache"
    path.mkdir(parents=True, exist_ok=True)
    return path


def allocate_network() -> dict[str, str]:
    """Return the settings ``prefix`` and ``subnet`` for another gateway, which no other process on this machine gets.

    The prefix starts with ``t`` and the run's id, and the subnet has room for 256 slots. Both remain claimed until this
    process exits. Raises RuntimeError if all are in use.
    """
    first_number = int(get_run_id(), 36) * 7 + LANE * len(_SUBNETS) // LANE_COUNT
    for offset in range(len(_SUBNETS)):
        number = (first_number + offset) % len(_SUBNETS)
        claim = socket.socket(socket.AF_UNIX)
        try:
            claim.bind(f"\0grove-test-network-{number}")
        except OSError:
            claim.close()
            continue
        _claimed_networks.append(claim)
        return {
            "prefix": f"t{get_run_id()}{_ID_CHARACTERS[number // 36]}{_ID_CHARACTERS[number % 36]}",
            "subnet": _SUBNETS[number],
        }
    raise RuntimeError(f"all {len(_SUBNETS)} networks are in use by test runs: wait until one ends")


def allocate_port() -> int:
    """Return a TCP port of this lane on which no process listens and which no earlier call has returned."""
    for number in itertools.islice(_port_numbers, len(_PORTS)):
        with socket.socket() as probe, contextlib.suppress(OSError):
            probe.bind(("127.0.0.1", port := _PORTS[number % len(_PORTS)]))
            return port
    raise RuntimeError(f"ports {_PORTS.start} to {_PORTS.stop - 1} are all in use")


def link_collection(repository: Path = REPOSITORY) -> None:
    """Create a symbolic link to the repository at the path where Ansible looks for the collection."""
    link = repository / COLLECTIONS.relative_to(REPOSITORY) / "ansible_collections" / "grove" / "sandbox"
    if not link.is_symlink():
        link.parent.mkdir(parents=True, exist_ok=True)
        link.symlink_to("../../../..")
