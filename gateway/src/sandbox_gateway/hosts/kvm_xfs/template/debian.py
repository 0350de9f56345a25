"""Build a Debian tree with mmdebstrap, and cache it as a tarball."""

from __future__ import annotations

import asyncio
import contextlib
import hashlib
import json
import platform
import re
import secrets
import shlex
import shutil
import time
from collections.abc import Sequence
from pathlib import Path

from sandbox_gateway.command import read_proxy_settings
from sandbox_gateway.errors import BackendFailed, Invalid
from sandbox_gateway.hosts.base import Log
from sandbox_gateway.hosts.kvm_xfs.commit_protocol import PARTIAL_PREFIX
from sandbox_gateway.hosts.kvm_xfs.template import guest_files
from sandbox_gateway.hosts.kvm_xfs.template.apt import read_apt_options, read_host_sources
from sandbox_gateway.hosts.kvm_xfs.template.tarball import untar
from sandbox_gateway.hosts.rootfs_common import run_logged
from sandbox_gateway.recipes import Recipe

_PARTIAL_TARBALL_PREFIX = f"{PARTIAL_PREFIX}rootfs-"
_CACHE_VERSION = 1
_STALE_AFTER_SECONDS = 86400.0
_CREDENTIALS_PATTERN = re.compile(r"://[^/\s\"]*@")

_build_locks: dict[Path, asyncio.Lock] = {}


async def unpack_debian(
    recipe: Recipe, tree: Path, work_directory: Path, cache_root: Path, log: Log, excluded: Sequence[str] = ()
) -> None:
    """Unpack the Debian tree of a recipe into ``tree``. Builds it first if ``cache_root`` does not contain it.

    ``excluded``: see ``untar``.
    """
    mirrors = _list_mirrors(recipe, work_directory)
    packages = _list_packages(recipe)
    options = await read_apt_options()
    digest = _digest(recipe.suite, packages, options, [_read_mirror_text(mirror) for mirror in mirrors])
    cached_tarball = cache_root / f"rootfs-{digest}.tar"
    async with _build_locks.setdefault(cached_tarball, asyncio.Lock()):
        if cached_tarball.is_file():
            log(f"using the cached root file system ({cached_tarball.name})")
        else:
            await build_tarball(recipe.suite, packages, options, mirrors, work_directory, log)
            await asyncio.to_thread(_commit_tarball, work_directory / "rootfs.tar", cached_tarball)
    _build_locks.pop(cached_tarball, None)
    log("unpacking the root file system")
    await untar(cached_tarball, tree, excluded)


def _list_packages(recipe: Recipe) -> list[str]:
    kernel_package = guest_files.find_kernel_package(platform.machine())
    if kernel_package is None:
        raise Invalid(
            f"'from: debootstrap' does not support this host's architecture {platform.machine()}: use 'from: rootfs' "
            "with a tree that was built elsewhere"
        )
    return sorted({*guest_files.read_lines("packages.txt"), kernel_package, *recipe.packages})


def _list_mirrors(recipe: Recipe, work_directory: Path) -> list[str]:
    """Return mmdebstrap's MIRROR arguments. If the list is empty, mmdebstrap uses the suite's default mirror."""
    configured_mirrors = [line.strip() for line in recipe.mirror.splitlines() if line.strip()]
    for line in configured_mirrors:
        if not (line.startswith("deb ") or re.match(r"[a-z+]+:/", line)):
            raise Invalid(
                f"the mirror {line!r} is not valid: use a URI ('http://host/debian') or a line for "
                "sources.list ('deb [signed-by=…] …')"
            )
    if configured_mirrors:
        return configured_mirrors
    text = read_host_sources(recipe.suite)
    if not text:
        return []
    sources_file = work_directory / "host.sources"
    sources_file.write_text(text)
    return [str(sources_file)]


def _list_dpkg_options() -> list[str]:
    return guest_files.read_lines("dpkg.cfg")


def _read_mirror_text(mirror: str) -> str:
    return Path(mirror).read_text() if mirror.startswith("/") else mirror


def _digest(suite: str, packages: list[str], options: list[str], mirrors: list[str]) -> str:
    inputs = [
        _CACHE_VERSION,
        suite,
        packages,
        options,
        mirrors,
        guest_files.read_initramfs_files(),
        _list_dpkg_options(),
    ]
    if any(map(_CREDENTIALS_PATTERN.search, options)):
        inputs.append("without passwords")  # Distinguishes these trees from those of older releases.
    return hashlib.sha256(json.dumps(inputs).encode()).hexdigest()[:32]


