"""Test the program that copies the files of a COPY step inside the sandbox, on temporary directories."""

from __future__ import annotations

import gzip
import importlib.util
import io
import os
import stat
import tarfile
from collections.abc import Callable, Sequence
from pathlib import Path
from types import ModuleType

import pytest
from e2b.template.utils import tar_file_stream

from tests.support.session import REPOSITORY

pytestmark = pytest.mark.usefixtures("requires_root")


def _load_program() -> ModuleType:
    path = REPOSITORY / "gateway/src/sandbox_gateway/hosts/kvm_xfs/template/guest/image/copy.py"
    spec = importlib.util.spec_from_file_location("image_copy", path)
    assert spec and spec.loader
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


program = _load_program()
Entry = tuple[str, bytes, str]
"""The path, the type and the contents of an entry, or the target of a link."""


class Image:
    """A directory that stands in for an image. Contains a working directory."""

    def __init__(self, root: Path) -> None:
        self.context = root / "context"
        self.root = root / "image"
        self.workdir = self.root / "work"
        self.archive = root / "archive.tar"
        self.context.mkdir()
        self.workdir.mkdir(parents=True)

    def copy(
        self, source: str, destination: str, owner: str = "", mode: str = "", *, is_compressed: bool = True
    ) -> str:
        """Archive a source as the client does, and copy it. Returns the error, or "" after a success.

        ``destination``: as in the step. An absolute path is relative to the root of the image.
        """
        with tar_file_stream(source, str(self.context), [], False, is_compressed) as stream:
            self.archive.write_bytes(stream.read())
        return self.run(destination, owner, mode)

    def copy_entries(self, entries: Sequence[Entry], destination: str) -> str:
        with tarfile.open(self.archive, "w") as archive:
            for name, type, text in entries:
                member = tarfile.TarInfo(name)
                member.type, member.linkname = type, "" if type == tarfile.REGTYPE else text
                member.size = len(text) if type == tarfile.REGTYPE else 0
                archive.addfile(member, io.BytesIO(text.encode()))
        return self.run(destination)

    def run(self, destination: str, owner: str = "", mode: str = "") -> str:
        if destination.startswith("/"):
            destination = f"{self.root}{destination}"
        try:
            program.main(str(self.archive), destination, owner, mode)
        except SystemExit as error:
            return str(error)
        finally:
            assert not self.archive.exists(), "the archive must not become part of the template"
        return ""

    def list_paths(self) -> list[str]:
        """Return the paths of all files and links inside the image."""
        paths = (path for path in self.root.rglob("*") if path.is_symlink() or not path.is_dir())
        return sorted(str(path.relative_to(self.root)) for path in paths)


