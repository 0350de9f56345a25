"""Choose the accelerator for this host by booting a stock kernel on KVM.

Opening `/dev/kvm` is not a sufficient test: nested KVM may run the first instructions of a boot loader, and then never
boot a kernel.
"""

from __future__ import annotations

import asyncio
import contextlib
import hashlib
import json
import os
import re
import shutil
import signal
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

from sandbox_gateway.command import build_child_environment, run_async
from sandbox_gateway.config import KvmXfs
from sandbox_gateway.errors import BackendFailed
from sandbox_gateway.log import Logger

_KVM_DEVICE = Path("/dev/kvm")
_QMP_TIMEOUT_SECONDS = 30.0
_MAX_SILENCE_SECONDS = 8.0
"""Seconds without output after which a booting kernel, which normally prints continuously, counts as hung."""
_CAPTURE_COMMAND = "xen-save-devices-state"
_BOOT_MESSAGE_PATTERN = re.compile(
    rb"not syncing: (VFS|No working init)|Unable to mount root|Run /(sbin/)?init as init process"
)
"""Messages that a kernel without a root file system prints once timers, interrupts and all CPUs work."""

log = Logger("accel")


@dataclass(frozen=True)
class Accel:
    name: Literal["kvm", "tcg"]
    cpu_model: Literal["host", "max"]
    qemu_version: str
    """For example `7.2.22`."""
    reason: str = ""
    """Why this accelerator was chosen, as part of a sentence."""


async def probe(config: KvmXfs, cache: Path, kernel: Path | None = None) -> Accel:
    """Check QEMU and choose the accelerator. With `auto`, boot ``kernel`` (default: the host's own) on KVM as a test.

    The JSON file ``cache`` stores the result for this QEMU, host kernel and guest kernel; remove the file to probe
    again. If there is no kernel to boot, an earlier result is used, or else TCG. Raises BackendFailed if QEMU is
    missing or lacks a feature that captures need.
    """
    version = await _check_qemu(config)
    if config.accelerator == "tcg":
        return Accel("tcg", "max", version, "the configuration requires it")
    if config.accelerator == "kvm":
        if problem := _find_kvm_problem():
            raise BackendFailed(
                f"[kvm_xfs] accelerator is kvm, but {problem}: fix this problem, or set accelerator to auto or tcg"
            )
        return Accel("kvm", "host", version, "the configuration requires it")
    if problem := _find_kvm_problem():
        return Accel("tcg", "max", version, problem)
    results = await asyncio.to_thread(_load_results, cache)
    key_prefix = f"{version} {os.uname().release} "
    kernel = kernel or await asyncio.to_thread(_find_host_kernel)
    if kernel is None:
        if any(has_booted for key, has_booted in results.items() if key.startswith(key_prefix)):
            return Accel("kvm", "host", version, "a kernel has booted on KVM before")
        return Accel("tcg", "max", version, "no kernel is available yet to test KVM")
    key = key_prefix + await asyncio.to_thread(_digest, kernel)
    if key not in results:
        log.info("testing KVM", kernel=str(kernel), seconds=config.probe_seconds)
        results[key] = await can_boot(config, kernel, accelerator="kvm", cpu_model="host")
        await asyncio.to_thread(_save_results, cache, results)
    if results[key]:
        return Accel("kvm", "host", version, "a kernel booted on KVM")
    reason = f"/dev/kvm can be opened, but {kernel} did not boot on it (remove {cache} to try again)"
    log.warning("KVM does not work on this host: sandboxes run on TCG, which is many times slower", reason=reason)
    return Accel("tcg", "max", version, reason)


async def can_boot(config: KvmXfs, kernel: Path, *, accelerator: str, cpu_model: str) -> bool:
    """Boot ``kernel`` without a disk. Return whether it looks for its root file system within ``probe_seconds``."""
    argv = [
        *(config.qemu, "-nodefaults", "-no-user-config", "-display", "none", "-no-reboot"),
        *("-M", config.machine, "-accel", accelerator, "-cpu", cpu_model, "-m", "256", "-serial", "stdio"),
        *("-kernel", str(kernel), "-append", "console=ttyS0 panic=-1"),
    ]
    process = await asyncio.create_subprocess_exec(
        *argv,
        stdin=asyncio.subprocess.DEVNULL,
        stdout=asyncio.subprocess.PIPE,
        stderr=asyncio.subprocess.STDOUT,
        env=build_child_environment(),
        start_new_session=True,
    )
    assert process.stdout is not None
    output = b""
    try:
        async with asyncio.timeout(config.probe_seconds):
            while chunk := await asyncio.wait_for(process.stdout.read(4096), _MAX_SILENCE_SECONDS):
                output = (output + chunk)[-16384:]
                if _BOOT_MESSAGE_PATTERN.search(output):
                    return True
    except TimeoutError:
        pass
    finally:
        await _kill(process)
    log.info(
        "the test kernel did not boot", accelerator=accelerator, output=output.decode(errors="replace").strip()[-300:]
    )
    return False


