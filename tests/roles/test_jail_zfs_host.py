"""Test the jail_zfs_host role with a real pool, and with test doubles for FreeBSD's commands in a separate network."""

from __future__ import annotations

import os
import re
import subprocess
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from tests.freebsd_shim.harness import Shim, created_shim
from tests.support import pools, session
from tests.support.roles import PlayResult, play


class JailHost:
    """A stand-in for a managed host, with a pool, the FreeBSD shim, and a directory for the files of the role."""

    def __init__(self, pool: pools.Pool, shim: Shim, directory: Path) -> None:
        self.pool, self.shim, self.directory = pool, shim, directory
        self.dataset = f"{pool.name}/a/sandboxes"
        network = session.allocate_network()
        self.bridge = f"{network['prefix']}br"
        self.prefix = network["prefix"]
        self.variables: dict[str, Any] = {
            "dataset": self.dataset,
            **network,
            "lzc_path": str(directory / "lzc"),
            "pf_conf": str(directory / "pf.conf"),
            "loader_conf": str(directory / "loader.conf"),
            "sysctl_conf": str(directory / "sysctl.conf"),
        }

    def apply(self, check: bool = False, **options: Any) -> PlayResult:
        variables = {f"jail_zfs_host_{name}": value for name, value in {**self.variables, **options}.items()}
        command_prefix = ["/usr/bin/nsenter", f"--net=/proc/{self.shim.namespace_pid}/ns/net", "/usr/bin/env"]
        command_prefix += [f"PATH={self.shim.environ['PATH']}", f"FREEBSD_SHIM_STATE={self.shim.state}"]
        return play(
            "jail_zfs_host", variables, check=check, directory=self.directory, command_prefix=tuple(command_prefix)
        )

    def list_datasets(self) -> list[str]:
        return pools.run("zfs", "list", "-H", "-r", "-o", "name", self.pool.name).stdout.split()


@pytest.fixture(scope="module")
def pool(requires_root: None) -> Iterator[pools.Pool]:
    with pools.pool(f"t{session.get_run_id()}r", session.get_run_dir()) as pool:
        yield pool


@pytest.fixture
def jail_host(pool: pools.Pool, tmp_path: Path) -> Iterator[JailHost]:
    with created_shim(tmp_path) as shim:
        yield JailHost(pool, shim, tmp_path)
    if f"{pool.name}/a" in pools.run("zfs", "list", "-H", "-o", "name").stdout.split():
        pools.destroy_all(f"{pool.name}/a")


def test_check_mode_predicts_the_first_run_and_a_second_run_changes_nothing(jail_host: JailHost) -> None:
    (jail_host.directory / "pf.conf").write_text("set skip on lo0\nnat on em0 from any to any -> 192.0.2.1\npass all\n")
    check_run = jail_host.apply(check=True)
    assert not check_run.failed, check_run.output
    assert jail_host.list_datasets() == [jail_host.pool.name]
    assert not (jail_host.directory / "loader.conf").exists()

    first_run = jail_host.apply()
    assert not first_run.failed, first_run.output
    assert check_run.changed_task_names == first_run.changed_task_names
    expected_datasets = [f"{jail_host.dataset}{name}" for name in ("", "/retired", "/sandboxes")]
    assert jail_host.list_datasets() == [jail_host.pool.name, f"{jail_host.pool.name}/a", *expected_datasets]
    property_values = pools.run(
        "zfs", "get", "-H", "-o", "value", "atime,com.sun:auto-snapshot", expected_datasets[2]
    ).stdout.split()
    assert property_values == ["off", "false"]
    assert (jail_host.directory / "pf.conf").read_text().splitlines() == [
        "set skip on lo0",
        "nat on em0 from any to any -> 192.0.2.1",
        'nat-anchor "sbx/*"',
        "pass all",
        'anchor "sbx/*"',
    ]
    assert 'kern.racct.enable="1"' in (jail_host.directory / "loader.conf").read_text()
    assert "net.inet.ip.forwarding=1" in (jail_host.directory / "sysctl.conf").read_text()
    assert jail_host.shim.check_ok("sysctl", "-n", "kern.logsigexit") == "0\n", "jails must not write to the host's log"
    assert jail_host.bridge in jail_host.shim.check_ok("ifconfig", "-l")
    assert re.search(r"inet 10\.\S+\.1 netmask", jail_host.shim.check_ok("ifconfig", jail_host.bridge))
    assert 'anchor "sbx/*" all' in jail_host.shim.check_ok("pfctl", "-s", "rules")

    second_run = jail_host.apply()
    assert (second_run.failed, second_run.changed_task_names) == (False, []), second_run.output

    pools.run("zfs", "set", "atime=on", jail_host.dataset)
    correction_run = jail_host.apply()
    assert correction_run.changed_task_names == ["grove.sandbox.jail_zfs_host : Set the values that differ"], (
        correction_run.output
    )


