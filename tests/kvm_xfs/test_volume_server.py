"""Test volume servers: real nfs-ganesha processes on an XFS file system.

Like sandboxes, the client sends its requests from slots. It can send arbitrary requests.
"""

from __future__ import annotations

import asyncio
import contextlib
import ipaddress
import os
import select
import signal
import socket
import stat
import struct
import time
from pathlib import Path
from typing import Any

import pytest

from sandbox_gateway.config import Network
from sandbox_gateway.errors import BackendFailed, Timeout
from sandbox_gateway.hosts.kvm_xfs.files import reflink
from sandbox_gateway.hosts.kvm_xfs.network.addresses import (
    GATEWAY_ADDRESS,
    VOLUME_PORTS,
    Slot,
    get_host_table,
    get_volume_address,
    get_volume_namespace,
)
from sandbox_gateway.hosts.kvm_xfs.network.rules import VOLUME_ACCESS, apply_on_host, build_host_rules
from sandbox_gateway.hosts.kvm_xfs.volumes import file_system, server_pool, server_start
from sandbox_gateway.hosts.kvm_xfs.volumes.configuration import derive_marker, render_configuration
from sandbox_gateway.hosts.kvm_xfs.volumes.server_pool import ServerPool
from sandbox_gateway.hosts.kvm_xfs.volumes.server_process import ServerProcess, ServerSettings
from sandbox_gateway.hosts.kvm_xfs.volumes.server_start import ServerStarter
from tests.kvm_xfs.slot_networks import run_inside
from tests.kvm_xfs.volume_clients import (
    DISCONNECT_ERRORS,
    Volume,
    get_nfs_status,
    kill_process,
    list_files_of_loop_devices,
    run_command,
    setup,
)
from tests.support import nfs3, session
from tests.support.nfs3 import Mount, NfsError, RpcRejected


async def wait_for_loop_devices(root: Path) -> None:
    """Wait until no loop device uses a file under ``root``."""
    for _ in range(2000):
        if not list_files_of_loop_devices(root):
            return
        await asyncio.sleep(0.02)
    raise AssertionError(f"loop devices still use {list_files_of_loop_devices(root)}")


# --- without a server ------------------------------------------------------------------------------------------


def test_configuration_lists_each_client_with_its_access() -> None:
    configuration = render_configuration(
        "10.0.0.254", "10.0.0.253", "abc", 22004, {"10.0.0.2": False, "10.0.0.6": True, "10.0.0.10": False}, "240.1.1.1"
    )
    assert "CLIENT { Clients = 10.0.0.10, 10.0.0.2; Access_Type = RW; }" in configuration
    assert "CLIENT { Clients = 10.0.0.6; Access_Type = RO; }" in configuration
    assert "Bind_addr = 10.0.0.254; NFS_Port = 22004; MNT_Port = 22005;" in configuration
    assert "Export_Id = 1; Path = /abc; Pseudo = /abc; Access_Type = None;" in configuration
    read_only_configuration = render_configuration(
        "10.0.0.254", "10.0.0.253", "abc", 22004, {"10.0.0.6": True}, "240.1.1.1"
    )
    assert "Access_Type = RW" not in read_only_configuration


def test_marker_is_a_reserved_address_that_depends_on_the_clients() -> None:
    def make_marker(clients: dict[str, bool]) -> str:
        return derive_marker(ServerSettings("", 0, clients))

    markers = {make_marker({"10.0.0.2": read_only}) for read_only in (False, True)} | {make_marker({"10.0.0.6": False})}
    assert len(markers) == 3
    assert all(ipaddress.IPv4Address(each).is_reserved for each in markers)
    assert make_marker({"a": True, "b": False}) == make_marker({"b": False, "a": True})


def test_a_guest_has_the_same_mount_on_every_gateway() -> None:
    server_pools = [ServerPool(Network(subnet=f"10.{net}.0.0/24"), Path("/nowhere")) for net in (1, 2)]
    mount, other_mount = (pool.create_guest_mount("abc", 22004, "/data", False) for pool in server_pools)
    assert mount == other_mount
    assert (mount.source, mount.type, mount.path, mount.read_only) == (f"{GATEWAY_ADDRESS}:/abc", "nfs", "/data", False)
    options = mount.options.split(",")
    assert {"vers=3", "proto=tcp", "port=22004", "mountport=22005", "hard", "nolock"} <= set(options)
    assert server_pools[0].create_guest_mount("abd", 22006, "/data", True).source != mount.source


async def test_a_missing_server_program_is_reported_with_its_package(xfs_root: Path) -> None:
    async with setup(xfs_root) as s:
        servers = ServerPool(s.network, s.root / "others", ganesha="no-such-ganesha")
        volume, (slot, _) = await s.create_volume(), await s.create_guest()
        with pytest.raises(BackendFailed, match="install nfs-ganesha and nfs-ganesha-vfs"):
            await servers.serve(volume.id, volume.image, volume.port, {slot.host_address: False})


