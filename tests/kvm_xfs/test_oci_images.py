"""Test copying and unpacking OCI images, some of them hostile. No test boots a machine."""

from __future__ import annotations

import asyncio
import dataclasses
import json
import os
import stat
import subprocess
import tarfile
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import pytest

from sandbox_gateway.command import run_async, run_async_bytes
from sandbox_gateway.config import KvmXfs
from sandbox_gateway.errors import GatewayError, Invalid
from sandbox_gateway.hosts.kvm_xfs.template.oci import layers
from sandbox_gateway.hosts.kvm_xfs.template.oci.confinement import FILE_CAPABILITIES, confine
from sandbox_gateway.hosts.kvm_xfs.template.oci.layers import unpack_layers
from sandbox_gateway.hosts.kvm_xfs.template.oci.registry import copy_image, resolve_digest
from sandbox_gateway.image_references import RegistryLogin, parse_image_reference
from tests.support.images import (
    PASSWORD,
    USER,
    make_entry,
    make_layer,
    push_image,
    running_registry,
    write_auth_file,
    write_layout,
)

pytestmark = pytest.mark.usefixtures("requires_root")


def unpack_image(
    reference: str,
    tmp_path: Path,
    disk_mb: int = 64,
    settings: KvmXfs | None = None,
    login: RegistryLogin | None = None,
) -> Path:
    """Copy and unpack an image. Returns the path of its tree."""
    work_directory = tmp_path / "work"
    work_directory.mkdir(mode=0o700)

    async def run() -> Path:
        image = parse_image_reference(reference)
        copied = await copy_image(image, work_directory, settings or KvmXfs(), disk_mb << 20, lambda line: None, login)
        return await unpack_layers(copied, work_directory, disk_mb, lambda line: None)

    return asyncio.run(run())


def unpack_entries(tmp_path: Path, *contents: Sequence[tuple[tarfile.TarInfo, bytes]], disk_mb: int = 64) -> Path:
    layout = write_layout(tmp_path / "image", [make_layer(*entries) for entries in contents])
    return unpack_image(f"oci:{layout}:test", tmp_path, disk_mb)


def describe_entry(path: Path) -> tuple[int, int, int]:
    status = path.lstat()
    return status.st_uid, status.st_gid, stat.S_IMODE(status.st_mode)


# --- unpacking -----------------------------------------------------------------------------------------------------


def test_owners_modes_links_and_whiteouts_match_the_image(tmp_path: Path) -> None:
    directory: dict[str, Any] = {"type": tarfile.DIRTYPE, "mode": 0o755}
    tree = unpack_entries(
        tmp_path,
        [
            make_entry("home", **directory, uid=1000, gid=1001),
            make_entry("home/file", b"lower", uid=1000, gid=1001, mode=0o640),
            make_entry("bin/su", b"program", mode=0o4755),
            make_entry("home/removed", b""),
            make_entry("opaque", **directory),
            make_entry("opaque/lower", b""),
        ],
        [
            make_entry("home/link", type=tarfile.LNKTYPE, linkname="home/file"),
            make_entry("home/absolute", type=tarfile.SYMTYPE, linkname="/etc/passwd"),
            make_entry("home/.wh.removed"),
            make_entry("opaque/.wh..wh..opq"),
            make_entry("opaque/upper", b""),
            make_entry("capable", b"", pax_headers={"SCHILY.xattr.user.key": "value"}),
        ],
    )
    assert describe_entry(tree / "home/file") == (1000, 1001, 0o640)
    assert describe_entry(tree / "bin/su") == (0, 0, 0o4755)
    assert (tree / "home/link").stat().st_ino == (tree / "home/file").stat().st_ino
    assert (tree / "home/absolute").readlink() == Path("/etc/passwd")
    assert sorted(path.name for path in (tree / "home").iterdir()) == ["absolute", "file", "link"]
    assert [path.name for path in (tree / "opaque").iterdir()] == ["upper"]
    assert os.getxattr(tree / "capable", "user.key") == b"value"