def _find_kvm_problem() -> str:
    """Return why KVM cannot be used, or "" if it may work. Does not start a guest."""
    try:
        os.close(os.open(_KVM_DEVICE, os.O_RDWR | os.O_CLOEXEC))
    except FileNotFoundError:
        return f"{_KVM_DEVICE} is missing (no virtualisation in the processor or its firmware, or no KVM module loaded)"
    except OSError as error:
        return f"{_KVM_DEVICE} cannot be opened ({error.strerror})"
    return ""


async def _check_qemu(config: KvmXfs) -> str:
    """Check that QEMU has the required features, and return its version. Raises BackendFailed otherwise."""
    if shutil.which(config.qemu) is None:
        raise BackendFailed(
            f"QEMU ({config.qemu}) is not installed: install it (Debian: qemu-system-x86), or run the kvm_xfs_host role"
        )
    output = (await run_async([config.qemu, "--version"], timeout=_QMP_TIMEOUT_SECONDS)).stdout
    match = re.search(r"version (\d+(?:\.\d+)+)", output)
    if match is None:
        raise BackendFailed(
            f"{config.qemu} --version printed {output[:100]!r} instead of a version: "
            "set [kvm_xfs] qemu to the path of QEMU"
        )
    commands, machine_types = await _list_features(config.qemu)
    if _CAPTURE_COMMAND not in commands:
        raise BackendFailed(
            f"QEMU {match[1]} ({config.qemu}) does not have the command {_CAPTURE_COMMAND}, which captures require: "
            "install a build that has it, such as Debian's or Ubuntu's"
        )
    if config.machine not in machine_types:
        supported_types = sorted(name for name in machine_types if name.startswith("pc-q35-"))
        raise BackendFailed(
            f"QEMU {match[1]} has no machine type {config.machine!r}: set [kvm_xfs] machine to a supported type"
            + (f" ({', '.join(supported_types[-4:])})" if supported_types else "")
        )
    return match[1]


async def _list_features(qemu: str) -> tuple[set[str], set[str]]:
    """Return the QMP commands and the machine types of this QEMU."""
    requests = ("qmp_capabilities", "query-commands", "query-machines", "quit")
    script = "".join(json.dumps({"execute": command, "id": command}) + "\n" for command in requests)
    argv = [qemu, "-M", "none", "-nodefaults", "-no-user-config", "-display", "none", "-qmp", "stdio"]
    result = await run_async(argv, timeout=_QMP_TIMEOUT_SECONDS, input=script)
    replies: dict[str, Any] = {}
    for line in result.stdout.splitlines():
        with contextlib.suppress(ValueError):
            message = json.loads(line)
            replies[message.get("id", "")] = message.get("return")
    try:
        commands = {item["name"] for item in replies["query-commands"]}
        machine_types = {
            name for item in replies["query-machines"] for name in (item["name"], item.get("alias")) if name
        }
    except (KeyError, TypeError):
        raise BackendFailed(
            f"{qemu} did not answer on QMP ({result.stderr.strip()[-300:] or 'it printed nothing'}): set [kvm_xfs] "
            "qemu to the path of QEMU"
        ) from None
    return commands, machine_types


async def _kill(process: asyncio.subprocess.Process) -> None:
    if process.returncode is None:
        with contextlib.suppress(ProcessLookupError):
            os.killpg(process.pid, signal.SIGKILL)
    await process.wait()


def _find_host_kernel() -> Path | None:
    """Return the path of the host's own kernel in /boot, or None if it is missing there or QEMU cannot load it."""
    for name in (f"vmlinuz-{os.uname().release}", "vmlinuz"):
        with contextlib.suppress(OSError), (Path("/boot") / name).open("rb") as file:
            file.seek(0x202)
            if file.read(4) == b"HdrS":
                return Path("/boot") / name
    return None


def _digest(kernel: Path) -> str:
    with kernel.open("rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()[:32]


def _load_results(cache: Path) -> dict[str, bool]:
    try:
        data = json.loads(cache.read_text())
    except (OSError, ValueError):
        return {}
    return {key: value for key, value in data.items() if isinstance(value, bool)} if isinstance(data, dict) else {}


def _save_results(cache: Path, results: dict[str, bool]) -> None:
    partial_file = cache.with_name(f".partial-{cache.name}")
    partial_file.touch(mode=0o600)
    partial_file.write_text(json.dumps(results, indent=1))
    partial_file.rename(cache)
