"""Build the image of the guest: a kernel for User-Mode Linux that contains OpenZFS, and Debian with ZFS's commands.

The image is cached by its recipe and the versions of its packages.
"""

from __future__ import annotations

import asyncio
import hashlib
import json
import os
import re
import shutil
import subprocess
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path

from sandbox_gateway.command import read_proxy_settings
from sandbox_gateway.hosts.kvm_xfs.template import apt
from tests.support import session

SUITE = "bookworm"
ZFS_SUITE = f"{SUITE}-backports"
FILES = Path(__file__).parent / "image_files"
PACKAGES = (FILES / "packages.txt").read_text().split()
KERNEL_PACKAGE, ZFS_PACKAGE = "linux-source-6.12", "zfs-dkms"
"""The packages with the sources that the kernel is built from."""
_VERSIONED_PACKAGES = (KERNEL_PACKAGE, ZFS_PACKAGE, "zfsutils-linux")
"""The packages whose versions decide whether a cached image is up to date."""
_DEBIAN_SOURCES = f"""\
Types: deb
URIs: http://deb.debian.org/debian
Suites: {SUITE} {SUITE}-updates
Components: main
Signed-By: /usr/share/keyrings/debian-archive-keyring.gpg

Types: deb
URIs: http://deb.debian.org/debian-security
Suites: {SUITE}-security
Components: main
Signed-By: /usr/share/keyrings/debian-archive-keyring.gpg
"""
ISOLATION = (
    *("unshare", "--mount", "--propagation", "slave", "--pid", "--fork", "--kill-child"),
    *("sh", "-c", 'umount --all --lazy --types fuse.zfs; exec "$@"', "sh"),
)
"""Runs a command in its own namespaces. Its mounts and processes disappear with it, and keep no host mounts busy.

The pools of zfs-fuse that are mounted at its start are detached, because other tests could not destroy them before the
command ends.
"""
_APT_SECONDS = 300
_BUILD_SECONDS = 3600
"""The deadline of each half of the build. Compiling the kernel takes most of the time."""
_FREE_MEGABYTES = 6144
"""Free space on the root file system, for the files of pools. The image is sparse."""

Report = Callable[[str], None]


@dataclass(frozen=True)
class Image:
    disk: Path
    kernel: Path
    versions: dict[str, str]


def find_or_build_image(work_directory: Path, report: Report) -> Image:
    """Return the cached image of this recipe and the current package versions. Builds it if it is missing."""
    sources = make_zfs_sources(apt.read_host_sources(SUITE) or _DEBIAN_SOURCES)
    apt_options = _make_apt_options(sources, work_directory / "apt")
    versions = _read_versions(sources, apt_options)
    image_directory = session.get_cache_dir() / f"openzfs-{_compute_digest(sources, versions)}"
    if not image_directory.is_dir():
        report(f"building the image with OpenZFS {versions[ZFS_PACKAGE]}, which takes 10 to 30 minutes")
        _build(sources, versions, apt_options, work_directory / "build")
        # Each image takes hundreds of megabytes.
        for old_directory in session.get_cache_dir().glob("openzfs-*"):
            shutil.rmtree(old_directory)
        (work_directory / "build" / "image").rename(image_directory)
        shutil.rmtree(work_directory / "build")
        report("the image is built")
    return _load(image_directory)


def _load(directory: Path) -> Image:
    versions = json.loads((directory / "versions.json").read_text())
    return Image(directory / "disk", directory / "kernel", versions)


def make_zfs_sources(sources: str) -> str:
    """Return APT sources in deb822 format with the component that contains ZFS, and with the suite of backports."""
    stanzas = []
    for stanza in sources.strip().split("\n\n"):
        stanza = re.sub(r"^Components:.*$", "Components: main contrib", stanza, flags=re.MULTILINE)
        suites = re.search(r"^Suites:(.*)$", stanza, re.MULTILINE)
        if suites and SUITE in suites[1].split():
            stanza = re.sub(r"^Suites:.*$", rf"\g<0> {ZFS_SUITE}", stanza, flags=re.MULTILINE)
        stanzas.append(stanza)
    return "\n\n".join(stanzas) + "\n"


def _compute_digest(sources: str, versions: dict[str, str]) -> str:
    files = {str(path.relative_to(FILES)): path.read_text() for path in sorted(FILES.rglob("*")) if path.is_file()}
    command = [word.replace(str(FILES), "") for word in _build_command(Path("tree"), Path("host.sources"))]
    inputs = [sources, versions, files, command]
    return hashlib.sha256(json.dumps(inputs).encode()).hexdigest()[:16]


def _make_apt_options(sources: str, root: Path) -> list[str]:
    """Return options with which apt uses these sources, whose package lists are downloaded into ``root``.

    The host's own package lists do not change.
    """
    for name in ("lists/partial", "cache/archives/partial"):
        (root / name).mkdir(parents=True)
    (root / "zfs.sources").write_text(sources)
    shutil.copy(FILES / "zfs.preferences", root / "preferences")
    settings = {
        "APT::Sandbox::User": "root",
        "Dir::Cache": str(root / "cache"),
        "Dir::Etc::Preferences": str(root / "preferences"),
        "Dir::Etc::PreferencesParts": "/dev/null",
        "Dir::Etc::SourceList": str(root / "zfs.sources"),
        "Dir::Etc::SourceParts": "/dev/null",
        "Dir::State::Lists": str(root / "lists"),
        "Dir::State::status": "/dev/null",
    }
    options = [word for key, value in settings.items() for word in ("-o", f"{key}={value}")]
    _run(["apt-get", *options, "--quiet", "update"], timeout=_APT_SECONDS)
    return options


