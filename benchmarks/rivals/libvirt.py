"""Run a private libvirt with its own daemon, directories and network, and leave no trace of it on the host.

The daemon runs in its own mount namespace, in which bind mounts replace libvirt's directories, and in its own network
namespace, in which each machine has its own tap. All guests have the same address, because they are forks of one
snapshot, so each probe selects a tap (SO_BINDTODEVICE). systemd and virtlogd are not needed. libvirt requires the user
libvirt-qemu even if another user is configured. The user libvirt-qemu exists only in the daemon's copy of /etc/passwd.
"""

from __future__ import annotations

import contextlib
import ctypes
import os
import shutil
import signal
import socket
import subprocess
import time
import uuid
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from types import TracebackType
from xml.etree import ElementTree

from benchmarks.rivals.probe import wait_for_answer
from sandbox_gateway.hosts.kvm_xfs.network.addresses import GATEWAY_ADDRESS, GUEST_ADDRESS, GUEST_PREFIX_LENGTH, TAP_MAC

_CLONE_NEWNET = 0x40000000
_TIMEOUT_SECONDS = 120.0
_USER = "libvirt-qemu"
_MAX_OPEN_FILES = 8192
_DIRECTORIES = {
    "etc": Path("/etc/libvirt"),
    "lib": Path("/var/lib/libvirt"),
    "cache": Path("/var/cache/libvirt"),
    "log": Path("/var/log/libvirt"),
    "run": Path("/run/libvirt"),
}
_libc = ctypes.CDLL(None, use_errno=True)


