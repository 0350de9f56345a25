"""Test the checks of an image's layers and settings, without unpacking anything."""

from __future__ import annotations

import asyncio
import gzip
import hashlib
import json
import os
import subprocess
import tarfile
from collections.abc import Sequence
from pathlib import Path, PurePosixPath
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from sandbox_gateway.command import CommandTimeout, run_async
from sandbox_gateway.config import KvmXfs
from sandbox_gateway.errors import BackendFailed, GatewayError, Invalid
from sandbox_gateway.hosts.kvm_xfs.template.oci import measuring, registry
from sandbox_gateway.hosts.kvm_xfs.template.oci.check_layers import LayerProblem, check_layers, check_member
from sandbox_gateway.hosts.kvm_xfs.template.oci.layers import check_tree_size
from sandbox_gateway.hosts.kvm_xfs.template.oci.measuring import run_measured
from sandbox_gateway.hosts.kvm_xfs.template.oci.settings import StartSettings, read_start_settings
from sandbox_gateway.hosts.rootfs_common import Tree
from sandbox_gateway.image_references import parse_image_reference
from tests.support.images import make_entry, make_layer, write_layout

IMAGE = parse_image_reference("docker://registry.example/app:1")


def find_problem(
    tmp_path: Path, *layers: bytes, max_bytes: int = 1 << 20, max_entries: int = 100, is_gzip: bool | None = None
) -> str:
    """Return what is wrong with layers, or "".

    ``is_gzip``: whether the media types say that the layers are compressed. By default, the types are correct.
    """
    paths = [tmp_path / str(number) for number in range(len(layers))]
    for path, data in zip(paths, layers, strict=True):
        path.write_bytes(data)
    kinds = ["gzip" if (data[:2] == b"\x1f\x8b" if is_gzip is None else is_gzip) else "tar" for data in layers]
    arguments = [f"{kind}:{path}" for kind, path in zip(kinds, paths, strict=True)]
    return check_layers(arguments, max_bytes, max_entries)


# --- layers --------------------------------------------------------------------------------------------------------

HOSTILE_ENTRIES: dict[str, tuple[tuple[tarfile.TarInfo, bytes], str]] = {
    "parent": (make_entry("../escaped"), "contains '../escaped', which leads outside"),
    "parent below": (make_entry("a/../../escaped"), "which leads outside"),
    "absolute": (make_entry("/escaped"), "contains '/escaped', which leads outside"),
    "hard link to the host": (
        make_entry("link", type=tarfile.LNKTYPE, linkname="/etc/shadow"),
        "contains the hard link 'link' to '/etc/shadow', which leads outside",
    ),
    "hard link to a parent": (make_entry("a/link", type=tarfile.LNKTYPE, linkname="../shadow"), "which leads outside"),
    "character device": (make_entry("mem", type=tarfile.CHRTYPE, devmajor=1, devminor=1), "contains the device 'mem'"),
    "block device": (make_entry("dev/vda", type=tarfile.BLKTYPE, devmajor=254), "contains the device 'dev/vda'"),
    "whiteout of the parent": (make_entry("a/.wh..."), "contains the invalid whiteout 'a/.wh...'"),
    "whiteout of the directory": (make_entry(".wh.."), "contains the invalid whiteout '.wh..'"),
    "whiteout of nothing": (make_entry(".wh."), "contains the invalid whiteout '.wh.'"),
    "whiteout of a whiteout": (make_entry(".wh..wh.a"), "contains the invalid whiteout '.wh..wh.a'"),
    "whiteout in a path": (make_entry(".wh.a/b"), "contains the invalid whiteout '.wh.a/b'"),
    "root that is a link": (make_entry("./", type=tarfile.SYMTYPE, linkname="/etc"), "contains a root that is not a"),
    "long name": (make_entry("a" * 5000), "whose name or target is too long"),
}


@pytest.mark.parametrize("kind", HOSTILE_ENTRIES)
def test_an_entry_that_leads_outside_is_refused(tmp_path: Path, kind: str) -> None:
    hostile_entry, problem = HOSTILE_ENTRIES[kind]
    message = find_problem(
        tmp_path, make_layer(make_entry("good")), gzip.compress(make_layer(make_entry("good"), hostile_entry))
    )
    assert message.startswith("layer 2 of 2 contains ") and problem in message


