"""The file system of a template before its first boot: from a recipe to an ext4 image, a kernel and an initrd.

Nothing is mounted on the host and nothing of the tree is run outside a private mount and process namespace. What
a foreign tree holds is looked at, never executed; paths inside it are resolved as the guest would resolve them,
so that a symbolic link to `/etc` means the guest's.
"""

from __future__ import annotations

import asyncio
import contextlib
import hashlib
import json
import os
import platform
import re
import secrets
import shlex
import shutil
import sys
import time
from pathlib import Path

from sandbox_gateway.command import arun, proxy_settings
from sandbox_gateway.errors import BackendFailed, Invalid, NoSpace
from sandbox_gateway.hosts.base import Log
from sandbox_gateway.hosts.kvm_xfs.netns import GATEWAY_ADDRESS, GUEST_ADDRESS, GUEST_MAC, GUEST_PREFIX
from sandbox_gateway.hosts.rootfs_common import (
    STEP_SECONDS,
    Tree,
    add_user,
    agent_package,
    as_gateway_error,
    compile_agent,
    compile_agent_of_foreign,
    install_agent,
    kind_of,
    python_minor,
    remove_tree,
    stream,
)
from sandbox_gateway.recipes import Recipe, Source

PARTIAL = ".partial-rootfs-"
_CACHE_VERSION = 1
_STALE_SECONDS = 86400.0
_JOURNAL_MB = 16

_PACKAGES = (
    "ca-certificates",
    "dbus",
    "iproute2",
    "kmod",
    "libnss-myhostname",
    "procps",
    "python3",
    "sudo",
    "systemd-sysv",
    "udev",
)
_KERNELS = {"x86_64": "linux-image-cloud-amd64", "aarch64": "linux-image-cloud-arm64"}

_INITRAMFS = {
    # Only what finds the root: a tenth of Debian's default, and so quicker to unpack (gzip needs no package).
    "conf.d/sandbox": "MODULES=list\nBUSYBOX=n\nCOMPRESS=gzip\nRESUME=none\n",
    "modules": "virtio_pci\nvirtio_blk\next4\n",
    # The kernel names the one disk there is; udev would be started for it, and take seconds without KVM.
    "hooks/sandbox": """\
#!/bin/sh
[ "$1" = prereqs ] && exit 0
cd "$DESTDIR" || exit 1
rm -rf scripts/init-top/udev bin/udevadm lib/udev lib/systemd sbin/dmsetup
printf '#!/bin/sh\\n[ "$1" = prereqs ] || mount -n -o move /dev "$rootmnt/dev"\\n' >scripts/init-bottom/udev
""",
}
"""Files below /etc/initramfs-tools."""

_DPKG_OPTIONS = (
    "path-exclude=/usr/share/man/*",
    "path-exclude=/usr/share/doc/*",
    "path-include=/usr/share/doc/*/copyright",
    "path-exclude=/usr/share/locale/*",
)

_MASKED = (
    # They write to the disk by the clock, so that every fork diverges by itself.
    "apt-daily.service",
    "apt-daily.timer",
    "apt-daily-upgrade.service",
    "apt-daily-upgrade.timer",
    "dpkg-db-backup.timer",
    "e2scrub_all.timer",
    "e2scrub_reap.service",
    "fstrim.timer",
    "logrotate.timer",
    "man-db.timer",
    "motd-news.timer",
    "plocate-updatedb.timer",
    "systemd-tmpfiles-clean.timer",
    "unattended-upgrades.service",
    # They write to the disk at every boot; the agent gives identity, time and entropy.
    "ldconfig.service",
    "systemd-firstboot.service",
    "systemd-hwdb-update.service",
    "systemd-journal-catalog-update.service",
    "systemd-journal-flush.service",
    "systemd-machine-id-commit.service",
    "systemd-random-seed.service",
    "systemd-timesyncd.service",
    "systemd-update-done.service",
    "systemd-update-utmp-runlevel.service",
    "systemd-update-utmp.service",
    # They wait for, or configure, a network that is already there.
    "cloud-init-local.service",
    "cloud-init.service",
    "cloud-init.target",
    "NetworkManager-wait-online.service",
    "networking.service",
    "systemd-networkd-wait-online.service",
    # Part of every boot, of use to nobody here; each is processes started (dear without KVM).
    "console-getty.service",
    "dev-hugepages.mount",
    "getty-static.service",
    "getty.target",
    "proc-sys-fs-binfmt_misc.automount",
    "kmod-static-nodes.service",
    "modprobe@configfs.service",
    "modprobe@dm_mod.service",
    "modprobe@drm.service",
    "modprobe@efi_pstore.service",
    "modprobe@loop.service",
    "sys-kernel-config.mount",
    "sys-kernel-debug.mount",
    "sys-kernel-tracing.mount",
    "systemd-binfmt.service",
    "systemd-pstore.service",
    "systemd-remount-fs.service",
    "systemd-repart.service",
    "systemd-sysusers.service",
    "systemd-vconsole-setup.service",
)

