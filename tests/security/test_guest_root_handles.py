"""Root in a virtual machine uses a custom NFS client to attack another sandbox's volume.

The attacker knows everything that the other sandbox knows about its volume: file handles, the export name, ports and
addresses. Tests in `tests/kvm_xfs` cover invalid handles and paths.
"""

from __future__ import annotations

import contextlib
from collections.abc import AsyncIterator
from pathlib import Path

import pytest

from sandbox_gateway.hosts.kvm_xfs.network.addresses import GATEWAY_ADDRESS, Slot, get_volume_address
from sandbox_gateway.hosts.kvm_xfs.volumes.file_system import format_image
from sandbox_gateway.records import new_id
from tests.kvm_xfs.slot_networks import Guest, run_inside
from tests.kvm_xfs.volume_clients import DISCONNECT_ERRORS, Setup, Volume, get_nfs_status, setup
from tests.support import nfs3
from tests.support.nfs3 import Mount, Nfs, NfsError, RpcRejected

pytestmark = pytest.mark.usefixtures("requires_root")

REFUSAL_ERRORS = (NfsError, RpcRejected, *DISCONNECT_ERRORS, OSError)
SECRET = b"of another sandbox"


class Victim:
    """A volume with a secret, and the sandbox that mounts it. The attacker knows all of the volume's handles."""

    def __init__(self, slot: Slot, guest: Guest, volume: Volume) -> None:
        self.slot, self.guest, self.volume = slot, guest, volume
        self.root_handle = volume.mount_volume(guest)
        self.file_handle = volume.connect_nfs(guest).create(self.root_handle, "secret")
        volume.connect_nfs(guest).write(self.file_handle, SECRET)

    def check_intact(self) -> None:
        client = self.volume.connect_nfs(self.guest)
        assert client.read(self.file_handle) == SECRET
        assert get_nfs_status(client.lookup, self.root_handle, "planted") == nfs3.NOENT


@contextlib.asynccontextmanager
async def created_victim(xfs_root: Path) -> AsyncIterator[tuple[Setup, Victim]]:
    async with setup(xfs_root) as s:
        slot, guest = await s.create_guest()
        volume = await s.create_volume()
        await volume.serve({slot: False})
        yield s, Victim(slot, guest, volume)


def check_all_procedures_fail(client: Nfs, victim: Victim) -> None:
    """Check that all procedures that would reveal or change data fail with the victim's handles."""
    for attempt in (
        lambda: client.getattr(victim.root_handle),
        lambda: client.lookup(victim.root_handle, "secret"),
        lambda: client.read(victim.file_handle),
        lambda: client.write(victim.file_handle, b"stolen"),
        lambda: client.truncate(victim.file_handle, 0),
        lambda: client.create(victim.root_handle, "planted"),
        lambda: client.mkdir(victim.root_handle, "planted"),
        lambda: client.symlink(victim.root_handle, "planted", "/"),
        lambda: client.remove(victim.root_handle, "secret"),
        lambda: client.rename(victim.root_handle, "secret", victim.root_handle, "planted"),
        lambda: client.commit(victim.file_handle),
    ):
        with pytest.raises(REFUSAL_ERRORS):
            attempt()


@pytest.mark.parametrize("uid", [0, 1000, 65534])
async def test_handles_of_another_volume_are_invalid(xfs_root: Path, uid: int) -> None:
    async with created_victim(xfs_root) as (s, victim):
        slot, attacker = await s.create_guest()
        own_volume = await s.create_volume()
        await own_volume.serve({slot: False})
        root_handle = own_volume.mount_volume(attacker)
        check_all_procedures_fail(own_volume.connect_nfs(attacker, uid=uid), victim)
        client = own_volume.connect_nfs(attacker)
        file_handle = client.create(root_handle, "own")
        for attempt in (
            lambda: client.rename(root_handle, "own", victim.root_handle, "planted"),
            lambda: client.rename(victim.root_handle, "secret", root_handle, "stolen"),
        ):
            with pytest.raises(REFUSAL_ERRORS):
                attempt()
        # Combine two handles: the volume of one and the file of the other.
        for offset in range(4, len(victim.file_handle)):
            forged_handles = (
                file_handle[:offset] + victim.file_handle[offset:],
                victim.file_handle[:offset] + file_handle[offset:],
            )
            for handle in forged_handles:
                with contextlib.suppress(*REFUSAL_ERRORS):
                    assert client.read(handle) != SECRET
        assert client.getattr(file_handle).kind == 1, "the server still works"
        victim.check_intact()


