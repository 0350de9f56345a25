"""The file system of a jail's template before its first start: an unpacked tree, the agent, what a jail needs.

What is run here is on the host, and portable: GNU's and FreeBSD's ``tar`` and ``cp`` both know these options.
"""

from __future__ import annotations

import asyncio
import hashlib
import os
import secrets
import sys
from pathlib import Path

from sandbox_gateway.command import arun, proxy_settings
from sandbox_gateway.errors import Invalid, Unsupported
from sandbox_gateway.hosts.base import Log
from sandbox_gateway.hosts.jail_zfs.jail import IDENTITY
from sandbox_gateway.hosts.rootfs_common import (
    STEP_SECONDS,
    Tree,
    add_user,
    agent_package,
    as_gateway_error,
    compile_agent_of_foreign,
    install_agent,
    kind_of,
    python_minor,
    stream,
)
from sandbox_gateway.recipes import Recipe, Source
from sandbox_gateway.records import Sandbox

_PYTHONS = ("/usr/local/bin/python3", "/usr/bin/python3")
_FILES = ("machine-id", "resolv.conf")
"""Of /etc; a jail finds its own in IDENTITY."""
_KEY = "gateway-key"
_HOSTS = "127.0.0.1 localhost\n::1 localhost\n"
_SMALLEST_PYTHON = 9


def check(recipe: Recipe) -> None:
    """Raises Unsupported for a recipe that only other kinds of host can follow."""
    if recipe.source is not Source.ROOTFS:
        raise Unsupported(
            "a jail host cannot debootstrap: give 'from: rootfs' with the path of a directory or tarball on the host, "
            "such as FreeBSD's base.txz with Python installed in it"
        )


async def build_rootfs(recipe: Recipe, root: Path, log: Log) -> None:
    """Fill the empty directory ``root``; needs root. Raises Invalid when the recipe's tree cannot be a sandbox's."""
    check(recipe)
    try:
        await _unpack(Path(recipe.path), root, log)
        if recipe.packages:
            log(f"installing {len(recipe.packages)} packages")
            await _install_packages(root, recipe.packages, log)
        log("installing the agent and the sandbox's settings")
        minor = await asyncio.to_thread(_furnish, root)
        await _add_user(root)
        if minor == sys.version_info.minor:
            await compile_agent_of_foreign(root, log)
    except OSError as error:
        raise as_gateway_error(error, "building the file system") from error


async def _unpack(source: Path, root: Path, log: Log) -> None:
    kind = await asyncio.to_thread(kind_of, source)
    if kind == "directory":
        if await asyncio.to_thread(lambda: root.resolve().is_relative_to(source.resolve())):
            raise Invalid(f"{source} contains the gateway's own state: give a directory that holds a root file system")
        log(f"copying {source}")
        await stream(["cp", "-a", "-x", f"{source}/.", f"{root}/"], log)
    elif kind == "file":
        log(f"unpacking {source}")
        # Nodes of devices are best never made: a jail has a devfs. Both tars know compressions by themselves.
        excluded = [f"--exclude={place}dev/*" for place in ("./", "")]
        argv = ["tar", "-x", "-p", "-f", str(source), "-C", str(root), "--numeric-owner", *excluded]
        await stream(argv, lambda line: None)
    else:
        raise Invalid(f"{source} is not there: 'path' names a directory or a tarball on the gateway's host")


async def _install_packages(root: Path, packages: list[str], log: Log) -> None:
    env = {**proxy_settings(), "ASSUME_ALWAYS_YES": "yes"}
    await stream(["pkg", "-r", str(root), "install", "-y", *packages], log, env=env)


def _furnish(root: Path) -> int:
    """Turn an unpacked tree into a sandbox's; returns the minor version of its Python 3."""
    tree = Tree(root)
    minor = _check(tree)
    install_agent(tree, agent_package())
    for directory in ("/dev", "/run", IDENTITY):
        if tree.real(directory, follow=False).is_symlink():
            tree.remove(directory)
        tree.mkdir(directory)
    for name in _FILES:
        tree.link(f"/etc/{name}", f"{IDENTITY}/{name}")
    tree.write("/etc/hosts", _HOSTS)
    return minor


def _check(tree: Tree) -> int:
    if not tree.is_file("/bin/sh"):
        raise Invalid("the root file system has no /bin/sh: give one that a system runs in")
    found = [tree.real(place) for place in _PYTHONS if tree.is_file(place)]
    if not found:
        raise Invalid(
            f"the root file system has no {' or '.join(_PYTHONS)}: install Python 3.{_SMALLEST_PYTHON} or later in it "
            "for the agent (FreeBSD: `pkg -r ROOT install python3`, or the recipe's packages)"
        )
    minor = python_minor(tree, found[0].name)
    if minor is None or minor < _SMALLEST_PYTHON:
        named = "of an unknown version" if minor is None else f"3.{minor}"
        raise Invalid(
            f"the root file system's python3 is {named}: the agent needs Python 3.{_SMALLEST_PYTHON} or later"
        )
    return minor


async def _add_user(root: Path) -> None:
    """The unprivileged user that E2B's images have. FreeBSD's accounts are in a database, which `pw` writes."""
    if not await asyncio.to_thread((root / "etc/master.passwd").is_file):
        await asyncio.to_thread(add_user, Tree(root))
        return
    known = await arun(["pw", "-R", str(root), "usershow", "user"], timeout=STEP_SECONDS, check=False)
    if known.returncode != 0:
        await arun(["pw", "-R", str(root), "useradd", "user", "-m", "-s", "/bin/sh"], timeout=STEP_SECONDS)


def write_identity(directory: Path, sandbox: Sandbox, dns: list[str]) -> None:
    """What is seen as IDENTITY in the sandbox's jail. The machine's id stays the same from start to start."""
    directory.mkdir(mode=0o755, parents=True, exist_ok=True)
    machine = hashlib.sha256(f"machine {sandbox.id}".encode()).hexdigest()[:32]
    (directory / "hostname").write_text(f"{sandbox.hostname}\n")
    (directory / "machine-id").write_text(f"{machine}\n")
    (directory / "resolv.conf").write_text("".join(f"nameserver {address}\n" for address in dns))


def write_gateway_key(directory: Path) -> None:
    """Give the agent of a jail that is about to start a key to know the gateway by.

    On the host's side of the bridge every user of the host has the gateway's address, and pf does not see whose packets
    they are. The file is readable by root alone, on the host and in the jail.
    """
    directory.mkdir(mode=0o755, parents=True, exist_ok=True)
    path = directory / _KEY
    path.unlink(missing_ok=True)
    with os.fdopen(os.open(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o600), "w") as file:
        file.write(secrets.token_hex(32))


def gateway_key(directory: Path) -> str:
    """That key; empty for a jail that was started without one."""
    try:
        return (directory / _KEY).read_text()
    except FileNotFoundError:
        return ""


def takes_identity(root: Path) -> bool:
    """Is there a directory IDENTITY to mount over, not reached through links that the sandbox's root planted?"""
    place = root
    for part in Path(IDENTITY).parts[1:]:
        place /= part
        if place.is_symlink() or not place.is_dir():
            return False
    return True
