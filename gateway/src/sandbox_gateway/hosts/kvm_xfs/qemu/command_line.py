"""Build QEMU's command line."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

from sandbox_gateway.hosts.kvm_xfs.files.layout import InstanceFiles

KERNEL_ARGUMENTS = (
    "root=/dev/vda rw rootflags=noatime,noinit_itable console=ttyS0 quiet panic=-1 net.ifnames=0 "
    "8250.nr_uarts=1 cryptomgr.notests"
)
"""The arguments of each boot. ``8250.nr_uarts`` and ``cryptomgr.notests`` only omit work: probing serial ports that a
machine lacks, and testing the kernel's ciphers.

A machine that resumes keeps the arguments of its own boot. A cold start from an older snapshot uses these arguments.
"""
TCG_KERNEL_ARGUMENTS = "tsc=reliable no_timer_check"
"""Arguments that are added without KVM.

``tsc=reliable`` makes the kernel trust the emulated time stamp counter, which is correct. Otherwise the kernel would
compare it with other clocks twice a second and at the start of each fork. Under TCG these clocks are slow to read, so
the kernel would consider the counter unstable and print warnings. ``no_timer_check`` omits a comparison of the timer
interrupt with real time. On KVM, the kernel itself omits it.

``mitigations=off`` would not save measurable work: a boot executes the same number of instructions with it.
"""
AGENT_PORT_NAME = "sandbox.agent"
_TB_SIZE_MB = 64
_CONSOLE_FDSET = 1
"""The number of QEMU's descriptor set (fdset) for the copy of the console."""


@dataclass(frozen=True)
class Platform:
    """The platform of a machine. A device state can be restored only on the platform that it was captured on."""

    accelerator: str
    cpu_model: str
    machine: str
    qemu_version: str


@dataclass(frozen=True)
class MachineSpec:
    """The properties of a machine that determine its command line, except for its files."""

    label: str
    """Name of the process, made up of the network slot and the instance, for administrators."""
    qemu: str
    platform: Platform
    cpus: int
    memory_mb: int
    guest_mac: str
    tap: str
    netns: Path
    uid: int
    """The user id that QEMU switches to after it has opened its files; 0 means root."""
    generation: str
    """GUID of this machine generation, different for every fork."""


def build_arguments(
    spec: MachineSpec,
    files: InstanceFiles,
    *,
    qmp_fd: int,
    line_fd: int,
    state_fd: int | None = None,
    console_fd: int | None = None,
    hold: bool = False,
) -> list[str]:
    """Return QEMU's command line. With ``state_fd``, the machine resumes from that device state; otherwise, it boots.

    ``line_fd`` is a connected socket, QEMU's end of the serial line to the agent. ``qmp_fd`` is a listening socket.
    ``console_fd`` receives a copy of the console, which remains available after QEMU has exited.
    ``hold``: the machine stays stopped until the QMP command ``cont``.
    """
    is_emulated = spec.platform.accelerator == "tcg"
    accelerator_option = f"tcg,tb-size={_TB_SIZE_MB}" if is_emulated else "kvm"
    argv = [
        spec.qemu,
        "-name", spec.label,
        "-nodefaults", "-no-user-config", "-display", "none", "-vga", "none", "-no-reboot",
        "-M", f"{spec.platform.machine},memory-backend=mem,suppress-vmdesc=on,usb=off,vmport=off",
        "-accel", accelerator_option,
        "-cpu", spec.platform.cpu_model,
        "-smp", str(spec.cpus),
        "-m", f"{spec.memory_mb}M",
        "-object", f"memory-backend-file,id=mem,size={spec.memory_mb}M,mem-path={files.memory},share=off,"
                   "dump=off,merge=off",
        "-blockdev", f"driver=file,node-name=disk-file,filename={files.disk},cache.direct=on,aio=threads",
        "-blockdev", "driver=raw,node-name=disk,file=disk-file,cache.direct=on",
        "-device", "virtio-blk-pci,drive=disk,addr=0x3",
        "-netdev", f"tap,id=net,ifname={spec.tap},script=no,downscript=no",
        "-device", f"virtio-net-pci,netdev=net,mac={spec.guest_mac},romfile=,addr=0x4",
        "-device", f"vmgenid,guid={spec.generation}",
        "-chardev", f"socket,id=line,fd={line_fd}",
        "-device", "virtio-serial-pci,max_ports=2,addr=0x5",
        "-device", f"virtserialport,chardev=line,nr=1,name={AGENT_PORT_NAME}",
        "-chardev", f"ringbuf,id=console,size=65536{_build_log_options(console_fd)}", "-serial", "chardev:console",
        "-chardev", f"socket,id=qmp,fd={qmp_fd},server=on,wait=off", "-mon", "chardev=qmp,mode=control",
        "-sandbox", "on,obsolete=deny,spawn=deny,resourcecontrol=deny"
                    + ("" if spec.uid else ",elevateprivileges=deny"),
    ]  # fmt: skip
    if console_fd is not None:
        argv += ["-add-fd", f"fd={console_fd},set={_CONSOLE_FDSET}"]
    if spec.uid:
        argv += ["-runas", f"{spec.uid}:{spec.uid}"]
    if state_fd is None:
        kernel_command_line = f"{KERNEL_ARGUMENTS} {TCG_KERNEL_ARGUMENTS}" if is_emulated else KERNEL_ARGUMENTS
        return [*argv, "-kernel", str(files.kernel), "-initrd", str(files.initrd), "-append", kernel_command_line]
    # The machine need not announce itself, because it and the tap have the same addresses in every slot.
    migration_options = ("-global", "migration.send-configuration=off", "-global", "migration.announce-rounds=0")
    return [*argv, *migration_options, "-incoming", f"fd:{state_fd}", *(["-S"] if hold else [])]


def _build_log_options(console_fd: int | None) -> str:
    # Without logappend, QEMU would truncate the log, which is sealed.
    return "" if console_fd is None else f",logfile=/dev/fdset/{_CONSOLE_FDSET},logappend=on"
