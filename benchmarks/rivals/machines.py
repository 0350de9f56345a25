"""Perform the same operations on virtual machines without this software: with virsh, in three ways, or with savevm.

The machines boot the disk, kernel and initrd of our template. Disks are copied with ``cp``, which creates reflinks by
default on this file system.
"""

from __future__ import annotations

import contextlib
import json
import os
import shutil
import signal
import struct
import subprocess
import time
import uuid
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path

from benchmarks.raw_qemu import Monitor
from benchmarks.rivals.libvirt import Libvirt, render_domain_xml
from benchmarks.rivals.rival import FORK_COUNT, VirtualMachine
from sandbox_gateway.hosts.kvm_xfs.files.layout import SnapshotFiles
from sandbox_gateway.hosts.kvm_xfs.network.addresses import GUEST_ADDRESS, GUEST_MAC
from sandbox_gateway.hosts.kvm_xfs.qemu import command_line
from sandbox_gateway.hosts.kvm_xfs.qemu.command_line import KERNEL_ARGUMENTS, TCG_KERNEL_ARGUMENTS, Platform
from sandbox_gateway.records import Resources

_TIMEOUT_SECONDS = 120.0
_SOURCE_NAME = "source"
_SAVED_HEADER = struct.Struct("=16sII")
_SAVED_HEADER_BYTES = 92
_NO_FORK_REASON = (
    "the state is inside the disk image, which the running source has open and locked. No command starts another "
    "machine from it"
)
_UNSUPPORTED_OPERATIONS = {"fork_1": _NO_FORK_REASON, f"fork_{FORK_COUNT}": _NO_FORK_REASON}


@dataclass(frozen=True)
class Guest:
    """The guest that all rivals run: the files of a template, and the platform that it was built on."""

    template: SnapshotFiles
    platform: Platform
    resources: Resources

    @property
    def append(self) -> str:
        is_emulated = self.platform.accelerator == "tcg"
        return f"{KERNEL_ARGUMENTS} {TCG_KERNEL_ARGUMENTS}" if is_emulated else KERNEL_ARGUMENTS


class Files:
    """The directory of one rival, with copies of the guest's files that the rival's QEMU user can own."""

    def __init__(self, directory: Path, guest: Guest) -> None:
        self.directory = directory
        self.guest = guest
        directory.mkdir(mode=0o711)
        for path in (guest.template.kernel, guest.template.initrd):
            copy_file(path, directory / path.name)

    def get_path(self, name: str) -> Path:
        return self.directory / name

    def create_qcow2(self, name: str) -> Path:
        """Convert the guest's disk to qcow2 and return its path."""
        disk = self.get_path(name)
        _run("qemu-img", "convert", "-O", "qcow2", str(self.guest.template.disk), str(disk))
        return disk

    def write_domain(self, disk: Path, format: str, tap: str) -> Path:
        """Write the XML of the source's domain, and return its path."""
        guest = self.guest
        xml = render_domain_xml(
            _SOURCE_NAME,
            disk=disk,
            format=format,
            kernel=self.get_path("kernel"),
            initrd=self.get_path("initrd"),
            append=guest.append,
            machine=guest.platform.machine,
            accelerator=guest.platform.accelerator,
            cpus=guest.resources.cpus,
            memory_mb=guest.resources.memory_mb,
            tb_size_mb=command_line._TB_SIZE_MB,
            mac=GUEST_MAC,
            tap=tap,
        )
        path = self.get_path("source.xml")
        path.write_text(xml)
        return path


def copy_file(source: Path, target: Path) -> None:
    _run("cp", str(source), str(target))


def edit_saved_xml(path: Path, replacements: dict[str, str]) -> None:
    """Replace strings in the XML at the beginning of a file from ``virsh save`` with strings of the same length.

    libvirt refuses to restore a file under another name or UUID, even with ``--xml``.
    """
    with path.open("r+b") as file:
        magic, _, length = _SAVED_HEADER.unpack(file.read(_SAVED_HEADER.size))
        if not magic.startswith(b"LibvirtQemudSave"):
            raise RuntimeError(f"{path} was not created by virsh save: it starts with {magic!r}")
        file.seek(_SAVED_HEADER_BYTES)
        xml = file.read(length)
        for old, new in replacements.items():
            if len(old) != len(new) or old.encode() not in xml:
                raise RuntimeError(f"cannot replace {old!r} with {new!r} in the XML of {path}")
            xml = xml.replace(old.encode(), new.encode())
        file.seek(_SAVED_HEADER_BYTES)
        file.write(xml)