class Libvirt:
    """A libvirtd that runs inside this context. QEMU runs as ``uid`` and uses one of ``tap_count`` taps.

    ``has_kvm``: whether KVM works. If it does not, /dev/kvm is hidden from libvirt.
    """

    def __init__(self, directory: Path, *, tap_count: int, uid: int, has_kvm: bool) -> None:
        self.directory = directory
        self.uid = uid
        self._tap_count = tap_count
        self._has_kvm = has_kvm
        self._created_directories: list[Path] = []
        self._process: subprocess.Popen[bytes] | None = None
        self._socket_opener = ThreadPoolExecutor(1, initializer=self._enter_network)

    def __enter__(self) -> Libvirt:
        self.directory.mkdir(mode=0o711)
        try:
            self._start_daemon()
        except BaseException:
            self._stop()
            raise
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._stop()

    @property
    def prefix(self) -> tuple[str, ...]:
        """The prefix of commands that must run in the network of the machines."""
        assert self._process is not None
        return "nsenter", f"--net=/proc/{self._process.pid}/ns/net", "--"

    def get_tap_name(self, number: int) -> str:
        return f"rival{number:02}"

    def run_virsh(self, *arguments: str) -> str:
        """Run virsh and return its output. Raises RuntimeError with virsh's message if it fails."""
        socket_path = self.directory / "sock" / "libvirt-sock"
        argv = ["virsh", "--quiet", "--connect", f"qemu+unix:///system?socket={socket_path}", *arguments]
        result = subprocess.run(
            argv, stdin=subprocess.DEVNULL, capture_output=True, text=True, timeout=_TIMEOUT_SECONDS, check=False
        )
        if result.returncode != 0:
            raise RuntimeError(f"virsh {' '.join(arguments)} failed: {result.stderr.strip()}")
        return result.stdout

    def wait_for_answer(self, tap: int) -> None:
        """Wait until the guest behind the tap with this number has answered."""
        device = self.get_tap_name(tap).encode()

        def open_socket() -> socket.socket:
            new_socket: socket.socket = self._socket_opener.submit(socket.socket).result()
            new_socket.setsockopt(socket.SOL_SOCKET, socket.SO_BINDTODEVICE, device)
            return new_socket

        wait_for_answer(GUEST_ADDRESS, open_socket)

    def destroy_domains(self) -> None:
        """Stop and undefine all domains."""
        for name in self.run_virsh("list", "--name").split():
            self.run_virsh("destroy", name)
        for name in self.run_virsh("list", "--all", "--name").split():
            self.run_virsh("undefine", name, "--snapshots-metadata")

    def _start_daemon(self) -> None:
        for name, target in _DIRECTORIES.items():
            (self.directory / name).mkdir(mode=0o711)
            for path in (*reversed(target.parents), target):
                if not path.exists():
                    path.mkdir()
                    self._created_directories.append(path)
        (self.directory / "sock").mkdir(mode=0o700)
        (self.directory / "etc" / "qemu.conf").write_text(
            f'user = "+{self.uid}"\ngroup = "+{self.uid}"\n'
            'cgroup_controllers = []\nstdio_handler = "file"\nsecurity_driver = "none"\nnamespaces = []\n'
        )
        settings = self.directory / "libvirtd.conf"
        settings.write_text(f'unix_sock_dir = "{self.directory}/sock"\nauth_unix_rw = "none"\nauth_unix_ro = "none"\n')
        accounts = self._write_accounts()
        # As in libvirtd.service, because libvirt's child processes visit every possible file descriptor.
        script_lines = ["set -e", f"ulimit -n {_MAX_OPEN_FILES}", "ip link set lo up"]
        # All taps have the same network, so strict filtering would drop the packets of all taps but one.
        script_lines += [f"echo 0 >/proc/sys/net/ipv4/conf/{name}/rp_filter" for name in ("all", "default")]
        for tap in map(self.get_tap_name, range(self._tap_count)):
            script_lines.append(f"ip tuntap add dev {tap} mode tap")
            script_lines.append(f"ip link set dev {tap} address {TAP_MAC} up")
            script_lines.append(f"ip address add {GATEWAY_ADDRESS}/{GUEST_PREFIX_LENGTH} dev {tap}")
        script_lines += [f"mount --bind {self.directory / name} {target}" for name, target in _DIRECTORIES.items()]
        script_lines += [f"mount --bind {self.directory / path.name} {path}" for path in accounts]
        if not self._has_kvm and Path("/dev/kvm").exists():
            # If /dev/kvm opens but no guest boots, libvirt probes QEMU before every start, which takes 8 seconds.
            (self.directory / "no-kvm").touch(mode=0o600)
            script_lines.append(f"mount --bind {self.directory}/no-kvm /dev/kvm")
        script_lines.append(f"exec libvirtd --config {settings} --pid-file {self.directory}/libvirtd.pid")
        environment = {**os.environ, "PATH": f"{os.environ['PATH']}:/usr/sbin:/sbin"}
        with (self.directory / "libvirtd.log").open("wb") as log:
            self._process = subprocess.Popen(
                ["unshare", "--mount", "--net", "sh", "-c", "\n".join(script_lines)],
                stdin=subprocess.DEVNULL,
                stdout=log,
                stderr=log,
                env=environment,
                start_new_session=True,
            )
        self._wait_until_ready(self._process)

    def _write_accounts(self) -> list[Path]:
        """Write copies of /etc/passwd and /etc/group with the user libvirt-qemu. Returns the paths to replace."""
        passwd, group = Path("/etc/passwd"), Path("/etc/group")
        users = [line for line in passwd.read_text().splitlines() if not line.startswith(f"{_USER}:")]
        users.append(f"{_USER}:x:{self.uid}:{self.uid}::/nonexistent:/usr/sbin/nologin")
        groups = [line for line in group.read_text().splitlines() if not line.startswith(f"{_USER}:")]
        groups = [f"{line},{_USER}".replace(":,", ":") if line.startswith("kvm:") else line for line in groups]
        groups.append(f"{_USER}:x:{self.uid}:")
        for path, lines in ((passwd, users), (group, groups)):
            (self.directory / path.name).write_text("\n".join(lines) + "\n")
        return [passwd, group]

    def _wait_until_ready(self, process: subprocess.Popen[bytes]) -> None:
        deadline = time.monotonic() + 60
        while True:
            try:
                self.run_virsh("version")
                return
            except RuntimeError as error:
                if process.poll() is not None or time.monotonic() > deadline:
                    log = (self.directory / "libvirtd.log").read_text(errors="replace")[-2000:]
                    raise RuntimeError(f"libvirtd does not answer: {error}\n{log}") from None
            time.sleep(0.1)

    def _stop(self) -> None:
        self._socket_opener.shutdown()
        if self._process is not None:
            try:
                if self._process.poll() is None:
                    self.destroy_domains()
            finally:
                self._stop_daemon(self._process)
        shutil.rmtree(self.directory)
        for path in reversed(self._created_directories):
            path.rmdir()

    def _stop_daemon(self, process: subprocess.Popen[bytes]) -> None:
        """Stop libvirtd, and kill the machines that it could not stop."""
        process.terminate()
        try:
            process.wait(_TIMEOUT_SECONDS)
        except subprocess.TimeoutExpired:
            process.kill()
            process.wait(_TIMEOUT_SECONDS)
        for pid_file in (self.directory / "run" / "qemu").glob("*.pid"):
            with contextlib.suppress(OSError):
                pid = int(pid_file.read_text())
                if str(self.directory.parent) in Path(f"/proc/{pid}/cmdline").read_text():
                    os.kill(pid, signal.SIGKILL)

    def _enter_network(self) -> None:
        """Move the thread of ``_socket_opener`` into the machines' network, where the sockets that it opens stay."""
        assert self._process is not None
        with Path(f"/proc/{self._process.pid}/ns/net").open("rb") as namespace:
            if _libc.setns(namespace.fileno(), _CLONE_NEWNET) != 0:
                raise OSError(ctypes.get_errno(), "entering the network namespace of the rivals")