def _read_versions(sources: str, apt_options: list[str]) -> dict[str, str]:
    """Return the versions of the packages that the sources offer now."""
    output = _run(["apt-cache", *apt_options, "policy", *_VERSIONED_PACKAGES], timeout=_APT_SECONDS)
    versions = dict(re.findall(r"^(\S+):\n  Installed: .*\n  Candidate: (\S+)", output, re.MULTILINE))
    missing = [name for name in _VERSIONED_PACKAGES if versions.get(name, "(none)") == "(none)"]
    if missing:
        raise RuntimeError(f"the APT sources of this machine do not offer {', '.join(missing)}:\n{sources}")
    return versions


def _build(sources: str, versions: dict[str, str], apt_options: list[str], work_directory: Path) -> None:
    """Create the directory ``image`` in ``work_directory``."""
    tree, image_directory = work_directory / "tree", work_directory / "image"
    kernel_directory, log = work_directory / "kernel", work_directory / "build.log"
    image_directory.mkdir(parents=True)
    kernel_directory.mkdir()
    packages = [f"{name}={versions[name]}" for name in (KERNEL_PACKAGE, ZFS_PACKAGE)]
    _run(["apt-get", *apt_options, "--quiet", "download", *packages], timeout=_APT_SECONDS, cwd=kernel_directory)
    _run_logged([*ISOLATION, str(FILES / "build-kernel")], log, kernel_directory)
    shutil.move(kernel_directory / "kernel", image_directory)
    sources_file = work_directory / "host.sources"
    sources_file.write_text(sources)
    _run_logged([*ISOLATION, *_build_command(tree, sources_file)], log, work_directory)
    make_disk(image_directory / "disk", tree, free_megabytes=_FREE_MEGABYTES)
    (image_directory / "versions.json").write_text(json.dumps(versions, indent=1))


def _build_command(tree: Path, sources_file: Path) -> list[str]:
    exclusions = [f"--dpkgopt=path-exclude=/usr/share/{name}/*" for name in ("doc", "info", "locale", "man")]
    return [
        *("mmdebstrap", "--verbose", "--mode=root", "--variant=minbase", "--format=directory"),
        f"--include={','.join(PACKAGES)}",
        *(exclusions),
        *(f"--aptopt={option}" for option in asyncio.run(apt.read_apt_options())),
        f'--setup-hook=install -D -m 644 {FILES}/zfs.preferences "$1"/etc/apt/preferences.d/zfs',
        f'--customize-hook=install -m 755 {FILES}/init "$1"/usr/local/sbin/openzfs-init',
        '--customize-hook=mkdir -p "$1"/job',
        *("--", SUITE, str(tree), str(sources_file)),
    ]


def make_disk(disk: Path, tree: Path, *, free_megabytes: int) -> None:
    """Create a sparse file with an ext4 file system that contains the files of ``tree``."""
    files = [path for path in tree.rglob("*") if not path.is_symlink()]
    megabytes = sum(path.stat().st_size + 4096 for path in files if path.is_file() or path.is_dir()) >> 20
    with disk.open("wb") as file:
        file.truncate((megabytes + megabytes // 10 + 64 + free_megabytes) << 20)
    argv = ["mke2fs", "-q", "-F", "-t", "ext4", "-O", "^has_journal", "-N", str(2 * len(files) + 65536), "-m", "0"]
    _run([*argv, "-E", "lazy_itable_init=1", "-d", str(tree), str(disk)], timeout=600)


def _run(argv: Sequence[str], *, timeout: float, cwd: Path | None = None) -> str:
    env = {**os.environ, "LC_ALL": "C", "PATH": f"{os.environ['PATH']}:/usr/sbin:/sbin"}
    result = subprocess.run(argv, capture_output=True, text=True, timeout=timeout, cwd=cwd, env=env, check=False)
    if result.returncode != 0:
        raise RuntimeError(f"{argv[0]} failed ({result.returncode}): {result.stderr.strip()[-2000:]}")
    return result.stdout


def _run_logged(argv: Sequence[str], log: Path, directory: Path) -> None:
    """Run a part of the build, whose output is appended to a log. Ends it after the deadline."""
    env = {
        **read_proxy_settings(),
        "DEBIAN_FRONTEND": "noninteractive",
        "LC_ALL": "C",
        "PATH": f"{os.environ['PATH']}:/usr/sbin:/sbin",
        "TMPDIR": str(log.parent),
    }
    with log.open("a") as output:
        process = subprocess.Popen(
            argv,
            stdin=subprocess.DEVNULL,
            stdout=output,
            stderr=subprocess.STDOUT,
            cwd=directory,
            env=env,
            start_new_session=True,
        )
        try:
            status = process.wait(_BUILD_SECONDS)
        finally:
            process.kill()
            process.wait(30)
    if status != 0:
        raise RuntimeError(f"the image could not be built ({status}):\n{log.read_text(errors='replace')[-4000:]}")