class _Domain:
    """The source's domain and its forks, which are restored from files. Each domain has its own tap.

    ``concurrency``: how many forks are started at the same time.
    """

    def __init__(self, libvirt: Libvirt, files: Files, disk: Path, format: str, concurrency: int) -> None:
        self._libvirt = libvirt
        self._files = files
        self._concurrency = concurrency
        self._forks: list[str] = []
        self.run_virsh = libvirt.run_virsh
        self.run_virsh("define", str(files.write_domain(disk, format, libvirt.get_tap_name(0))))
        self.run_virsh("start", _SOURCE_NAME)
        self.wait()

    def wait(self) -> None:
        self._libvirt.wait_for_answer(0)

    def fork(self, count: int, state_file: Path, disk: Path, xml_disk: Path) -> None:
        """Start ``count`` domains from a state file, with copies of the snapshot's ``disk``.

        ``xml_disk`` is the path of the disk in the XML of the state file.
        """
        source_uuid = self.run_virsh("domuuid", _SOURCE_NAME).strip()

        def fork(number: int) -> str:
            name = f"fork{number:02}"
            fork_disk, fork_state_file = xml_disk.with_name(f"{name}.img"), self._files.get_path(f"{name}.save")
            copy_file(disk, fork_disk)
            copy_file(state_file, fork_state_file)
            replacements = {
                f"<name>{_SOURCE_NAME}<": f"<name>{name}<",
                source_uuid: str(uuid.uuid4()),
                f"'{xml_disk}'": f"'{fork_disk}'",
                f"'{self._libvirt.get_tap_name(0)}'": f"'{self._libvirt.get_tap_name(number)}'",
            }
            edit_saved_xml(fork_state_file, replacements)
            self.run_virsh("restore", str(fork_state_file))
            self._libvirt.wait_for_answer(number)
            return name

        with ThreadPoolExecutor(self._concurrency) as pool:
            self._forks = list(pool.map(fork, range(1, count + 1)))

    def remove_forks(self) -> None:
        for name in self._forks:
            self.run_virsh("destroy", name)
            for path in self._files.directory.glob(f"{name}.*"):
                path.unlink()
        self._forks = []


class VirshSave:
    """``virsh save`` stops the machine; ``virsh restore`` starts it again from the file."""

    key = "virsh_save"
    title = "virsh save, restore"
    baseline_key = "ours"
    address = GUEST_ADDRESS

    def __init__(self, libvirt: Libvirt, files: Files, concurrency: int) -> None:
        self.not_offered: dict[str, str] = {}
        self.prefix = libvirt.prefix
        self._disk, self._state_file, self._snapshot_disk = map(
            files.get_path, ("source.img", "source.save", "snapshot.img")
        )
        copy_file(files.guest.template.disk, self._disk)
        self._domain = _Domain(libvirt, files, self._disk, "raw", concurrency)

    def snapshot(self) -> None:
        self._domain.run_virsh("save", _SOURCE_NAME, str(self._state_file))
        copy_file(self._disk, self._snapshot_disk)
        self._domain.run_virsh("restore", str(self._state_file))
        self._domain.wait()

    def fork(self, count: int) -> None:
        self._domain.fork(count, self._state_file, self._snapshot_disk, self._disk)

    def rollback(self) -> None:
        self._domain.run_virsh("destroy", _SOURCE_NAME)
        copy_file(self._snapshot_disk, self._disk)
        self._domain.run_virsh("restore", str(self._state_file))
        self._domain.wait()

    def count_written_bytes(self) -> float:
        return _measure_allocated_bytes(self._state_file)

    def remove_forks(self) -> None:
        self._domain.remove_forks()

    def remove_snapshot(self) -> None:
        self._state_file.unlink()
        self._snapshot_disk.unlink()


