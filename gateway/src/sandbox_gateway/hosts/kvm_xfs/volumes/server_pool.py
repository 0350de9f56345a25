"""Serve volumes to guests: one nfs-ganesha process (NFSv3) for each mounted volume.

A server runs in a mount namespace that contains only its volume's file system (`launcher`). So names or handles that a
guest forges cannot lead to other files, and nothing remains mounted when the server exits. Servers share a separate
network namespace, in which they cannot open connections to other machines (`network`). They have control groups and a
seccomp filter (`seccomp`), and run as root with only the capabilities to act on behalf of users in the guests. A server
outlives the gateway; the next gateway finds it by its command line, or by its network
namespace if it has changed its command line.

A guest mounts a volume through the volume's ports at the address of its gateway. These ports and this address never
change. Handles are derived from the file system's UUID and inodes, so they are valid for every later server of the
volume. A server can therefore be replaced while guests use it: they wait and then continue, and forks keep the open
files of their source. After a rollback, the handle of a file that is no longer in the image is stale (ESTALE); other
handles remain valid.

Access is checked in two places: the host accepts only packets whose source address and destination port are in a set of
its nftables table (`access`), and the server checks each client's address and whether the client may write. The server
shows the list of its clients to each client (in the MOUNT protocol's list of exports). So that sandboxes do not learn
each other's addresses, the host translates the source addresses of packets to aliases.

The server reloads its configuration on SIGHUP. The new configuration then applies to every request, even on open
connections. It contains a marker: an impossible client address, which appears in the list of exports and shows which
configuration is in effect.
"""

from __future__ import annotations

import asyncio
import contextlib
import signal
from collections.abc import AsyncIterator, Mapping
from contextlib import AbstractAsyncContextManager
from pathlib import Path
from weakref import WeakValueDictionary

from sandbox_gateway.config import Network
from sandbox_gateway.errors import BackendFailed, GatewayError
from sandbox_gateway.hosts.base import GuestMount
from sandbox_gateway.hosts.kvm_xfs.bounded_log import open_process_log
from sandbox_gateway.hosts.kvm_xfs.network.addresses import GATEWAY_ADDRESS
from sandbox_gateway.hosts.kvm_xfs.volumes import file_system
from sandbox_gateway.hosts.kvm_xfs.volumes.access import Aliases, VolumeAccess
from sandbox_gateway.hosts.kvm_xfs.volumes.launcher import BLOCK_BYTES, read_block_counts
from sandbox_gateway.hosts.kvm_xfs.volumes.server_process import (
    ServerProcess,
    ServerSettings,
    find_servers,
    load_settings,
)
from sandbox_gateway.hosts.kvm_xfs.volumes.server_start import ServerStarter
from sandbox_gateway.hosts.threads import run_with_timeout
from sandbox_gateway.hosts.tree_removal import remove_tree
from sandbox_gateway.log import Logger
from sandbox_gateway.tasks import BackgroundTasks

_STOP_TIMEOUT_SECONDS = 10.0
_SYNC_TIMEOUT_SECONDS = 30.0
_USAGE_TIMEOUT_SECONDS = 2.0
_REPLACE_INTERVAL_SECONDS = 5.0

log = Logger("volumes")


