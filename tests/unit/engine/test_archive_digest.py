"""The gateway computes the same digest of an archive as the client has computed of the files."""

from __future__ import annotations

import hashlib
import io
import os
import random
import tarfile
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import pytest

from sandbox_gateway.cli.build_context import Archive, translate_dockerfile
from sandbox_gateway.engine.archive_digest import ArchiveHasher
from sandbox_gateway.errors import Invalid


def pack(context: Path) -> Archive:
    """Pack a whole directory as the client does."""

    def post(path: str, body: Mapping[str, Any]) -> dict[str, Any]:
        source = {"source": ".", "line": 2, "components": []}
        answer = {"image": "app", "sources": [source], "ignorePatterns": [], "maxArchiveBytes": 1 << 40}
        return {**answer, "setup": [], "startCommand": "", "missingDigests": list(body.get("digests", {}).values())}

    dockerfile = context.parent / "Dockerfile"
    dockerfile.write_text("FROM app\nCOPY . /\n")
    (archive,) = translate_dockerfile(post, str(dockerfile), str(context)).missing_archives
    return archive


def compute(data: bytes, piece_bytes: int = 1 << 20) -> str:
    hasher = ArchiveHasher()
    for start in range(0, len(data), piece_bytes):
        hasher.feed(data[start : start + piece_bytes])
    return hasher.compute()


def read(archive: tarfile.TarFile, member: tarfile.TarInfo) -> bytes:
    file = archive.extractfile(member)
    assert file is not None
    return file.read()


def list_entries(data: bytes) -> list[Any]:
    """Return what the program that copies the files reads."""
    with tarfile.open(fileobj=io.BytesIO(data)) as archive:
        return [
            (member.name, member.type, member.mode, member.linkname, member.isreg() and read(archive, member))
            for member in archive
        ]


@pytest.fixture
def context(tmp_path: Path) -> Path:
    """Files, directories and links with ordinary and unusual names, sizes and modes."""
    context = tmp_path / "context"
    deep_directory = context.joinpath(*["a-long-directory-name"] * 8)
    deep_directory.mkdir(parents=True)
    generator = random.Random(19)
    for size in (0, 1, 511, 512, 513, 70_000):
        (context / f"file of {size}").write_bytes(generator.randbytes(size))
    (deep_directory / "file").write_text("deep")
    (context / "ä ö").write_text("not ASCII")
    Path(os.fsdecode(bytes(context) + b"/not-UTF-8-\xff")).write_text("bytes")
    (context / ("n" * 100)).write_text("a name that fills its field")
    (context / "line\nfeed").write_text("x")
    (context / "link").symlink_to("file of 1")
    (context / "long link").symlink_to("t" * 300)
    (context / "empty").mkdir(mode=0o1700)
    (context / "program").touch(mode=0o755)
    (context / "program").chmod(0o4755)
    os.utime(context / "program", (1 << 34, 1 << 34))
    return context


@pytest.mark.parametrize("piece_bytes", [1, 511, 512, 1 << 20])
def test_both_digests_are_equal(context: Path, piece_bytes: int) -> None:
    archive = pack(context)
    data = b"".join(archive.read_pieces())
    assert len(data) == archive.size
    assert compute(data, piece_bytes) == archive.digest


def test_the_size_of_a_large_file_is_read_from_the_extended_header() -> None:
    info = tarfile.TarInfo("large")
    info.size = 9 << 30
    hasher = ArchiveHasher()
    hasher.feed(info.tobuf(tarfile.PAX_FORMAT))
    assert hasher._remaining == 9 << 30


def test_every_change_that_a_copy_would_show_changes_the_digest(context: Path) -> None:
    archive = pack(context)
    data = b"".join(archive.read_pieces())
    entries = list_entries(data)
    generator, refused, changed = random.Random(20), 0, 0
    for _ in range(600):
        damaged_data = bytearray(data)
        damaged_data[generator.randrange(len(data))] ^= 1 << generator.randrange(8)
        try:
            digest = compute(bytes(damaged_data))
        except Invalid:
            refused += 1
        else:
            changed += digest != archive.digest
            assert digest != archive.digest or list_entries(bytes(damaged_data)) == entries
    assert refused > 20 and changed > 300


def test_an_archive_cut_at_any_block_or_byte_is_refused(context: Path) -> None:
    data = b"".join(pack(context).read_pieces())
    generator = random.Random(21)
    for end in {*range(0, len(data), 512), *(generator.randrange(len(data)) for _ in range(200))}:
        with pytest.raises(Invalid, match="Upload the files again"):
            compute(data[:end])


def make_header(change: Callable[[tarfile.TarInfo], None] = lambda info: None, **fields: Any) -> bytes:
    info = tarfile.TarInfo("a")
    for name, value in fields.items():
        setattr(info, name, value)
    change(info)
    return info.tobuf(tarfile.GNU_FORMAT)


def make_extended(*records: bytes, size: int | None = None) -> bytes:
    data = b"".join(records)
    header = make_header(type=b"x", size=len(data) if size is None else size)
    return header + data.ljust(-(-len(data) // 512) * 512, b"\0") + make_header()


BAD_ARCHIVES = {
    "hard link": make_header(type=b"1", linkname="b"),
    "device": make_header(type=b"3"),
    "pipe": make_header(type=b"6"),
    "sparse file": make_header(type=b"S"),
    "old file": make_header(type=b"\0"),
    "GNU long name": make_header(name="n" * 200),
    "global header": make_header(type=b"g"),
    "directory with contents": make_header(type=b"5", size=512) + bytes(512),
    "file with a target": make_header(linkname="b"),
    "link without a target": make_header(type=b"2"),
    "no name": make_header(name=""),
    "name with a zero": make_extended(b"9 path=a\0\n"),
    "binary number": make_header(size=9 << 30),
    "name in two fields": make_header()[:345] + b"prefix".ljust(155, b"\0") + bytes(12),
    "changed header": b"b" + make_header()[1:],
    "unknown keyword": make_extended(b"21 SCHILY.xattr.a=bc\n"),
    "keyword of a sparse file": make_extended(b"22 GNU.sparse.size=10\n"),
    "twice the same keyword": make_extended(b"9 path=a\n", b"9 path=b\n"),
    "record without its end": make_extended(b"9 path=ab"),
    "record that is too long": make_extended(b"99 path=a\n"),
    "record that is too short": make_extended(b"3 path=a\n"),
    "size that is not a number": make_extended(b"11 size=-1\n"),
    "two extended headers": make_extended(b"10 path=ab\n")[:1024] + make_extended(b"10 path=ab\n"),
    "large extended header": make_header(type=b"x", size=1 << 30),
    "data after the end": bytes(1024) + make_header(),
    "extended header at the end": make_extended(b"10 path=ab\n")[:1024],
}


@pytest.mark.parametrize("name", BAD_ARCHIVES)
def test_an_entry_that_no_client_writes_is_refused(name: str) -> None:
    with pytest.raises(Invalid, match="the archive is damaged, or was not written by sandboxctl or a module"):
        compute(BAD_ARCHIVES[name] + bytes(1024))


def test_the_digest_is_as_documented() -> None:
    info = tarfile.TarInfo("run.sh")
    info.size, info.mode, info.mtime, info.uid = 3, 0o755, 1_700_000_000, 1000
    data = info.tobuf(tarfile.PAX_FORMAT) + b"abc".ljust(512, b"\0") + bytes(1024)
    assert compute(data) == hashlib.sha256(b"100755 3 6 0 run.shabc").hexdigest()