@pytest.mark.parametrize("name", ["../../escaped", "dev/.wh..."])
def test_a_layer_that_leads_outside_is_refused_and_leaves_nothing_behind(tmp_path: Path, name: str) -> None:
    with pytest.raises(Invalid, match=r"the image cannot be unpacked: layer 2 of 2 contains"):
        unpack_entries(tmp_path, [make_entry("good")], [make_entry(name)])
    assert not (tmp_path / "work" / "tree").exists() and not list(tmp_path.rglob("escaped"))


def test_a_layer_cannot_write_through_a_link(tmp_path: Path) -> None:
    target = tmp_path / "host"
    target.mkdir()
    tree = unpack_entries(
        tmp_path,
        [
            make_entry("absolute", type=tarfile.SYMTYPE, linkname=str(target)),
            make_entry("relative", type=tarfile.SYMTYPE, linkname="../" * 20 + str(target)),
        ],
        [
            make_entry("absolute/file", b"written"),
            make_entry("relative/file2", b"written"),
            make_entry("absolute/.wh.kept"),
        ],
    )
    assert list(target.iterdir()) == []
    assert tree.is_dir()
    assert {path.name for path in tree.rglob("file*")} == {"file", "file2"}


def test_large_images_are_refused_before_they_are_unpacked(tmp_path: Path) -> None:
    with pytest.raises(Invalid, match=r"^the image unpacks to more than 8 MiB.*set 'diskSizeMB'"):
        unpack_entries(tmp_path / "zeros", [make_entry("zeros", bytes(9 << 20))], disk_mb=8)
    with pytest.raises(Invalid, match=r"larger than 8 MiB.*even while compressed"):
        unpack_entries(tmp_path / "noise", [make_entry("noise", os.urandom(9 << 20))], disk_mb=8)


