"""Turn an unpacked tree into a guest's file system: add the agent, network and systemd settings, and an identity."""

from __future__ import annotations

import re
import secrets
from pathlib import Path

from sandbox_gateway.errors import BackendFailed, Invalid
from sandbox_gateway.hosts.kvm_xfs.template import guest_files
from sandbox_gateway.hosts.rootfs_common import Tree, add_user, find_python_minor_version, install_agent

_MAX_BOOT_FILE_BYTES = 1 << 30
_PAM_DIRECTORIES = (
    "/lib/security",
    "/lib64/security",
    "/lib/x86_64-linux-gnu/security",
    "/lib/aarch64-linux-gnu/security",
)


def set_up_guest(root: Path, agent: Path) -> tuple[Path, Path]:
    """Set up a tree as a guest's root file system. Returns the paths of its kernel and initrd.

    Raises Invalid if the tree is unsuitable for a sandbox.
    """
    tree = Tree(root)
    boot_files = find_boot_files(tree)
    _check_programs(tree)
    _install_agent(tree, agent)
    _set_up_network(tree)
    _reduce_background_work(tree)
    set_identity(tree)
    add_user(tree)
    return boot_files


def find_boot_files(tree: Tree) -> tuple[Path, Path]:
    """Return the paths of the newest kernel of a tree and of its initrd. Raises Invalid if there is none."""
    versions = [name.removeprefix("vmlinuz-") for name in tree.list_directory("/boot") if name.startswith("vmlinuz-")]
    for version in sorted(versions, key=_build_natural_key, reverse=True):
        kernel = tree.resolve(f"/boot/vmlinuz-{version}")
        for name in (f"initrd.img-{version}", f"initramfs-{version}.img"):
            initrd = tree.resolve(f"/boot/{name}")
            if kernel.is_file() and initrd.is_file():
                _check_boot_file_sizes(kernel, initrd)
                return kernel, initrd
    if versions:
        raise Invalid(
            f"the root file system has kernel {versions[0]} but no /boot/initrd.img-{versions[0]}: create "
            "one with update-initramfs"
        )
    raise Invalid("the root file system has no /boot/vmlinuz-*: install a kernel (Debian: linux-image-cloud-amd64)")


def _check_boot_file_sizes(*boot_files: Path) -> None:
    """Raise Invalid if a file is too large to copy: a sparse file takes up no space in the tree, but its copy does."""
    for file in boot_files:
        if file.stat().st_size > _MAX_BOOT_FILE_BYTES:
            raise Invalid(
                f"the root file system's /boot/{file.name} is larger than {_MAX_BOOT_FILE_BYTES >> 20} MiB: install a "
                "smaller kernel or initrd"
            )


def _build_natural_key(text: str) -> list[tuple[int, int, str]]:
    return [(1, int(part), "") if part.isdigit() else (0, 0, part) for part in re.findall(r"\d+|\D+", text)]


def _check_programs(tree: Tree) -> None:
    init = tree.resolve("/sbin/init")
    if not init.is_file():
        raise Invalid("the root file system has no /sbin/init: install systemd in it (Debian: systemd-sysv)")
    if init.name != "systemd":
        raise Invalid(
            f"/sbin/init of the root file system is {init.name}, but systemd must start the agent: install systemd"
        )
    python = tree.resolve("/usr/bin/python3")
    if not python.is_file():
        raise Invalid("the root file system has no /usr/bin/python3: install Python 3.9 or later in it for the agent")
    minor_version = find_python_minor_version(tree, python.name)
    if minor_version is None or minor_version < 9:
        version = "of an unknown version" if minor_version is None else f"3.{minor_version}"
        raise Invalid(
            f"the root file system's /usr/bin/python3 is {version}: install Python 3.9 or later in it for the agent"
        )
    if not any(tree.is_file(f"{directory}/ip") for directory in ("/sbin", "/bin", "/usr/sbin", "/usr/bin")):
        raise Invalid("the root file system has no 'ip' command: install iproute2 in it")


def _install_agent(tree: Tree, agent: Path) -> None:
    install_agent(tree, agent)
    unit = "sandbox-agent.service"
    try:
        text = (agent / unit).read_text()
    except FileNotFoundError:
        raise BackendFailed(f"{agent / unit} is missing: reinstall the gateway") from None
    _enable_unit(tree, unit, text)


def _enable_unit(tree: Tree, unit: str, text: str) -> None:
    """Install a unit and create the links that its [Install] section describes."""
    tree.write(f"/etc/systemd/system/{unit}", text)
    for target in re.findall(r"^WantedBy=(.+)$", text, re.MULTILINE):
        for name in target.split():
            tree.link(f"/etc/systemd/system/{name}.wants/{unit}", f"/etc/systemd/system/{unit}")


def _set_up_network(tree: Tree) -> None:
    install_network_script(tree)
    _enable_unit(tree, "sandbox-network.service", guest_files.read_text("units/sandbox-network.service"))
    tree.link("/etc/systemd/network/99-default.link", "/dev/null")


def install_network_script(tree: Tree) -> None:
    tree.write("/usr/local/lib/sandbox/network", guest_files.render_network_script(), mode=0o755)
    tree.write("/etc/resolv.conf", "")
    tree.write("/etc/hosts", guest_files.read_text("hosts"))


def _reduce_background_work(tree: Tree) -> None:
    """Reduce the number of processes at boot, and disable periodic writes to the disk."""
    for unit in guest_files.read_lines("masked-units.txt"):
        tree.link(f"/etc/systemd/system/{unit}", "/dev/null")
    if not any(name == "pam_systemd.so" for directory in _PAM_DIRECTORIES for name in tree.list_directory(directory)):
        tree.link("/etc/systemd/system/systemd-logind.service", "/dev/null")
    tree.write(
        "/etc/systemd/system/systemd-udev-trigger.service.d/sandbox.conf", guest_files.read_text("coldplug.conf")
    )
    for generator in guest_files.read_lines("masked-generators.txt"):
        tree.link(f"/etc/systemd/system-generators/{generator}", "/dev/null")
    tree.link("/etc/systemd/system/default.target", "/lib/systemd/system/multi-user.target")
    tree.write("/etc/systemd/journald.conf.d/sandbox.conf", guest_files.read_text("journald.conf"))
    tree.write("/etc/fstab", "# The kernel mounts the root, as its arguments specify.\n")


def set_identity(tree: Tree) -> None:
    tree.write("/etc/hostname", "sandbox\n")
    # systemd writes the file if it is empty, and assumes a first boot if it is missing.
    tree.write("/etc/machine-id", f"{secrets.token_hex(16)}\n", mode=0o444)
