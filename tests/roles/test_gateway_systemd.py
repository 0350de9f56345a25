"""Test the gateway role under systemd, in a Debian 12 container that boots on this machine."""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import yaml

from tests.roles.container import Container, running_container, unpack_debian
from tests.roles.upgrade import NEWER_VERSION, read_counter
from tests.support import session
from tests.support.gateway import Gateway
from tests.support.roles import PlayResult, play
from tests.support.waiting import wait_until

pytestmark = pytest.mark.in_order

MAX_EXPOSURE = 62
"""Maximum result of `systemd-analyze security`, in tenths. With private mounts it would be 48."""

NEEDED_PERMISSIONS = {
    "run as root to create mounts, namespaces and control groups, and drop unneeded capabilities": (
        "UserOrDynamicUser CapabilityBoundingSet_CAP_SYS_ADMIN PrivateUsers ProtectControlGroups Delegate "
        "SystemCallFilter_mount SystemCallFilter_privileged CapabilityBoundingSet_CAP_SYS_CHROOT "
        "RestrictNamespaces_mnt RestrictNamespaces_pid RestrictNamespaces_ipc RestrictNamespaces_uts"
    ),
    "networks of sandboxes: namespaces, taps, nft, sysctls, forwarded ports, downloads, host names": (
        "PrivateNetwork CapabilityBoundingSet_CAP_NET_ADMIN RestrictNamespaces_net "
        "RestrictAddressFamilies_AF_NETLINK RestrictAddressFamilies_AF_INET_INET6 RestrictAddressFamilies_AF_UNIX "
        "IPAddressDeny ProtectHostname"
    ),
    "start, measure, limit and stop machines and volume servers, which run as other users with fewer privileges": (
        "CapabilityBoundingSet_CAP_SET_UID_GID_PCAP CapabilityBoundingSet_CAP_SYS_PTRACE "
        "CapabilityBoundingSet_CAP_KILL CapabilityBoundingSet_CAP_SYS_NICE_RESOURCE SystemCallFilter_resources "
        "MemoryDenyWriteExecute"
    ),
    "KVM, taps and loop devices": ("PrivateDevices DeviceAllow"),
    "templates: create a file tree with owners, modes and devices, and run programs of packages in it": (
        "CapabilityBoundingSet_CAP_CHOWN_FSETID_SETFCAP CapabilityBoundingSet_CAP_DAC_FOWNER_IPC_OWNER "
        "RestrictSUIDSGID CapabilityBoundingSet_CAP_MKNOD CapabilityBoundingSet_CAP_AUDIT UMask"
    ),
    "no private mounts: network namespaces are mounts and must outlive the service": (
        "PrivateMounts PrivateTmp ProtectHome ProtectSystem ProtectProc ProcSubset ProtectKernelLogs "
        "ProtectKernelModules ProtectKernelTunables RootDirectoryOrRootImage"
    ),
}
"""Permissions of the unit, by the feature that needs them, with the names of `systemd-analyze security --json`."""


@pytest.fixture(scope="module")
def container(xfs_root: Path, shared_gateway: Gateway, template: str) -> Iterator[Container]:
    directory, state_root = xfs_root / "debian12", xfs_root / "debian12-state"
    state_root.mkdir()
    subprocess.run(
        ["cp", "-a", "--reflink=always", str(shared_gateway.state_root / "templates"), str(state_root)], check=True
    )
    unpack_debian(directory)
    with running_container(directory, state_root) as container:
        container.run("mknod", "/dev/loop-control", "c", "10", "237")
        for number in range(64):
            container.run("mknod", f"/dev/loop{number}", "b", "7", str(number))
        yield container
    shutil.rmtree(directory)
    shutil.rmtree(state_root)


@pytest.fixture(scope="module")
def variables() -> dict[str, Any]:
    return {
        "gateway_config": {
            "kvm_xfs": {"accelerator": os.environ.get("GROVE_TEST_ACCELERATOR", "auto")},
            "network": {**session.allocate_network(), "pool": 1},
        }
    }


def apply_role(
    container: Container,
    variables: dict[str, Any],
    *,
    check: bool = False,
    collections: Path = session.COLLECTIONS,
    **options: Any,
) -> PlayResult:
    role_options = {f"gateway_{name}": value for name, value in options.items()}
    command_prefix = (*container.enter_command, "env", f"ANSIBLE_COLLECTIONS_PATH={collections}")
    return play("gateway", {**variables, **role_options}, check=check, command_prefix=command_prefix)


