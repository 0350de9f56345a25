"""The module recognizes the files that a gateway writes, and replaces no other files."""

from __future__ import annotations

from pathlib import Path

import pytest
from ansible_collections.grove.sandbox.plugins.module_utils._failure import Failure
from ansible_collections.grove.sandbox.plugins.module_utils._snapshot_files import (
    new_file_opened,
    read_head,
    read_pieces,
    read_snapshot_file,
)

from sandbox_gateway.engine.transfer import container
from tests.unit.engine.snapshot_file_samples import EDGES, FILE, make_file

OTHER_FILE = make_file(snapshot_id="fedcba987654")[0]


@pytest.fixture
def path(tmp_path: Path) -> Path:
    path = tmp_path / "file"
    path.write_bytes(FILE)
    return path


def test_a_file_of_a_gateway_is_recognized(path: Path) -> None:
    file = read_snapshot_file(str(path))
    assert file is not None and file.is_complete
    assert (file.snapshot_id, file.manifest["names"]) == ("0123456789ab", ["before-upgrade"])
    assert file.data_bytes == 13000 + (16 << 20)
    assert read_head(str(path)) == [FILE[: EDGES[1]]]
    assert b"".join(read_pieces(str(path))) == FILE
    assert read_snapshot_file(f"{path}.missing") is None and read_head(f"{path}.missing") == []


def test_files_of_all_versions_are_recognized(path: Path) -> None:
    for version in range(1, container.VERSION + 1):
        path.write_bytes(FILE[:19] + version.to_bytes(2, "big") + FILE[21:])
        file = read_snapshot_file(str(path))
        assert file is not None and file.snapshot_id == "0123456789ab"


def test_a_file_that_was_cut_off_is_not_complete(path: Path) -> None:
    for size in (EDGES[1], EDGES[-2], len(FILE) - 1):
        path.write_bytes(FILE[:size])
        file = read_snapshot_file(str(path))
        assert file is not None and not file.is_complete


@pytest.mark.parametrize(
    ("contents", "message"),
    [
        (b"", "is not a snapshot file"),
        (b"important", "is not a snapshot file"),
        (FILE[:22], "is not a snapshot file"),
        (FILE[:19] + b"\0\0" + FILE[21:], "has format version 0"),
        (FILE[:19] + (container.VERSION + 1).to_bytes(2, "big") + FILE[21:], "has format version 3"),
        (FILE[: EDGES[1] - 1], "is damaged"),
        (FILE[:22] + b"\xff\xff\xff\xff" + FILE[26:], "is damaged"),
        (FILE.replace(b'"sizes"', b'"sides"', 1), "is damaged"),
        (FILE.replace(b'"data_bytes":5000', b'"data_bytes":null', 1), "is damaged"),
        (FILE.replace(b'{"snapshot_id"', b"[" * 13, 1), "is damaged"),
    ],
)
def test_other_files_are_refused(path: Path, contents: bytes, message: str) -> None:
    path.write_bytes(contents)
    with pytest.raises(Failure, match=message):
        read_snapshot_file(str(path))


def test_a_directory_is_refused(tmp_path: Path) -> None:
    with pytest.raises(Failure, match="cannot be read"):
        read_snapshot_file(str(tmp_path))
    with pytest.raises(Failure, match="cannot be written"), new_file_opened(str(tmp_path / "no" / "file")):
        pass


def test_a_file_gets_its_final_name_when_it_is_complete(path: Path) -> None:
    with pytest.raises(Failure, match="lost"), new_file_opened(str(path)) as file:
        file.write(b"half")
        raise Failure("the connection was lost")
    assert path.read_bytes() == FILE and [*path.parent.iterdir()] == [path]
    with new_file_opened(str(path)) as file:
        file.write(OTHER_FILE)
    assert path.read_bytes() == OTHER_FILE and path.stat().st_mode & 0o777 == 0o600
    assert [*path.parent.iterdir()] == [path]