async def build_tarball(
    suite: str, packages: list[str], options: list[str], mirrors: list[str], work_directory: Path, log: Log
) -> None:
    log(f"building Debian {suite} with {len(packages)} named packages, which takes about a minute")
    temporary_directory = work_directory / "mmdebstrap"
    temporary_directory.mkdir()
    initramfs_directory = work_directory / "initramfs-tools"
    for name, text in guest_files.read_initramfs_files().items():
        file = initramfs_directory / name
        file.parent.mkdir(parents=True, exist_ok=True)
        file.write_text(text)
        file.chmod(0o755 if text.startswith("#!") else 0o644)
    argv = [
        # In its own namespaces, mmdebstrap's mounts and processes end with it and do not keep mounts of the host busy.
        *("unshare", "--mount", "--propagation", "slave", "--pid", "--fork", "--kill-child"),
        *("mmdebstrap", "--verbose", "--mode=root", "--variant=minbase", "--format=tar"),
        f"--include={','.join(packages)}",
        *(f"--dpkgopt={option}" for option in _list_dpkg_options()),
        *_build_apt_arguments(options, work_directory),
        *_build_keyring_hooks(mirrors),
        f"--essential-hook=copy-in {shlex.quote(str(initramfs_directory))} /etc",
        *("--", suite, str(work_directory / "rootfs.tar"), *mirrors),
    ]
    if shutil.which("mmdebstrap") is None:
        raise BackendFailed("mmdebstrap is not installed: install it, or run the kvm_xfs_host role of this collection")
    env = {**read_proxy_settings(), "TMPDIR": str(temporary_directory), "DEBIAN_FRONTEND": "noninteractive"}
    await run_logged(argv, log, should_log=_is_worth_logging, env=env)


def _build_apt_arguments(options: list[str], work_directory: Path) -> list[str]:
    """Return mmdebstrap's arguments that set APT's options.

    Options with a password are passed in a file, because every user of the host can read command lines. The file is
    removed from the tree, because every sandbox can read the tree.
    """
    secret_options = [option for option in options if _CREDENTIALS_PATTERN.search(option)]
    arguments = [f"--aptopt={option}" for option in options if option not in secret_options]
    if secret_options:
        file = work_directory / "98secret"
        file.touch(mode=0o600)
        file.write_text("".join(f"{option};\n" for option in secret_options))
        arguments.append(f"--setup-hook=copy-in {shlex.quote(str(file))} /etc/apt/apt.conf.d")
        arguments.append(f'--customize-hook=rm "$1/etc/apt/apt.conf.d/{file.name}"')
    return arguments


def _build_keyring_hooks(mirrors: list[str]) -> list[str]:
    """Return mmdebstrap hooks that copy the mirrors' keyrings into the tree, unless a Debian package installs them."""
    keyrings = {
        path
        for mirror in mirrors
        for path in re.findall(r"(?:Signed-By:|signed-by=)\s*(/[^\s\],]+)", _read_mirror_text(mirror), re.IGNORECASE)
        if not path.startswith("/usr/share/keyrings/debian-") and Path(path).is_file()
    }
    hooks = []
    for path in sorted(keyrings):
        hooks += [f'--essential-hook=mkdir -p "$1{Path(path).parent}"', f"--essential-hook=upload {path} {path}"]
    return hooks


def _is_worth_logging(line: str) -> bool:
    # The download is "unsandboxed" because other users may not read the working directory.
    is_expected = line.startswith("I: running --") or "performed unsandboxed" in line
    return line.startswith(("I: ", "W: ", "E: ", "Setting up ")) and not is_expected


def _commit_tarball(tarball: Path, cached_tarball: Path) -> None:
    cached_tarball.parent.mkdir(mode=0o700, parents=True, exist_ok=True)
    tarball.chmod(0o600)
    for partial_tarball in cached_tarball.parent.glob(f"{_PARTIAL_TARBALL_PREFIX}*"):
        with contextlib.suppress(OSError):
            if time.time() - partial_tarball.stat().st_mtime > _STALE_AFTER_SECONDS:
                partial_tarball.unlink()
    try:
        tarball.rename(cached_tarball)
    except OSError:
        partial_tarball = cached_tarball.parent / f"{_PARTIAL_TARBALL_PREFIX}{secrets.token_hex(4)}"
        try:
            partial_tarball.touch(mode=0o600)
            shutil.copyfile(tarball, partial_tarball)
            partial_tarball.rename(cached_tarball)
        finally:
            partial_tarball.unlink(missing_ok=True)