_GENERATORS = (
    # Each is a process at every boot that looks for what is not there: other disks, kernel arguments, consoles.
    "systemd-cryptsetup-generator",
    "systemd-debug-generator",
    "systemd-getty-generator",
    "systemd-gpt-auto-generator",
    "systemd-hibernate-resume-generator",
    "systemd-integritysetup-generator",
    "systemd-run-generator",
    "systemd-system-update-generator",
    "systemd-veritysetup-generator",
)

_NETWORK_SCRIPT = f"""\
#!/bin/sh
# Address and route of the sandbox: the same in every sandbox, so that a fork needs no change of them.
# The card is found by its address: it may have been named before udev's rules were there.
modprobe -q virtio_net
tries=0
while [ "$tries" -lt 100 ]; do
    for card in /sys/class/net/*; do
        read -r mac < "$card/address" || continue
        [ "$mac" = "{GUEST_MAC}" ] && break 2
    done
    card=
    tries=$((tries + 1))
    sleep 0.1
done
[ -n "$card" ] || {{ echo "no network card with address {GUEST_MAC}" >&2; exit 1; }}
name=${{card##*/}}
[ -e /proc/sys/net/ipv6 ] && echo 1 > "/proc/sys/net/ipv6/conf/$name/disable_ipv6"
ip -batch - <<END
link set dev lo up
link set dev $name up
address replace {GUEST_ADDRESS}/{GUEST_PREFIX} dev $name
route replace default via {GATEWAY_ADDRESS} dev $name
END
# What volumes are mounted with. Loaded while the template boots it is there in every fork; later it takes seconds.
modprobe -q nfsv3 &
"""

_NETWORK_UNIT = """\
[Unit]
Description=Network of the sandbox
DefaultDependencies=no
Before=network.target network-online.target sysinit.target shutdown.target
Wants=network.target
Conflicts=shutdown.target

[Service]
Type=oneshot
RemainAfterExit=yes
ExecStart=/bin/sh /usr/local/lib/sandbox/network

[Install]
WantedBy=sysinit.target
"""

_COLDPLUG = """\
[Service]
# What a sandbox has. The kernel finds two hundred things more (terminals, buttons, the CPU's abilities); to ask each
# for its rules and modules takes ten seconds without KVM.
ExecStart=
ExecStart=-udevadm trigger --type=devices --action=add \
    --subsystem-match=block --subsystem-match=misc --subsystem-match=net --subsystem-match=pci \
    --subsystem-match=rtc --subsystem-match=virtio
"""

_HOSTS = """\
127.0.0.1 localhost
::1 localhost ip6-localhost ip6-loopback
"""

_CREDENTIALS = re.compile(r"://[^/\s\"]*@")

_building: dict[Path, asyncio.Lock] = {}