def test_a_tree_that_outgrows_the_disk_despite_the_check_is_refused(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Simulate that umoci reads a layer differently from the checker. Each file is within the limit for one file."""
    checker = tmp_path / "checker.py"
    checker.write_text("""print('{"problem": ""}')""")
    monkeypatch.setattr(layers.check_layers, "__file__", str(checker))
    with pytest.raises(Invalid, match=r"unpacked image does not fit on the template's disk of 8 MiB"):
        unpack_entries(tmp_path, [make_entry(f"{number}", bytes(6 << 20)) for number in range(4)], disk_mb=8)


def test_a_header_that_claims_to_be_huge_is_refused(tmp_path: Path) -> None:
    header = tarfile.TarInfo("x")
    header.type, header.size = tarfile.XHDTYPE, 150 << 20
    layout = write_layout(tmp_path / "image", [header.tobuf() + bytes(header.size)])
    with pytest.raises(Invalid, match="layer 1 of 1 has headers that are too large"):
        unpack_image(f"oci:{layout}:test", tmp_path, disk_mb=1024)


def test_warnings_about_attributes_that_cannot_be_set_do_not_fill_the_memory(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    output = []

    async def record(argv: Sequence[str], **options: Any) -> subprocess.CompletedProcess[str]:
        result = await run_async(argv, **options)
        output.append(result.stderr)
        return result

    monkeypatch.setattr(layers, "run_async", record)
    attributes = {"SCHILY.xattr.system.nfs4_acl": "value"}
    tree = unpack_entries(tmp_path, [make_entry("file", b"", pax_headers=attributes)])
    assert (tree / "file").exists() and output == ["", ""]


def test_a_program_that_reads_an_image_can_write_only_to_its_directory(tmp_path: Path) -> None:
    """The programs are trusted, but the data that they read is not."""
    victim = tmp_path / "victim"
    victim.write_text("unchanged")
    work_directory = tmp_path / "work"
    work_directory.mkdir()
    script = f"""
echo written > inside
echo written > {victim}; rm -f {victim}; echo written > /usr/written; echo written > /etc/passwd
mount -t tmpfs none /usr; mknod node c 1 1; kill -9 {os.getpid()}; cat /etc/shadow; ls /proc
"""
    argv = confine(["sh", "-c", script], work_directory, capabilities=FILE_CAPABILITIES)
    result = subprocess.run(argv, capture_output=True, text=True, timeout=30, check=False)
    assert [path.name for path in work_directory.iterdir()] == ["inside"], result.stderr
    assert victim.read_text() == "unchanged" and not Path("/usr/written").exists()
    assert "root:" not in result.stdout and str(os.getpid()) not in result.stdout.split()
    for problem in ("Read-only file system", "Operation not permitted", "No such process"):
        assert problem in result.stderr or problem.lower() in result.stderr, result.stderr
    network = confine(["cat", "/proc/net/dev"], work_directory)
    devices = subprocess.run(network, capture_output=True, text=True, timeout=30, check=True).stdout
    assert [line.split(":")[0].strip() for line in devices.splitlines()[2:]] == ["lo"]


async def test_a_program_that_reads_an_image_sees_only_the_variables_for_it(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("API_KEY", "secret")
    result = await run_async(confine(["env"], tmp_path), timeout=30, env={"https_proxy": "http://proxy.example"})
    variables = dict(line.split("=", 1) for line in result.stdout.splitlines())
    variables.pop("PWD", None)
    expected = {"PATH": "/usr/sbin:/usr/bin", "HOME": "/work", "TMPDIR": "/work", "LC_ALL": "C"}
    assert variables == {**expected, "https_proxy": "http://proxy.example"}


# --- where images come from ----------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def registry(requires_root: None, tmp_path_factory: pytest.TempPathFactory) -> Iterator[str]:
    with running_registry(tmp_path_factory.mktemp("registry") / "registry") as address:
        yield address


@pytest.fixture
def layout(tmp_path: Path) -> Path:
    return write_layout(tmp_path / "image", [make_layer(make_entry("hello", b"world"))])


def test_images_come_from_registries_layouts_and_archives(registry: str, layout: Path, tmp_path: Path) -> None:
    push_image(layout, f"{registry}/team/app:1.0")
    sources = {"registry": f"docker://{registry}/team/app:1.0", "layout": f"oci:{layout}:test", "only": f"oci:{layout}"}
    for transport, suffix in (("oci-archive", ""), ("docker-archive", ":team/app:1.0")):
        file = tmp_path / f"{transport}.tar"
        target = f"{transport}:{file}{suffix}"
        argv = ["skopeo", "copy", "--quiet", f"oci:{layout}:test", target]
        subprocess.run(argv, check=True, capture_output=True, timeout=60)
        sources[transport] = f"{transport}:{file}"
    settings = KvmXfs(insecure_registries=[registry])
    for name, source in sources.items():
        (tmp_path / name).mkdir()
        assert (unpack_image(source, tmp_path / name, settings=settings) / "hello").read_text() == "world", source


def test_the_digest_depends_on_the_image_and_not_on_its_name(registry: str, tmp_path: Path) -> None:
    settings = KvmXfs(insecure_registries=[registry])
    first = write_layout(tmp_path / "first", [make_layer(make_entry("file", b"1"))])
    second = write_layout(tmp_path / "second", [make_layer(make_entry("file", b"2"))])

    def resolve(name: str) -> str:
        return asyncio.run(resolve_digest(parse_image_reference(f"docker://{registry}/{name}"), settings))

    for layout, name in ((first, "moving:a"), (first, "other:b")):
        push_image(layout, f"{registry}/{name}")
    digest = resolve("moving:a")
    assert digest == resolve("other:b") == resolve(f"moving@{digest}")
    push_image(second, f"{registry}/moving:a")
    assert resolve("moving:a") != digest
    pinned = dataclasses.replace(parse_image_reference(f"docker://{registry}/moving:a"), tag="", digest=digest)
    (tmp_path / "pinned").mkdir()
    assert (unpack_image(str(pinned), tmp_path / "pinned", settings=settings) / "file").read_text() == "1"


def check_refused(reference: str, tmp_path: Path, message: str, settings: KvmXfs | None = None) -> None:
    with pytest.raises(GatewayError, match=message):
        asyncio.run(resolve_digest(parse_image_reference(reference), settings or KvmXfs()))
    with pytest.raises(GatewayError, match=message):
        unpack_image(reference, tmp_path, settings=settings)
    assert not (tmp_path / "work" / "tree").exists()


def test_a_registry_without_https_must_be_configured(registry: str, layout: Path, tmp_path: Path) -> None:
    push_image(layout, f"{registry}/plain:1")
    check_refused(f"docker://{registry}/plain:1", tmp_path, "does not use HTTPS.*kvm_xfs.insecure_registries")


def test_missing_images_and_registries_are_reported(registry: str, tmp_path: Path) -> None:
    settings = KvmXfs(insecure_registries=[registry])
    (tmp_path / "empty").mkdir()
    cases = {
        f"docker://{registry}/nothing:1": "does not exist: check its name and tag",
        "docker://127.0.0.1:9/app:1": "the registry 127.0.0.1:9 does not respond",
        f"oci:{tmp_path}/missing": "cannot be read on the gateway's host|does not exist on the gateway's host",
        f"oci-archive:{tmp_path}/missing.tar": "cannot be read on the gateway's host|does not exist on the gateway's",
        f"oci:{tmp_path}/empty": "cannot be read on the gateway's host|does not exist: check its name and tag",
    }
    for number, (reference, message) in enumerate(cases.items()):
        (tmp_path / str(number)).mkdir()
        check_refused(reference, tmp_path / str(number), message, settings)


async def test_a_cancelled_copy_leaves_no_process(tmp_path: Path) -> None:
    connected = asyncio.Event()

    async def hang(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        connected.set()
        await reader.read()
        writer.close()

    async with await asyncio.start_server(hang, "127.0.0.1", 0) as server:
        registry = f"127.0.0.1:{server.sockets[0].getsockname()[1]}"
        settings = KvmXfs(insecure_registries=[registry])
        image = parse_image_reference(f"docker://{registry}/app:1")
        copy = asyncio.ensure_future(copy_image(image, tmp_path, settings, 1 << 20, lambda line: None))
        await asyncio.wait_for(connected.wait(), 30)
        assert list_processes(registry)
        copy.cancel()
        with pytest.raises(asyncio.CancelledError):
            await copy
        for _ in range(100):
            if not list_processes(registry):
                return
            await asyncio.sleep(0.05)
        raise AssertionError(f"skopeo is still running: {list_processes(registry)}")


def list_processes(text: str) -> list[str]:
    """Return the ids of processes with ``text`` in their command line."""
    return subprocess.run(["pgrep", "-f", text], capture_output=True, text=True, check=False).stdout.split()


def test_credentials_are_used_and_are_in_no_command_line(
    layout: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    command_lines = []

    async def record(argv: Sequence[str], **options: Any) -> subprocess.CompletedProcess[bytes]:
        command_lines.append(" ".join(argv))
        return await run_async_bytes(argv, **options)

    monkeypatch.setattr("sandbox_gateway.hosts.kvm_xfs.template.oci.registry.run_async_bytes", record)
    with running_registry(tmp_path / "private", with_password=True) as registry:
        auth_file = write_auth_file(tmp_path / "auth.json", registry)
        push_image(layout, f"{registry}/private:1", auth_file)
        reference = f"docker://{registry}/private:1"
        config_without_file, config_with_missing_file, config_with_file = (
            KvmXfs(insecure_registries=[registry], registry_auth_file=path)
            for path in (None, tmp_path / "missing", auth_file)
        )
        check_refused(reference, tmp_path, "refuses access .* administrator to set", config_without_file)
        (tmp_path / "2").mkdir()
        check_refused(
            reference, tmp_path / "2", "missing does not exist on the gateway's host", config_with_missing_file
        )
        (tmp_path / "3").mkdir()
        assert (unpack_image(reference, tmp_path / "3", settings=config_with_file) / "hello").exists()
        (tmp_path / "4").mkdir()
        login = RegistryLogin(USER, PASSWORD)
        tree = unpack_image(reference, tmp_path / "4", settings=config_with_missing_file, login=login)
        assert (tree / "hello").exists(), "the login of a request replaces the file in the configuration"
        assert PASSWORD not in repr(login)
        (tmp_path / "5").mkdir()
        with pytest.raises(Invalid, match=r"refuses access .* pass a user name and a password"):
            unpack_image(reference, tmp_path / "5", settings=config_with_file, login=RegistryLogin(USER, "wrong"))
    token = json.loads(auth_file.read_text())["auths"][registry]["auth"]
    assert len(command_lines) >= 3
    assert not any(secret in line for line in command_lines for secret in (PASSWORD, token))
