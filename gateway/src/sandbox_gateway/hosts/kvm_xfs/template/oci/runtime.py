"""Add what a virtual machine needs to the tree of an image: kernel modules, an init, and a Python for the agent.

Images need none of these, and their own versions may be too old or too small. Everything comes from the Debian tree of
the default recipe. The programs in `/opt/sandbox/bin` load only libraries from `/opt/sandbox/lib`, so they work
regardless of the image's C library. Nothing from the image is executed.
"""

from __future__ import annotations

import asyncio
import shutil
from collections.abc import Iterable
from pathlib import Path

from sandbox_gateway.command import run_async
from sandbox_gateway.errors import BackendFailed, Invalid
from sandbox_gateway.hosts.base import Log
from sandbox_gateway.hosts.kvm_xfs.template import guest_files
from sandbox_gateway.hosts.kvm_xfs.template.guest_setup import find_boot_files, install_network_script, set_identity
from sandbox_gateway.hosts.kvm_xfs.template.oci.settings import StartSettings
from sandbox_gateway.hosts.rootfs_common import Tree, add_user, install_agent

PREFIX = "/opt/sandbox"
AGENT_PYTHON = f"{PREFIX}/bin/python3"
START_COMMAND = f"exec {PREFIX}/start"
_LOADER = f"{PREFIX}/lib/ld.so"
_PROGRAMS = {"python3": "/usr/bin/python3", "kmod": "/bin/kmod", "ip": "/bin/ip", "resize2fs": "/sbin/resize2fs"}
"""The programs in `/opt/sandbox/bin`, and their paths in the Debian tree."""
_OWN_PYTHON = "#!/usr/bin/env -S python3 "
UNUSED_DEBIAN_FILES = (
    *("./etc/*", "./home/*", "./root/*", "./var/*", "./usr/libexec", "./usr/share"),
    *("./usr/lib/apt", "./usr/lib/klibc", "./usr/lib/locale", "./usr/lib/systemd", "./usr/lib/udev"),
    *("./usr/lib/*/gconv", "./usr/lib/*/perl", "./usr/lib/*/perl-base", "./usr/lib/*/security"),
)
"""Patterns of files in the Debian tree that ``add_runtime`` does not need."""
_MOUNT_POINTS = ("/dev", "/proc", "/run", "/sys")
_PATCH_TIMEOUT_SECONDS = 60


async def add_runtime(tree: Path, debian: Path, agent: Path, settings: StartSettings, log: Log) -> tuple[Path, Path]:
    """Make the tree of an image bootable. ``debian``: the tree of the default recipe, from which files are moved.

    Both trees must be on the same file system. Returns the paths of the kernel and the initrd. Raises Invalid if the
    image is unsuitable for a sandbox.
    """
    guest, source = Tree(tree), Tree(debian)
    await asyncio.to_thread(_check_image, guest)
    log("adding the kernel modules, the init and the agent's Python")
    boot_files = find_boot_files(source)
    await asyncio.to_thread(_prepare_tree, guest, agent, settings)
    await asyncio.to_thread(_move_modules, source, guest)
    await _copy_programs(source, guest)
    return boot_files


def read_step_programs() -> dict[str, str]:
    """Return the programs that run build steps in a template that was not built from an image, by their paths there.

    They run with the template's own Python.
    """
    programs = {name: guest_files.read_text(f"image/{name}.py") for name in ("start", "copy")}
    shebang = f"#!{AGENT_PYTHON} "
    return {
        f"{PREFIX}/start.json": StartSettings().to_json(),
        **{f"{PREFIX}/{name}": text.replace(shebang, _OWN_PYTHON, 1) for name, text in programs.items()},
    }


def _check_image(guest: Tree) -> None:
    if not guest.is_file("/bin/sh"):
        raise Invalid("the image has no /bin/sh, which runs the commands of a template: use an image with a shell")
    passwd = [line.split(":") for line in guest.read("/etc/passwd").splitlines()]
    if passwd and not any(entry[0] == "root" for entry in passwd):
        raise Invalid("the image's /etc/passwd has no user 'root': add it, because commands run as root by default")


