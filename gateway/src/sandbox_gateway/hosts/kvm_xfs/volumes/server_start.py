"""Start volume servers, and change the clients of running servers."""

from __future__ import annotations

import asyncio
import contextlib
import os
import shutil
import signal
import sys
import time
from collections.abc import AsyncIterator
from pathlib import Path

from sandbox_gateway.command import build_child_environment
from sandbox_gateway.config import Network
from sandbox_gateway.errors import BackendFailed, Timeout
from sandbox_gateway.hosts.kvm_xfs.bounded_log import create_log
from sandbox_gateway.hosts.kvm_xfs.cgroup import Cgroups
from sandbox_gateway.hosts.kvm_xfs.network.addresses import get_volume_address, get_volume_gateway, get_volume_namespace
from sandbox_gateway.hosts.kvm_xfs.volumes import file_system, launcher, rpc
from sandbox_gateway.hosts.kvm_xfs.volumes.access import Aliases
from sandbox_gateway.hosts.kvm_xfs.volumes.configuration import derive_marker, render_configuration
from sandbox_gateway.hosts.kvm_xfs.volumes.launcher import CONFIG_FILE
from sandbox_gateway.hosts.kvm_xfs.volumes.seccomp import build_file_server_filter
from sandbox_gateway.hosts.kvm_xfs.volumes.server_process import (
    ServerProcess,
    ServerSettings,
    replace_file,
    save_settings,
)
from sandbox_gateway.log import Logger

_START_TIMEOUT_SECONDS = 20.0
_APPLY_TIMEOUT_SECONDS = 2.0
_QUERY_TIMEOUT_SECONDS = 2.0
_QUERY_INTERVAL_SECONDS = 0.005

_MEMORY_MB, _CPUS = 1024, 1.5
"""Limits of a server. The page cache of the volume counts towards the memory limit, but is released as needed."""

_NFS, _MOUNT, _MOUNT_EXPORT = 100003, 100005, 5

log = Logger("volumes")


