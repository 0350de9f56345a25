"""The rivals of a virtual machine's snapshot: virsh in three ways, and QEMU's own savevm.

They boot our template's disk, kernel and initrd. Copies of a disk are made by cp, which shares blocks on this file
system by itself.
"""

from __future__ import annotations

import contextlib
import json
import os
import signal
import struct
import subprocess
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path

from benchmarks.raw_qemu import Monitor
from benchmarks.rivals.libvirt import Libvirt, domain_xml
from benchmarks.rivals.rival import Rival
from sandbox_gateway.hosts.kvm_xfs.network.addresses import GUEST_ADDRESS, GUEST_MAC
from sandbox_gateway.hosts.kvm_xfs.qemu import command_line
from sandbox_gateway.hosts.kvm_xfs.qemu.command_line import KERNEL_ARGUMENTS, TCG_KERNEL_ARGUMENTS, Platform
from sandbox_gateway.records import Resources

_SECONDS = 120.0
_SOURCE = "source"
_SAVED_HEADER = struct.Struct("=16sII")
_SAVED_HEADER_BYTES = 92
_NO_FORK = (
    "the state is inside the disk image, which the running source has open and locked: there is no command that starts "
    "another machine from it"
)


@dataclass(frozen=True)
class Guest:
    """The guest that all rivals run: the files of a template, and the machine that it was built on."""

    template: Path
    platform: Platform
    resources: Resources

    @property
    def append(self) -> str:
        emulated = self.platform.accelerator == "tcg"
        return f"{KERNEL_ARGUMENTS} {TCG_KERNEL_ARGUMENTS}" if emulated else KERNEL_ARGUMENTS


class Files:
    """One rival's directory, with copies of the guest's files that its QEMU may own."""

    def __init__(self, directory: Path, guest: Guest) -> None:
        self.directory = directory
        self.guest = guest
        directory.mkdir(mode=0o711)
        for name in ("kernel", "initrd"):
            copy(guest.template / name, directory / name)

    def path(self, name: str) -> Path:
        return self.directory / name

    def create_qcow2(self, name: str) -> Path:
        """Return the guest's disk, converted to qcow2."""
        disk = self.path(name)
        _run("qemu-img", "convert", "-O", "qcow2", str(self.guest.template / "rootfs.img"), str(disk))
        return disk

    def domain(self, disk: Path, format: str, tap: str) -> Path:
        """Write the XML of the source's domain and return its path."""
        guest = self.guest
        xml = domain_xml(
            _SOURCE,
            disk=disk,
            format=format,
            kernel=self.path("kernel"),
            initrd=self.path("initrd"),
            append=guest.append,
            machine=guest.platform.machine,
            accelerator=guest.platform.accelerator,
            cpus=guest.resources.cpus,
            memory_mb=guest.resources.memory_mb,
            tb_size_mb=command_line._TB_SIZE_MB,
            mac=GUEST_MAC,
            tap=tap,
        )
        path = self.path("source.xml")
        path.write_text(xml)
        return path


def copy(source: Path, target: Path) -> None:
    _run("cp", str(source), str(target))


def rename_saved(path: Path, replacements: dict[str, str]) -> None:
    """Replace words in the XML at the beginning of a file of ``virsh save``, each by one of the same length.

    libvirt refuses to restore a file under another name or UUID, even with ``--xml``.
    """
    with path.open("r+b") as file:
        magic, _, length = _SAVED_HEADER.unpack(file.read(_SAVED_HEADER.size))
        if not magic.startswith(b"LibvirtQemudSave"):
            raise RuntimeError(f"{path} is not a file of virsh save: it begins with {magic!r}")
        file.seek(_SAVED_HEADER_BYTES)
        xml = file.read(length)
        for old, new in replacements.items():
            if len(old) != len(new) or old.encode() not in xml:
                raise RuntimeError(f"cannot replace {old!r} by {new!r} in the XML of {path}")
            xml = xml.replace(old.encode(), new.encode())
        file.seek(_SAVED_HEADER_BYTES)
        file.write(xml)