def _prepare_tree(guest: Tree, agent: Path, settings: StartSettings) -> None:
    guest.remove(PREFIX)
    for path in _MOUNT_POINTS:
        if guest.resolve(path, follow=False).is_symlink():
            guest.remove(path)
        guest.mkdir(path)
    guest.mkdir("/tmp")
    guest.resolve("/tmp").chmod(0o1777)
    if not guest.is_file("/etc/passwd"):
        guest.write("/etc/passwd", "root:x:0:0:root:/root:/bin/sh\n")
        guest.write("/etc/group", "root:x:0:\n")
        guest.mkdir("/root", mode=0o700)
    guest.write("/sbin/init", guest_files.read_text("image/init.py"), mode=0o755)
    guest.write(f"{PREFIX}/start", guest_files.read_text("image/start.py"), mode=0o755)
    guest.write(f"{PREFIX}/start.json", settings.to_json())
    guest.write(f"{PREFIX}/copy", guest_files.read_text("image/copy.py"), mode=0o755)
    install_network_script(guest)
    set_identity(guest)
    install_agent(guest, agent)
    add_user(guest)


def _move_modules(source: Tree, guest: Tree) -> None:
    for version in source.list_directory("/lib/modules"):
        _move_directory(source, guest, f"/lib/modules/{version}", f"/lib/modules/{version}")


def _move_directory(source: Tree, guest: Tree, path: str, guest_path: str) -> None:
    """Move a directory of Debian into an image's tree, where it replaces the entry at ``guest_path``."""
    guest.remove(guest_path)
    source.resolve(path).rename(guest.resolve(guest_path, follow=False))


async def _copy_programs(source: Tree, guest: Tree) -> None:
    python = source.resolve(_PROGRAMS["python3"])
    standard_library = f"{PREFIX}/lib/{python.name}"
    guest.mkdir(f"{PREFIX}/bin")
    guest.mkdir(f"{PREFIX}/lib")
    await asyncio.to_thread(_move_directory, source, guest, f"/usr/lib/{python.name}", standard_library)
    files = []
    for name, path in _PROGRAMS.items():
        program = source.resolve(path)
        target = guest.resolve(f"{PREFIX}/bin/{program.name}")
        await asyncio.to_thread(_copy_file, program, target)
        files.append(target)
        if program.name != name:
            guest.link(f"{PREFIX}/bin/{name}", program.name)
    loader = await _run_patchelf("--print-interpreter", files[0])
    await asyncio.to_thread(_copy_file, source.resolve(loader), guest.resolve(_LOADER))
    extension_modules = sorted(guest.resolve(f"{standard_library}/lib-dynload").glob("*.so"))
    await _copy_libraries(source, guest, [*files, *extension_modules])
    await _run_patchelf("--set-interpreter", _LOADER, "--force-rpath", "--set-rpath", f"{PREFIX}/lib", *files)
    guest.link(f"{PREFIX}/bin/modprobe", "kmod")


async def _copy_libraries(source: Tree, guest: Tree, files: Iterable[Path]) -> None:
    """Copy the libraries that ``files`` need, and those that these libraries need."""
    pending_files = list(files)
    copied_names: set[str] = set()
    while pending_files:
        needed_names = {*(await _run_patchelf("--print-needed", *pending_files)).split()} - copied_names
        pending_files = []
        for name in sorted(name for name in needed_names if not name.startswith("ld-linux")):
            copied_names.add(name)
            target = guest.resolve(f"{PREFIX}/lib/{name}")
            await asyncio.to_thread(_copy_file, _find_library(source, name), target)
            pending_files.append(target)


def _find_library(source: Tree, name: str) -> Path:
    for triplet in source.list_directory("/usr/lib"):
        path = f"/usr/lib/{triplet}/{name}"
        if "-linux-gnu" in triplet and source.is_file(path):
            return source.resolve(path)
    raise BackendFailed(
        f"the Debian tree has no library {name}: delete the gateway's cache, and build the template again"
    )


def _copy_file(source: Path, target: Path) -> None:
    shutil.copyfile(source, target)
    target.chmod(0o755)


async def _run_patchelf(*arguments: str | Path) -> str:
    result = await run_async(["patchelf", *map(str, arguments)], timeout=_PATCH_TIMEOUT_SECONDS)
    return result.stdout.strip()