async def test_ports_of_another_volume_are_unreachable_at_every_address(xfs_root: Path) -> None:
    async with created_victim(xfs_root) as (s, victim):
        slot, attacker = await s.create_guest()
        own_volume = await s.create_volume()
        await own_volume.serve({slot: False})
        own_volume.mount_volume(attacker)
        ports = (victim.volume.port, victim.volume.port + 1)
        gateway_addresses = (
            GATEWAY_ADDRESS,
            get_volume_address(s.network),
            victim.slot.veth_address,
            victim.slot.host_address,
        )
        for address in (*gateway_addresses, slot.veth_address, slot.host_address):
            for port in ports:
                for source in (0, 700):
                    with pytest.raises((*DISCONNECT_ERRORS, OSError)):
                        run_inside(
                            attacker.path,
                            lambda address=address, port=port, source=source: Nfs(
                                address, port, seconds=0.4, source=source
                            ),
                        )
        # Not even the attacker's own volume is reachable at the address of the servers.
        with pytest.raises((*DISCONNECT_ERRORS, OSError)):
            run_inside(attacker.path, lambda: Mount(get_volume_address(s.network), own_volume.port + 1, seconds=0.4))
        victim.check_intact()


async def test_another_volumes_export_cannot_be_mounted(xfs_root: Path) -> None:
    async with created_victim(xfs_root) as (s, victim):
        slot, attacker = await s.create_guest()
        own_volume = await s.create_volume()
        await own_volume.serve({slot: False})
        victim_id = victim.volume.id
        for path in (
            f"/{victim_id}",
            victim_id,
            f"/{own_volume.id}/../{victim_id}",
            f"//{victim_id}",
            "/" * 1000,
        ):
            assert get_nfs_status(own_volume.mount_volume, attacker, path) != nfs3.OK
        # As a C string, this is the attacker's own volume.
        assert own_volume.mount_volume(attacker, f"/{own_volume.id}\0/{victim_id}") == own_volume.mount_volume(attacker)
        with run_inside(attacker.path, lambda: Mount(GATEWAY_ADDRESS, own_volume.port + 1)) as mount:
            assert victim_id not in str(mount.exports())
        victim.check_intact()


async def test_handles_are_invalid_after_the_port_is_reused(xfs_root: Path) -> None:
    """A sandbox keeps a volume's handles. Later, another volume's server uses the same port."""

    async with created_victim(xfs_root) as (s, victim):
        slot, new_owner = await s.create_guest()
        await victim.volume.serve({slot: False})
        new_owner_client = victim.volume.connect_nfs(new_owner)
        assert new_owner_client.read(victim.file_handle) == SECRET, "the volume now belongs to the new owner"
        with pytest.raises(DISCONNECT_ERRORS):
            victim.volume.connect_nfs(victim.guest, seconds=0.4)
        await victim.volume.serve({})
        later_volume = Volume(s, s.root / f"{new_id()}.img", victim.volume.port)
        await format_image(later_volume.image, later_volume.id, 64)
        await later_volume.serve({slot: False, victim.slot: False})
        root_handle = later_volume.mount_volume(new_owner)
        later_volume.connect_nfs(new_owner).write(
            later_volume.connect_nfs(new_owner).create(root_handle, "secret"), b"of the later one"
        )
        check_all_procedures_fail(later_volume.connect_nfs(victim.guest), victim)
        assert get_nfs_status(later_volume.connect_nfs(new_owner).lookup, root_handle, "planted") == nfs3.NOENT
        assert (
            later_volume.connect_nfs(new_owner).read(later_volume.connect_nfs(new_owner).lookup(root_handle, "secret"))
            == b"of the later one"
        )
