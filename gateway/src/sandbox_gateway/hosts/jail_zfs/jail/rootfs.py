"""Build the file system of a jail template from an unpacked tree, the agent, and settings for jails.

All commands run on the host, with options that both the GNU and the FreeBSD versions of ``tar`` and ``cp`` support.
"""

from __future__ import annotations

import re
import sys
from pathlib import Path

from sandbox_gateway.command import read_proxy_settings, run_async
from sandbox_gateway.errors import Invalid, Unsupported
from sandbox_gateway.hosts.base import Log
from sandbox_gateway.hosts.guest_digest import digest_guest
from sandbox_gateway.hosts.jail_zfs.jail.identity import IDENTITY
from sandbox_gateway.hosts.rootfs_common import (
    HOME,
    STEP_TIMEOUT_SECONDS,
    Tree,
    add_user,
    compile_agent_in_foreign_tree,
    create_home,
    find_agent_package,
    find_file_kind,
    find_free_uid,
    find_python_minor_version,
    install_agent,
    run_logged,
    to_gateway_error,
)
from sandbox_gateway.hosts.threads import run_in_thread
from sandbox_gateway.recipes import Recipe, Source

_PYTHON_PATHS = ("/usr/local/bin/python3", "/usr/bin/python3")
_USER_FILE = "/etc/master.passwd"
_IDENTITY_FILE_NAMES = ("machine-id", "resolv.conf")
"""Files in /etc that are symbolic links to files in IDENTITY."""
_HOSTS_FILE_CONTENT = "127.0.0.1 localhost\n::1 localhost\n"
_MIN_MINOR_VERSION = 9


def check_recipe(recipe: Recipe) -> None:
    """Raise Unsupported if only another kind of host can build the recipe."""
    if recipe.source is not Source.ROOTFS:
        raise Unsupported(
            "a jail host cannot build templates with debootstrap: use 'from: rootfs' with the path of a directory or "
            "tarball on the host, such as FreeBSD's base.txz with Python installed in it"
        )


def compute_guest_digest() -> str:
    """Return a digest of the inputs of every template: agent, builder, and the path of the identity's files."""
    return digest_guest(Path(__file__), IDENTITY)


async def build_rootfs(recipe: Recipe, root: Path, log: Log) -> None:
    """Build the template in the empty directory ``root``. Requires root privileges.

    Raises Invalid if the recipe's tree is unsuitable for a sandbox.
    """
    check_recipe(recipe)
    try:
        await _unpack(Path(recipe.path), root, log)
        if recipe.packages:
            log(f"installing {len(recipe.packages)} packages")
            await _install_packages(root, recipe.packages, log)
        log("installing the agent and the settings of the sandbox")
        minor_version = await run_in_thread(_prepare_tree, root)
        await _add_user(root)
        if minor_version == sys.version_info.minor:
            await compile_agent_in_foreign_tree(root, log)
    except OSError as error:
        raise to_gateway_error(error, "building the file system") from error


async def _unpack(source: Path, root: Path, log: Log) -> None:
    kind = await run_in_thread(find_file_kind, source)
    if kind == "directory":
        if await run_in_thread(lambda: root.resolve().is_relative_to(source.resolve())):
            raise Invalid(
                f"{source} contains the gateway's own state: set 'path' to a directory with a root file system"
            )
        log(f"copying {source}")
        await run_logged(["cp", "-a", "-x", f"{source}/.", f"{root}/"], log)
    elif kind == "file":
        log(f"unpacking {source}")
        # Device nodes are excluded, because a jail has a devfs. GNU's and FreeBSD's tar both detect the compression.
        exclude_options = [f"--exclude={prefix}dev/*" for prefix in ("./", "")]
        argv = ["tar", "-x", "-p", "-f", str(source), "-C", str(root), "--numeric-owner", *exclude_options]
        await run_logged(argv, lambda line: None)
    else:
        raise Invalid(f"{source} does not exist: 'path' must name a directory or a tarball on the gateway's host")


async def _install_packages(root: Path, packages: list[str], log: Log) -> None:
    env = {**read_proxy_settings(), "ASSUME_ALWAYS_YES": "yes"}
    await run_logged(["pkg", "-r", str(root), "install", "-y", *packages], log, env=env)


def _prepare_tree(root: Path) -> int:
    """Prepare an unpacked tree for a sandbox. Returns the minor version of its Python 3."""
    tree = Tree(root)
    minor_version = _check_tree(tree)
    install_agent(tree, find_agent_package())
    for directory in ("/dev", "/run", IDENTITY):
        if tree.resolve(directory, follow=False).is_symlink():
            tree.remove(directory)
        tree.mkdir(directory)
    for name in _IDENTITY_FILE_NAMES:
        tree.link(f"/etc/{name}", f"{IDENTITY}/{name}")
    tree.write("/etc/hosts", _HOSTS_FILE_CONTENT)
    return minor_version


def _check_tree(tree: Tree) -> int:
    if not tree.is_file("/bin/sh"):
        raise Invalid("the root file system has no /bin/sh: use the root file system of a complete installation")
    python_paths = [tree.resolve(path) for path in _PYTHON_PATHS if tree.is_file(path)]
    if not python_paths:
        raise Invalid(
            f"the root file system has no {' or '.join(_PYTHON_PATHS)}: install Python 3.{_MIN_MINOR_VERSION} or "
            "later in it for the agent (FreeBSD: `pkg -r ROOT install python3`, or the recipe's packages)"
        )
    minor_version = find_python_minor_version(tree, python_paths[0].name)
    if minor_version is None or minor_version < _MIN_MINOR_VERSION:
        version = "of an unknown version" if minor_version is None else f"Python 3.{minor_version}"
        raise Invalid(
            f"the root file system's python3 is {version}: install Python 3.{_MIN_MINOR_VERSION} or later in it "
            "for the agent"
        )
    return minor_version


async def _add_user(root: Path) -> None:
    """Add the unprivileged user `user`, as in E2B's images.

    FreeBSD keeps accounts in a database, which `pw` updates.
    """
    tree = Tree(root)
    if not await run_in_thread(tree.is_file, _USER_FILE):
        await run_in_thread(add_user, tree)
        return
    await run_in_thread(_refuse_linked_account_files, tree)
    uid = await run_in_thread(find_free_uid, tree, _USER_FILE)
    if uid is None:
        return
    # The tree's pw.conf could name a log on the host. -m would follow links in the tree to the host.
    options = ("-u", str(uid), "-d", HOME, "-s", "/bin/sh", "-C", "/dev/null")
    await run_async(["pw", "-R", str(root), "useradd", "user", *options], timeout=STEP_TIMEOUT_SECONDS)
    await run_in_thread(create_home, tree, uid, "/usr/share/skel")


def _refuse_linked_account_files(tree: Tree) -> None:
    """Raise Invalid if `pw`, which resolves links from the host's root, could change files outside the tree."""
    names = [name for name in tree.list_directory("/etc") if re.match(r"(master\.passwd|passwd|group|s?pwd)\b", name)]
    for path in ("/etc", *(f"/etc/{name}" for name in names)):
        if (tree.root / path.lstrip("/")).is_symlink():
            raise Invalid(f"the root file system's {path} is a symbolic link: replace it with a copy of its target")