async def build_rootfs(
    recipe: Recipe,
    image: Path,
    kernel: Path,
    initrd: Path,
    *,
    cache_root: Path,
    log: Log,
    agent: Path | None = None,
) -> None:
    """Build ``recipe`` into ``image`` (sparse ext4 of ``disk_mb``), ``kernel`` and ``initrd``; needs root.

    ``agent`` is the directory of the in-sandbox agent's package; default: the one installed beside the gateway.
    All three files appear whole or not at all; what is in the making is in a `.partial-rootfs-*` directory beside
    ``image``. Raises Invalid when the recipe's tree cannot be a sandbox or does not fit its disk, NoSpace when the
    host's disk is full, BackendFailed when a tool fails.
    """
    agent = agent or agent_package()
    work = image.parent / f"{PARTIAL}{secrets.token_hex(4)}"
    work.mkdir(mode=0o700, parents=True)
    try:
        tree = work / "tree"
        tree.mkdir(mode=0o755)
        if recipe.source is Source.DEBOOTSTRAP:
            await _unpack_debian(recipe, tree, work, cache_root, log)
        else:
            await _unpack_given(Path(recipe.path), tree, log)
        log("installing the agent and the sandbox's settings")
        boot = await asyncio.to_thread(_furnish, tree, agent)
        await _compile_agent(recipe.source, tree, log)
        await _make_image(tree, work / "image", recipe.resources.disk_mb, log)
        await asyncio.to_thread(_deliver, work, boot, image, kernel, initrd)
    except OSError as error:
        raise as_gateway_error(error, "building the file system") from error
    finally:
        await remove_tree(work)


# --- Debian, by mmdebstrap -------------------------------------------------------------------------------------


async def _unpack_debian(recipe: Recipe, tree: Path, work: Path, cache_root: Path, log: Log) -> None:
    mirrors = _mirrors(recipe, work)
    packages = _packages(recipe)
    options = await _apt_options()
    digest = _digest(recipe.suite, packages, options, [_text(mirror) for mirror in mirrors])
    cached = cache_root / f"rootfs-{digest}.tar"
    async with _building.setdefault(cached, asyncio.Lock()):
        if cached.is_file():
            log(f"using the root file system built earlier ({cached.name})")
        else:
            await _debootstrap(recipe.suite, packages, options, mirrors, work, log)
            await asyncio.to_thread(_commit_tarball, work / "rootfs.tar", cached)
    _building.pop(cached, None)
    log("unpacking the root file system")
    await _untar(cached, tree)


def _packages(recipe: Recipe) -> list[str]:
    kernel = _KERNELS.get(platform.machine())
    if kernel is None:
        raise Invalid(
            f"templates cannot be debootstrapped on {platform.machine()}: use 'from: rootfs' with a tree made elsewhere"
        )
    return sorted({*_PACKAGES, kernel, *recipe.packages})


def _mirrors(recipe: Recipe, work: Path) -> list[str]:
    """mmdebstrap's MIRROR arguments; none: its own default for the suite."""
    given = [line.strip() for line in recipe.mirror.splitlines() if line.strip()]
    for line in given:
        if not (line.startswith("deb ") or re.match(r"[a-z+]+:/", line)):
            raise Invalid(
                f"mirror {line!r}: give a URI ('http://host/debian') or a line for sources.list ('deb [signed-by=…] …')"
            )
    if given:
        return given
    text = host_sources(recipe.suite)
    if not text:
        return []
    sources = work / "host.sources"
    sources.write_text(text)
    return [str(sources)]


def _text(mirror: str) -> str:
    return Path(mirror).read_text() if mirror.startswith("/") else mirror


def _digest(suite: str, packages: list[str], options: list[str], mirrors: list[str]) -> str:
    made_of = [_CACHE_VERSION, suite, packages, options, mirrors, _INITRAMFS, _DPKG_OPTIONS]
    if any(map(_CREDENTIALS.search, options)):
        made_of.append("without passwords")  # As what an older release made of these options is not.
    return hashlib.sha256(json.dumps(made_of).encode()).hexdigest()[:32]