def test_ordinary_entries_are_accepted(tmp_path: Path) -> None:
    entries = [
        make_entry("./", type=tarfile.DIRTYPE),
        make_entry("./etc/passwd", b"root"),
        make_entry("etc/absolute", type=tarfile.SYMTYPE, linkname="/usr/bin/../lib"),
        make_entry("etc/hard", type=tarfile.LNKTYPE, linkname="./etc/passwd"),
        make_entry("fifo", type=tarfile.FIFOTYPE),
        make_entry("etc/.wh.removed"),
        make_entry("etc/.wh..wh..opq"),
        make_entry("etc/..data"),
        make_entry("äöü/" + "n" * 200, b"x"),
    ]
    assert find_problem(tmp_path, make_layer(*entries), gzip.compress(make_layer(*entries)), make_layer()) == ""


@given(
    st.lists(st.sampled_from(["", ".", "..", "a", ".wh.", ".wh.a", ".wh..", ".wh...", ".wh..wh..opq"]), max_size=5),
    st.sampled_from([tarfile.REGTYPE, tarfile.DIRTYPE, tarfile.LNKTYPE]),
)
def test_an_accepted_name_stays_inside_the_root(parts: list[str], kind: bytes) -> None:
    member, _ = make_entry("/".join(parts), type=kind, linkname="/".join(parts))
    try:
        check_member(member)
    except LayerProblem:
        return
    path = os.path.normpath(f"/root/{member.name}")
    assert path == "/root" or path.startswith("/root/")
    name = PurePosixPath(member.name).name
    if name.startswith(".wh.") and name != ".wh..wh..opq":
        assert name.removeprefix(".wh.") not in ("", ".", "..")


def test_an_image_that_is_too_large_is_refused(tmp_path: Path) -> None:
    size_problem = "the image unpacks to more than 1 MiB, the size of the template's disk: set 'diskSizeMB'"
    half_layer = gzip.compress(make_layer(make_entry("half", bytes(600 << 10))))
    assert find_problem(tmp_path, half_layer) == ""
    assert find_problem(tmp_path, half_layer, half_layer).startswith(size_problem)
    padded_layer = gzip.compress(make_layer(make_entry("small")) + bytes(4 << 20))
    assert find_problem(tmp_path, padded_layer).startswith(size_problem)
    layer_of_many_files = make_layer(*(make_entry(f"{number}") for number in range(101)))
    assert "contains more than 100 files" in find_problem(tmp_path, layer_of_many_files)


def test_directories_implied_by_file_names_are_counted(tmp_path: Path) -> None:
    """umoci creates them, each with its own inode."""
    deep_names = ["/".join([f"{number}"] * 30) for number in range(4)]
    assert "contains more than 100 files and directories" in find_problem(
        tmp_path, make_layer(*map(make_entry, deep_names))
    )
    sibling_names = [f"{'a/' * 30}{number}" for number in range(60)]
    assert find_problem(tmp_path, make_layer(*map(make_entry, sibling_names))) == ""
    directories = [make_entry("a/" * depth, type=tarfile.DIRTYPE) for depth in range(1, 60)]
    assert find_problem(tmp_path, make_layer(*directories, *map(make_entry, "bc"))) == ""


def test_sparse_files_and_damaged_layers_are_refused(tmp_path: Path) -> None:
    (tmp_path / "huge").touch()
    os.truncate(tmp_path / "huge", 1 << 40)
    for format_options in (["--format=gnu"], ["--format=posix", "--sparse-version=1.0"]):
        argv = ["tar", "--sparse", *format_options, "--create", "--directory", str(tmp_path), "huge"]
        sparse_layer = subprocess.run(argv, check=True, capture_output=True, timeout=60).stdout
        assert "contains the sparse file 'huge'" in find_problem(tmp_path, sparse_layer)
    assert "is compressed with zstd" in find_problem(tmp_path, b"\x28\xb5\x2f\xfd rest")
    whole_layer = gzip.compress(make_layer(make_entry("file", os.urandom(5000))))
    for damaged_layer in (whole_layer[:-3000], b"noise" * 200, b"\x1f\x8b" + b"noise" * 200, b"x"):
        assert "layer 1 of 1 is damaged" in find_problem(tmp_path, damaged_layer)