class ServerStarter:
    """Starts and reconfigures volume servers. Their files are in the directory ``root``.

    It does not change which clients the host allows to connect.
    """

    def __init__(self, network: Network, root: Path, ganesha: str, aliases: Aliases) -> None:
        self._subnet = network.subnet
        self._address = get_volume_address(network)
        self._gateway = get_volume_gateway(network)
        self._root = root
        self._ganesha = ganesha
        self._aliases = aliases
        self.namespace = get_volume_namespace(network)
        self.cgroups = Cgroups(network.prefix, "volumes")

    def limit(self, server: ServerProcess) -> None:
        """Apply a server's memory and CPU limits."""
        self.cgroups.limit(server.volume, server.pid, memory_mb=_MEMORY_MB, cpus=_CPUS)

    @contextlib.asynccontextmanager
    async def started(self, volume: str, settings: ServerSettings) -> AsyncIterator[ServerProcess]:
        """Start a volume's server. Inside this context, the server is ready and isolated.

        The caller must not allow clients to connect earlier. If the server does not become ready, or an exception is
        raised inside the context, the server is killed.
        """
        program_path = _find_program(self._ganesha)
        start_time = time.monotonic()
        directory = self._root / volume
        (directory / "root").mkdir(mode=0o700, parents=True, exist_ok=True)
        await file_system.grow_offline(Path(settings.image))
        save_settings(directory, settings)
        marker, text = self._build_configuration(volume, settings)
        replace_file(directory / CONFIG_FILE, text)
        server = ServerProcess(volume, 0, settings, log=create_log())
        process = await asyncio.create_subprocess_exec(
            *(sys.executable, "-I", "-S", launcher.__file__, settings.image, str(directory), volume, program_path),
            *(str(self.namespace), build_file_server_filter().hex(), str(settings.port)),
            stdin=asyncio.subprocess.PIPE,
            stdout=asyncio.subprocess.PIPE,
            stderr=server.log,
            env=build_child_environment(),
            start_new_session=True,
            cwd="/",
        )
        try:
            async with asyncio.timeout(_START_TIMEOUT_SECONDS):
                await self._wait_until_ready(process, server, marker)
            yield server
        except BaseException as error:
            if process.returncode is None:
                with contextlib.suppress(ProcessLookupError):
                    # Kill the whole process group, because the server's pid may be unknown.
                    os.killpg(process.pid, signal.SIGKILL)
            # After the launcher has exited, its pid may belong to a different group. Then the server's pid is known.
            server.send_signal(signal.SIGKILL)
            await process.wait()
            log_tail = server.log_tail()
            server.stop_watching()
            if isinstance(error, TimeoutError):
                raise Timeout(
                    f"the server for volume {volume} did not answer within {_START_TIMEOUT_SECONDS:g} s{log_tail}. "
                    f"Check the load of the host, and that nothing else on it uses {self._subnet}"
                ) from None
            raise
        server.is_current = True
        log.info("serving a volume", volume=volume, pid=server.pid, ms=round((time.monotonic() - start_time) * 1000))

    async def _wait_until_ready(self, process: asyncio.subprocess.Process, server: ServerProcess, marker: str) -> None:
        assert process.stdout is not None and process.stdin is not None
        if line := await process.stdout.readline():
            server.pid = int(line)
            with contextlib.suppress(ProcessLookupError):
                server.pidfd = os.pidfd_open(server.pid)
            self.limit(server)
            await self._wait_until_applied(server, marker)
            process.stdin.close()
        await process.wait()
        if server.has_ended() or process.returncode or not server.is_isolated(self.namespace):
            raise BackendFailed(f"volume {server.volume} cannot be served{server.log_tail() or ': its server exited'}")

    async def reconfigure(self, server: ServerProcess, settings: ServerSettings) -> None:
        """Change the clients of a running server.

        Afterwards, ``server.is_current`` shows whether the server applied the change.
        """
        # Keep the mounted image: serving a different image requires a new server.
        server.settings = ServerSettings(server.settings.image, settings.port, settings.clients)
        server.is_current = False
        save_settings(self._root / server.volume, server.settings)
        marker, text = self._build_configuration(server.volume, server.settings)
        try:
            async with asyncio.timeout(_APPLY_TIMEOUT_SECONDS):
                server.configure(text)
                server.send_signal(signal.SIGHUP)
                await self._wait_until_applied(server, marker)
                server.is_current = not server.has_ended()
        except (TimeoutError, BackendFailed):
            log.warning("a volume server did not reload its configuration and will be replaced", volume=server.volume)

    async def _wait_until_applied(self, server: ServerProcess, marker: str) -> None:
        """Wait until the configuration that contains ``marker`` is in effect, or the server has exited."""
        while True:
            if server.has_ended() or await self._has_marker(server.settings.port, marker):
                return
            await asyncio.sleep(_QUERY_INTERVAL_SECONDS)

    async def _has_marker(self, port: int, marker: str) -> bool:
        """Return whether the server at ``port`` answers and its configuration contains the marker."""
        try:
            async with asyncio.timeout(_QUERY_TIMEOUT_SECONDS):
                encoded_exports = await rpc.call(self._address, port + 1, _MOUNT, _MOUNT_EXPORT)
                if rpc.encode_opaque(f"{marker}/32") not in encoded_exports:
                    return False
                await rpc.call(self._address, port, _NFS, 0)
                return True
        except (OSError, EOFError, TimeoutError):
            return False

    def _build_configuration(self, volume: str, settings: ServerSettings) -> tuple[str, str]:
        """Return the marker and the text of a server's configuration."""
        marker = derive_marker(settings)
        return marker, render_configuration(
            self._address,
            self._gateway,
            volume,
            settings.port,
            self._aliases.alias_clients(settings.clients),
            marker,
        )


def _find_program(name: str) -> str:
    """Return the path of a program. Raises BackendFailed if it is not installed.

    The path is the same inside the server's root directory.
    """
    path = shutil.which(name)
    if path is None:
        raise BackendFailed(
            f"{name} is not installed: install nfs-ganesha and nfs-ganesha-vfs, or run the kvm_xfs_host role of this "
            "collection"
        )
    return str(Path(path).resolve())
