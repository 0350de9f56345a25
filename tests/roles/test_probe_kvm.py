"""Test the kvm_xfs_host role's probe, which determines whether a guest can boot."""

from __future__ import annotations

import json
import subprocess
from pathlib import Path

from tests.support import session

PROBE_SCRIPT = session.REPOSITORY / "roles" / "kvm_xfs_host" / "files" / "probe_kvm.py"


def run_probe(*arguments: str) -> dict[str, str]:
    argv = ["/usr/bin/python3", str(PROBE_SCRIPT), *arguments]
    process = subprocess.run(argv, capture_output=True, text=True, timeout=300, check=True)
    result: dict[str, str] = json.loads(process.stdout)
    return result


def test_a_booting_guest_is_detected() -> None:
    result = run_probe("--accelerator", "tcg,tb-size=64", "--seconds", "180")
    assert result["accelerator"] == "tcg,tb-size=64", result
    assert "booted" in result["reason"]


def test_a_guest_that_exceeds_the_time_limit_is_reported() -> None:
    result = run_probe("--accelerator", "tcg", "--seconds", "0.01")
    assert result["accelerator"] == "tcg"
    assert "no guest kernel started" in result["reason"]


def test_a_guest_without_output_is_stopped_early(tmp_path: Path) -> None:
    silent_qemu = tmp_path / "qemu"
    silent_qemu.write_text("#!/bin/sh\necho Probing EDD\nexec sleep 1000\n")
    silent_qemu.chmod(0o755)
    result = run_probe("--accelerator", "tcg", "--seconds", "1000", "--qemu", str(silent_qemu))
    assert result["reason"].endswith("(no further output within the time limit); last output: Probing EDD")


def test_a_missing_qemu_is_reported() -> None:
    result = run_probe("--accelerator", "tcg", "--qemu", "missing-qemu")
    assert result["reason"] == "missing-qemu cannot be started: No such file or directory"