def make_header(name: str = "hidden", **fields: bytes) -> bytes:
    """Return the header of an entry in the USTAR format. ``fields``: bytes to write, by the name of their field."""
    offsets = {"size": 124, "kind": 156, "magic": 257, "devmajor": 329, "prefix": 345, "trailer": 508}
    block = bytearray(tarfile.TarInfo(name).tobuf(tarfile.USTAR_FORMAT))
    for field, data in fields.items():
        block[offsets[field] : offsets[field] + len(data)] = data
    block[148:156] = b" " * 8
    block[148:156] = b"%06o\0 " % sum(block)
    return bytes(block)


def make_pax_header(data: bytes, kind: bytes = b"x") -> bytes:
    """Return an extended header."""
    return make_header("pax", kind=kind, size=b"%011o\0" % len(data)) + data + bytes(-len(data) % 512)


END = bytes(1024)
NO_MAGIC = bytes(8)
HIDING_PLACES = {
    "bad number in a V7 header, which Go does not read": make_header(magic=NO_MAGIC, devmajor=b"zzzzzzzz"),
    "prefix in a V7 header, which Go does not read": make_header("/etc/a", magic=NO_MAGIC, prefix=b"p"),
    "prefix in a GNU header, which Go reads as a time": make_header(
        "/etc/a", magic=b"ustar  \0", prefix=b"00000000001"
    ),
    "prefix in a star header": make_header(prefix=b"p" * 155, trailer=b"tar\0"),
    "NUL before a size, which Go removes": make_header(size=b"\0" + b"0000002000"),
    "sign in a size": make_header(size=b"+0000002000\0"),
    "negative size": make_header(size=b"\xff" * 12),
    "bad checksum": make_header().replace(b"hidden", b"hiddem"),
    "half a header": make_header()[:100],
    "contents that end early": make_header(size=b"00000002000\0") + b"x",
    "entries after a single block of zeros": bytes(512) + make_header(),
    "entries after the end": END + make_header(),
    "global header": make_pax_header(b"12 size=100\n", b"g"),
    "record whose length has a sign, which Go accepts": make_pax_header(b"+25 GNU.sparse.major=1\n") + make_header(),
    "record after one that is cut": make_pax_header(b"9 a=b\n\n25 GNU.sparse.major=1\n") + make_header(),
    "record with a bad size": make_pax_header(b"12 size=+99\n") + make_header(),
    "NUL in a path": make_pax_header(b"13 path=a\0/..\n"[:12] + b"\n") + make_header(),
    "two extended headers": make_pax_header(b"11 size=00\n") + make_pax_header(b"11 size=00\n") + make_header(),
    "extended header without an entry": make_pax_header(b"11 size=00\n"),
    "file with the name of a directory": make_header("hidden/"),
}


@pytest.mark.parametrize("place", HIDING_PLACES)
def test_an_entry_that_only_another_program_reads_is_refused(tmp_path: Path, place: str) -> None:
    """umoci is written in Go, whose archive/tar interprets some headers differently from Python's tarfile."""
    hostile_layer = make_layer(make_entry("good"))[:512] + HIDING_PLACES[place]
    assert find_problem(tmp_path, hostile_layer + END).startswith("layer 1 of 1 ")
    compressed_layer = gzip.compress(hostile_layer)
    assert find_problem(tmp_path, compressed_layer).startswith("layer 1 of 1 ")