# --- use -------------------------------------------------------------------------------------------------------


async def test_writes_are_visible_to_other_sandboxes_and_in_the_image(xfs_root: Path) -> None:
    async with setup(xfs_root) as s:
        volume = await s.create_volume()
        (slot_a, guest_a), (slot_b, guest_b) = await s.create_guest(), await s.create_guest()
        await volume.serve({slot_a: False, slot_b: False})
        root = volume.mount_volume(guest_a)
        assert volume.mount_volume(guest_b) == root
        writer = volume.connect_nfs(guest_a)
        file = writer.create(root, "file")
        writer.write(file, b"hello", stable=nfs3.UNSTABLE)
        reader = volume.connect_nfs(guest_b)
        assert reader.read(reader.lookup(root, "file")) == b"hello"
        await s.servers.stop(volume.id)
        assert volume.read_contents("file") == b"hello", "data that the client did not commit was lost"
        await s.servers.stop(volume.id)


async def test_files_belong_to_the_users_of_the_sandbox(xfs_root: Path) -> None:
    async with setup(xfs_root) as s:
        volume, (slot, guest) = await s.create_volume(), await s.create_guest()
        await volume.serve({slot: False})
        root = volume.mount_volume(guest)
        root_client, user_client, other_client = (volume.connect_nfs(guest, uid=uid) for uid in (0, 1000, 1001))
        assert root_client.getattr(root).mode == 0o777
        private_file = user_client.create(root, "private", 0o600)
        assert (user_client.getattr(private_file).uid, user_client.getattr(private_file).gid) == (1000, 1000)
        assert get_nfs_status(other_client.read, private_file) == nfs3.ACCES
        root_client.write(private_file, b"from root")
        assert user_client.read(private_file) == b"from root"
        assert root_client.getattr(root_client.create(root, "of-root")).uid == 0
        assert get_nfs_status(root_client.lookup, root, "lost+found") == nfs3.NOENT


async def test_handles_survive_a_stopped_or_killed_server(xfs_root: Path) -> None:
    async with setup(xfs_root) as s:
        volume, (slot, guest) = await s.create_volume(), await s.create_guest()
        await volume.serve({slot: False})
        root = volume.mount_volume(guest)
        file = volume.connect_nfs(guest).create(root, "file")
        volume.connect_nfs(guest).write(file, b"before")
        await s.servers.stop(volume.id)
        # This changes the number of the next loop device, if the kernel assigns them in order.
        loop_device = run_command("losetup", "--find", "--show", str(volume.image)).strip()
        try:
            await volume.serve({slot: False})
        finally:
            run_command("losetup", "--detach", loop_device)
        assert volume.mount_volume(guest) == root
        assert volume.connect_nfs(guest).read(file) == b"before"

        first_pid = volume.pid
        await kill_process(first_pid)
        start = time.monotonic()
        while True:
            with contextlib.suppress(OSError):
                assert await asyncio.to_thread(lambda: volume.connect_nfs(guest, seconds=1).read(file)) == b"before"
                break
            assert time.monotonic() - start < 10
            await asyncio.sleep(0.02)
        assert volume.pid != first_pid


async def test_used_bytes_are_the_same_with_and_without_a_server(xfs_root: Path) -> None:
    async with setup(xfs_root) as s:
        volume, (slot, guest) = await s.create_volume(), await s.create_guest()
        assert await s.servers.count_used_bytes(volume.id, volume.image) < 1 << 20
        await volume.serve({slot: False})
        client = volume.connect_nfs(guest)
        file = client.create(volume.mount_volume(guest), "file")
        for chunk_number in range(32):
            client.write(file, os.urandom(1 << 17), chunk_number << 17)
        used_bytes_with_server = await s.servers.count_used_bytes(volume.id, volume.image)
        assert 4 << 20 <= used_bytes_with_server < 5 << 20
        await s.servers.stop(volume.id)
        assert abs(await s.servers.count_used_bytes(volume.id, volume.image) - used_bytes_with_server) < 1 << 18