class ServerPool:
    """Manages the servers of one gateway. ``volume`` is always a volume's id, ``port`` one of ``VOLUME_PORTS``.

    ``VOLUME_PORTS`` is a range with step 2: a volume permanently owns ``port`` (NFS) and ``port + 1`` (MOUNT), which no
    other volume of the gateway may use. All methods return, or raise BackendFailed or Timeout, within bounded time.
    """

    def __init__(self, network: Network, run_root: Path, ganesha: str = "ganesha.nfsd") -> None:
        """Create an empty pool. ``run_root``: directory of the servers' files, which ``open`` creates if necessary."""
        aliases = Aliases(network)
        self._access = VolumeAccess(network, aliases)
        self._starter = ServerStarter(network, run_root, ganesha, aliases)
        self._root = run_root
        self._servers: dict[str, ServerProcess] = {}
        self._locks: WeakValueDictionary[str, asyncio.Lock] = WeakValueDictionary()
        self._replacements = BackgroundTasks(log)

    # -- start and stop ---------------------------------------------------------------------------------------------

    async def open(self, known_volumes: set[str]) -> list[str]:
        """Adopt the running servers in ``run_root`` whose volume is in ``known_volumes``, and stop all other servers.

        Call this after ``SlotPool.open``, which recreates the namespace and the rules. Returns sentences for
        ``Scan.repaired``. An adopted server keeps its clients until ``serve`` is called.
        """
        self._root.mkdir(mode=0o700, parents=True, exist_ok=True)
        self._access.clear()
        repaired: list[str] = []
        stopped_volumes: set[str] = set()
        for found_server in find_servers(self._root, self._starter.namespace):
            volume = found_server.volume
            settings = load_settings(self._root / volume)
            server = ServerProcess(
                volume, found_server.pid, settings or ServerSettings("", 0, {}), pidfd=found_server.pidfd
            )
            if (
                found_server.is_serving
                and settings
                and volume in known_volumes
                and volume not in self._servers
                and server.is_isolated(self._starter.namespace)
            ):
                server.send_signal(signal.SIGCONT)  # If a gateway died during a capture, the server is still frozen.
                with contextlib.suppress(OSError):
                    server.log = open_process_log(found_server.pid)
                self._watch(server)
                self._starter.limit(server)
                await self._access.allow(volume, settings.list_access_pairs())
                continue
            name = f"a server for volume {volume}" if volume else "an unknown server"
            repaired.append(f"stopped {name} that could not be adopted")
            stopped_volumes.add(volume)
            repaired += await _stop_found_server(server)
        for directory in self._root.iterdir():
            if directory.name in self._servers:
                continue
            # A server that hid its volume may have been writing to the image until now.
            if directory.name not in stopped_volumes and (settings := load_settings(directory)):
                repaired += await _stop_found_server(ServerProcess(directory.name, 0, settings))
            remove_tree(directory, ignore_errors=True)
        self._starter.cgroups.sweep(set(self._servers))
        return repaired

    async def close(self) -> None:
        """Stop watching the servers, which keep running."""
        await self._replacements.cancel()
        for server in self._servers.values():
            server.stop_watching()
        self._servers.clear()

    async def destroy(self) -> None:
        """Stop all servers, including those of an earlier gateway."""
        await self.close()
        await self.open(set())
        remove_tree(self._root, ignore_errors=True)

    # -- serving ----------------------------------------------------------------------------------------------------

    async def serve(self, volume: str, image: Path, port: int, clients: Mapping[str, bool]) -> None:
        """Serve a volume to exactly these ``clients``, or stop its server if there are none.

        ``clients``: whether each client is read-only, keyed by ``Slot.host_address``.

        Starts the server if necessary. On return, the server answers only these clients, even on open connections. The
        call is idempotent, and fast if nothing changes. Call this method before resuming a fork that has
        mounted the volume: a guest whose connection is refused waits several seconds before it retries.

        Clients that are no longer listed are disconnected first. A server that does not apply the change within a few
        seconds is replaced, so that removing clients takes bounded time.
        """
        settings = ServerSettings(str(image), port, dict(clients))
        async with self._lock(volume):
            await self._access.revoke(volume, settings.list_access_pairs())
            if not clients:
                try:
                    await self._stop(volume, _STOP_TIMEOUT_SECONDS)
                except GatewayError as error:
                    log.error("an unused volume server could not be stopped", volume=volume, reason=str(error))
                return
            server = self._servers.get(volume)
            if server is not None and (server.has_ended() or server.settings.port != port):
                await self._stop(volume)
                server = None
            if server is None:
                await self._start(volume, settings)
            elif server.settings.clients != settings.clients or not server.is_current:
                await self._reconfigure(server, settings)
            await self._access.allow(volume, settings.list_access_pairs())

    async def stop(self, volume: str) -> None:
        """Stop the server, if there is one. Afterwards, all its data is in the image."""
        async with self._lock(volume):
            await self._access.revoke(volume, set())
            await self._stop(volume)

    def create_guest_mount(self, volume: str, port: int, path: str, read_only: bool) -> GuestMount:
        """Return the mount for a guest's agent. It depends only on the arguments, so that forks keep their mounts.

        After one sandbox has written and closed a file, sandboxes that open it see the changes (close-to-open). Guests
        cache names and attributes for one second (``actimeo``), but do not cache that a file is missing
        (``lookupcache``), so they find new files immediately. With ``nolock``, locks are local to a sandbox. With
        ``hard``, guests wait while a server is replaced. With ``noresvport``, a new connection uses any port, so it
        need not wait until the port of the previous connection is free.
        """
        options = (
            f"addr={GATEWAY_ADDRESS},vers=3,proto=tcp,port={port},mountproto=tcp,mountport={port + 1},"
            "nolock,hard,noresvport,actimeo=1,lookupcache=positive"
        )
        return GuestMount(path, f"{GATEWAY_ADDRESS}:/{volume}", "nfs", options, read_only)

    # -- the file system --------------------------------------------------------------------------------------------

    def frozen(self, volume: str) -> AbstractAsyncContextManager[None]:
        """Freeze the server inside this context. The image then contains all earlier writes and can be cloned.

        When the clone is served for the first time, its journal is replayed, as after a power failure. This takes
        milliseconds. Without a server, this context does nothing, because the image is already consistent. If the
        gateway dies inside the context, the next ``open`` resumes the server.
        """
        return self._frozen(volume)

    @contextlib.asynccontextmanager
    async def _frozen(self, volume: str) -> AsyncIterator[None]:
        # Do not use fsfreeze(8): if the gateway and the server died, the kernel would never thaw the file system.
        async with self._lock(volume):
            server = self._servers.get(volume)
            if server is None or server.has_ended():
                yield
                return
            try:
                server.send_signal(signal.SIGSTOP)
                await run_with_timeout(
                    lambda: file_system.wait_until_frozen(server, _SYNC_TIMEOUT_SECONDS),
                    _SYNC_TIMEOUT_SECONDS,
                    f"volume {volume} could not be frozen",
                )
                yield
            finally:
                server.send_signal(signal.SIGCONT)

    async def flush(self, volume: str) -> None:
        """Write all cached data to the image, to keep a subsequent ``frozen`` short. Does nothing without a server."""
        if server := self._servers.get(volume):
            with contextlib.suppress(BackendFailed):  # If the server has just exited, all data has been written.
                await run_with_timeout(
                    lambda: file_system.sync(server),
                    _SYNC_TIMEOUT_SECONDS,
                    f"volume {volume} could not be written back",
                )

    async def grow(self, volume: str) -> None:
        """Grow the mounted file system to the new size of its image.

        Does nothing without a server, because the next server grows the file system when it starts.
        """
        async with self._lock(volume):
            server = self._servers.get(volume)
            if server is None or server.has_ended():
                return
            if file_system.can_resize():
                await run_with_timeout(
                    lambda: file_system.grow(server), _SYNC_TIMEOUT_SECONDS, f"volume {volume} could not be grown"
                )
            else:
                await self._restart(server)

    async def count_used_bytes(self, volume: str, image: Path) -> int:
        """Return how many bytes the files in the volume use, with or without a server."""
        server = self._servers.get(volume)
        if server is not None and not server.has_ended():
            with contextlib.suppress(BackendFailed):
                return await run_with_timeout(
                    lambda: file_system.count_used_bytes(server),
                    _USAGE_TIMEOUT_SECONDS,
                    f"the server for volume {volume} did not answer",
                )
        with image.open("rb") as file:
            return read_block_counts(file.fileno())[1] * BLOCK_BYTES

    # -- one server -------------------------------------------------------------------------------------------------

    def _lock(self, volume: str) -> asyncio.Lock:
        return self._locks.setdefault(volume, asyncio.Lock())

    async def _start(self, volume: str, settings: ServerSettings) -> None:
        await self._access.revoke(volume, set())  # No request may reach the server before it is isolated.
        async with self._starter.started(volume, settings) as server:
            await self._access.allow(volume, settings.list_access_pairs())
        self._watch(server)

    async def _reconfigure(self, server: ServerProcess, settings: ServerSettings) -> None:
        """Change the clients of a running server. Replaces the server if it does not apply the change."""
        await self._starter.reconfigure(server, settings)
        if server.is_current:
            await self._access.allow(server.volume, server.settings.list_access_pairs())
        else:
            await self._stop(server.volume)
            await self._start(server.volume, server.settings)

    async def _restart(self, server: ServerProcess) -> None:
        """Stop a server and start a new one. If the start fails, retry it in the background."""
        await self._stop(server.volume)
        try:
            await self._start(server.volume, server.settings)
        except Exception:
            self._servers[server.volume] = server
            self._replacements.start(self._replace(server))
            raise

    async def _stop(self, volume: str, seconds: float = _SYNC_TIMEOUT_SECONDS) -> None:
        """Stop a server, if there is one. Its image is then consistent."""
        # Do this first: a client retries dropped packets within a second, but waits longer after a refusal.
        await self._access.revoke(volume, set())
        server = self._servers.pop(volume, None)
        if server is None:
            return
        try:
            await file_system.stop_server(server, seconds)
        finally:
            server.stop_watching()
        self._starter.cgroups.remove(volume)
        remove_tree(self._root / volume, ignore_errors=True)

    def _watch(self, server: ServerProcess) -> None:
        self._servers[server.volume] = server
        asyncio.get_running_loop().add_reader(server.pidfd, self._on_end, server)

    def _on_end(self, server: ServerProcess) -> None:
        asyncio.get_running_loop().remove_reader(server.pidfd)
        if self._servers.get(server.volume) is server:
            self._replacements.start(self._replace(server))

    async def _replace(self, server: ServerProcess) -> None:
        """Replace a server that exited unexpectedly, so that waiting guests can continue.

        Gives up when no sandbox needs the server any longer.
        """
        has_exited_early = server.was_started_recently()
        async with self._lock(server.volume):
            if self._servers.get(server.volume) is not server:
                return
            with contextlib.suppress(GatewayError):  # `_start` will try again, and report a failure.
                # All servers share a network namespace: another one could open the port, and answer the sandboxes.
                await self._access.revoke(server.volume, set())
        await asyncio.sleep(server.compute_backoff_seconds())
        while True:
            async with self._lock(server.volume):
                if self._servers.get(server.volume) is not server:
                    return
                output = server.log_tail().removeprefix(": ")
                log.warning("a volume server exited, starting another", volume=server.volume, output=output)
                try:
                    # The server has exited, but its image may not be complete yet.
                    await file_system.stop_server(server, _SYNC_TIMEOUT_SECONDS)
                    await self._start(server.volume, server.settings)
                except (GatewayError, OSError) as error:
                    log.error(
                        "a volume cannot be served, retrying in the background",
                        volume=server.volume,
                        reason=str(error),
                    )
                else:
                    self._servers[server.volume].early_exits = server.early_exits + 1 if has_exited_early else 0
                    server.stop_watching()
                    return
            await asyncio.sleep(_REPLACE_INTERVAL_SECONDS)


async def _stop_found_server(server: ServerProcess) -> list[str]:
    """Stop a server of an earlier gateway, if it is running, and wait for its image. Returns any error messages."""
    try:
        await file_system.stop_server(server, _STOP_TIMEOUT_SECONDS)
    except GatewayError as error:
        return [str(error)]
    finally:
        server.stop_watching()
    return []
