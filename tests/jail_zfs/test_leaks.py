"""Test that tests.leaks removes the leftovers of an earlier run that was killed."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

from tests import leaks
from tests.support import session

ADDRESS = "198.51.100.254"
RUN_PROGRAM = """
import os, signal, subprocess, sys
from pathlib import Path
from tests import leaks
from tests.support import pools
from tests.support import jail_world, session
from tests.support.xfs import LoopXfs

temporary, mark_file, address = Path(sys.argv[1]), Path(sys.argv[2]), sys.argv[3]
leaks.record_temporary_directory(temporary)
place, prefix = session.get_run_dir(), "t" + session.get_run_id()
LoopXfs(place / "xfs.img", place / "xfs", size_mb=320).__enter__()
pool = pools.pool(prefix + "k", place, megabytes=128)
pool.__enter__()
for target in ("jailed", "bound"):
    (temporary / target).mkdir()
shim_state = place / jail_world.SHIM_DIRECTORY
jail_world.run_shim("mount", "-t", "nullfs", "-o", "ro", "/usr", f"{temporary}/jailed", state=shim_state)
for command in (
    f"mount --bind /usr {temporary}/bound",
    f"ip netns add {prefix}n",
    f"ip link add {prefix}b type bridge",
    f"nft add table inet {prefix}aa_sandbox",
    f"nft add chain inet {prefix}aa_sandbox at",
    f"nft add rule inet {prefix}aa_sandbox at ip daddr {address} tcp dport 2049 drop",
    f"ip address add {address}/32 dev lo",
):
    subprocess.run(command.split(), check=True, timeout=30)
subprocess.Popen(["sleep", "600"], start_new_session=True)
mark_file.write_text(os.environ[session.RUN_VARIABLE])
os.kill(os.getpid(), signal.SIGKILL)
"""


def test_leftovers_of_a_killed_run_are_removed(
    requires_root: None, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    temporary_directory = tmp_path / "temporary"
    temporary_directory.mkdir()
    monkeypatch.setenv("GROVE_TEST_STATE", str(tmp_path / "state"))
    mark_file = tmp_path / "mark"
    # The output goes to a file, because processes that keep running would keep a pipe open.
    with (tmp_path / "errors").open("w") as errors:
        subprocess.run(
            [sys.executable, "-c", RUN_PROGRAM, str(temporary_directory), str(mark_file), ADDRESS],
            cwd=session.REPOSITORY,
            env={name: value for name, value in os.environ.items() if name != session.RUN_VARIABLE},
            stdout=errors,
            stderr=errors,
            timeout=120,
            check=False,
        )
    assert mark_file.exists(), (tmp_path / "errors").read_text()
    mark = mark_file.read_text()
    run_id = mark.partition("-")[2]
    leftovers = _find_leftovers(mark, f"t{run_id}", tmp_path)
    assert [len(items) for items in leftovers.values()] == [1, 4, 1, 1, 1, 1, 1, 1, 1], leftovers
    leaks.sweep_earlier_runs()
    assert not any(_find_leftovers(mark, f"t{run_id}", tmp_path).values())
    assert any(Path("/usr/bin").iterdir())


def _find_leftovers(mark: str, prefix: str, directory: Path) -> dict[str, list[str]]:
    """Return only the leftovers of the killed run, because other runs may be active."""
    inventory = leaks.take_inventory()
    return {
        "processes": list(leaks._find_processes(directory / "state" / f"run-{mark}", mark).values()),
        "mounts": [line for line in inventory.mounts if line.startswith(str(directory))],
        "loops": [line for line in inventory.loops if str(directory) in line],
        "namespaces": [name for name in inventory.namespaces if name.startswith(prefix)],
        "links": [name for name in inventory.links if name.startswith(prefix)],
        "tables": [line for line in inventory.tables if f" {prefix}" in line],
        "addresses": [address for address in leaks._list_addresses("lo") if address == ADDRESS],
        "zpools": [name for name in inventory.zpools if name.startswith(prefix)],
        "files": [str(path) for path in (directory / "state").glob("run-*")],
    }