def host_sources(suite: str, etc_apt: Path = Path("/etc/apt")) -> str:
    """The host's own APT sources of the distribution's ``suite``, in deb822 form; empty if it has none of it.

    Only entries with component `main` count: those of the distribution, not of a vendor's repository that happens
    to call its suite the same.
    """
    files = [etc_apt / "sources.list", *sorted((etc_apt / "sources.list.d").glob("*"))]
    stanzas: list[dict[str, str]] = []
    for file in files:
        with contextlib.suppress(OSError):
            text = file.read_text(errors="replace")
            stanzas += _deb822(text) if file.suffix == ".sources" else _one_line(text) if file.suffix == ".list" else []
    wanted = {suite, f"{suite}-updates", f"{suite}-security", f"{suite}/updates"}
    kept = []
    for stanza in stanzas:
        suites = [word for word in stanza.get("Suites", "").split() if word in wanted]
        usable = "deb" in stanza.get("Types", "").split() and stanza.get("Enabled", "yes").strip().lower() != "no"
        if suites and usable and "main" in stanza.get("Components", "").split():
            kept.append({**stanza, "Types": "deb", "Suites": " ".join(suites)})
    if not any(suite in stanza["Suites"].split() for stanza in kept):
        return ""
    return "\n".join("".join(f"{key}: {value}\n" for key, value in stanza.items()) for stanza in kept)


def _deb822(text: str) -> list[dict[str, str]]:
    stanzas: list[dict[str, str]] = []
    for block in re.split(r"\n[ \t]*\n", text):
        stanza: dict[str, str] = {}
        key = ""
        for line in block.splitlines():
            if line.startswith("#") or not line.strip():
                continue
            if line[0] in " \t" and key:
                stanza[key] += f"\n{line}"
            elif ":" in line:
                key, value = line.split(":", 1)
                key = _DEB822_KEYS.get(key.lower(), key)
                stanza[key] = value.strip()
        stanzas.append(stanza)
    return stanzas


_DEB822_KEYS = {
    key.lower(): key for key in ("Types", "URIs", "Suites", "Components", "Enabled", "Signed-By", "Trusted")
}
_ONE_LINE = re.compile(r"deb\s+(?:\[(?P<options>[^]]*)\]\s+)?(?P<uri>\S+)\s+(?P<suite>\S+)\s+(?P<components>[^#]+)")


def _one_line(text: str) -> list[dict[str, str]]:
    stanzas = []
    for line in text.splitlines():
        if not (match := _ONE_LINE.match(line.strip())):
            continue
        stanza = {"Types": "deb", "URIs": match["uri"], "Suites": match["suite"]}
        stanza["Components"] = match["components"].strip()
        for option in (match["options"] or "").split():
            key, _, value = option.partition("=")
            name = {"signed-by": "Signed-By", "trusted": "Trusted", "check-valid-until": "Check-Valid-Until"}.get(key)
            if name:
                stanza[name] = value.replace(",", " ")
        stanzas.append(stanza)
    return stanzas


async def _apt_options() -> list[str]:
    """The host's own proxy and date checks: a template is fetched the way the host fetches its packages."""
    if shutil.which("apt-config") is None:
        return []
    dump = await arun(["apt-config", "dump"], timeout=30, check=False)
    wanted = re.compile(r"^Acquire::((http|https)::Proxy|Check-Valid-Until|Check-Date) ", re.IGNORECASE)
    return [line.rstrip(";") for line in dump.stdout.splitlines() if wanted.match(line)]


async def _debootstrap(
    suite: str, packages: list[str], options: list[str], mirrors: list[str], work: Path, log: Log
) -> None:
    log(f"building Debian {suite} with {len(packages)} packages named; this takes a minute or so")
    temporary = work / "mmdebstrap"
    temporary.mkdir()
    settings = work / "initramfs-tools"
    for name, text in _INITRAMFS.items():
        file = settings / name
        file.parent.mkdir(parents=True, exist_ok=True)
        file.write_text(text)
        file.chmod(0o755 if text.startswith("#!") else 0o644)
    argv = [
        # Mounts and processes of mmdebstrap end with it, however it ends; the host's it does not hold on to meanwhile.
        *("unshare", "--mount", "--propagation", "slave", "--pid", "--fork", "--kill-child"),
        *("mmdebstrap", "--verbose", "--mode=root", "--variant=minbase", "--format=tar"),
        f"--include={','.join(packages)}",
        *(f"--dpkgopt={option}" for option in _DPKG_OPTIONS),
        *_apt_arguments(options, work),
        *_keyrings(mirrors),
        f"--essential-hook=copy-in {shlex.quote(str(settings))} /etc",
        *("--", suite, str(work / "rootfs.tar"), *mirrors),
    ]
    if shutil.which("mmdebstrap") is None:
        raise BackendFailed("mmdebstrap is not installed: install it, or run the kvm_xfs_host role of this collection")
    env = {**proxy_settings(), "TMPDIR": str(temporary), "DEBIAN_FRONTEND": "noninteractive"}
    await stream(argv, log, keep=_worth_telling, env=env)