def run_sandboxctl(container: Container, *argv: str) -> str:
    return container.run("/usr/local/bin/sandboxctl", *argv)


def read_sandbox_state(container: Container, name: str) -> str:
    return str(json.loads(run_sandboxctl(container, "--json", "show", name))["state"])


def make_sandbox_runner(container: Container) -> Callable[..., str]:
    """Return a function that runs a program in the sandbox ``lives`` and returns its output if it succeeds."""
    return lambda *argv: run_sandboxctl(container, "exec", "lives", "--", *argv)


def read_unit_property(container: Container, name: str) -> str:
    """Return the value of the unit's property ``name``, as systemctl prints it."""
    return container.run("systemctl", "show", f"--property={name}", "--value", "sandbox-gateway").strip()


def test_services_of_host_packages_never_run(container: Container) -> None:
    variables = yaml.safe_load((session.REPOSITORY / "roles/kvm_xfs_host/vars/Debian.yml").read_text())
    units = [unit for package_units in variables["kvm_xfs_host_services"].values() for unit in package_units]
    playbook = session.get_run_dir() / "packages.json"
    task = {"ansible.builtin.include_role": {"name": "grove.sandbox.kvm_xfs_host", "tasks_from": "packages"}}
    interpreter_variable = {"ansible_python_interpreter": "/usr/bin/python3"}
    play_data = {
        "hosts": "localhost",
        "connection": "local",
        "gather_facts": False,
        "vars": {**interpreter_variable, **variables},
    }
    playbook.write_text(json.dumps([{**play_data, "tasks": [task]}]))
    ansible_command = (str(Path(sys.executable).with_name("ansible-playbook")), "-i", "localhost,", str(playbook))
    first_output = container.run(*ansible_command)
    assert "TASK [grove.sandbox.kvm_xfs_host : Prevent the services of new packages from starting]" in first_output
    container.run("dpkg-query", "--show", "nfs-ganesha", "nfs-ganesha-vfs", "rpcbind")
    container.run("test", "-x", "/usr/bin/ganesha.nfsd", "-a", "!", "-e", "/usr/sbin/policy-rc.d")
    for unit in units:
        unit_state = container.run("systemctl", "show", "--property=LoadState,ActiveEnterTimestampMonotonic", unit)
        assert sorted(unit_state.split()) == ["ActiveEnterTimestampMonotonic=0", "LoadState=masked"], unit
    assert "changed=0 " in container.run(*ansible_command)


def test_the_role_installs_the_unit_and_a_second_run_changes_nothing(
    container: Container, variables: dict[str, Any]
) -> None:
    check_run = apply_role(container, variables, check=True)
    assert not check_run.failed, check_run.output
    first_run = apply_role(container, variables)
    assert not first_run.failed, first_run.output
    assert container.run("systemctl", "is-active", "sandbox-gateway").strip() == "active"
    assert container.run("systemctl", "is-enabled", "sandbox-gateway").strip() == "enabled"
    assert container.run("stat", "--format=%a %G", "/run/sandbox-gateway/gateway.sock").split() == ["660", "sandbox"]
    assert container.run("stat", "--format=%a", "/run/sandbox-gateway").strip() == "755"
    second_run = apply_role(container, variables)
    assert (second_run.failed, second_run.changed_task_names) == (False, []), second_run.output


def test_the_unit_has_only_the_permissions_it_needs(container: Container) -> None:
    assessments = json.loads(container.run("systemd-analyze", "security", "--json=short", "sandbox-gateway"))
    exposed_fields = {
        assessment["json_field"] for assessment in assessments if float(assessment.get("exposure") or 0) > 0
    }
    assert exposed_fields == {name for names in NEEDED_PERMISSIONS.values() for name in names.split()}
    container.run("systemd-analyze", "security", f"--threshold={MAX_EXPOSURE}", "sandbox-gateway")