class _Domain:
    """The source's domain, and forks of it from files of ``virsh save``, each with its own tap."""

    def __init__(self, libvirt: Libvirt, files: Files, disk: Path, format: str, at_once: int) -> None:
        self._libvirt = libvirt
        self._files = files
        self._at_once = at_once
        self._forks: list[str] = []
        self.virsh = libvirt.virsh
        self.virsh("define", str(files.domain(disk, format, libvirt.tap(0))))
        self.virsh("start", _SOURCE)
        self.wait()

    def wait(self) -> None:
        self._libvirt.wait_for_answer(0)

    def fork(self, count: int, saved: Path, disk: Path, named: Path) -> None:
        """Start ``count`` domains from a saved file, with copies of the snapshot's ``disk``.

        ``named``: the disk in the file's XML.
        """
        uuid = self.virsh("domuuid", _SOURCE).strip()

        def fork(number: int) -> str:
            name = f"fork{number:02}"
            own_disk, own_saved = named.with_name(f"{name}.img"), self._files.path(f"{name}.save")
            copy(disk, own_disk)
            copy(saved, own_saved)
            tap = self._libvirt.tap(0), self._libvirt.tap(number)
            own_uuid = f"{uuid[:-2]}{number:02x}"
            renamed = {
                f"<name>{_SOURCE}<": f"<name>{name}<",
                uuid: own_uuid,
                f"'{named}'": f"'{own_disk}'",
                f"'{tap[0]}'": f"'{tap[1]}'",
            }
            rename_saved(own_saved, renamed)
            self.virsh("restore", str(own_saved))
            self._libvirt.wait_for_answer(number)
            return name

        with ThreadPoolExecutor(self._at_once) as pool:
            self._forks = list(pool.map(fork, range(1, count + 1)))

    def remove_forks(self) -> None:
        for name in self._forks:
            self.virsh("destroy", name)
            for path in self._files.directory.glob(f"{name}.*"):
                path.unlink()
        self._forks = []


class VirshSave:
    """``virsh save`` stops the machine; ``virsh restore`` starts it again from the file."""

    key = "virsh_save"
    title = "virsh save, restore"
    address = GUEST_ADDRESS

    def __init__(self, libvirt: Libvirt, files: Files, at_once: int) -> None:
        self.not_offered: dict[str, str] = {}
        self.prefix = libvirt.prefix
        self._disk, self._saved, self._saved_disk = map(files.path, ("source.img", "source.save", "snapshot.img"))
        copy(files.guest.template / "rootfs.img", self._disk)
        self._domain = _Domain(libvirt, files, self._disk, "raw", at_once)

    def snapshot(self) -> None:
        self._domain.virsh("save", _SOURCE, str(self._saved))
        copy(self._disk, self._saved_disk)
        self._domain.virsh("restore", str(self._saved))
        self._domain.wait()

    def fork(self, count: int) -> None:
        self._domain.fork(count, self._saved, self._saved_disk, self._disk)

    def rollback(self) -> None:
        self._domain.virsh("destroy", _SOURCE)
        copy(self._saved_disk, self._disk)
        self._domain.virsh("restore", str(self._saved))
        self._domain.wait()

    def written(self) -> float:
        return _allocated(self._saved)

    def remove_forks(self) -> None:
        self._domain.remove_forks()

    def remove_snapshot(self) -> None:
        self._saved.unlink()
        self._saved_disk.unlink()