def test_headers_of_common_programs_are_accepted(tmp_path: Path) -> None:
    gnu_header = make_header("good", magic=b"ustar  \0")
    old_header = make_header("directory/", magic=NO_MAGIC + bytes(64), kind=b"\0", devmajor=bytes(16))
    large_entry = make_header("large", size=b"\x80" + (1024).to_bytes(11, "big")) + bytes(1024)
    entry_with_spaces = make_header("spaces", size=b"      1000 \0") + bytes(512)
    assert find_problem(tmp_path, gnu_header + old_header + large_entry + entry_with_spaces + END, gnu_header) == ""
    (tmp_path / "tree/directory").mkdir(parents=True)
    (tmp_path / "tree" / ("n" * 200)).write_text("x" * 5000)
    (tmp_path / "tree/directory" / ("m" * 130)).symlink_to("l" * 150)
    for format_option in ("v7", "oldgnu", "gnu", "ustar", "posix"):
        argv = ["tar", f"--format={format_option}", "--create", "--directory", str(tmp_path / "tree"), "."]
        # tar leaves out names that are too long for the format.
        data = subprocess.run(argv, capture_output=True, timeout=60, check=False).stdout
        assert find_problem(tmp_path, data, gzip.compress(data)) == "" and len(data) >= 1024


def test_a_layer_whose_compression_contradicts_its_media_type_is_refused(tmp_path: Path) -> None:
    """umoci relies on the media type. A file can be valid both as a compressed and as an uncompressed layer."""
    problem = "layer 1 of 1 is not compressed as its media type says"
    assert find_problem(tmp_path, gzip.compress(make_layer(make_entry("a"))), is_gzip=False).startswith(problem)
    assert find_problem(tmp_path, make_layer(make_entry("a")), is_gzip=True).startswith(problem)


