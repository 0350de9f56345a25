"""The role jail_zfs_host on a real pool, with doubles of FreeBSD's commands in their own network."""

from __future__ import annotations

import os
import re
import subprocess
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from tests.freebsd_shim.harness import Shim, shim_in
from tests.jail_zfs import pools
from tests.support import session
from tests.support.roles import Played, play


class Place:
    """A pool, a shim, and the files that the role writes."""

    def __init__(self, pool: pools.Pool, shim: Shim, directory: Path) -> None:
        self.pool, self.shim, self.directory = pool, shim, directory
        self.dataset = f"{pool.name}/a/sandboxes"
        network = session.network()
        self.bridge = f"{network['prefix']}br"
        self.prefix = network["prefix"]
        self.variables: dict[str, Any] = {
            "dataset": self.dataset,
            **network,
            "pf_conf": str(directory / "pf.conf"),
            "loader_conf": str(directory / "loader.conf"),
            "sysctl_conf": str(directory / "sysctl.conf"),
        }

    def apply(self, check: bool = False, **options: Any) -> Played:
        variables = {f"jail_zfs_host_{name}": value for name, value in {**self.variables, **options}.items()}
        inside = ["/usr/bin/nsenter", f"--net=/proc/{self.shim.space}/ns/net", "/usr/bin/env"]
        inside += [f"PATH={self.shim.environ['PATH']}", f"FREEBSD_SHIM_STATE={self.shim.state}"]
        return play("jail_zfs_host", variables, check=check, into=self.directory, inside=tuple(inside))

    def datasets(self) -> list[str]:
        return pools.run("zfs", "list", "-H", "-r", "-o", "name", self.pool.name).stdout.split()


@pytest.fixture(scope="module")
def pool(need_root: None) -> Iterator[pools.Pool]:
    with pools.pool(f"t{session.run_id()}r", session.run_dir()) as made:
        yield made


@pytest.fixture
def place(pool: pools.Pool, tmp_path: Path) -> Iterator[Place]:
    with shim_in(tmp_path) as shim:
        yield Place(pool, shim, tmp_path)
    if f"{pool.name}/a" in pools.run("zfs", "list", "-H", "-o", "name").stdout.split():
        pools.destroy_all(f"{pool.name}/a")


def test_check_mode_then_first_run_then_no_changes(place: Place) -> None:
    (place.directory / "pf.conf").write_text("set skip on lo0\nnat on em0 from any to any -> 192.0.2.1\npass all\n")
    predicted = place.apply(check=True)
    assert not predicted.failed, predicted.output
    assert place.datasets() == [place.pool.name]
    assert not (place.directory / "loader.conf").exists()

    first = place.apply()
    assert not first.failed, first.output
    assert predicted.changed_task_names == first.changed_task_names
    tree = [f"{place.dataset}{name}" for name in ("", "/retired", "/sandboxes")]
    assert place.datasets() == [place.pool.name, f"{place.pool.name}/a", *tree]
    got = pools.run("zfs", "get", "-H", "-o", "value", "atime,com.sun:auto-snapshot", tree[2]).stdout.split()
    assert got == ["off", "false"]
    assert (place.directory / "pf.conf").read_text().splitlines() == [
        "set skip on lo0",
        "nat on em0 from any to any -> 192.0.2.1",
        'nat-anchor "sbx/*"',
        "pass all",
        'anchor "sbx/*"',
    ]
    assert 'kern.racct.enable="1"' in (place.directory / "loader.conf").read_text()
    assert "net.inet.ip.forwarding=1" in (place.directory / "sysctl.conf").read_text()
    assert place.shim.check_ok("sysctl", "-n", "kern.logsigexit") == "0\n", "a jail writes no lines of the host's log"
    assert place.bridge in place.shim.check_ok("ifconfig", "-l")
    assert re.search(r"inet 10\.\S+\.1 netmask", place.shim.check_ok("ifconfig", place.bridge))
    assert 'anchor "sbx/*" all' in place.shim.check_ok("pfctl", "-s", "rules")

    for check in (False, True):
        again = place.apply(check=check)
        assert (again.failed, again.changed_task_names) == (False, []), again.output

    pools.run("zfs", "set", "atime=on", place.dataset)
    mended = place.apply()
    assert mended.changed_task_names == ["grove.sandbox.jail_zfs_host : Set the values that differ"], mended.output


