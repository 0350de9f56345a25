"""Build QEMU's command line, which determines everything about a machine except its files."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

from sandbox_gateway.hosts.kvm_xfs.image.layout import Instance

KERNEL_ARGUMENTS = "root=/dev/vda rw rootflags=noatime,noinit_itable console=ttyS0 quiet panic=-1 net.ifnames=0"
TCG_KERNEL_ARGUMENTS = "tsc=reliable"
"""The emulated counter is correct.

But the kernel compares it with other clocks, which are slow to read under TCG, and would consider it unstable, twice a
second, with warnings, and at the start of each fork.
"""
LINE = "sandbox.agent"
_TB_SIZE_MB = 64


@dataclass(frozen=True)
class Platform:
    """The platform of a machine. Its device state can be restored only on an equal platform."""

    accelerator: str
    cpu_model: str
    machine: str
    qemu_version: str


@dataclass(frozen=True)
class Shape:
    """Everything that determines a machine's command line, except its files."""

    label: str
    """Name of the process, made of network slot and instance. A restarted gateway finds the process by it."""
    qemu: str
    platform: Platform
    cpus: int
    memory_mb: int
    guest_mac: str
    tap: str
    netns: Path
    uid: int
    """The user to which QEMU switches after opening its files; 0: root."""
    generation: str
    """GUID of this machine generation: different for every fork."""


def arguments(
    shape: Shape, files: Instance, *, qmp_fd: int, line_fd: int, state_fd: int | None, hold: bool = False
) -> list[str]:
    """Return the command line. With ``state_fd`` the machine resumes from that device state, otherwise it boots.

    ``line_fd``: a connected socket, QEMU's end of the serial line to the agent. ``hold``: stay stopped until ``cont``.
    """
    emulated = shape.platform.accelerator == "tcg"
    accelerator = f"tcg,tb-size={_TB_SIZE_MB}" if emulated else "kvm"
    argv = [
        shape.qemu,
        "-name", shape.label,
        "-nodefaults", "-no-user-config", "-display", "none", "-vga", "none", "-no-reboot",
        "-M", f"{shape.platform.machine},memory-backend=mem,suppress-vmdesc=on,usb=off,vmport=off",
        "-accel", accelerator,
        "-cpu", shape.platform.cpu_model,
        "-smp", str(shape.cpus),
        "-m", f"{shape.memory_mb}M",
        "-object", f"memory-backend-file,id=mem,size={shape.memory_mb}M,mem-path={files.memory},share=off,"
                   "dump=off,merge=off",
        "-blockdev", f"driver=file,node-name=disk-file,filename={files.disk},cache.direct=on,aio=threads",
        "-blockdev", "driver=raw,node-name=disk,file=disk-file,cache.direct=on",
        "-device", "virtio-blk-pci,drive=disk,addr=0x3",
        "-netdev", f"tap,id=net,ifname={shape.tap},script=no,downscript=no",
        "-device", f"virtio-net-pci,netdev=net,mac={shape.guest_mac},romfile=,addr=0x4",
        "-device", f"vmgenid,guid={shape.generation}",
        "-chardev", f"socket,id=line,fd={line_fd}",
        "-device", "virtio-serial-pci,max_ports=2,addr=0x5",
        "-device", f"virtserialport,chardev=line,nr=1,name={LINE}",
        "-chardev", "ringbuf,id=console,size=65536", "-serial", "chardev:console",
        "-chardev", f"socket,id=qmp,fd={qmp_fd},server=on,wait=off", "-mon", "chardev=qmp,mode=control",
        "-sandbox", "on,obsolete=deny,spawn=deny,resourcecontrol=deny"
                    + ("" if shape.uid else ",elevateprivileges=deny"),
    ]  # fmt: skip
    if shape.uid:
        argv += ["-runas", f"{shape.uid}:{shape.uid}"]
    if state_fd is None:
        append = f"{KERNEL_ARGUMENTS} {TCG_KERNEL_ARGUMENTS}" if emulated else KERNEL_ARGUMENTS
        return [*argv, "-kernel", str(files.kernel), "-initrd", str(files.initrd), "-append", append]
    # No announcement is needed, because machine and tap have the same addresses in every slot.
    quiet = ("-global", "migration.send-configuration=off", "-global", "migration.announce-rounds=0")
    return [*argv, *quiet, "-incoming", f"fd:{state_fd}", *(["-S"] if hold else [])]