async def test_a_program_that_unpacks_more_than_the_check_has_counted_is_killed(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The program simulates an umoci that reads a layer differently. It writes many small files, or zeros."""
    monkeypatch.setattr(measuring, "_INTERVAL_SECONDS", 0.01)
    for number, loop in enumerate(("> $((i++))", "head -c 100000 /dev/zero >> zeros")):
        tree = tmp_path / str(number) / "tree"
        tree.mkdir(parents=True)
        script = f"cd {tree}; i=0; while true; do {loop}; done"
        program = run_async(["bash", "-c", script], timeout=30)
        with pytest.raises(Invalid, match="unpacked image does not fit on the template's disk of 1 MiB"):
            await run_measured(program, lambda tree=tree: check_tree_size(tree, 1))
        sizes = [await measuring.measure_file_sizes(tree) + await measuring.count_inodes(tree) for _ in range(2)]
        assert sizes[0] == sizes[1], "the program is still running"


async def test_slow_measurements_take_only_a_part_of_the_time(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(measuring, "_INTERVAL_SECONDS", 0.01)
    check_count = 0

    async def check() -> None:
        nonlocal check_count
        check_count += 1
        await asyncio.sleep(0.1)

    await run_measured(asyncio.sleep(1.5), check)
    # Without pauses, there would be at least 10. The last one comes after the program's end.
    assert 2 <= check_count <= 5


@pytest.mark.parametrize("transport", ["oci-archive", "docker-archive"])
async def test_an_archive_that_never_ends_is_refused(tmp_path: Path, transport: str) -> None:
    os.mkfifo(tmp_path / "pipe")
    for path in (tmp_path / "pipe", "/dev/zero"):
        with pytest.raises(Invalid, match="cannot be read on the gateway's host: it is not a regular file"):
            await registry.resolve_digest(parse_image_reference(f"{transport}:{path}"), KvmXfs())


@pytest.fixture
def skopeo_output(monkeypatch: pytest.MonkeyPatch) -> list[bytes]:
    """The output of skopeo, which contacts no registry."""
    output = [b""]

    async def run_skopeo(*args: Any) -> bytes:
        return output[0]

    monkeypatch.setattr(registry, "_run_skopeo", run_skopeo)
    return output


async def test_a_registry_that_sends_an_image_with_a_different_digest_is_refused(skopeo_output: list[bytes]) -> None:
    named_manifest, other_manifest = b'{"named": "\xff"}', b'{"named": "\xfe"}'
    digest = f"sha256:{hashlib.sha256(named_manifest).hexdigest()}"
    image = parse_image_reference(f"registry.example/app@{digest}")
    skopeo_output[0] = named_manifest
    assert await registry.resolve_digest(image, KvmXfs()) == digest
    skopeo_output[0] = other_manifest
    with pytest.raises(
        Invalid, match=rf"registry\.example sent a different image for .*@{digest}, with the digest sha256:"
    ):
        await registry.resolve_digest(image, KvmXfs())
    assert await registry.resolve_digest(IMAGE, KvmXfs()) != digest


async def test_a_host_user_cannot_read_the_proxys_password_in_a_command_line(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("https_proxy", "http://user:s3cret@proxy.example")
    monkeypatch.setenv("API_KEY", "s3cret")
    command_lines, environments = [], []

    async def record(argv: Sequence[str], **options: Any) -> subprocess.CompletedProcess[bytes]:
        command_lines.append(" ".join(argv))
        environments.append(options.get("env"))
        return subprocess.CompletedProcess(argv, 0, b"", b"")

    monkeypatch.setattr(registry, "run_async_bytes", record)
    await registry.resolve_digest(IMAGE, KvmXfs())
    assert "s3cret" not in command_lines[0] and "skopeo" in command_lines[0]
    assert environments == [{"https_proxy": "http://user:s3cret@proxy.example"}]


async def test_a_registry_that_accepts_and_never_answers_is_named(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    async def time_out(argv: Sequence[str], *, timeout: float, **options: Any) -> subprocess.CompletedProcess[bytes]:
        raise CommandTimeout("bwrap --die-with-parent did not finish")

    monkeypatch.setattr(registry, "run_async_bytes", time_out)
    with pytest.raises(Invalid, match=r"registry\.example did not send a complete response for .* within 60 s"):
        await registry.resolve_digest(IMAGE, KvmXfs())
    image = parse_image_reference(f"oci:{tmp_path}")
    (tmp_path / "work").mkdir()
    with pytest.raises(Invalid, match=f"reading the image oci:{tmp_path} took longer than 3600 s"):
        await registry.copy_image(image, tmp_path / "work", KvmXfs(), 1 << 20, lambda line: None)


async def test_a_registry_that_stops_sending_does_not_occupy_a_build_slot(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    async def hang(*args: Any) -> bytes:
        await asyncio.sleep(60)
        return b""

    monkeypatch.setattr(registry, "_run_skopeo", hang)
    monkeypatch.setattr(measuring, "_INTERVAL_SECONDS", 0.01)
    monkeypatch.setattr(registry, "_STALL_SECONDS", 0)
    with pytest.raises(Invalid, match=r"the registry registry\.example has sent less than 256 KiB of the image"):
        await registry.copy_image(IMAGE, tmp_path, KvmXfs(), 1 << 20, lambda line: None)


def test_a_copy_stalls_if_it_grows_too_little_for_two_minutes() -> None:
    progress = registry.Progress(1000)
    assert not progress.has_stalled(0, 1119)
    assert not progress.has_stalled(256 << 10, 1121), "it has grown just now"
    assert not progress.has_stalled((256 << 10) + 5, 1241)
    assert progress.has_stalled((512 << 10) - 1, 1242)
    assert not progress.has_stalled(512 << 10, 1242)
    assert not progress.has_stalled(0, 1300), "skopeo has removed a temporary file"
    assert not progress.has_stalled(256 << 10, 1400)


@pytest.mark.parametrize("path", ["tmp", "opt", "sbin", "dev", "lib"])
def test_a_file_in_place_of_a_directory_is_refused(tmp_path: Path, path: str) -> None:
    (tmp_path / path).touch()
    with pytest.raises(Invalid, match=f"the root file system has a file at /{path}, where the gateway needs a direct"):
        Tree(tmp_path).mkdir(f"/{path}/below")
    with pytest.raises(Invalid, match=f"has a file at /{path}, "):
        Tree(tmp_path).mkdir(f"/{path}")


# --- the layout ----------------------------------------------------------------------------------------------------


def read_image(layout: Path) -> registry.CopiedImage:
    layout.rename(layout.with_name(registry.LAYOUT))
    return registry.read_layout(layout.parent, IMAGE)


def test_a_layout_is_read(tmp_path: Path) -> None:
    image = read_image(write_layout(tmp_path / "image", [make_layer(), make_layer(make_entry("a"))], {"Cmd": ["run"]}))
    assert len(image.layers) == 2 and image.config["config"] == {"Cmd": ["run"]}
    assert all((tmp_path / layer.path).is_file() and layer.is_gzip for layer in image.layers)


def test_unsuitable_images_are_refused(tmp_path: Path) -> None:
    def check_refusal(message: str, edit: Any = None, **options: Any) -> None:
        directory = tmp_path / str(len(list(tmp_path.iterdir())))
        directory.mkdir()
        layout = write_layout(directory / "image", [make_layer(make_entry("file"))], **options)
        if edit:
            index = json.loads((layout / "index.json").read_text())
            (layout / "index.json").write_text(json.dumps(edit(index)))
        with pytest.raises(Invalid, match=message):
            read_image(layout)

    check_refusal("is for linux/s390x, but this host runs linux/", architecture="s390x")
    check_refusal("compressed with zstd", media_type="application/vnd.oci.image.layer.v1.tar+zstd")
    check_refusal("unknown media type 'text/plain' of a layer", media_type="text/plain")
    check_refusal("is not a container image", lambda index: {"manifests": []})
    check_refusal("is not a container image", lambda index: [])
    outside_index = {"manifests": [{"digest": "sha256:../../../../etc/passwd"}]}
    check_refusal("is not a container image", lambda index: outside_index)


@pytest.mark.parametrize(
    ("output", "kind", "message"),
    [
        ("dial tcp 127.0.0.1:9: connect: connection refused", Invalid, "registry.example does not respond"),
        ("pinging: http: server gave HTTP response to HTTPS client", Invalid, "kvm_xfs.insecure_registries"),
        ("reading manifest 1 in registry.example/app: manifest unknown", Invalid, "does not exist: check its name"),
        ("unauthorized: authentication required", Invalid, "kvm_xfs.registry_auth_file"),
        ("no image found in manifest list for architecture s390x", Invalid, "for this host's platform"),
        ("x509: certificate signed by unknown authority", Invalid, "certificate of the registry"),
        ("Source image rejected: A signature was required", Invalid, "policy.json"),
        ("copying: write /work/x: no space left on device", GatewayError, "disk is full"),
        ('something with \\"quotes\\"', BackendFailed, 'skopeo cannot read the image .*: something with "quotes"'),
    ],
)
def test_failures_of_skopeo_are_explained(output: str, kind: type[GatewayError], message: str) -> None:
    line = f'time="2026-01-01T00:00:00Z" level=fatal msg="{output}"'
    error = registry.explain_failure(IMAGE, f"an earlier line\n{line}\n")
    with pytest.raises(kind, match=message):
        raise error


# --- settings ------------------------------------------------------------------------------------------------------


def test_the_settings_of_an_image_are_read() -> None:
    settings = {
        "Entrypoint": ["/run"],
        "Cmd": ["--port", "80"],
        "Env": ["A=b=c", "EMPTY=", "no value"],
        "User": "1000:5",
        "WorkingDir": "srv",
    }
    assert read_start_settings({"config": settings}) == StartSettings(
        ["/run", "--port", "80"], {"A": "b=c", "EMPTY": ""}, "1000:5", "/srv", ["/run"]
    )
    for empty_config in ({}, {"config": None}, {"config": {"Env": None, "Cmd": None, "User": None}}):
        assert read_start_settings(empty_config) == StartSettings()


@pytest.mark.parametrize(
    "settings",
    [{"Cmd": "run"}, {"Env": [1]}, {"User": 5}, ["Cmd"], {"Cmd": ["a\0b"]}, {"Env": [f"A={'x' * (200 << 10)}"]}],
)
def test_invalid_settings_are_refused(settings: Any) -> None:
    with pytest.raises(Invalid, match=r"configuration is not valid|NUL character"):
        read_start_settings({"config": settings})