def test_data_are_kept_unless_removal_is_requested(place: Place) -> None:
    assert not place.apply().failed
    clone = f"{place.dataset}/sandboxes/i1"
    pools.run("zfs", "create", clone)
    pools.run("zfs", "snapshot", f"{clone}@s1")

    done = place.apply(state="absent")
    assert not done.failed, done.output
    assert "keeps its sandboxes" in done.output
    assert clone in place.datasets()
    assert place.bridge not in place.shim.check_ok("ifconfig", "-l")
    assert "sbx" not in (place.directory / "pf.conf").read_text() + place.shim.check_ok("pfctl", "-s", "rules")
    assert place.apply(state="absent").changed_task_names == []

    outside = f"{place.pool.name}/theirs"
    pools.run("zfs", "clone", f"{clone}@s1", outside)
    pools.run("zfs", "create", f"{place.dataset}/precious")
    refused = place.apply(state="absent", remove_data=True)
    assert refused.failed
    assert outside in refused.message
    assert f"{place.dataset}/precious" in refused.message
    assert clone in place.datasets()

    pools.destroy_all(outside)
    pools.destroy_all(f"{place.dataset}/precious")
    predicted = place.apply(state="absent", remove_data=True, check=True)
    assert not predicted.failed, predicted.output
    assert clone in place.datasets()
    removed = place.apply(state="absent", remove_data=True)
    assert not removed.failed, removed.output
    assert place.dataset not in place.datasets()
    assert f"{clone}@s1" in removed.output, "what goes is listed"
    assert place.apply(state="absent", remove_data=True).changed_task_names == []


def test_pools_and_datasets_in_use_are_left_alone(place: Place) -> None:
    assert not place.apply().failed
    dataset = f"{place.dataset}/sandboxes/i2"
    pools.run("zfs", "create", dataset)
    root = place.pool.mount_point / "a/sandboxes/sandboxes/i2"
    place.shim.check_ok("jail", "-c", "name=busy", f"path={root}", "persist")
    done = place.apply(state="absent", remove_data=True)
    place.shim.check_ok("jail", "-R", "busy")
    assert done.failed
    assert "(busy): end them first" in done.message
    assert dataset in place.datasets()

    moved = place.apply(mountpoint=str(place.directory / "elsewhere"))
    assert moved.failed
    assert "where its sandboxes run" in moved.message


def test_a_kernel_without_racct_is_reported(place: Place) -> None:
    place.shim.check_ok("freebsd-shim", "set", "kern.racct.enable", "0")
    done = place.apply()
    assert not done.failed, done.output
    assert "reboot needed: kern.racct.enable" in done.output


@pytest.mark.parametrize(
    ("options", "sentence"),
    [
        ({"dataset": "nosuchpool/sandboxes"}, "The pool nosuchpool cannot be queried"),
        ({"dataset": "wholepool"}, "a dataset below a pool"),
        ({"prefix": "Sandbox"}, "jail_zfs_host_prefix up to 6"),
    ],
)
def test_invalid_options_are_refused(place: Place, options: dict[str, str], sentence: str) -> None:
    done = place.apply(check=True, **options)
    assert done.failed
    assert sentence in done.message


def test_old_and_foreign_systems_are_refused(place: Place) -> None:
    place.shim.check_ok("freebsd-shim", "set", "kern.osreldate", "1302000")
    assert "14.0 (1400000) or newer" in place.apply().message
    environment = {name: value for name, value in os.environ.items() if name != "FREEBSD_SHIM_STATE"}
    assert (
        subprocess.run(["sysctl", "-n", "kern.ostype"], env=environment, capture_output=True, text=True).stdout.strip()
        != "FreeBSD"
    )
    variables = {f"jail_zfs_host_{name}": value for name, value in place.variables.items()}
    done = play("jail_zfs_host", variables, into=place.directory)
    assert "jails need FreeBSD" in done.message