class VirshExternal:
    """``virsh snapshot-create-as`` with external memory and an overlay, while the machine runs.

    libvirt 9 cannot revert to such a snapshot. Instead, users restore the memory file with XML that names another disk.
    """

    key = "virsh_external"
    title = "virsh snapshot, external memory"
    baseline_key = "ours"
    address = GUEST_ADDRESS

    def __init__(self, libvirt: Libvirt, files: Files, concurrency: int) -> None:
        self.not_offered: dict[str, str] = {}
        self.prefix = libvirt.prefix
        self._files = files
        self._snapshot_number = 0
        self._memory = files.get_path("memory.save")
        self._disk = files.create_qcow2("000000.img")
        self._overlay = self._disk
        # Whether the source uses a copy of the snapshot's disk instead of an overlay, as after a rollback.
        self._has_copied_disk = False
        self._domain = _Domain(libvirt, files, self._disk, "qcow2", concurrency)

    def snapshot(self) -> None:
        self._snapshot_number += 1
        self._has_copied_disk = False
        self._disk, self._overlay = self._overlay, self._files.get_path(f"overlay-{self._snapshot_number}.img")
        self._domain.run_virsh(
            "snapshot-create-as", _SOURCE_NAME, "snapshot", "--live", "--atomic",
            "--memspec", f"file={self._memory},snapshot=external",
            "--diskspec", f"vda,snapshot=external,file={self._overlay}",
        )  # fmt: skip
        self._domain.wait()

    def fork(self, count: int) -> None:
        self._domain.fork(count, self._memory, self._disk, self._disk)

    def rollback(self) -> None:
        self._domain.run_virsh("destroy", _SOURCE_NAME)
        self._overlay.unlink()
        self._overlay = self._files.get_path(f"{self._snapshot_number:06}.img")
        copy_file(self._disk, self._overlay)
        self._has_copied_disk = True
        edited_xml_file = self._files.get_path("edited.xml")
        saved_xml = self._domain.run_virsh("save-image-dumpxml", str(self._memory), "--security-info")
        edited_xml_file.write_text(saved_xml.replace(f"'{self._disk}'", f"'{self._overlay}'"))
        self._domain.run_virsh("restore", str(self._memory), "--xml", str(edited_xml_file))
        self._domain.wait()

    def count_written_bytes(self) -> float:
        return _measure_allocated_bytes(self._memory) + _measure_allocated_bytes(self._overlay)

    def remove_forks(self) -> None:
        self._domain.remove_forks()

    def remove_snapshot(self) -> None:
        self._domain.run_virsh("snapshot-delete", _SOURCE_NAME, "snapshot", "--metadata")
        self._memory.unlink()
        if self._has_copied_disk:
            self._disk.unlink()


class VirshInternal:
    """``virsh snapshot-create-as`` and ``snapshot-revert`` with memory and disk in one qcow2."""

    key = "virsh_internal"
    title = "virsh snapshot, internal"
    baseline_key = "ours"
    address = GUEST_ADDRESS

    def __init__(self, libvirt: Libvirt, files: Files, concurrency: int) -> None:
        self.not_offered = _UNSUPPORTED_OPERATIONS
        self.prefix = libvirt.prefix
        self._disk = files.create_qcow2("source.qcow2")
        self._domain = _Domain(libvirt, files, self._disk, "qcow2", concurrency)

    def snapshot(self) -> None:
        self._domain.run_virsh("snapshot-create-as", _SOURCE_NAME, "snapshot")
        self._domain.wait()

    def rollback(self) -> None:
        self._domain.run_virsh("snapshot-revert", _SOURCE_NAME, "snapshot")
        self._domain.wait()

    def count_written_bytes(self) -> float:
        return _read_state_bytes(self._disk)

    def remove_snapshot(self) -> None:
        self._domain.run_virsh("snapshot-delete", _SOURCE_NAME, "snapshot")