class VirshExternal:
    """``virsh snapshot-create-as`` with external memory and an overlay, while the machine runs.

    Version 9 of libvirt cannot revert to such a snapshot: its users restore the memory file with an edited disk.
    """

    key = "virsh_external"
    title = "virsh snapshot, external memory"
    address = GUEST_ADDRESS

    def __init__(self, libvirt: Libvirt, files: Files, at_once: int) -> None:
        self.not_offered: dict[str, str] = {}
        self.prefix = libvirt.prefix
        self._files = files
        self._number = 0
        self._memory = files.path("memory.save")
        self._disk = files.create_qcow2("000000.img")
        self._overlay = self._disk
        self._domain = _Domain(libvirt, files, self._disk, "qcow2", at_once)

    def snapshot(self) -> None:
        self._number += 1
        self._disk, self._overlay = self._overlay, self._files.path(f"overlay-{self._number}.img")
        self._domain.virsh(
            "snapshot-create-as", _SOURCE, "snapshot", "--live", "--atomic",
            "--memspec", f"file={self._memory},snapshot=external",
            "--diskspec", f"vda,snapshot=external,file={self._overlay}",
        )  # fmt: skip
        self._domain.wait()

    def fork(self, count: int) -> None:
        self._domain.fork(count, self._memory, self._disk, self._disk)

    def rollback(self) -> None:
        self._domain.virsh("destroy", _SOURCE)
        self._overlay.unlink()
        self._overlay = self._files.path(f"{self._number:06}.img")
        copy(self._disk, self._overlay)
        edited = self._files.path("edited.xml")
        saved = self._domain.virsh("save-image-dumpxml", str(self._memory), "--security-info")
        edited.write_text(saved.replace(f"'{self._disk}'", f"'{self._overlay}'"))
        self._domain.virsh("restore", str(self._memory), "--xml", str(edited))
        self._domain.wait()

    def written(self) -> float:
        return _allocated(self._memory) + _allocated(self._overlay)

    def remove_forks(self) -> None:
        self._domain.remove_forks()

    def remove_snapshot(self) -> None:
        """Remove the snapshot after a rollback, so that no disk in use depends on its disk."""
        self._domain.virsh("snapshot-delete", _SOURCE, "snapshot", "--metadata")
        self._memory.unlink()
        self._disk.unlink()


class VirshInternal:
    """``virsh snapshot-create-as`` and ``snapshot-revert`` with memory and disk in one qcow2."""

    key = "virsh_internal"
    title = "virsh snapshot, internal"
    address = GUEST_ADDRESS

    def __init__(self, libvirt: Libvirt, files: Files, at_once: int) -> None:
        self.not_offered = {"fork_1": _NO_FORK, "fork_10": _NO_FORK}
        self.prefix = libvirt.prefix
        self._disk = files.create_qcow2("source.qcow2")
        self._domain = _Domain(libvirt, files, self._disk, "qcow2", at_once)

    def snapshot(self) -> None:
        self._domain.virsh("snapshot-create-as", _SOURCE, "snapshot")
        self._domain.wait()

    def fork(self, count: int) -> None:
        raise NotImplementedError(_NO_FORK)

    def rollback(self) -> None:
        self._domain.virsh("snapshot-revert", _SOURCE, "snapshot")
        self._domain.wait()

    def written(self) -> float:
        return _state_size(self._disk)

    def remove_forks(self) -> None:
        """Do nothing: there are no forks."""

    def remove_snapshot(self) -> None:
        self._domain.virsh("snapshot-delete", _SOURCE, "snapshot")