def _apt_arguments(options: list[str], work: Path) -> list[str]:
    """Arguments that give APT its options. One with a password is neither in a command line nor in the tree it makes:
    every user of the host reads the one, every sandbox the other."""
    secret = [option for option in options if _CREDENTIALS.search(option)]
    arguments = [f"--aptopt={option}" for option in options if option not in secret]
    if secret:
        file = work / "98secret"
        file.touch(mode=0o600)
        file.write_text("".join(f"{option};\n" for option in secret))
        arguments.append(f"--setup-hook=copy-in {shlex.quote(str(file))} /etc/apt/apt.conf.d")
        arguments.append(f'--customize-hook=rm "$1/etc/apt/apt.conf.d/{file.name}"')
    return arguments


def _keyrings(mirrors: list[str]) -> list[str]:
    """Hooks that carry keyrings which no Debian package installs into the tree, so that APT works there too."""
    named = {
        path
        for mirror in mirrors
        for path in re.findall(r"(?:Signed-By:|signed-by=)\s*(/[^\s\],]+)", _text(mirror), re.IGNORECASE)
        if not path.startswith("/usr/share/keyrings/debian-") and Path(path).is_file()
    }
    hooks = []
    for path in sorted(named):
        hooks += [f'--essential-hook=mkdir -p "$1{Path(path).parent}"', f"--essential-hook=upload {path} {path}"]
    return hooks


def _worth_telling(line: str) -> bool:
    # The download is "unsandboxed" because no other user may look into our working directory.
    ours = line.startswith("I: running --") or "performed unsandboxed" in line
    return line.startswith(("I: ", "W: ", "E: ", "Setting up ")) and not ours


def _commit_tarball(made: Path, cached: Path) -> None:
    cached.parent.mkdir(mode=0o700, parents=True, exist_ok=True)
    made.chmod(0o600)
    for left in cached.parent.glob(f"{PARTIAL}*"):
        with contextlib.suppress(OSError):
            if time.time() - left.stat().st_mtime > _STALE_SECONDS:
                left.unlink()
    try:
        made.rename(cached)
    except OSError:
        partial = cached.parent / f"{PARTIAL}{secrets.token_hex(4)}"
        try:
            partial.touch(mode=0o600)
            shutil.copyfile(made, partial)
            partial.rename(cached)
        finally:
            partial.unlink(missing_ok=True)


# --- a tree that was given -------------------------------------------------------------------------------------


async def _unpack_given(source: Path, tree: Path, log: Log) -> None:
    kind = await asyncio.to_thread(kind_of, source)
    if kind == "directory":
        if await asyncio.to_thread(lambda: tree.resolve().is_relative_to(source.resolve())):
            raise Invalid(f"{source} contains the gateway's own state: give a directory that holds a root file system")
        log(f"copying {source}")
        await stream(["cp", "-a", "--one-file-system", "--reflink=auto", "-T", str(source), str(tree)], log)
    elif kind == "file":
        log(f"unpacking {source}")
        await _untar(source, tree)
    else:
        raise Invalid(f"{source} is not there: 'path' names a directory or a tarball on the gateway's host")


async def _untar(tarball: Path, tree: Path) -> None:
    # GNU tar refuses '..', takes the leading '/' off and makes symbolic links last; it knows compressions by itself.
    argv = [
        *("tar", "--extract", "--file", str(tarball), "--directory", str(tree)),
        *("--numeric-owner", "--same-owner", "--same-permissions", "--delay-directory-restore"),
        *("--xattrs", "--xattrs-include=*"),
        # The kernel fills /dev; nodes of devices in the host's file system are best never made.
        *("--anchored", "--exclude=./dev/*", "--exclude=dev/*"),
    ]
    await stream(argv, lambda line: None)


