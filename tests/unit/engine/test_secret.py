"""The host's secret survives restarts, only root can read it, and it is never too short."""

from __future__ import annotations

from pathlib import Path

import pytest

from sandbox_gateway.engine.secret import load_secret
from sandbox_gateway.errors import Invalid


def test_the_secret_is_private_and_created_only_once(tmp_path: Path) -> None:
    secret = load_secret(tmp_path / "secret")
    assert len(secret) == 32 and len(set(secret)) > 8
    assert load_secret(tmp_path / "secret") == secret
    assert (tmp_path / "secret").stat().st_mode & 0o777 == 0o600
    assert load_secret_elsewhere(tmp_path) != secret


def load_secret_elsewhere(tmp_path: Path) -> bytes:
    (tmp_path / "elsewhere").mkdir()
    return load_secret(tmp_path / "elsewhere" / "secret")


def test_a_world_readable_secret_is_made_private(tmp_path: Path) -> None:
    (tmp_path / "secret").write_bytes(b"s" * 32)
    (tmp_path / "secret").chmod(0o644)
    assert load_secret(tmp_path / "secret") == b"s" * 32
    assert (tmp_path / "secret").stat().st_mode & 0o777 == 0o600


def test_reading_a_secret_does_not_change_its_file(tmp_path: Path) -> None:
    path = tmp_path / "secret"
    secret = load_secret(path)
    status = path.stat()
    assert load_secret(path) == secret and path.stat().st_ctime_ns == status.st_ctime_ns


def test_a_half_written_secret_is_replaced(tmp_path: Path) -> None:
    (tmp_path / ".secret.new").write_bytes(b"half")
    assert len(load_secret(tmp_path / "secret")) == 32
    assert not (tmp_path / ".secret.new").exists()


@pytest.mark.parametrize("length", [0, 31, 33])
def test_a_secret_of_the_wrong_length_is_refused(tmp_path: Path, length: int) -> None:
    (tmp_path / "secret").write_bytes(bytes(length))
    with pytest.raises(Invalid, match=f"is {length} bytes long instead of 32: restore it"):
        load_secret(tmp_path / "secret")
