"""Debian 12 containers that boot with systemd on this machine and share its network."""

from __future__ import annotations

import contextlib
import os
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path

from tests.support import session
from tests.support.roles import make_environment

_PACKAGES = (
    "ca-certificates,dbus,e2fsprogs,iproute2,mmdebstrap,nftables,procps,python3,python3-venv,"
    "qemu-system-x86,systemd-sysv,xfsprogs,zstd"
)
_BOOT_SCRIPT = """
for groups in /sys/fs/cgroup/systemd /sys/fs/cgroup/unified /sys/fs/cgroup; do
    test -e "$groups/cgroup.procs" || continue
    mkdir "$groups/$0"
    echo $$ >"$groups/$0/cgroup.procs"
done
mount --make-rslave /
umount --all --lazy --types fuse.zfs
mount -t tmpfs tmpfs /run
mkdir -p /run/systemd
exec "$@"
"""
"""Boots a container in a control group of its own, so that several can run.

A container keeps the mounts that exist at its start. Other tests could not destroy their pools before its end.
"""
_SYSTEMD_PATH = "/usr/lib/systemd/systemd"


class Container:
    """A booted container that has the repository at the same path as this machine."""

    def __init__(self, directory: Path, state_root: Path) -> None:
        self.directory = directory
        self._name = f"t{session.get_run_id()}{session.LANE}-{directory.name}"
        bind_options = [f"--bind={state_root}:/var/lib/sandbox-gateway", "--bind=/dev/net/tun"]
        for path in (session.REPOSITORY, Path(sys.prefix), Path(sys.base_prefix), session.get_run_dir()):
            if not path.is_relative_to("/usr"):
                bind_options.append(f"--bind={path}")
        for name in ("/etc/pip.conf", "/etc/ssl", "/etc/resolv.conf"):
            if Path(name).exists():
                bind_options.append(f"--bind-ro={name}")
        argv = ["systemd-nspawn", "--directory", str(directory), "--machine", self._name, "--boot", "--console=pipe"]
        # nspawn forbids open_by_handle_at, which volume servers need.
        argv += [
            "--register=no",
            "--keep-unit",
            "--capability=all",
            "--system-call-filter=open_by_handle_at ptrace pidfd_getfd userfaultfd",
            "--resolv-conf=off",
            *bind_options,
        ]
        self.process = subprocess.Popen(
            ["unshare", "--mount", "sh", "-c", _BOOT_SCRIPT, self._name, *argv],
            env={**os.environ, "SYSTEMD_NSPAWN_API_VFS_WRITABLE": "yes"},
            stdin=subprocess.DEVNULL,
            stdout=subprocess.DEVNULL,
            stderr=subprocess.DEVNULL,
        )
        self.init_pid = self._find_init_pid()

    def _find_init_pid(self) -> int:
        """Return the process id of the container's systemd, as seen from this machine."""
        deadline = time.monotonic() + 60
        while time.monotonic() < deadline:
            assert self.process.poll() is None, "the container did not boot"
            child_pids = Path(f"/proc/{self.process.pid}/task/{self.process.pid}/children").read_text().split()
            for child_pid in child_pids:
                if Path(f"/proc/{child_pid}/cmdline").read_bytes().startswith(_SYSTEMD_PATH.encode()):
                    return int(child_pid)
            time.sleep(0.1)
        raise AssertionError("the container did not boot within a minute")

    @property
    def enter_command(self) -> tuple[str, ...]:
        return ("nsenter", "--target", str(self.init_pid), "--mount", "--uts", "--ipc", "--pid", "--")

    def run(self, *argv: str) -> str:
        result = subprocess.run(
            [*self.enter_command, *argv],
            capture_output=True,
            text=True,
            timeout=300,
            env=make_environment(session.get_run_dir()),
            check=False,
        )
        assert result.returncode == 0, f"{argv}: {result.stdout} {result.stderr}\n{self.read_journal()}"
        return result.stdout

    def read_journal(self) -> str:
        argv = ["journalctl", "--unit=sandbox-gateway", "--lines=30", "--output=cat", "--no-pager"]
        return subprocess.run(
            [*self.enter_command, *argv], capture_output=True, text=True, timeout=60, check=False
        ).stdout

    def stop(self) -> None:
        os.kill(self.init_pid, signal.SIGRTMIN + 4)
        try:
            self.process.wait(60)
        except subprocess.TimeoutExpired:
            self.process.kill()
            self.process.wait()
        self._remove_cgroups()

    def _remove_cgroups(self) -> None:
        """Remove the container's control groups, with those that its systemd created for mounts and left behind."""
        for top in [*Path("/sys/fs/cgroup").glob(self._name), *Path("/sys/fs/cgroup").glob(f"*/{self._name}")]:
            for group in sorted((path for path in top.rglob("*") if path.is_dir()), reverse=True):
                with contextlib.suppress(OSError):
                    group.rmdir()
            with contextlib.suppress(OSError):
                top.rmdir()


@contextlib.contextmanager
def running_container(directory: Path, state_root: Path) -> Iterator[Container]:
    container = Container(directory, state_root)
    try:
        yield container
    finally:
        container.stop()


def unpack_debian(directory: Path) -> None:
    """Create ``directory`` with the root file system of a container, which is downloaded once."""
    archive = session.get_cache_dir() / "debian12-systemd.tar.zst"
    if not archive.exists():
        partial_archive = archive.with_name("fresh-" + archive.name)
        subprocess.run(
            ["mmdebstrap", "--variant=minbase", f"--include={_PACKAGES}", "bookworm", str(partial_archive)],
            check=True,
            capture_output=True,
            timeout=900,
        )
        partial_archive.rename(archive)
    directory.mkdir()
    subprocess.run(["tar", "--extract", "--zstd", f"--file={archive}", f"--directory={directory}"], check=True)