@pytest.mark.slow
def test_data_is_kept_unless_removal_is_requested(jail_host: JailHost) -> None:
    assert not jail_host.apply().failed
    instance_dataset = f"{jail_host.dataset}/sandboxes/i1"
    pools.run("zfs", "create", instance_dataset)
    pools.run("zfs", "snapshot", f"{instance_dataset}@s1")

    run = jail_host.apply(state="absent")
    assert not run.failed, run.output
    assert "keeps its sandboxes" in run.output
    assert instance_dataset in jail_host.list_datasets()
    assert jail_host.bridge not in jail_host.shim.check_ok("ifconfig", "-l")
    assert "sbx" not in (jail_host.directory / "pf.conf").read_text() + jail_host.shim.check_ok("pfctl", "-s", "rules")

    foreign_dataset = f"{jail_host.pool.name}/theirs"
    pools.run("zfs", "clone", f"{instance_dataset}@s1", foreign_dataset)
    pools.run("zfs", "create", f"{jail_host.dataset}/precious")
    refused_run = jail_host.apply(state="absent", remove_data=True)
    assert refused_run.failed
    assert foreign_dataset in refused_run.message
    assert f"{jail_host.dataset}/precious" in refused_run.message
    assert instance_dataset in jail_host.list_datasets()

    pools.destroy_all(foreign_dataset)
    pools.destroy_all(f"{jail_host.dataset}/precious")
    check_run = jail_host.apply(state="absent", remove_data=True, check=True)
    assert not check_run.failed, check_run.output
    assert instance_dataset in jail_host.list_datasets()
    removal_run = jail_host.apply(state="absent", remove_data=True)
    assert not removal_run.failed, removal_run.output
    assert jail_host.dataset not in jail_host.list_datasets()
    assert f"{instance_dataset}@s1" in removal_run.output, "the output must list the destroyed datasets"
    assert jail_host.apply(state="absent", remove_data=True).changed_task_names == []


def test_pools_and_datasets_in_use_are_left_alone(jail_host: JailHost) -> None:
    assert not jail_host.apply().failed
    dataset = f"{jail_host.dataset}/sandboxes/i2"
    pools.run("zfs", "create", dataset)
    jail_root = jail_host.pool.mount_point / "a/sandboxes/sandboxes/i2"
    jail_host.shim.check_ok("jail", "-c", "name=busy", f"path={jail_root}", "persist")
    run = jail_host.apply(state="absent", remove_data=True)
    jail_host.shim.check_ok("jail", "-R", "busy")
    assert run.failed
    assert "(busy): stop them first" in run.message
    assert dataset in jail_host.list_datasets()

    move_run = jail_host.apply(mountpoint=str(jail_host.directory / "elsewhere"))
    assert move_run.failed
    assert "where its sandboxes run" in move_run.message


def test_a_kernel_without_racct_is_reported(jail_host: JailHost) -> None:
    jail_host.shim.check_ok("freebsd-shim", "set", "kern.racct.enable", "0")
    run = jail_host.apply()
    assert not run.failed, run.output
    assert "reboot needed: kern.racct.enable" in run.output


@pytest.mark.parametrize(
    ("options", "sentence"),
    [
        ({"dataset": "nosuchpool/sandboxes"}, "The pool nosuchpool cannot be queried"),
        ({"dataset": "wholepool"}, "a dataset inside a pool"),
        ({"prefix": "Sandbox"}, "jail_zfs_host_prefix up to 6"),
    ],
)
def test_invalid_options_are_refused(jail_host: JailHost, options: dict[str, str], sentence: str) -> None:
    run = jail_host.apply(check=True, **options)
    assert run.failed
    assert sentence in run.message


def test_old_and_foreign_systems_are_refused(jail_host: JailHost) -> None:
    jail_host.shim.check_ok("freebsd-shim", "set", "kern.osreldate", "1302000")
    assert "14.0 (1400000) or newer" in jail_host.apply().message
    environment = {name: value for name, value in os.environ.items() if name != "FREEBSD_SHIM_STATE"}
    assert (
        subprocess.run(["sysctl", "-n", "kern.ostype"], env=environment, capture_output=True, text=True).stdout.strip()
        != "FreeBSD"
    )
    variables = {f"jail_zfs_host_{name}": value for name, value in jail_host.variables.items()}
    run = play("jail_zfs_host", variables, directory=jail_host.directory)
    assert "jails need FreeBSD" in run.message
