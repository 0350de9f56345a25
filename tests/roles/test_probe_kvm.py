"""The probe of the role kvm_xfs_host: it distinguishes a guest that boots from one that does not."""

from __future__ import annotations

import json
import subprocess
from pathlib import Path

from tests.support import session

PROBE = session.REPOSITORY / "roles" / "kvm_xfs_host" / "files" / "probe_kvm.py"


def probe(*arguments: str) -> dict[str, str]:
    argv = ["/usr/bin/python3", str(PROBE), *arguments]
    done = subprocess.run(argv, capture_output=True, text=True, timeout=300, check=True)
    answer: dict[str, str] = json.loads(done.stdout)
    return answer


def test_a_booting_guest_is_detected() -> None:
    answer = probe("--accelerator", "tcg,tb-size=64", "--seconds", "180")
    assert answer["accelerator"] == "tcg,tb-size=64", answer
    assert "booted" in answer["reason"]


def test_a_stuck_guest_is_given_up() -> None:
    answer = probe("--accelerator", "tcg", "--seconds", "0.01")
    assert answer["accelerator"] == "tcg"
    assert "no guest kernel started" in answer["reason"]


def test_a_silent_guest_is_given_up_early(tmp_path: Path) -> None:
    silent = tmp_path / "qemu"
    silent.write_text("#!/bin/sh\necho Probing EDD\nexec sleep 1000\n")
    silent.chmod(0o755)
    answer = probe("--accelerator", "tcg", "--seconds", "1000", "--qemu", str(silent))
    assert answer["reason"].endswith("(there was no further output in time); last output: Probing EDD")


def test_a_missing_qemu_is_named() -> None:
    answer = probe("--accelerator", "tcg", "--qemu", "qemu-that-is-not-there")
    assert answer["reason"] == "qemu-that-is-not-there cannot be started: No such file or directory"
