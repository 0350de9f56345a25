"""Read the files in `guest/`: the settings of a guest and its list of packages.

`*.txt` and `dpkg.cfg` are lists with one item per line; lines that begin with # are comments. `initramfs-tools/` is
copied to the tree's /etc during the build. In `network.sh`, each name between two @ characters is replaced by the
value of the constant with that name.
"""

from __future__ import annotations

from importlib import resources

from sandbox_gateway.hosts.guest_digest import digest_guest
from sandbox_gateway.hosts.kvm_xfs.network import addresses
from sandbox_gateway.hosts.kvm_xfs.qemu.command_line import KERNEL_ARGUMENTS, TCG_KERNEL_ARGUMENTS

_ROOT = resources.files(__package__) / "guest"
_CONSTANT_NAMES = ("GUEST_ADDRESS", "GUEST_PREFIX_LENGTH", "GUEST_MAC", "GATEWAY_ADDRESS")


def read_text(name: str) -> str:
    return (_ROOT / name).read_text(encoding="utf-8")


def read_lines(name: str) -> list[str]:
    """Return the lines of a list, without comments and empty lines."""
    return [line for line in read_text(name).splitlines() if line and not line.startswith("#")]


def find_kernel_package(machine: str) -> str | None:
    """Return the name of the kernel package for ``machine`` (`uname -m`), or None for an unsupported architecture."""
    return dict(line.split() for line in read_lines("kernels.txt")).get(machine)


def read_initramfs_files() -> dict[str, str]:
    """Return the files for the guest's /etc/initramfs-tools, as a dictionary from relative path to contents."""
    return {name: read_text(f"initramfs-tools/{name}") for name in ("conf.d/sandbox", "modules", "hooks/sandbox")}


def render_network_script() -> str:
    """Return the script that gives the guest its address and route."""
    text = read_text("network.sh")
    for name in _CONSTANT_NAMES:
        text = text.replace(f"@{name}@", str(getattr(addresses, name)))
    return text


def compute_guest_digest() -> str:
    """Return a digest of the inputs of every template: agent, these files, the builder, and the kernel's arguments."""
    return digest_guest(resources.files(__package__), render_network_script(), KERNEL_ARGUMENTS, TCG_KERNEL_ARGUMENTS)