class Savevm:
    """QEMU's savevm and loadvm on qcow2, without libvirt: commands over one open QMP connection."""

    key = "savevm"
    title = "QEMU savevm, loadvm"
    baseline_key = "ours"
    address = GUEST_ADDRESS

    def __init__(self, libvirt: Libvirt, files: Files, concurrency: int) -> None:
        self.not_offered = _UNSUPPORTED_OPERATIONS
        self.prefix = libvirt.prefix
        self._disk = files.create_qcow2("source.qcow2")
        os.chown(self._disk, libvirt.uid, libvirt.uid)
        guest = files.guest
        is_emulated = guest.platform.accelerator == "tcg"
        socket_path = files.get_path("qmp.sock")
        argv = [
            *libvirt.prefix, "qemu-system-x86_64",
            "-nodefaults", "-no-user-config", "-display", "none", "-vga", "none", "-no-reboot",
            "-M", f"{guest.platform.machine},usb=off,vmport=off",
            "-accel", f"tcg,tb-size={command_line._TB_SIZE_MB}" if is_emulated else "kvm",
            "-cpu", guest.platform.cpu_model,
            "-smp", str(guest.resources.cpus),
            "-m", f"{guest.resources.memory_mb}M",
            "-drive", f"if=virtio,file={self._disk},format=qcow2,cache=none",
            "-netdev", f"tap,id=net,ifname={libvirt.get_tap_name(0)},script=no,downscript=no",
            "-device", f"virtio-net-pci,netdev=net,mac={GUEST_MAC},romfile=",
            "-kernel", str(files.get_path("kernel")), "-initrd", str(files.get_path("initrd")), "-append", guest.append,
            "-qmp", f"unix:{socket_path},server=on,wait=off",
            "-runas", f"{libvirt.uid}:{libvirt.uid}",
        ]  # fmt: skip
        with files.get_path("qemu.log").open("wb") as log:
            self._process = subprocess.Popen(argv, stdin=subprocess.DEVNULL, stdout=log, stderr=log)
        try:
            self._monitor = self._connect(socket_path)
            self._wait: Callable[[], None] = lambda: libvirt.wait_for_answer(0)
            self._wait()
        except BaseException:
            self.stop()
            raise

    def snapshot(self) -> None:
        self._execute("savevm snapshot")
        self._wait()

    def rollback(self) -> None:
        self._execute("loadvm snapshot")
        self._wait()

    def count_written_bytes(self) -> float:
        return _read_state_bytes(self._disk)

    def remove_snapshot(self) -> None:
        self._execute("delvm snapshot")

    def stop(self) -> None:
        self._process.send_signal(signal.SIGKILL)
        self._process.wait(_TIMEOUT_SECONDS)

    def _execute(self, command: str) -> None:
        output = self._monitor.execute("human-monitor-command", {"command-line": command})
        if output:
            raise RuntimeError(f"QEMU rejected {command}: {output}")

    def _connect(self, socket_path: Path) -> Monitor:
        deadline = time.monotonic() + 30
        while True:
            try:
                monitor = Monitor(str(socket_path))
                break
            except OSError:
                if self._process.poll() is not None or time.monotonic() > deadline:
                    log = socket_path.with_name("qemu.log").read_text(errors="replace")[-1000:]
                    raise RuntimeError(f"QEMU does not answer: {log}") from None
            time.sleep(0.05)
        monitor.execute("qmp_capabilities")
        return monitor


RivalKind = type[VirshSave] | type[VirshInternal] | type[VirshExternal] | type[Savevm]
RIVAL_KINDS: tuple[RivalKind, ...] = (VirshSave, Savevm, VirshInternal, VirshExternal)


@contextlib.contextmanager
def rival_machine(
    kind: RivalKind,
    libvirt: Libvirt,
    directory: Path,
    guest: Guest,
    *,
    concurrency: int,
    settle_seconds: float,
) -> Iterator[VirtualMachine]:
    """Start a source and yield it after ``settle_seconds``. Removes it, its forks and its files at the end."""
    files = Files(directory, guest)
    machine: VirtualMachine | None = None
    try:
        machine = kind(libvirt, files, concurrency)
        time.sleep(settle_seconds)
        yield machine
    finally:
        if isinstance(machine, Savevm):
            machine.stop()
        libvirt.destroy_domains()
        shutil.rmtree(directory)


def _measure_allocated_bytes(path: Path) -> float:
    return path.stat().st_blocks * 512.0


def _read_state_bytes(disk: Path) -> float:
    """Return the size in bytes of the machine state in the only snapshot of a qcow2 image, which may be in use."""
    info = json.loads(_run("qemu-img", "info", "--force-share", "--output=json", str(disk)))
    (snapshot,) = info["snapshots"]
    return float(snapshot["vm-state-size"])


def _run(*argv: str) -> str:
    result = subprocess.run(argv, capture_output=True, text=True, timeout=_TIMEOUT_SECONDS, check=False)
    if result.returncode != 0:
        raise RuntimeError(f"{' '.join(argv)} failed: {result.stderr.strip()}")
    return result.stdout