# --- inside the tree -------------------------------------------------------------------------------------------


def _furnish(root: Path, agent: Path) -> tuple[Path, Path]:
    """Turn an unpacked tree into a sandbox's; returns its kernel and initrd. Raises Invalid if it cannot be one."""
    tree = Tree(root)
    boot = _kernel_of(tree)
    _check(tree)
    _install_agent(tree, agent)
    _network(tree)
    _quiet(tree)
    _identity(tree)
    add_user(tree)
    return boot


def _kernel_of(tree: Tree) -> tuple[Path, Path]:
    versions = [name.removeprefix("vmlinuz-") for name in tree.names("/boot") if name.startswith("vmlinuz-")]
    for version in sorted(versions, key=_natural, reverse=True):
        kernel = tree.real(f"/boot/vmlinuz-{version}")
        for name in (f"initrd.img-{version}", f"initramfs-{version}.img"):
            initrd = tree.real(f"/boot/{name}")
            if kernel.is_file() and initrd.is_file():
                return kernel, initrd
    if versions:
        raise Invalid(
            f"the root file system has a kernel {versions[0]} but no /boot/initrd.img-{versions[0]}: make one"
        )
    raise Invalid("the root file system has no /boot/vmlinuz-*: install a kernel (Debian: linux-image-cloud-amd64)")


def _natural(text: str) -> list[tuple[int, int, str]]:
    return [(1, int(part), "") if part.isdigit() else (0, 0, part) for part in re.findall(r"\d+|\D+", text)]


def _check(tree: Tree) -> None:
    init = tree.real("/sbin/init")
    if not init.is_file():
        raise Invalid("the root file system has no /sbin/init: install systemd in it (Debian: systemd-sysv)")
    if init.name != "systemd":
        raise Invalid(f"/sbin/init of the root file system is {init.name}: install systemd, which starts the agent")
    python = tree.real("/usr/bin/python3")
    if not python.is_file():
        raise Invalid("the root file system has no /usr/bin/python3: install Python 3.9 or later in it for the agent")
    minor = python_minor(tree, python.name)
    if minor is None or minor < 9:
        found = "of an unknown version" if minor is None else f"3.{minor}"
        raise Invalid(f"the root file system's /usr/bin/python3 is {found}: the agent needs Python 3.9 or later")
    if not any(tree.is_file(f"{place}/ip") for place in ("/sbin", "/bin", "/usr/sbin", "/usr/bin")):
        raise Invalid("the root file system has no 'ip' command: install iproute2 in it")


def _install_agent(tree: Tree, agent: Path) -> None:
    install_agent(tree, agent)
    unit = "sandbox-agent.service"
    try:
        text = (agent / unit).read_text()
    except FileNotFoundError:
        raise BackendFailed(f"{agent / unit} is missing: install the gateway again") from None
    _enable(tree, unit, text)


async def _compile_agent(source: Source, tree: Path, log: Log) -> None:
    if source is Source.DEBOOTSTRAP:
        # Debian's own interpreter, in a tree of Debian's packages.
        namespaces = ("--mount", "--propagation", "slave", "--pid", "--net")
        inside = ("unshare", *namespaces, "--fork", "--kill-child", "chroot", str(tree))
        await compile_agent([*inside, "/usr/bin/python3", "-I", "-S"], ["/opt/sandbox_agent"], log)
    elif python_minor(Tree(tree), Tree(tree).real("/usr/bin/python3").name) == sys.version_info.minor:
        await compile_agent_of_foreign(tree, log)


def _enable(tree: Tree, unit: str, text: str) -> None:
    """Install a unit and make the links of its [Install] section."""
    tree.write(f"/etc/systemd/system/{unit}", text)
    for target in re.findall(r"^WantedBy=(.+)$", text, re.MULTILINE):
        for name in target.split():
            tree.link(f"/etc/systemd/system/{name}.wants/{unit}", f"/etc/systemd/system/{unit}")


def _network(tree: Tree) -> None:
    tree.write("/usr/local/lib/sandbox/network", _NETWORK_SCRIPT, mode=0o755)
    _enable(tree, "sandbox-network.service", _NETWORK_UNIT)
    tree.link("/etc/systemd/network/99-default.link", "/dev/null")
    tree.write("/etc/resolv.conf", "")
    tree.write("/etc/hosts", _HOSTS)