def render_domain_xml(
    name: str,
    *,
    disk: Path,
    format: str,
    kernel: Path,
    initrd: Path,
    append: str,
    machine: str,
    accelerator: str,
    cpus: int,
    memory_mb: int,
    tb_size_mb: int,
    mac: str,
    tap: str,
) -> str:
    """Return the XML of a domain with the same devices as our guests, as far as libvirt supports them."""
    is_emulated = accelerator == "tcg"
    root = ElementTree.Element("domain", type="qemu" if is_emulated else "kvm")

    def add(parent: ElementTree.Element, tag: str, text: str = "", **attributes: str) -> ElementTree.Element:
        element = ElementTree.SubElement(parent, tag, attributes)
        element.text = text or None
        return element

    add(root, "name", name)
    add(root, "uuid", str(uuid.uuid4()))
    add(root, "memory", str(memory_mb), unit="MiB")
    add(root, "vcpu", str(cpus))
    boot = add(root, "os")
    add(boot, "type", "hvm", arch="x86_64", machine=machine)
    for tag, text in (("kernel", str(kernel)), ("initrd", str(initrd)), ("cmdline", append)):
        add(boot, tag, text)
    features = add(root, "features")
    add(features, "acpi")
    if is_emulated:
        add(add(features, "tcg"), "tb-cache", str(tb_size_mb), unit="MiB")
    add(root, "cpu", mode="maximum" if is_emulated else "host-passthrough", migratable="on")
    devices = add(root, "devices")
    add(devices, "emulator", "/usr/bin/qemu-system-x86_64")
    drive = add(devices, "disk", type="file", device="disk")
    add(drive, "driver", name="qemu", type=format, cache="none")
    add(drive, "source", file=str(disk))
    add(drive, "target", dev="vda", bus="virtio")
    card = add(devices, "interface", type="ethernet")
    add(card, "mac", address=mac)
    add(card, "target", dev=tap, managed="no")
    add(card, "model", type="virtio")
    add(card, "rom", enabled="no")
    add(devices, "controller", type="usb", model="none")
    add(devices, "memballoon", model="none")
    add(devices, "audio", id="1", type="none")
    return ElementTree.tostring(root, encoding="unicode")