def test_the_unit_allows_all_features(container: Container) -> None:
    """Use a sandbox with a volume (loop device, mount, NFS server), capture it with memory, and fork the snapshot."""
    run_sandboxctl(container, "volume", "create", "data", "--size", "64M")
    run_sandboxctl(container, "create", "debian", "--name", "lives", "--volume", "data:/srv/data")
    run_inside = make_sandbox_runner(container)
    run_inside("sh", "-c", "echo kept >/srv/data/file; sync")
    run_sandboxctl(container, "volume", "grow", "data", "96M")
    count_before = read_counter(run_inside)
    run_sandboxctl(container, "snapshot", "create", "lives", "--name", "running")
    # The first capture copies a lot of memory while the machine runs.
    run_sandboxctl(container, "snapshot", "create", "lives", "--name", "again")
    assert json.loads(run_sandboxctl(container, "--json", "snapshot", "show", "again"))["memory"] == "written"
    run_sandboxctl(container, "create", "running", "--name", "fork")
    assert read_counter(lambda *argv: run_sandboxctl(container, "exec", "fork", "--", *argv)).is_continuation_of(
        count_before
    )
    assert run_sandboxctl(container, "exec", "fork", "--", "cat", "/srv/data/file") == "kept\n"
    run_sandboxctl(container, "kill", "fork")
    assert "limit" not in container.read_journal(), "machines must be in separate control groups"


def test_sandboxes_survive_a_restart_and_a_crash_of_the_unit(container: Container, variables: dict[str, Any]) -> None:
    count_before = read_counter(make_sandbox_runner(container))
    container.run("systemctl", "restart", "sandbox-gateway")
    assert read_sandbox_state(container, "lives") == "running"
    crashed_pid = read_unit_property(container, "MainPID")
    container.run("systemctl", "kill", "--signal=KILL", "--kill-who=main", "sandbox-gateway")
    wait_until(
        lambda: (
            read_unit_property(container, "MainPID") != crashed_pid
            and read_unit_property(container, "SubState") == "running"
        ),
        60,
    )
    assert read_counter(make_sandbox_runner(container)).is_continuation_of(count_before)
    assert run_sandboxctl(container, "exec", "lives", "--", "cat", "/srv/data/file") == "kept\n"


def test_a_hung_gateway_is_restarted_and_sandboxes_keep_running(
    container: Container, variables: dict[str, Any]
) -> None:
    count_before = read_counter(make_sandbox_runner(container))
    hung_pid = read_unit_property(container, "MainPID")
    # A stopped process sends no notifications, like one whose event loop is blocked.
    container.run("kill", "-STOP", hung_pid)
    wait_until(
        lambda: (
            read_unit_property(container, "MainPID") != hung_pid
            and read_unit_property(container, "SubState") == "running"
        ),
        240,
    )
    assert "watchdog" in container.read_journal().lower()
    assert read_counter(make_sandbox_runner(container)).is_continuation_of(count_before)
    assert run_sandboxctl(container, "exec", "lives", "--", "cat", "/srv/data/file") == "kept\n"


def test_sandboxes_survive_an_upgrade(container: Container, variables: dict[str, Any], newer_collections: Path) -> None:
    count_before = read_counter(make_sandbox_runner(container))
    result = apply_role(container, variables, collections=newer_collections)
    assert not result.failed, result.output
    assert json.loads(run_sandboxctl(container, "--json", "health"))["version"] == NEWER_VERSION
    assert read_counter(make_sandbox_runner(container)).is_continuation_of(count_before)
    assert run_sandboxctl(container, "exec", "lives", "--", "cat", "/srv/data/file") == "kept\n"


def test_a_new_configuration_restarts_the_gateway(container: Container, variables: dict[str, Any]) -> None:
    new_variables = {**variables, "gateway_config": {**variables["gateway_config"], "limits": {"sandboxes": 9}}}
    result = apply_role(container, new_variables)
    assert not result.failed, result.output
    assert read_sandbox_state(container, "lives") == "running"


def test_a_startup_error_is_reported_once(container: Container, variables: dict[str, Any]) -> None:
    invalid_variables = {**variables, "gateway_config": {**variables["gateway_config"], "nonsense": {"a": 1}}}
    result = apply_role(container, invalid_variables)
    assert result.failed
    assert "nonsense: unknown key" in result.message
    assert read_unit_property(container, "NRestarts") == "0"
    assert not apply_role(container, variables).failed
    assert read_sandbox_state(container, "lives") == "running"


def test_removal_needs_remove_data_while_a_sandbox_runs(container: Container, variables: dict[str, Any]) -> None:
    refused_run = apply_role(container, variables, state="absent")
    assert refused_run.failed
    assert "lives" in refused_run.message
    removal_run = apply_role(container, variables, state="absent", remove_data=True)
    assert not removal_run.failed, removal_run.output
    assert "qemu-system" not in container.run("ps", "--no-headers", "-eo", "comm")
    container.run("test", "!", "-e", "/etc/systemd/system/sandbox-gateway.service")
    assert apply_role(container, variables, state="absent", remove_data=True).changed_task_names == []