def _quiet(tree: Tree) -> None:
    for unit in _MASKED:
        tree.link(f"/etc/systemd/system/{unit}", "/dev/null")
    if not any(name == "pam_systemd.so" for place in _PAM for name in tree.names(place)):
        tree.link("/etc/systemd/system/systemd-logind.service", "/dev/null")
    tree.write("/etc/systemd/system/systemd-udev-trigger.service.d/sandbox.conf", _COLDPLUG)
    for generator in _GENERATORS:
        tree.link(f"/etc/systemd/system-generators/{generator}", "/dev/null")
    tree.link("/etc/systemd/system/default.target", "/lib/systemd/system/multi-user.target")
    tree.write("/etc/systemd/journald.conf.d/sandbox.conf", "[Journal]\nStorage=volatile\nRuntimeMaxUse=8M\nAudit=no\n")
    tree.write("/etc/fstab", "# The root is mounted by the kernel's arguments.\n")


_PAM = (
    "/lib/security",
    "/lib64/security",
    "/lib/x86_64-linux-gnu/security",
    "/lib/aarch64-linux-gnu/security",
)


def _identity(tree: Tree) -> None:
    tree.write("/etc/hostname", "sandbox\n")
    # An empty one would have systemd write it, a missing one would be a first boot.
    tree.write("/etc/machine-id", f"{secrets.token_hex(16)}\n", mode=0o444)


# --- the image -------------------------------------------------------------------------------------------------


async def _make_image(tree: Path, image: Path, disk_mb: int, log: Log) -> None:
    log(f"making the disk image ({disk_mb} MiB)")
    with image.open("xb") as file:
        os.fchmod(file.fileno(), 0o600)
        file.truncate(disk_mb << 20)
    journal = min(_JOURNAL_MB, max(4, disk_mb // 64))
    argv = [
        *("mke2fs", "-q", "-F", "-t", "ext4", "-b", "4096", "-m", "0", "-L", "root", "-d", str(tree)),
        # Everything is initialised now (holes read as zeros): no kernel thread writes to it after the first mount.
        *("-E", "lazy_itable_init=0,lazy_journal_init=0,discard", "-J", f"size={journal}"),
        str(image),
    ]
    done = await arun(argv, timeout=STEP_SECONDS, check=False)
    if done.returncode == 0:
        return
    said = (done.stderr.strip() or done.stdout.strip())[-1000:]
    if "No space left on device" in said and shutil.disk_usage(image.parent).free < 1 << 20:
        raise NoSpace("making the disk image: the host's disk is full; make room and build again")
    need = await asyncio.to_thread(_tree_mb, tree)
    if "populating" in said or need > disk_mb:
        raise Invalid(
            f"the root file system ({need} MiB) does not fit on a disk of {disk_mb} MiB: "
            f"give diskSizeMB {-(-need * 5 // 4 // 64) * 64 + 64} or more"
        )
    raise BackendFailed(f"mke2fs failed ({done.returncode}): {said}")


def _tree_mb(tree: Path) -> int:
    """Disk that a tree takes in blocks of 4 KiB, in MiB."""
    size = 0
    seen: set[int] = set()
    for folder, directories, files in os.walk(tree):
        for name in [*directories, *files]:
            status = os.lstat(os.path.join(folder, name))  # noqa: PTH118 - hundreds of thousands of them
            if status.st_ino not in seen:
                seen.add(status.st_ino)
                size += -(-status.st_size // 4096) * 4096
    return -(-size >> 20) or 1


def _deliver(work: Path, boot: tuple[Path, Path], image: Path, kernel: Path, initrd: Path) -> None:
    for source, name, target in ((boot[0], "kernel", kernel), (boot[1], "initrd", initrd)):
        # QEMU opens them before it gives up root.
        (work / name).touch(mode=0o600)
        shutil.copyfile(source, work / name)
        (work / name).rename(target)
    (work / "image").rename(image)


# --- commands that take long -----------------------------------------------------------------------------------
