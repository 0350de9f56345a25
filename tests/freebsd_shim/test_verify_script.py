"""Test the script that checks FreeBSD's behaviour on a real machine, by running it with the shim and zfs-fuse."""

from __future__ import annotations

import subprocess
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest

from tests.freebsd_shim.harness import Shim
from tests.jail_zfs import pools

_SCRIPT = Path(__file__).with_name("verify_on_freebsd.sh")


@contextmanager
def _kept_responsive(directory: Path) -> Iterator[None]:
    """Keep zfs-fuse responsive, as ``pools.pool`` does, for the pool that the script creates under ``directory``."""
    stop_event = threading.Event()

    def watch() -> None:
        while not stop_event.wait(1):
            pools._all_respond(pools._list_mount_points_below(directory), 10)

    thread = threading.Thread(target=watch)
    thread.start()
    try:
        yield
    finally:
        stop_event.set()
        thread.join()


def test_the_shim_passes_the_checks_that_it_can_run(shim: Shim, pool: pools.Pool, tmp_path: Path) -> None:
    environ = {"PATH": f"{shim.environ['PATH']}", "TMPDIR": str(tmp_path)}
    shim.check_ok("pfctl", "-q", "-f", "-", input='nat-anchor "sbx/*"\nanchor "sbx/*"\n')
    pools_before = set(pools.run("zpool", "list", "-H", "-o", "name").stdout.split())
    with _kept_responsive(tmp_path):
        result = shim("sh", str(_SCRIPT), timeout=300, **environ)
    assert result.returncode == 0, result.stdout + result.stderr
    rows = [line.split()[0] for line in result.stdout.splitlines()]
    assert rows.count("ok") >= 30 and "FAILED" not in rows, result.stdout
    # zfs-fuse may still report the script's pool as busy when the script gives up.
    pools.destroy_pools(set(pools.run("zpool", "list", "-H", "-o", "name").stdout.split()) - pools_before)
    assert shim("ifconfig", "-g", "vfy-epair").stdout == "" and "vfy" not in shim.check_ok("jls", "name")


def test_the_script_refuses_other_systems(tmp_path: Path) -> None:
    result = subprocess.run(
        ["sh", str(_SCRIPT)], capture_output=True, text=True, timeout=30, env={"PATH": "/usr/bin:/bin"}, check=False
    )
    assert result.returncode == 2 and ("not FreeBSD" in result.stderr or "as root" in result.stderr)


@pytest.mark.parametrize("argument", ["-x", "report"])
def test_the_script_refuses_unknown_arguments(argument: str) -> None:
    result = subprocess.run(["sh", str(_SCRIPT), argument], capture_output=True, text=True, timeout=30, check=False)
    assert result.returncode == 2 and result.stderr.startswith("usage:")