class Savevm:
    """QEMU's savevm and loadvm on qcow2, without libvirt: its commands over one open QMP connection."""

    key = "savevm"
    title = "QEMU savevm, loadvm"
    address = GUEST_ADDRESS

    def __init__(self, libvirt: Libvirt, files: Files, at_once: int) -> None:
        self.not_offered = {"fork_1": _NO_FORK, "fork_10": _NO_FORK}
        self.prefix = libvirt.prefix
        self._disk = files.create_qcow2("source.qcow2")
        os.chown(self._disk, libvirt.uid, libvirt.uid)
        guest = files.guest
        emulated = guest.platform.accelerator == "tcg"
        place = files.path("qmp.sock")
        argv = [
            *libvirt.prefix, "qemu-system-x86_64",
            "-nodefaults", "-no-user-config", "-display", "none", "-vga", "none", "-no-reboot",
            "-M", f"{guest.platform.machine},usb=off,vmport=off",
            "-accel", f"tcg,tb-size={command_line._TB_SIZE_MB}" if emulated else "kvm",
            "-cpu", guest.platform.cpu_model,
            "-smp", str(guest.resources.cpus),
            "-m", f"{guest.resources.memory_mb}M",
            "-drive", f"if=virtio,file={self._disk},format=qcow2,cache=none",
            "-netdev", f"tap,id=net,ifname={libvirt.tap(0)},script=no,downscript=no",
            "-device", f"virtio-net-pci,netdev=net,mac={GUEST_MAC},romfile=",
            "-kernel", str(files.path("kernel")), "-initrd", str(files.path("initrd")), "-append", guest.append,
            "-qmp", f"unix:{place},server=on,wait=off",
            "-runas", f"{libvirt.uid}:{libvirt.uid}",
        ]  # fmt: skip
        with files.path("qemu.log").open("wb") as log:
            self._process = subprocess.Popen(argv, stdin=subprocess.DEVNULL, stdout=log, stderr=log)
        try:
            self._monitor = self._connect(place)
            self._wait: Callable[[], None] = lambda: libvirt.wait_for_answer(0)
            self._wait()
        except BaseException:
            self.end()
            raise

    def snapshot(self) -> None:
        self._execute("savevm snapshot")
        self._wait()

    def fork(self, count: int) -> None:
        raise NotImplementedError(_NO_FORK)

    def rollback(self) -> None:
        self._execute("loadvm snapshot")
        self._wait()

    def written(self) -> float:
        return _state_size(self._disk)

    def remove_forks(self) -> None:
        """Do nothing: there are no forks."""

    def remove_snapshot(self) -> None:
        self._execute("delvm snapshot")

    def end(self) -> None:
        self._process.send_signal(signal.SIGKILL)
        self._process.wait(_SECONDS)

    def _execute(self, command: str) -> None:
        said = self._monitor.execute("human-monitor-command", {"command-line": command})
        if said:
            raise RuntimeError(f"QEMU refused {command}: {said}")

    def _connect(self, place: Path) -> Monitor:
        deadline = time.monotonic() + 30
        while True:
            try:
                monitor = Monitor(str(place))
                break
            except OSError:
                if self._process.poll() is not None or time.monotonic() > deadline:
                    log = place.with_name("qemu.log").read_text(errors="replace")[-1000:]
                    raise RuntimeError(f"QEMU does not answer: {log}") from None
            time.sleep(0.05)
        monitor.execute("qmp_capabilities")
        return monitor


Kind = type[VirshSave] | type[VirshInternal] | type[VirshExternal] | type[Savevm]
KINDS: tuple[Kind, ...] = (
    VirshSave,
    Savevm,
    VirshInternal,
    VirshExternal,
)


@contextlib.contextmanager
def rival_machine(
    kind: Kind,
    libvirt: Libvirt,
    directory: Path,
    guest: Guest,
    *,
    at_once: int,
    settle: float,
) -> Iterator[Rival]:
    """Run a source. Removes it, its forks and its files at the end."""
    files = Files(directory, guest)
    made: Rival | None = None
    try:
        made = kind(libvirt, files, at_once)
        time.sleep(settle)
        yield made
    finally:
        if isinstance(made, Savevm):
            made.end()
        libvirt.destroy_all()
        _run("rm", "-r", str(directory))


def _allocated(path: Path) -> float:
    return path.stat().st_blocks * 512.0


def _state_size(disk: Path) -> float:
    """Return the bytes of machine state that the only internal snapshot of a qcow2 in use has."""
    found = json.loads(_run("qemu-img", "info", "--force-share", "--output=json", str(disk)))
    (snapshot,) = found["snapshots"]
    return float(snapshot["vm-state-size"])


def _run(*argv: str) -> str:
    done = subprocess.run(argv, capture_output=True, text=True, timeout=_SECONDS, check=False)
    if done.returncode != 0:
        raise RuntimeError(f"{' '.join(argv)} failed: {done.stderr.strip()}")
    return done.stdout