@pytest.fixture
def image(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Image:
    image = Image(tmp_path)
    monkeypatch.chdir(image.workdir)
    monkeypatch.setenv("TARGET", str(image.root / "expanded"))
    (image.context / "app/deep").mkdir(parents=True)
    (image.context / "app/main.py").write_text("main")
    (image.context / "app/deep/data").write_text("data")
    (image.context / "app/link").symlink_to("/usr/bin/python3")
    (image.context / "one.txt").write_text("one")
    (image.context / "two.txt").write_text("two")
    return image


TREE = ["deep/data", "link", "main.py"]


@pytest.mark.parametrize(
    ("source", "destination", "expected"),
    [
        ("one.txt", "/srv/", ["srv/one.txt"]),
        ("one.txt", "/srv/name", ["srv/name"]),
        ("app/deep/data", "/srv/", ["srv/data"]),
        ("one.txt", "/work", ["work/one.txt"]),
        ("one.txt", ".", ["work/one.txt"]),
        ("one.txt", "new", ["work/new"]),
        ("one.txt", "new/", ["work/new/one.txt"]),
        ("one.txt", "new/.", ["work/new/one.txt"]),
        ("./app/../one.txt", "a/b/c", ["work/a/b/c"]),
        ("one.txt", "$TARGET/x", ["expanded/x"]),
        ("one.txt", "${TARGET}/", ["expanded/one.txt"]),
        ("*.txt", "/srv", ["srv/one.txt", "srv/two.txt"]),
        ("**/*.py", "/srv/", ["srv/main.py"]),
        ("app", "/srv/", [f"srv/{name}" for name in TREE]),
        ("app", "/srv", [f"srv/{name}" for name in TREE]),
        ("app/", "below", [f"work/below/{name}" for name in TREE]),
        ("app/link", "/srv/", ["srv/link"]),
        ("app/link", "/srv", ["srv"]),
        (".", "/srv", [*(f"srv/app/{name}" for name in TREE), "srv/one.txt", "srv/two.txt"]),
        ("*", "/srv/", [*(f"srv/{name}" for name in TREE), "srv/one.txt", "srv/two.txt"]),
    ],
)
def test_files_are_copied_as_docker_copies_them(
    image: Image, source: str, destination: str, expected: list[str]
) -> None:
    assert image.copy(source, destination) == ""
    assert image.list_paths() == sorted(expected)


def test_contents_links_modes_and_times_are_kept(image: Image) -> None:
    main_file = image.context / "app/main.py"
    main_file.chmod(0o751)
    os.utime(main_file, (1_000_000_000, 1_000_000_000))
    (image.context / "app/deep").chmod(0o700)
    (image.context / "app/same").hardlink_to(main_file)
    assert image.copy("app", "/srv", is_compressed=False) == ""
    status = (image.root / "srv/main.py").stat()
    assert (image.root / "srv/main.py").read_text() == (image.root / "srv/same").read_text() == "main"
    assert (stat.S_IMODE(status.st_mode), status.st_mtime) == (0o751, 1_000_000_000)
    assert (image.root / "srv/link").readlink() == Path("/usr/bin/python3")
    assert stat.S_IMODE((image.root / "srv/deep").stat().st_mode) == 0o700
    assert stat.S_IMODE((image.root / "srv").stat().st_mode) == 0o755


@pytest.mark.parametrize(
    ("owner", "ids"),
    [("", (0, 0)), ("daemon", (1, 1)), ("12345", (12345, 12345)), ("daemon:0", (1, 0)), ("7:daemon", (7, 1))],
)
def test_the_owner_and_the_mode_apply_to_everything_that_is_copied(
    image: Image, owner: str, ids: tuple[int, int]
) -> None:
    other_file = image.workdir / "other"
    other_file.write_text("other")
    status_before = other_file.lstat(), image.workdir.stat().st_mode
    assert image.copy("app", "new/dir", owner, "0640") == ""
    for path in (image.workdir / "new").rglob("*"):
        status = path.lstat()
        assert (status.st_uid, status.st_gid) == ids, path
        if not path.is_symlink() and path.name != "dir":
            assert stat.S_IMODE(status.st_mode) == 0o640, path
    created_status = (image.workdir / "new").stat()
    assert (created_status.st_uid, stat.S_IMODE(created_status.st_mode)) == (ids[0], 0o755)
    assert (other_file.lstat(), image.workdir.stat().st_mode) == status_before


def test_a_directory_is_merged_into_an_existing_one(image: Image) -> None:
    (image.workdir / "deep").mkdir()
    for name in ("deep/data", "deep/old", "link"):
        (image.workdir / name).write_text("before")
    assert image.copy("app", ".") == ""
    assert image.list_paths() == ["work/deep/data", "work/deep/old", "work/link", "work/main.py"]
    assert (image.workdir / "deep/data").read_text() == "data" and (image.workdir / "link").is_symlink()


def test_a_destination_that_is_a_link_in_the_image_is_followed(image: Image) -> None:
    (image.root / "linked").symlink_to("work")
    assert image.copy("app", "/linked/") == ""
    assert image.copy("one.txt", "/linked") == ""
    assert image.list_paths() == ["linked", *(f"work/{name}" for name in sorted([*TREE, "one.txt"]))]


def test_a_destination_that_is_a_link_to_a_missing_directory_is_created(image: Image) -> None:
    (image.root / "linked").symlink_to("missing/directory")
    assert image.copy("one.txt", "/linked/") == ""
    assert image.list_paths() == ["linked", "missing/directory/one.txt"]


def test_a_file_replaces_a_link_and_not_its_target(image: Image) -> None:
    (image.workdir / "target").write_text("kept")
    (image.workdir / "name").symlink_to("target")
    assert image.copy("one.txt", "name") == ""
    assert (image.workdir / "target").read_text() == "kept" and not (image.workdir / "name").is_symlink()


@pytest.mark.parametrize(
    ("prepare", "source", "message"),
    [
        (lambda work: (work / "x").write_text(""), "app", "x is not a directory"),
        (lambda work: (work / "x/one.txt").mkdir(parents=True), "one.txt", "one.txt exists and is a directory"),
        (lambda work: (work / "x/deep").symlink_to("/"), "app", "x/deep exists and is not a directory"),
    ],
)
def test_an_entry_that_cannot_be_replaced_is_an_error(
    image: Image, prepare: Callable[[Path], object], source: str, message: str
) -> None:
    if message.startswith("x/"):
        (image.workdir / "x").mkdir()
    prepare(image.workdir)
    assert message in image.copy(source, "x")


@pytest.mark.parametrize("owner", ["nobody-here", "root:nobody-here"])
def test_an_unknown_owner_is_an_error(image: Image, owner: str) -> None:
    assert "'nobody-here' does not exist" in image.copy("one.txt", "x", owner)
    assert image.list_paths() == []


FILE, LINK, HARD_LINK, DIRECTORY = tarfile.REGTYPE, tarfile.SYMTYPE, tarfile.LNKTYPE, tarfile.DIRTYPE


@pytest.mark.parametrize(
    ("entries", "message"),
    [
        ([("../evil", FILE, "x")], "leads out of it"),
        ([("a/../../evil", FILE, "x")], "leads out of it"),
        ([("/evil", FILE, "x")], "leads out of it"),
        ([("out", LINK, ".."), ("out/evil", FILE, "x")], "'out/evil' is inside 'out', which is not a directory"),
        ([("a", DIRECTORY, ""), ("a/out", LINK, "/"), ("a/out/b/evil", FILE, "x")], "is inside 'a/out'"),
        ([("out", LINK, "/etc"), ("out", FILE, "x"), ("out/evil", FILE, "x")], "is inside 'out'"),
        ([("a", HARD_LINK, "/etc/passwd")], "leads out of it"),
        ([("a", HARD_LINK, "../../archive.tar")], "leads out of it"),
        ([("a", LINK, "/etc/passwd"), ("b", HARD_LINK, "a")], "no earlier file has this path"),
        ([("a", tarfile.CHRTYPE, "")], "neither a file nor a directory nor a link"),
        ([("a", tarfile.FIFOTYPE, "")], "neither a file nor a directory nor a link"),
        ([], "the archive is empty"),
    ],
)
def test_a_hostile_archive_writes_nothing_outside_its_destination(
    image: Image, tmp_path: Path, entries: list[Entry], message: str
) -> None:
    assert message in image.copy_entries(entries, "dest/")
    assert not list(tmp_path.rglob("evil"))


@pytest.mark.parametrize(
    "contents",
    [b"", b"noise" * 1000, gzip.compress(b"noise" * 1000, mtime=0)[:30], b"\x1f\x8b\x08"],
    ids=["empty", "noise", "cut off", "only a gzip header"],
)
def test_a_damaged_archive_is_an_error(image: Image, contents: bytes) -> None:
    image.archive.write_bytes(contents)
    assert image.run("/srv/").startswith("the files cannot be copied to")


@pytest.mark.parametrize("is_compressed", [True, False], ids=["gzip", "tar"])
def test_a_truncated_archive_is_an_error(image: Image, is_compressed: bool) -> None:
    (image.context / "large").write_bytes(os.urandom(100_000))
    with tar_file_stream("large", str(image.context), [], False, is_compressed) as stream:
        image.archive.write_bytes(stream.read(50_000))
    assert image.run("/srv/").startswith("the files cannot be copied to")
