"""Build the file system of a template before its first boot: an ext4 image, a kernel and an initrd from a recipe.

The build does not mount anything on the host. Programs from the tree run only in private mount and PID namespaces.
Files from a foreign tree are read, but never executed. Paths in the tree are resolved as in the guest: a symbolic link
to `/etc` leads to the guest's `/etc`.
"""

from __future__ import annotations

import asyncio
import shutil
import sys
from pathlib import Path

from sandbox_gateway.config import KvmXfs
from sandbox_gateway.errors import Invalid
from sandbox_gateway.hosts.base import Log
from sandbox_gateway.hosts.kvm_xfs.template.debian import unpack_debian
from sandbox_gateway.hosts.kvm_xfs.template.disk import create_image
from sandbox_gateway.hosts.kvm_xfs.template.guest_setup import set_up_guest
from sandbox_gateway.hosts.kvm_xfs.template.oci.builder import ImageBuilder
from sandbox_gateway.hosts.kvm_xfs.template.oci.runtime import AGENT_PYTHON
from sandbox_gateway.hosts.kvm_xfs.template.tarball import untar
from sandbox_gateway.hosts.rootfs_common import (
    Tree,
    compile_agent,
    compile_agent_in_foreign_tree,
    find_agent_package,
    find_file_kind,
    find_python_minor_version,
    remove_tree_in_thread,
    run_logged,
    to_gateway_error,
)
from sandbox_gateway.image_references import RegistryLogin
from sandbox_gateway.recipes import Recipe, Source


async def build_rootfs(
    recipe: Recipe,
    image: Path,
    kernel: Path,
    initrd: Path,
    *,
    cache_root: Path,
    log: Log,
    settings: KvmXfs | None = None,
    work_directory: Path,
    image_digest: str = "",
    login: RegistryLogin | None = None,
    agent: Path | None = None,
) -> str:
    """Build ``image`` (a sparse ext4 image), ``kernel`` and ``initrd`` from ``recipe``. Requires root.

    Returns the start command of the recipe's OCI image; "" if there is none. ``image_digest``: the digest of the OCI
    image in its registry. ``login``: for this registry. ``agent``: directory of the agent's package; default: the agent
    installed with the gateway. ``work_directory``: a directory to create on the file system of ``image``. Each file is
    built there and then renamed. After a successful build, the caller removes it. Raises Invalid if the recipe's tree
    is unsuitable for a sandbox or does not fit its disk, NoSpace if the host's disk is full, and BackendFailed if a
    tool fails.
    """
    agent = agent or find_agent_package()
    await asyncio.to_thread(work_directory.mkdir, mode=0o700)
    start_command = ""
    try:
        if recipe.source is Source.IMAGE:
            builder = ImageBuilder(work_directory, cache_root, settings or KvmXfs(), agent, log, login)
            tree, boot_files, start_command = await builder.build(recipe, image_digest)
        else:
            tree = work_directory / "tree"
            tree.mkdir(mode=0o755)
            if recipe.source is Source.DEBOOTSTRAP:
                await unpack_debian(recipe, tree, work_directory, cache_root, log)
            else:
                await _unpack_source(Path(recipe.path), tree, log)
            log("installing the agent and the sandbox's settings")
            boot_files = await asyncio.to_thread(set_up_guest, tree, agent)
        await _compile_agent(recipe.source, tree, log)
        await create_image(tree, work_directory / "image", recipe.resources.disk_mb, log)
        await asyncio.to_thread(_move_results, work_directory, boot_files, image, kernel, initrd)
    except BaseException as error:
        await remove_tree_in_thread(work_directory)
        if isinstance(error, OSError):
            raise to_gateway_error(error, "building the file system") from error
        raise
    return start_command


async def _unpack_source(source: Path, tree: Path, log: Log) -> None:
    kind = await asyncio.to_thread(find_file_kind, source)
    if kind == "directory":
        if await asyncio.to_thread(lambda: tree.resolve().is_relative_to(source.resolve())):
            raise Invalid(
                f"{source} contains the gateway's own state: set 'path' to a directory with a root file system"
            )
        log(f"copying {source}")
        await run_logged(["cp", "-a", "--one-file-system", "--reflink=auto", "-T", str(source), str(tree)], log)
    elif kind == "file":
        log(f"unpacking {source}")
        await untar(source, tree)
    else:
        raise Invalid(f"{source} does not exist: 'path' must name a directory or a tarball on the gateway's host")


async def _compile_agent(source: Source, tree: Path, log: Log) -> None:
    if source is Source.DEBOOTSTRAP:
        # All files of the tree are from Debian's packages, so its interpreter can be trusted.
        namespace_options = ("--mount", "--propagation", "slave", "--pid", "--net")
        chroot_command = ("unshare", *namespace_options, "--fork", "--kill-child", "chroot", str(tree))
        await compile_agent([*chroot_command, "/usr/bin/python3", "-I", "-S"], ["/opt/sandbox_agent"], log)
        return
    python = AGENT_PYTHON if source is Source.IMAGE else "/usr/bin/python3"
    if find_python_minor_version(Tree(tree), Tree(tree).resolve(python).name) == sys.version_info.minor:
        await compile_agent_in_foreign_tree(tree, log)


def _move_results(work_directory: Path, boot_files: tuple[Path, Path], image: Path, kernel: Path, initrd: Path) -> None:
    for source, name, target in ((boot_files[0], "kernel", kernel), (boot_files[1], "initrd", initrd)):
        # QEMU opens them before it drops root privileges.
        (work_directory / name).touch(mode=0o600)
        shutil.copyfile(source, work_directory / name)
        (work_directory / name).rename(target)
    (work_directory / "image").rename(image)
