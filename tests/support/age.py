"""Keys for `age`, programs that imitate it, and damaged files."""

from __future__ import annotations

import os
import random
import shutil
import subprocess
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path

import httpx
import pytest

from sandbox_gateway.engine.transfer import transfers
from tests.support.memory_gateway import MemoryGateway
from tests.support.waiting import wait_until

LARGE_TEXT = random.Random(5).randbytes(300_000).hex()
"""A text that cannot be compressed to less than 300 kB. `age` encrypts chunks of 64 KiB."""
DAMAGES: dict[str, Callable[[bytes], bytes]] = {
    "cut off in the header": lambda file: file[:60],
    "cut off in the first chunk": lambda file: file[:500],
    "cut off in the middle": lambda file: file[: len(file) // 2],
    "cut off at the end": lambda file: file[:-1],
    "longer": lambda file: file + b"more",
    "changed in the middle": lambda file: file[: len(file) // 2] + b"changed" + file[len(file) // 2 + 7 :],
    "changed at the end": lambda file: file[:-1] + bytes([file[-1] ^ 1]),
}
"""Ways to damage an encrypted file."""
FAILURE_AT_THE_END = f"{shutil.which('age')} \"$@\"; echo 'age: error: at the end' >&2; exit 1"
"""A script that fails after it has encrypted or decrypted everything."""


@dataclass
class Key:
    """``path``: of the file with the secret key. ``recipient``: the public key."""

    path: str
    recipient: str


def make_key(path: Path) -> Key:
    subprocess.run(["age-keygen", "-o", path], check=True, capture_output=True, timeout=60)
    public_key = subprocess.run(["age-keygen", "-y", path], check=True, capture_output=True, timeout=60, text=True)
    return Key(str(path), public_key.stdout.strip())


@pytest.fixture
def key(tmp_path_factory: pytest.TempPathFactory) -> Key:
    return make_key(tmp_path_factory.mktemp("keys") / "key")


def decrypt(file: Path, key: Key) -> bytes:
    command = ["age", "-d", "-i", key.path, str(file)]
    return subprocess.run(command, check=True, capture_output=True, timeout=60).stdout


@pytest.fixture
def no_import_remains(
    memory_gateway: MemoryGateway, api: httpx.Client, monkeypatch: pytest.MonkeyPatch
) -> Iterator[None]:
    """Check afterwards that the test has imported nothing, not even in part. The gateway processes what it gets."""
    monkeypatch.setattr(transfers, "_BATCH_BYTES", 1)
    yield
    wait_until(lambda: memory_gateway.engine.transfers._active_count == 0)
    assert api.get("/interrupted-imports").json() == [] and memory_gateway.host.partial_imports == set()
    assert "copy" not in [name for each in api.get("/snapshots").json() for name in each["names"]]


def write_program(directory: Path, script: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Make a shell script the program `age`."""
    (directory / "age").write_text(f"#!/bin/sh\n{script}\n")
    (directory / "age").chmod(0o755)
    monkeypatch.setenv("PATH", f"{directory}:{os.environ['PATH']}")