@pytest.mark.parametrize("can_resize", [True, False])
async def test_a_volume_grows_while_in_use(xfs_root: Path, can_resize: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    if can_resize and not file_system.can_resize():
        pytest.skip("without CAP_SYS_RESOURCE, the kernel does not grow mounted file systems")
    monkeypatch.setattr(file_system, "can_resize", lambda: can_resize)

    async with setup(xfs_root) as s:
        volume, (slot, guest) = await s.create_volume(64), await s.create_guest()
        await s.servers.grow(volume.id)
        await volume.serve({slot: False})
        client = volume.connect_nfs(guest)
        root = volume.mount_volume(guest)
        file = client.create(root, "file")
        chunk = b"x" * (1 << 18)
        write_arguments = [(file, chunk, n << 18, nfs3.UNSTABLE) for n in range(280)]
        assert get_nfs_status(lambda: [client.write(*each) for each in write_arguments]) == nfs3.NOSPC
        os.truncate(volume.image, 192 << 20)
        await s.servers.grow(volume.id)
        second_client = volume.connect_nfs(guest)
        for each in write_arguments:
            second_client.write(*each)
        assert second_client.getattr(file).size == 280 << 18
        await s.servers.stop(volume.id)

        os.truncate(volume.image, 256 << 20)
        await volume.serve({slot: False})
        assert os.statvfs(f"/proc/{volume.pid}/root/{volume.id}").f_blocks * 4096 > 200 << 20


async def test_a_server_that_fails_after_growth_is_restarted(xfs_root: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(file_system, "can_resize", lambda: False)
    monkeypatch.setattr(server_pool, "_REPLACE_INTERVAL_SECONDS", 0.1)

    async with setup(xfs_root) as s:
        volume, (slot, guest) = await s.create_volume(), await s.create_guest()
        await volume.serve({slot: False})
        root = volume.mount_volume(guest)
        original_grow_offline = file_system.grow_offline

        async def fail_once(image: Path) -> None:
            monkeypatch.setattr(file_system, "grow_offline", original_grow_offline)
            raise BackendFailed("forced")

        monkeypatch.setattr(file_system, "grow_offline", fail_once)
        os.truncate(volume.image, 128 << 20)
        with pytest.raises(BackendFailed, match="forced"):
            await s.servers.grow(volume.id)
        for _ in range(2000):
            if s.servers._servers[volume.id].is_current:
                break
            await asyncio.sleep(0.02)
        await volume.serve({slot: False})
        assert volume.connect_nfs(guest).getattr(root).kind == 2


async def test_serving_an_invalid_file_system_fails_and_cleans_up(xfs_root: Path) -> None:
    async with setup(xfs_root) as s:
        volume, (slot, guest) = await s.create_volume(), await s.create_guest()
        volume.image.write_bytes(b"\0" * (64 << 20))
        with pytest.raises(BackendFailed, match=r"cannot be served: .*mount|is damaged"):
            await volume.serve({slot: False})
        assert list_files_of_loop_devices(s.root) == []
        assert not guest.can_reach(GATEWAY_ADDRESS, volume.port)


async def test_a_port_in_use_is_reported(xfs_root: Path) -> None:
    async with setup(xfs_root) as s:
        volume, (slot, _) = await s.create_volume(), await s.create_guest()
        with (
            run_inside(
                get_volume_namespace(s.network),
                lambda: socket.create_server((get_volume_address(s.network), volume.port)),
            ),
            pytest.raises(BackendFailed, match=r"cannot be served: .*bind"),
        ):
            await volume.serve({slot: False})
        await volume.serve({slot: False})


# --- access rights ---------------------------------------------------------------------------------------------


async def test_changed_permissions_apply_to_open_handles_and_connections(xfs_root: Path) -> None:
    async with setup(xfs_root) as s:
        volume = await s.create_volume()
        (slot_a, guest_a), (slot_b, guest_b) = await s.create_guest(), await s.create_guest()
        await volume.serve({slot_a: False})
        root = volume.mount_volume(guest_a)
        client = volume.connect_nfs(guest_a, seconds=0.7)
        file = client.create(root, "file")
        pid_before = volume.pid

        async def change_clients(clients: dict[Slot, bool]) -> None:
            start = time.monotonic()
            await volume.serve(clients)
            assert time.monotonic() - start < 2
            assert volume.pid == pid_before, "the server was replaced"

        await change_clients({slot_a: True})
        assert get_nfs_status(client.write, file, b"x") == nfs3.ROFS
        await change_clients({slot_a: False, slot_b: True})
        client.write(file, b"x")
        reader = volume.connect_nfs(guest_b, seconds=0.7)
        assert reader.read(file) == b"x"
        assert get_nfs_status(reader.write, file, b"y") == nfs3.ROFS
        await change_clients({slot_b: False})
        with pytest.raises(DISCONNECT_ERRORS):
            client.read(file)
        with pytest.raises(DISCONNECT_ERRORS):
            volume.connect_nfs(guest_a, seconds=0.7)
        reader.write(file, b"y")
        await change_clients({slot_a: True, slot_b: True})
        assert volume.connect_nfs(guest_a).read(file) == b"y"
        await volume.serve({})
        assert list_files_of_loop_devices(s.root) == []
        with pytest.raises(DISCONNECT_ERRORS):
            reader.read(file)


async def test_a_server_refuses_unknown_clients_that_the_firewall_accepts(xfs_root: Path) -> None:
    async with setup(xfs_root) as s:
        volume = await s.create_volume()
        (slot_a, guest_a), (slot_b, guest_b) = await s.create_guest(), await s.create_guest()
        await volume.serve({slot_a: False})
        root = volume.mount_volume(guest_a)
        # The host accepts the client, but the server must refuse it.
        access_elements = {f"{slot_b.host_address} . {port}" for port in (volume.port, volume.port + 1)}
        await s.servers._access.allow("other", access_elements)
        assert get_nfs_status(volume.mount_volume, guest_b) == nfs3.ACCES
        client = volume.connect_nfs(guest_b)
        for procedure in (client.getattr, client.read, lambda handle: client.create(handle, "file")):
            with pytest.raises(RpcRejected):
                procedure(root)
        with run_inside(guest_b.path, lambda: Mount(GATEWAY_ADDRESS, volume.port + 1)) as mount:
            assert mount.exports() == []


async def test_a_read_only_client_cannot_change_anything(xfs_root: Path) -> None:
    async with setup(xfs_root) as s:
        volume = await s.create_volume()
        (slot_a, guest_a), (slot_b, guest_b) = await s.create_guest(), await s.create_guest()
        await volume.serve({slot_a: False, slot_b: True})
        root = volume.mount_volume(guest_a)
        file = volume.connect_nfs(guest_a).create(root, "file", 0o666)
        volume.connect_nfs(guest_a).write(file, b"unchanged")
        for uid in (0, 1000):
            reader = volume.connect_nfs(guest_b, uid=uid)
            for procedure, *arguments in (
                (reader.write, file, b"changed"),
                (reader.truncate, file, 0),
                (reader.create, root, "new"),
                (reader.mkdir, root, "new"),
                (reader.symlink, root, "new", "/etc/passwd"),
                (reader.mknod, root, "new", 8, 0),
                (reader.remove, root, "file"),
                (reader.rename, root, "file", root, "new"),
            ):
                assert get_nfs_status(procedure, *arguments) == nfs3.ROFS
            assert reader.read(file) == b"unchanged"
            assert get_nfs_status(reader.lookup, root, "new") == nfs3.NOENT


async def test_clients_can_use_any_source_port(xfs_root: Path) -> None:
    async with setup(xfs_root) as s:
        volume, (slot, guest) = await s.create_volume(), await s.create_guest()
        await volume.serve({slot: False})
        for source in (700, 40700):
            root = volume.mount_volume(guest, source=source + 1)
            assert volume.connect_nfs(guest, source=source).getattr(root).kind == 2


# --- hostile guests --------------------------------------------------------------------------------------------


async def test_no_path_leads_out_of_the_volume(xfs_root: Path) -> None:
    async with setup(xfs_root) as s:
        volume, other_volume = await s.create_volume(), await s.create_volume()
        (slot_a, guest), (slot_b, _) = await s.create_guest(), await s.create_guest()
        await volume.serve({slot_a: False})
        await other_volume.serve({slot_b: False})
        for path in (
            "/",
            "",
            "/usr",
            "/proc",
            f"/{other_volume.id}",
            f"/{volume.id}/..",
            f"/{volume.id}/../usr",
            "usr",
        ):
            assert get_nfs_status(volume.mount_volume, guest, path or "/.") != nfs3.OK
        with pytest.raises(DISCONNECT_ERRORS):
            other_volume.mount_volume(guest, seconds=0.7)
        client = volume.connect_nfs(guest)
        root = volume.mount_volume(guest)
        assert client.lookup(root, "..") == root
        client.symlink(root, "out", "/usr")
        assert get_nfs_status(volume.mount_volume, guest, f"/{volume.id}/out") != nfs3.OK
        link_handle = client.lookup(root, "out")
        assert client.getattr(link_handle).kind == 5, "lookup followed the symbolic link"
        assert get_nfs_status(client.lookup, link_handle, "bin") != nfs3.OK
        # The server passes names with slashes, which no normal client sends, to the kernel.
        for name in (
            "/usr",
            "../usr",
            "out/bin",
            "/etc/hosts",
            "/proc/self/root",
            "/dev/null",
            "/ganesha.conf",
            "/host",
        ):
            assert get_nfs_status(client.lookup, root, name) != nfs3.OK
        for name in ("/new", "../new", "/etc/hosts", "/ganesha.conf", "/run/new", f"/{volume.id}/../new"):
            for procedure in (client.create, client.mkdir):
                assert get_nfs_status(procedure, root, name) != nfs3.OK
            assert get_nfs_status(client.symlink, root, name, "x") != nfs3.OK
        assert get_nfs_status(client.remove, root, "/ganesha.conf") != nfs3.OK
        client.create(root, "file")
        for name in ("/ganesha.conf", "../ganesha.conf"):
            assert get_nfs_status(client.rename, root, "file", root, name) != nfs3.OK
            assert get_nfs_status(client.rename, root, name, root, "stolen") != nfs3.OK
        assert get_nfs_status(client.mknod, root, "disk", 8, 0) == nfs3.PERM
        assert volume.mount_volume(guest) == root, "the server no longer answers"


async def test_no_handle_leads_out_of_the_volume(xfs_root: Path) -> None:
    async with setup(xfs_root) as s:
        volume, other_volume = await s.create_volume(), await s.create_volume()
        (slot_a, guest_a), (slot_b, guest_b) = await s.create_guest(), await s.create_guest()
        await other_volume.serve({slot_b: False})
        other_root = other_volume.mount_volume(guest_b)
        secret_file = other_volume.connect_nfs(guest_b).create(other_root, "secret")
        other_volume.connect_nfs(guest_b).write(secret_file, b"secret")

        await volume.serve({slot_a: False})
        root = volume.mount_volume(guest_a)
        volume.connect_nfs(guest_a).create(root, "public")
        inode_numbers = {volume.connect_nfs(guest_a).getattr(root).fileid, 12}

        def check_handle(handle: bytes) -> None:
            """Check that a forged handle is refused or refers to a file of this volume."""
            client = volume.connect_nfs(guest_a)
            try:
                attributes = client.getattr(handle)
            except (NfsError, RpcRejected, OSError):
                return
            assert attributes.fsid == client.getattr(root).fsid
            assert attributes.fileid in inode_numbers | {8}, handle.hex()
            assert get_nfs_status(client.lookup, handle, "secret") != nfs3.OK
            with contextlib.suppress(NfsError):
                assert client.read(handle) != b"secret"

        id_offset = root.index(get_filesystem_id(f"/proc/{volume.pid}/root/{volume.id}"))
        check_handle(other_root)
        check_handle(secret_file)
        for index in range(len(root)):
            for change in (0x01, 0x80, 0xFF):
                check_handle(root[:index] + bytes([root[index] ^ change]) + root[index + 1 :])
        # Other file systems: the host's own, by their number and root.
        for path in ("/usr", "/", str(s.root), "/proc", "/dev", f"/proc/{volume.pid}/root"):
            for inode in (2, 1, 64, 128, os.lstat(path).st_ino & 0xFFFFFFFF):
                forged_handle = root[:id_offset] + get_filesystem_id(path) + b"\x01" + struct.pack("<II", inode, 0)
                check_handle(forged_handle.ljust(len(root), b"\0"))
        for handle in (b"", b"\0" * 64, b"\xff" * 64, root[:5], root * 2, os.urandom(64)):
            check_handle(handle)
        assert volume.connect_nfs(guest_a).getattr(root).kind == 2, "the server no longer answers"


def get_filesystem_id(path: str) -> bytes:
    """Return the ID of the file system at ``path`` as it appears in file handles."""
    return struct.pack("<Q", os.statvfs(path).f_fsid)


async def test_the_handle_of_a_removed_file_is_stale(xfs_root: Path) -> None:
    async with setup(xfs_root) as s:
        volume, (slot, guest) = await s.create_volume(), await s.create_guest()
        await volume.serve({slot: False})
        root = volume.mount_volume(guest)
        client = volume.connect_nfs(guest)
        file = client.create(root, "file")
        client.write(file, b"old")
        client.remove(root, "file")
        other_file = client.create(root, "another")
        client.write(other_file, b"new")
        assert get_nfs_status(client.read, file) == nfs3.STALE


async def test_handles_after_a_rollback_refer_to_existing_files(xfs_root: Path) -> None:
    async with setup(xfs_root) as s:
        volume, (slot, guest) = await s.create_volume(), await s.create_guest()
        await volume.serve({slot: False})
        root = volume.mount_volume(guest)
        captured_file = volume.connect_nfs(guest).create(root, "captured")
        volume.connect_nfs(guest).write(captured_file, b"old")
        old_image = volume.image.with_suffix(".old")
        async with s.servers.frozen(volume.id):
            reflink.clone(volume.image, old_image)
        volume.connect_nfs(guest).write(captured_file, b"new")
        late_file = volume.connect_nfs(guest).create(root, "late")
        await s.servers.stop(volume.id)
        old_image.rename(volume.image)
        await volume.serve({slot: False})
        client = volume.connect_nfs(guest)
        assert client.read(captured_file) == b"old"
        assert get_nfs_status(client.read, late_file) == nfs3.STALE
        client.write(client.create(root, "later"), b"other")
        assert get_nfs_status(client.read, late_file) == nfs3.STALE, (
            "the handle refers to a new file with the same inode"
        )


async def test_a_server_serves_only_nfs_3_and_mount(xfs_root: Path) -> None:
    async with setup(xfs_root) as s:
        volume, (slot, guest) = await s.create_volume(), await s.create_guest()
        await volume.serve({slot: False})
        for port in (volume.port, volume.port + 1):
            with run_inside(guest.path, lambda port=port: nfs3.Connection(GATEWAY_ADDRESS, port)) as connection:
                for program, version in ((nfs3.NFS, 4), (nfs3.NLM, 4), (nfs3.RQUOTA, 1), (nfs3.PORTMAP, 2)):
                    with pytest.raises((RpcRejected, ConnectionError)):
                        connection.call(program, version, 0)
        for port in (111, 2049, 20048):
            assert not guest.can_reach(GATEWAY_ADDRESS, port)
        socket_lines = run_command("nsenter", f"--net={get_volume_namespace(s.network)}", "ss", "-Hlnptu").splitlines()
        sockets = [line.split() for line in socket_lines if f"pid={volume.pid}," in line]
        address = get_volume_address(s.network)
        assert sorted(fields[4].replace("[::ffff:", "").replace("]", "") for fields in sockets) == [
            f"{address}:{volume.port}",
            f"{address}:{volume.port + 1}",
        ]
        assert all(fields[0] == "tcp" for fields in sockets)


def list_foreign_descriptors(proc_directory: Path, volume_id: str) -> list[str]:
    """Return the targets of a server's open descriptors that would give it access to files of the host."""
    own_devices = {(proc_directory / "root" / path).stat().st_dev for path in ("", volume_id)}
    foreign_targets = []
    for descriptor in (proc_directory / "fd").iterdir():
        target, status = str(descriptor.readlink()), descriptor.stat()
        is_harmless = target == "/ganesha.pid" or target.startswith(("socket:", "pipe:", "anon_inode:", "/memfd:log "))
        if (
            not (is_harmless or status.st_dev in own_devices)
            or stat.S_ISBLK(status.st_mode)
            or stat.S_ISCHR(status.st_mode)
        ):
            foreign_targets.append(target)
    return foreign_targets


async def test_a_server_has_no_access_to_the_host(xfs_root: Path) -> None:
    async with setup(xfs_root) as s:
        volume, (slot, guest) = await s.create_volume(), await s.create_guest()
        await volume.serve({slot: False})
        volume.connect_nfs(guest).create(volume.mount_volume(guest), "file")
        proc_directory = Path(f"/proc/{volume.pid}")
        mounts = {
            fields[1]: fields
            for fields in (line.split() for line in (proc_directory / "mounts").read_text().splitlines())
        }
        assert mounts.keys() == {"/", f"/{volume.id}"}
        assert mounts["/"][2] == "tmpfs"
        assert "ro" in mounts["/"][3].split(",")
        assert {"nosuid", "nodev", "noexec"} <= set(mounts[f"/{volume.id}"][3].split(","))
        assert list_foreign_descriptors(proc_directory, volume.id) == []
        status = dict(
            line.split(":\t", 1) for line in (proc_directory / "status").read_text().splitlines() if ":\t" in line
        )
        assert int(status["CapBnd"], 16) == int(status["CapEff"], 16) == 0b11011111
        assert status["NoNewPrivs"] == "1"
        limits = (proc_directory / "limits").read_text().splitlines()
        assert next(line.split()[3] for line in limits if line.startswith("Max data size")) == str(768 << 20)
        for namespace in ("mnt", "pid", "ipc", "uts", "net"):
            assert not (proc_directory / "ns" / namespace).samefile(f"/proc/self/ns/{namespace}")
        assert int(status["Threads"]) < 40


async def test_clients_cannot_reach_a_server_before_it_is_isolated(
    xfs_root: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    async with setup(xfs_root) as s:
        volume, (slot, guest) = await s.create_volume(), await s.create_guest()
        elements_before_ready: list[str] = []
        original_wait_until_ready = ServerStarter._wait_until_ready

        async def wait_and_record_access(*arguments: Any) -> None:
            await original_wait_until_ready(*arguments)
            elements_before_ready.append(
                run_command("nft", "list", "set", "inet", get_host_table(s.network), VOLUME_ACCESS)
            )

        monkeypatch.setattr(ServerStarter, "_wait_until_ready", wait_and_record_access)
        await volume.serve({slot: False})
        root = volume.mount_volume(guest)
        os.kill(volume.pid, signal.SIGSTOP)
        await volume.serve({slot: True})  # The stopped server does not answer, so it is replaced.
        assert volume.connect_nfs(guest).getattr(root).kind == 2
        await kill_process(volume.pid)
        for _ in range(2000):
            if len(elements_before_ready) == 3:
                break
            await asyncio.sleep(0.02)
        assert len(elements_before_ready) == 3
        assert not any(slot.host_address in elements for elements in elements_before_ready)
        await volume.serve({slot: True})
        assert slot.host_address in run_command("nft", "list", "set", "inet", get_host_table(s.network), VOLUME_ACCESS)


async def test_a_server_that_cannot_be_reached_is_reported_with_the_subnet(
    xfs_root: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(server_start, "_START_TIMEOUT_SECONDS", 2.0)
    async with setup(xfs_root) as other:
        network_settings = session.allocate_network()
        monkeypatch.setattr(session, "allocate_network", lambda: {**network_settings, "subnet": other.network.subnet})
        async with setup(xfs_root) as s:
            volume, (slot, _) = await s.create_volume(), await s.create_guest()
            with pytest.raises(Timeout, match=f"did not answer within 2 s.*nothing else on it uses {s.network.subnet}"):
                await volume.serve({slot: False})


async def test_a_server_that_is_not_isolated_is_not_adopted(xfs_root: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    async with setup(xfs_root) as s:
        volume, (slot, _) = await s.create_volume(), await s.create_guest()
        await volume.serve({slot: False})
        monkeypatch.setattr(ServerProcess, "is_isolated", lambda server, namespace: False)
        await s.crash()
        assert len(await s.servers.open({volume.id})) == 1
        await wait_for_loop_devices(s.root)
        with pytest.raises(BackendFailed, match="cannot be served"):
            await volume.serve({slot: False})
        await wait_for_loop_devices(s.root)


# --- frozen servers --------------------------------------------------------------------------------------------


async def test_a_frozen_volume_does_not_change_and_its_clone_is_complete(xfs_root: Path) -> None:
    async with setup(xfs_root) as s:
        volume, (slot, guest) = await s.create_volume(), await s.create_guest()
        clone = volume.image.with_suffix(".clone")
        async with s.servers.frozen(volume.id):
            pass  # This does nothing, because there is no server.
        await volume.serve({slot: False})
        root = volume.mount_volume(guest)
        client = volume.connect_nfs(guest, seconds=30)
        file = client.create(root, "file")
        client.write(file, b"before", stable=nfs3.UNSTABLE)
        await s.servers.flush(volume.id)
        async with s.servers.frozen(volume.id):
            late_client = volume.connect_nfs(guest, seconds=0.5)
            with pytest.raises(TimeoutError):
                late_client.write(file, b"within", stable=nfs3.UNSTABLE)
            reflink.clone(volume.image, clone)
        assert client.read(file) in (b"within", b"before")
        client.write(file, b"after!")

        clone_volume = Volume(s, clone, VOLUME_PORTS[-1])
        await clone_volume.serve({slot: False})
        assert (
            clone_volume.connect_nfs(guest).read(
                clone_volume.connect_nfs(guest).lookup(clone_volume.mount_volume(guest), "file")
            )
            == b"before"
        )
        await s.servers.stop(clone_volume.id)
        run_command("e2fsck", "-fn", str(clone))


async def test_a_failure_while_frozen_resumes_the_server(xfs_root: Path) -> None:
    async with setup(xfs_root) as s:
        volume, (slot, guest) = await s.create_volume(), await s.create_guest()
        await volume.serve({slot: False})
        root = volume.mount_volume(guest)
        with pytest.raises(ZeroDivisionError):
            async with s.servers.frozen(volume.id):
                raise ZeroDivisionError
        assert volume.connect_nfs(guest).getattr(root).kind == 2


async def test_a_clone_is_a_point_in_time_copy_of_a_changing_volume(xfs_root: Path) -> None:
    """A client creates numbered files, each of which contains its number. A clone must contain the first n files."""

    async with setup(xfs_root) as s:
        volume, (slot, guest) = await s.create_volume(), await s.create_guest()
        await volume.serve({slot: False})
        root = volume.mount_volume(guest)
        should_stop = False

        def write_files() -> int:
            client = volume.connect_nfs(guest, seconds=30)
            number = 0
            while not should_stop:
                client.write(client.create(root, f"n{number}"), f"{number}".encode(), stable=nfs3.FILE_SYNC)
                number += 1
            return number

        writer = asyncio.ensure_future(asyncio.to_thread(write_files))
        clones = []
        for number in range(4):
            await asyncio.sleep(0.15)
            clones.append(volume.image.with_suffix(f".{number}"))
            async with s.servers.frozen(volume.id):
                reflink.clone(volume.image, clones[-1])
        should_stop = True
        file_count = await writer
        previous_count = 0
        for clone_number, clone in enumerate(clones):
            clone_volume = Volume(s, clone, VOLUME_PORTS[-1 - clone_number])
            await clone_volume.serve({slot: False})
            client, copy_root = clone_volume.connect_nfs(guest), clone_volume.mount_volume(guest)
            copied_count = 0
            while get_nfs_status(client.lookup, copy_root, f"n{copied_count}") == nfs3.OK:
                copied_count += 1
            assert previous_count < copied_count <= file_count
            contents = [client.read(client.lookup(copy_root, f"n{number}")) for number in range(copied_count)]
            assert contents[:-1] == [f"{number}".encode() for number in range(copied_count - 1)]
            assert contents[-1] in (b"", f"{copied_count - 1}".encode()), "only the last file may still be empty"
            assert get_nfs_status(client.lookup, copy_root, f"n{copied_count + 1}") == nfs3.NOENT
            previous_count = copied_count
            await s.servers.stop(clone_volume.id)


# --- crashes ---------------------------------------------------------------------------------------------------


async def test_a_new_gateway_adopts_the_servers_of_known_volumes(xfs_root: Path) -> None:
    async with setup(xfs_root) as s:
        known_volume, unknown_volume = await s.create_volume(), await s.create_volume()
        slot, guest = await s.create_guest()
        for volume in (known_volume, unknown_volume):
            await volume.serve({slot: False})
        root, pid = known_volume.mount_volume(guest), known_volume.pid
        client = known_volume.connect_nfs(guest)
        unknown_pidfd = os.pidfd_open(unknown_volume.pid)
        await s.crash()
        file = client.create(root, "file")

        await apply_on_host(build_host_rules(s.network))  # SlotPool.open does this before servers are adopted.
        repaired = await s.servers.open({known_volume.id})
        assert repaired == [f"stopped a server for volume {unknown_volume.id} that could not be adopted"]
        assert select.select([unknown_pidfd], [], [], 0)[0]
        os.close(unknown_pidfd)
        assert list_files_of_loop_devices(s.root) == [str(known_volume.image)]
        client.write(file, b"unchanged")
        await known_volume.serve({slot: True})
        assert known_volume.pid == pid
        assert get_nfs_status(client.write, file, b"x") == nfs3.ROFS
        assert sorted(path.name for path in (s.root / "servers").iterdir()) == [known_volume.id]

        await s.servers.close()
        assert client.read(file) == b"unchanged"


async def test_a_new_gateway_resumes_frozen_servers(xfs_root: Path) -> None:
    async with setup(xfs_root) as s:
        volume, (slot, guest) = await s.create_volume(), await s.create_guest()
        await volume.serve({slot: False})
        root, pid = volume.mount_volume(guest), volume.pid
        freeze_context = s.servers.frozen(volume.id)
        await freeze_context.__aenter__()
        await s.crash()
        with pytest.raises(TimeoutError):
            volume.connect_nfs(guest, seconds=0.4).getattr(root)
        await s.servers.open({volume.id})
        assert volume.connect_nfs(guest).getattr(root).kind == 2
        assert volume.pid == pid
        with contextlib.suppress(GeneratorExit, RuntimeError, OSError):
            await freeze_context.__aexit__(None, None, None)


async def test_a_server_that_dies_with_the_gateway_loses_no_data(xfs_root: Path) -> None:
    async with setup(xfs_root) as s:
        volume, (slot, guest) = await s.create_volume(), await s.create_guest()
        await volume.serve({slot: False})
        root, pid = volume.mount_volume(guest), volume.pid
        volume.connect_nfs(guest).write(volume.connect_nfs(guest).create(root, "file"), b"data", stable=nfs3.UNSTABLE)
        os.kill(pid, signal.SIGSTOP)  # As during a capture.
        await s.crash()
        os.kill(pid, signal.SIGKILL)
        await wait_for_loop_devices(s.root)
        assert volume.read_contents("file") == b"data"
        assert await s.servers.open({volume.id}) == []
        assert list((s.root / "servers").iterdir()) == []
        await volume.serve({slot: False})
        assert volume.mount_volume(guest) == root


async def test_a_hung_server_is_replaced_or_stopped_within_seconds(xfs_root: Path) -> None:
    async with setup(xfs_root) as s:
        volume, (slot, guest), (other_slot, _) = await s.create_volume(), await s.create_guest(), await s.create_guest()
        await volume.serve({slot: False})
        root, pid = volume.mount_volume(guest), volume.pid
        os.kill(pid, signal.SIGSTOP)
        start = time.monotonic()
        await volume.serve({slot: False, other_slot: True})
        assert time.monotonic() - start < 10
        assert volume.pid != pid
        assert volume.connect_nfs(guest).getattr(root).kind == 2
        os.kill(volume.pid, signal.SIGSTOP)
        start = time.monotonic()
        await volume.serve({})
        assert time.monotonic() - start < 5
        assert list_files_of_loop_devices(s.root) == []


async def test_a_cancelled_start_leaves_no_loop_device(xfs_root: Path) -> None:
    async with setup(xfs_root) as s:
        volume, (slot, guest) = await s.create_volume(), await s.create_guest()
        for delay in (0.0, 0.02, 0.05, 0.08, 0.12):
            serve_task = asyncio.ensure_future(volume.serve({slot: False}))
            await asyncio.sleep(delay)
            serve_task.cancel()
            with contextlib.suppress(asyncio.CancelledError):
                await serve_task
                await s.servers.stop(volume.id)
            await wait_for_loop_devices(s.root)
        await volume.serve({slot: False})
        assert volume.connect_nfs(guest).getattr(volume.mount_volume(guest)).kind == 2


async def test_an_image_is_never_mounted_twice(xfs_root: Path) -> None:
    async with setup(xfs_root) as s:
        volume, (slot, _) = await s.create_volume(), await s.create_guest()
        await volume.serve({slot: False})
        duplicate_volume = Volume(s, volume.image, VOLUME_PORTS[-1])
        with pytest.raises(BackendFailed, match="in use by an earlier server"):
            await duplicate_volume.serve({slot: False})
        assert list_files_of_loop_devices(s.root) == [str(volume.image)]
