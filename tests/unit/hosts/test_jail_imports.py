"""The temporary file to which a jail host writes a snapshot that it imports."""

from __future__ import annotations

import errno
import os
from pathlib import Path
from typing import Any, cast

import pytest

from sandbox_gateway.errors import BackendFailed, NoSpace
from sandbox_gateway.hosts.base import SnapshotPart
from sandbox_gateway.hosts.jail_zfs import transfer
from sandbox_gateway.hosts.jail_zfs.storage_calls import StorageCalls


def _create_target(directory: Path) -> transfer.StreamTarget:
    calls = StorageCalls(cast("Any", None), cast("Any", None))
    return transfer.StreamTarget(directory, calls, receive=lambda descriptor: None, discard=lambda: None)


@pytest.mark.parametrize(
    ("error_number", "error_type", "message"),
    [
        (errno.ENOSPC, NoSpace, "no space left on {directory}"),
        (errno.EDQUOT, NoSpace, "no space left on {directory}"),
        (errno.EIO, BackendFailed, "Input/output error"),
    ],
    ids=["full", "quota", "broken"],
)
def test_a_failed_write_is_reported_with_its_cause(
    error_number: int, error_type: type[Exception], message: str, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    def fail(*args: Any) -> None:
        raise OSError(error_number, os.strerror(error_number))

    target = _create_target(tmp_path)
    target.create(16, 0)
    monkeypatch.setattr(transfer, "write_all", fail)
    with pytest.raises(error_type, match=message.format(directory=tmp_path)):
        target.write(SnapshotPart.STREAM, 0, b"data")


def test_a_missing_directory_is_reported(tmp_path: Path) -> None:
    target = _create_target(tmp_path / "missing")
    with pytest.raises(BackendFailed, match="No such file"):
        target.create(16, 0)
