"""Test the probe of QEMU and of the accelerator, with the real QEMU and a stock kernel."""

from __future__ import annotations

import asyncio
import json
import os
import subprocess
from pathlib import Path
from typing import Any

import pytest

from sandbox_gateway.config import KvmXfs
from sandbox_gateway.errors import BackendFailed
from sandbox_gateway.hosts.kvm_xfs.qemu import accel
from sandbox_gateway.hosts.kvm_xfs.qemu.accel import Accel


def run_probe(cache_file: Path, kernel: Path | None = None, **settings: Any) -> Accel:
    return asyncio.run(accel.probe(KvmXfs(**settings), cache_file, kernel))


@pytest.fixture
def cache_file(tmp_path: Path) -> Path:
    return tmp_path / "accelerator.json"


def write_script(path: Path, text: str) -> str:
    path.write_text(f"#!/bin/sh\n{text}\n")
    path.chmod(0o755)
    return str(path)


@pytest.mark.parametrize("name", ["tcg", "auto"])
def test_the_probe_reports_its_choice_and_the_reason(cache_file: Path, name: str) -> None:
    result = run_probe(cache_file, accelerator=name)
    assert result.name in ("kvm", "tcg")
    assert result.cpu_model == ("host" if result.name == "kvm" else "max")
    assert result.qemu_version[0].isdigit()
    assert result.reason
    if name == "tcg":
        assert result.name == "tcg"
        assert not cache_file.exists()


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"qemu": "qemu-system-nowhere"}, r"is not installed: install it .*kvm_xfs_host role"),
        ({"qemu": "/bin/echo"}, r"printed .*: set \[kvm_xfs\] qemu to the path of QEMU"),
        (
            {"machine": "pc-q35-99.9"},
            r"has no machine type 'pc-q35-99.9': set \[kvm_xfs\] machine to a supported type \(pc-q35-",
        ),
    ],
)
def test_an_unsuitable_qemu_is_refused(cache_file: Path, settings: dict[str, str], message: str) -> None:
    with pytest.raises(BackendFailed, match=message):
        run_probe(cache_file, **settings)


def test_a_qemu_without_the_capture_command_is_refused(cache_file: Path, tmp_path: Path) -> None:
    qemu = KvmXfs().qemu
    qemu_without_command = write_script(
        tmp_path / "qemu", f'{qemu} "$@" | sed s/xen-save-devices-state/something-else/g'
    )
    with pytest.raises(BackendFailed, match="does not have the command xen-save-devices-state, which captures require"):
        run_probe(cache_file, qemu=qemu_without_command)


def test_accelerator_kvm_requires_the_device(cache_file: Path, monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setattr(accel, "_KVM_DEVICE", tmp_path / "kvm")
    with pytest.raises(BackendFailed, match="is missing"):
        run_probe(cache_file, accelerator="kvm")
    assert run_probe(cache_file).name == "tcg"


def test_can_boot_returns_true_for_a_stock_kernel(template_kernel: Path) -> None:
    config = KvmXfs(probe_seconds=60)
    assert asyncio.run(accel.can_boot(config, template_kernel, accelerator="tcg", cpu_model="max"))


def test_can_boot_returns_false_and_stops_qemu_if_the_boot_fails(tmp_path: Path, template_kernel: Path) -> None:
    # With -S, the processors never start, however fast this machine is.
    stopped_qemu = write_script(tmp_path / "qemu", f'exec {KvmXfs().qemu} "$@" -S')
    config = KvmXfs(qemu=stopped_qemu, probe_seconds=0.5)
    assert not asyncio.run(accel.can_boot(config, template_kernel, accelerator="tcg", cpu_model="max"))
    config = KvmXfs(probe_seconds=60)
    invalid_kernel = tmp_path / "vmlinuz"
    invalid_kernel.write_bytes(b"no kernel")
    assert not asyncio.run(accel.can_boot(config, invalid_kernel, accelerator="tcg", cpu_model="max"))
    pgrep = subprocess.run(["pgrep", "-f", str(template_kernel)], capture_output=True, check=False)
    assert pgrep.returncode == 1, pgrep.stdout


def test_can_boot_gives_up_on_a_silent_guest(
    tmp_path: Path, template_kernel: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(accel, "_MAX_SILENCE_SECONDS", 0.5)
    config = KvmXfs(qemu=write_script(tmp_path / "qemu", "echo Linux version 6.1\nexec sleep 1000"), probe_seconds=600)
    boot = accel.can_boot(config, template_kernel, accelerator="tcg", cpu_model="max")
    assert not asyncio.run(asyncio.wait_for(boot, 60))


def test_auto_probes_once_and_caches_the_result(
    cache_file: Path, template_kernel: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(accel, "_KVM_DEVICE", Path("/dev/null"))
    runs_file = tmp_path / "runs"
    counting_qemu = write_script(
        tmp_path / "qemu", f'case "$*" in *-kernel*) echo run >> {runs_file};; esac; exec {KvmXfs().qemu} "$@"'
    )
    first_result = run_probe(cache_file, template_kernel, qemu=counting_qemu, probe_seconds=3)
    second_result = run_probe(cache_file, template_kernel, qemu=counting_qemu, probe_seconds=3)
    assert first_result == second_result
    assert runs_file.read_text() == "run\n"
    (key,) = json.loads(cache_file.read_text())
    assert key.split()[:2] == [first_result.qemu_version, os.uname().release]
    if first_result.name == "tcg":
        assert str(cache_file) in first_result.reason, "the reason does not name the file to remove"
    other_kernel = tmp_path / "vmlinuz-other"
    other_kernel.write_bytes(b"another kernel")
    assert run_probe(cache_file, other_kernel, qemu=counting_qemu, probe_seconds=3).name == "tcg"
    assert runs_file.read_text() == "run\nrun\n", "another kernel was not tested"


def test_without_a_kernel_earlier_results_are_used(cache_file: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(accel, "_KVM_DEVICE", Path("/dev/null"))
    monkeypatch.setattr(accel, "_find_host_kernel", lambda: None)
    version = run_probe(cache_file).qemu_version
    assert run_probe(cache_file).name == "tcg"
    for host_kernel, has_booted, expected_name in (("other", True, "tcg"), (os.uname().release, False, "tcg")):
        cache_file.write_text(json.dumps({f"{version} {host_kernel} 0123": has_booted}))
        assert run_probe(cache_file).name == expected_name
    cache_file.write_text(json.dumps({f"{version} {os.uname().release} 0123": True}))
    assert run_probe(cache_file).name == "kvm"


def test_a_damaged_cache_is_ignored(cache_file: Path, template_kernel: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(accel, "_KVM_DEVICE", Path("/dev/null"))
    for text in ("{", "[1]", '{"a": 3}'):
        cache_file.write_text(text)
        assert run_probe(cache_file, template_kernel, probe_seconds=0.5).qemu_version
