"""Serving volumes to guests: one nfs-ganesha process (NFSv3) for each volume that is mounted anywhere.

A server lives in a mount namespace in which its volume's image is mounted, and nothing else (volume_launcher): no
name or handle that a guest makes up leads elsewhere, and nothing stays mounted when the server ends, however it ends.
Servers have a network namespace of their own, from which nothing can be reached (netns), and control groups. They run
as root, with the capabilities that acting for users of the guests takes, and a seccomp filter (seccomp).
It outlives the gateway; the next one finds it by its command line.

What a guest mounts names its gateway and the volume's ports, which never change, and handles are made of the file
system's UUID and inodes: they are good for every later server of the volume. So a server can be ended and started
anew under its guests, who wait and go on, and a fork goes on with what its source had open. After a rollback the
handle of a file that the image no longer has is stale (ESTALE), the others are good.

Who may do what is said twice: the host lets through whom the set of its nftables table names, and the server knows
each client's address and whether it may write. It tells every client of all the others (the MOUNT protocol's list of
exports), so it knows sandboxes by aliases, which the host gives their packets: their addresses stay unknown.

The server reads its configuration anew on SIGHUP, and what it says holds from then on for every request, also on
connections that are open. A marker in it, a client that cannot exist, is asked for by the list of exports: this is how
we know which configuration holds.
"""

from __future__ import annotations

import asyncio
import contextlib
import ctypes
import fcntl
import hashlib
import ipaddress
import json
import os
import select
import shutil
import signal
import struct
import sys
import threading
import time
from collections.abc import AsyncIterator, Callable, Iterator, Mapping
from contextlib import AbstractAsyncContextManager
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import TypeVar
from weakref import WeakValueDictionary

from sandbox_gateway.command import arun, child_environment
from sandbox_gateway.config import Network
from sandbox_gateway.errors import BackendFailed, GatewayError, Timeout
from sandbox_gateway.hosts.base import GuestMount
from sandbox_gateway.hosts.connect import open_connection
from sandbox_gateway.hosts.kvm_xfs import volume_launcher
from sandbox_gateway.hosts.kvm_xfs.bounded_log import create_log, open_log_of, read_log
from sandbox_gateway.hosts.kvm_xfs.cgroup import Cgroups
from sandbox_gateway.hosts.kvm_xfs.netns import (
    ALIASES,
    GATEWAY_ADDRESS,
    VOLUME_ACCESS,
    VOLUME_ALIASES,
    VOLUME_PORTS,
    host_table,
    volume_address,
    volume_gateway,
    volume_space,
)
from sandbox_gateway.hosts.kvm_xfs.seccomp import file_server_filter
from sandbox_gateway.hosts.kvm_xfs.volume_launcher import BLOCK, CONFIG, EXT4_IOC_RESIZE_FS, ROOT, block_counts
from sandbox_gateway.log import Logger

__all__ = ["VOLUME_PORTS", "VolumeServers", "format_image"]

_START_SECONDS = 20.0
_OBEY_SECONDS = 2.0
_END_SECONDS = 10.0
_SYNC_SECONDS = 30.0
_FORMAT_SECONDS = 120.0
_RESIZE_SECONDS = 600.0
_NFT_SECONDS = 20.0
_ASK_SECONDS = 2.0
_ASK_EVERY = 0.005
_REVIVE_SECONDS = 5.0
_STEADY_SECONDS = 60.0
_LONGEST_BACKOFF = 30.0
_LARGEST_ANSWER = 4 << 20
_PIECE = 256 << 10
"""Most that one request reads or writes, in bytes: what a guest asks for and never takes stays in memory."""

_MEMORY_MB, _CPUS = 1024, 1.5
"""Of a server. What it caches of its volume counts, but is given up as needed."""

_LOOP_SET_CAPACITY = 0x4C07
_CAP_SYS_RESOURCE = 24
_NFS, _MOUNT, _MOUNT_EXPORT = 100003, 100005, 5
_WANTED = "wanted.json"

log = Logger("volumes")
_libc = ctypes.CDLL(None, use_errno=True)
_T = TypeVar("_T")


async def format_image(image: Path, volume: str, size_mb: int) -> None:
    """Make ``image`` (which must not exist) a sparse file of ``size_mb`` MiB with an empty ext4 as servers want it.

    Nothing remains on failure.
    """
    await asyncio.to_thread(_make_sparse, image, size_mb << 20)
    try:
        # Everything is initialised now (holes read as zeros): no kernel thread writes to it later.
        await arun(
            [
                *("mke2fs", "-q", "-F", "-t", "ext4", "-b", str(BLOCK), "-m", "0", "-L", volume[:16]),
                *("-E", "lazy_itable_init=0,lazy_journal_init=0,discard"),
                *("-J", f"size={min(64, max(4, size_mb // 64))}"),
                str(image),
            ],
            timeout=_FORMAT_SECONDS,
        )
        # Any user of a guest may write in it; what fsck would keep there is not the guests' concern.
        changes = "set_inode_field <2> mode 040777\nrmdir lost+found\n"
        await arun(["debugfs", "-w", "-f", "-", str(image)], timeout=_FORMAT_SECONDS, input=changes)
    except BaseException:
        await asyncio.to_thread(image.unlink)
        raise


def _make_sparse(image: Path, size: int) -> None:
    with image.open("xb") as file:
        os.fchmod(file.fileno(), 0o600)
        file.truncate(size)


@dataclass(frozen=True)
class _Wanted:
    """What a server is to serve, and to whom; kept beside it for the next gateway."""

    image: str
    port: int
    clients: dict[str, bool]

    def access(self) -> set[str]:
        """Elements of the host's set."""
        return {f"{address} . {port}" for address in self.clients for port in (self.port, self.port + 1)}


@dataclass
class _Server:
    volume: str
    pid: int
    wanted: _Wanted
    obeys: bool = False
    """It was seen to; not of one that was adopted."""
    pidfd: int = -1
    log: int = -1
    """Memory that it writes its log to."""
    started: float = field(default_factory=time.monotonic)
    early_ends: int = 0
    """How many servers of this volume ended soon after their start, one after another, before this one."""

    def backoff(self) -> float:
        """Seconds to wait before a server that has ended is started anew: a guest may end each one on purpose."""
        if time.monotonic() - self.started >= _STEADY_SECONDS or not self.early_ends:
            return 0.0
        return min(2.0 ** (self.early_ends - 1), _LONGEST_BACKOFF)

    def ended(self) -> bool:
        return self.pidfd < 0 or _ends(self.pidfd, 0)

    def signal(self, number: signal.Signals) -> None:
        if self.pidfd >= 0:
            with contextlib.suppress(ProcessLookupError):
                signal.pidfd_send_signal(self.pidfd, number)

    def directory(self) -> int:
        """A descriptor of the served file system's root. Raises BackendFailed when the server has ended."""
        return self._descriptor(f"root/{self.volume}")

    def configure(self, text: str) -> None:
        """Replace its configuration, which it reads on SIGHUP. Raises BackendFailed when it has ended."""
        root = self._descriptor(f"fd/{ROOT}")
        try:
            _replace(Path(f"/proc/self/fd/{root}", CONFIG), text)
        finally:
            os.close(root)

    def shut_in(self, space: Path) -> bool:
        """Whether nothing of the host is left in its view, and its network namespace is ``space``."""
        with contextlib.suppress(OSError):
            mounts = Path(f"/proc/{self.pid}/mountinfo").read_text().splitlines()
            alone = {line.split()[4] for line in mounts} == {"/", f"/{self.volume}"}
            return alone and Path(f"/proc/{self.pid}/ns/net").samefile(space)
        return False

    def log_tail(self) -> str:
        """What it wrote to its log, as the end of a sentence."""
        try:
            lines = read_log(self.log).splitlines()
        except OSError:
            return ""
        # Before what it says stand date, program and thread; NULL is the level of what is always said.
        said = [line.rpartition("] ")[2].strip() for line in lines if ":NULL :" not in line]
        return f": {'; '.join(said[-4:])[-800:]}" if said else ""

    def _descriptor(self, what: str) -> int:
        """Of a directory below its entry in /proc."""
        try:
            found = os.open(f"/proc/{self.pid}/{what}", os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
        except OSError as error:
            raise BackendFailed(f"the server of volume {self.volume} is gone: {error.strerror}") from None
        if self.ended():  # The number may be another process's by now.
            os.close(found)
            raise BackendFailed(f"the server of volume {self.volume} has ended")
        return found


class VolumeServers:
    """The servers of one gateway. ``volume`` is a volume's id everywhere, ``port`` one of ``VOLUME_PORTS``.

    ``VOLUME_PORTS`` is a range with step 2: a volume has ``port`` (NFS) and ``port + 1`` (MOUNT), for life; no two
    volumes of a gateway may have the same. Everything raises BackendFailed or Timeout, and within bounded time.
    """

    def __init__(self, network: Network, run_root: Path, ganesha: str = "ganesha.nfsd") -> None:
        """``run_root``: a directory for what servers are started from; made when it is missing."""
        self._address = volume_address(network)
        self._gateway = volume_gateway(network)
        self._space = volume_space(network)
        self._aliases = _Aliases(network)
        self._cgroups = Cgroups(network.prefix, "volumes")
        self._table = host_table(network)
        self._root = run_root
        self._ganesha = ganesha
        self._servers: dict[str, _Server] = {}
        self._admitted: dict[str, set[str]] = {}
        self._locks: WeakValueDictionary[str, asyncio.Lock] = WeakValueDictionary()
        self._revivals: set[asyncio.Task[None]] = set()

    # -- life -------------------------------------------------------------------------------------------------------

    async def open(self, known: set[str]) -> list[str]:
        """Adopt the servers of ``run_root`` that still run and whose volume is ``known``; end the others.

        Call it after ``SlotPool.open``, which makes the address and the rules anew. Returns sentences for
        ``Scan.repaired``. What an adopted server's clients are is as it was: call ``serve`` for what shall be.
        """
        self._root.mkdir(mode=0o700, parents=True, exist_ok=True)
        self._admitted.clear()
        said: list[str] = []
        for pid, volume, serves in _processes(self._root):
            wanted = _recall(self._root / volume)
            server = _Server(volume, pid, wanted or _Wanted("", 0, {}))
            try:
                server.pidfd = os.pidfd_open(pid)
            except ProcessLookupError:
                continue
            if serves and wanted and volume in known and volume not in self._servers and server.shut_in(self._space):
                server.signal(signal.SIGCONT)  # A gateway that died while it was frozen left it so.
                with contextlib.suppress(OSError):
                    server.log = open_log_of(pid)
                self._keep(server)
                self._cgroups.place(volume, pid, memory_mb=_MEMORY_MB, cpus=_CPUS)
                await self._admit(volume, wanted.access())
                continue
            said.append(f"ended the server of volume {volume}, which belonged to nothing")
            try:
                await _kill(server, _END_SECONDS)
            except GatewayError as error:
                said.append(str(error))
            _forget(server)
        for directory in self._root.iterdir():
            if directory.name not in self._servers:
                shutil.rmtree(directory, ignore_errors=True)
        self._cgroups.sweep(set(self._servers))
        return said

    async def close(self) -> None:
        """Servers go on."""
        for task in list(self._revivals):
            task.cancel()
            await asyncio.wait([task])
        for server in self._servers.values():
            _forget(server)
        self._servers.clear()

    async def destroy(self) -> None:
        """End all servers, those of an earlier gateway too."""
        await self.close()
        await self.open(set())
        shutil.rmtree(self._root, ignore_errors=True)

    # -- serving ----------------------------------------------------------------------------------------------------

    async def serve(self, volume: str, image: Path, port: int, clients: Mapping[str, bool]) -> None:
        """Let exactly ``clients`` (``Slot.host_address`` → read-only) use the volume; nobody: the server ends.

        Starts the server if none runs. When it returns, the server answers, lets these in and nobody else,
        connections open by then included. Idempotent, quick when nothing changes. Call it before a machine that
        forks with the volume mounted goes on: a guest whose connection is refused tries again after seconds only.

        Whoever is no longer among ``clients`` is cut off first of all, whatever the server does; a server that does
        not obey within seconds is ended and another started. So taking clients away takes bounded time.
        """
        wanted = _Wanted(str(image), port, dict(clients))
        async with self._lock(volume):
            await self._withdraw(volume, wanted)
            if not clients:
                try:
                    await self._end(volume, _END_SECONDS)
                except GatewayError as error:
                    log.error("a server of a volume that nobody uses lingers", volume=volume, reason=str(error))
                return
            server = self._servers.get(volume)
            if server is not None and (server.ended() or server.wanted.port != port):
                await self._end(volume)
                server = None
            if server is None:
                await self._start(volume, wanted)
            elif server.wanted.clients != wanted.clients or not server.obeys:
                await self._instruct(server, wanted)
            await self._admit(volume, wanted.access())

    async def stop(self, volume: str) -> None:
        """End the server; everything written is in the image when this returns. No server: nothing happens."""
        async with self._lock(volume):
            await self._withdraw(volume, None)
            await self._end(volume)

    def mounts(self, volume: str, port: int, path: str, read_only: bool) -> GuestMount:
        """What the agent of a guest must mount: depends on nothing but its arguments, so that forks keep theirs.

        What one sandbox has written and closed, others see when they open it: NFS asks for a file's attributes then
        (close-to-open). What they know of names and attributes is a second old at most (``actimeo``), and that there
        is no such file they never take from memory (``lookupcache``): a new file is found at once. ``nolock``: locks
        hold inside one sandbox. ``hard``: a server that is started anew is waited for. ``noresvport``: the server
        asks for no low port, and a new connection need not wait for the port of the last.
        """
        options = (
            f"addr={GATEWAY_ADDRESS},vers=3,proto=tcp,port={port},mountproto=tcp,mountport={port + 1},"
            "nolock,hard,noresvport,actimeo=1,lookupcache=positive"
        )
        return GuestMount(path, f"{GATEWAY_ADDRESS}:/{volume}", "nfs", options, read_only)

    # -- the file system --------------------------------------------------------------------------------------------

    def frozen(self, volume: str) -> AbstractAsyncContextManager[None]:
        """Within, no request is carried out, and all that was before is in the image file, to be FICLONEd.

        The image is then that of a machine that lost its power when all was written: its journal is replayed when
        the clone is first served, in milliseconds. No server: nothing is done, the image is whole as it is. A gateway
        that dies within leaves it to ``open`` to let the server go on; a server that stands still can be killed.
        """
        return self._frozen(volume)

    @contextlib.asynccontextmanager
    async def _frozen(self, volume: str) -> AsyncIterator[None]:
        # Not fsfreeze(8): were we and the server to die in it, the kernel would keep the file system for ever.
        async with self._lock(volume):
            server = self._servers.get(volume)
            if server is None or server.ended():
                yield
                return
            try:
                server.signal(signal.SIGSTOP)
                await _aside(
                    lambda: _quiet(server, _SYNC_SECONDS),
                    _SYNC_SECONDS,
                    f"volume {volume} could not be brought to a stand",
                )
                yield
            finally:
                server.signal(signal.SIGCONT)

    async def flush(self, volume: str) -> None:
        """Write everything back ahead of ``frozen``, so that that is short. No server: nothing happens."""
        if server := self._servers.get(volume):
            with contextlib.suppress(BackendFailed):  # It has just ended: then it is written.
                await _aside(lambda: _sync(server), _SYNC_SECONDS, f"volume {volume} could not be written back")

    async def grow(self, volume: str) -> None:
        """The image has become longer: let the file system fill it, while it is in use.

        No server: nothing happens, the next one does it when it starts.
        """
        async with self._lock(volume):
            server = self._servers.get(volume)
            if server is None or server.ended():
                return
            if _may_resize():
                await _aside(lambda: _grow(server), _SYNC_SECONDS, f"volume {volume} could not be grown")
            else:
                await self._restart(server)

    async def used_bytes(self, volume: str, image: Path) -> int:
        """What files take in it, server or not."""
        server = self._servers.get(volume)
        if server is not None and not server.ended():
            with contextlib.suppress(BackendFailed):
                return await _aside(lambda: _used(server), _ASK_SECONDS, f"volume {volume} does not answer")
        with image.open("rb") as file:
            return block_counts(file.fileno())[1] * BLOCK

    # -- one server -------------------------------------------------------------------------------------------------

    def _lock(self, volume: str) -> asyncio.Lock:
        return self._locks.setdefault(volume, asyncio.Lock())

    async def _start(self, volume: str, wanted: _Wanted) -> None:
        """Start a server that is not running, and let its clients through; nothing of it remains on failure."""
        program = _program(self._ganesha)
        started = time.monotonic()
        await self._withdraw(volume, None)  # Nobody may ask it anything before it is shut in.
        directory = self._root / volume
        (directory / "root").mkdir(mode=0o700, parents=True, exist_ok=True)
        await _fit(Path(wanted.image))
        _remember(directory, wanted)
        marker, text = self._configuration(volume, wanted)
        _replace(directory / CONFIG, text)
        server = _Server(volume, 0, wanted, log=create_log())
        launcher = await asyncio.create_subprocess_exec(
            *(sys.executable, "-I", "-S", volume_launcher.__file__, wanted.image, str(directory), volume, program),
            *(str(self._space), file_server_filter().hex()),
            stdin=asyncio.subprocess.PIPE,
            stdout=asyncio.subprocess.PIPE,
            stderr=server.log,
            env=child_environment(),
            start_new_session=True,
            cwd="/",
        )
        try:
            async with asyncio.timeout(_START_SECONDS):
                await self._see_it_start(launcher, server, marker)
            await self._admit(volume, wanted.access())
        except BaseException as error:
            with contextlib.suppress(ProcessLookupError):
                os.killpg(launcher.pid, signal.SIGKILL)  # The server too, whether we know its number yet or not.
            await launcher.wait()
            said = server.log_tail()
            _forget(server)
            if isinstance(error, TimeoutError):
                raise Timeout(
                    f"the server of volume {volume} did not answer within {_START_SECONDS:g} s{said}"
                ) from None
            raise
        server.obeys = True
        self._keep(server)
        log.info("serving a volume", volume=volume, pid=server.pid, ms=round((time.monotonic() - started) * 1000))

    async def _see_it_start(self, launcher: asyncio.subprocess.Process, server: _Server, marker: str) -> None:
        assert launcher.stdout is not None and launcher.stdin is not None
        if line := await launcher.stdout.readline():
            server.pid = int(line)
            with contextlib.suppress(ProcessLookupError):
                server.pidfd = os.pidfd_open(server.pid)
            self._cgroups.place(server.volume, server.pid, memory_mb=_MEMORY_MB, cpus=_CPUS)
            await self._until(server, marker)
            launcher.stdin.close()
        await launcher.wait()
        if server.ended() or launcher.returncode or not server.shut_in(self._space):
            raise BackendFailed(f"volume {server.volume} cannot be served{server.log_tail() or ': it ended'}")

    async def _instruct(self, server: _Server, wanted: _Wanted) -> None:
        """Make a running server let in whom ``wanted`` names; another takes its place if it does not obey."""
        # The image is the one it has mounted: to serve another, `stop` comes first.
        server.wanted = _Wanted(server.wanted.image, wanted.port, wanted.clients)
        server.obeys = False
        _remember(self._root / server.volume, server.wanted)
        marker, text = self._configuration(server.volume, server.wanted)
        try:
            async with asyncio.timeout(_OBEY_SECONDS):
                server.configure(text)
                server.signal(signal.SIGHUP)
                await self._until(server, marker)
                server.obeys = not server.ended()
        except (TimeoutError, BackendFailed):
            log.warning("a server of a volume did not obey: another takes its place", volume=server.volume)
        if server.obeys:
            await self._admit(server.volume, server.wanted.access())
        else:
            await self._end(server.volume)
            await self._start(server.volume, server.wanted)

    async def _restart(self, server: _Server) -> None:
        """End a server and start another; one that cannot be started now is tried for again later."""
        await self._end(server.volume)
        try:
            await self._start(server.volume, server.wanted)
        except Exception:
            self._servers[server.volume] = server
            self._revive_later(server)
            raise

    async def _until(self, server: _Server, marker: str) -> None:
        """Return when the server answers and obeys the configuration with that marker, or has ended."""
        while True:
            if server.ended() or await self._shows(server.wanted.port, marker):
                return
            await asyncio.sleep(_ASK_EVERY)

    async def _shows(self, port: int, marker: str) -> bool:
        try:
            async with asyncio.timeout(_ASK_SECONDS):
                exports = await _ask(self._address, port + 1, _MOUNT, _MOUNT_EXPORT)
                if _opaque(f"{marker}/32") not in exports:
                    return False
                await _ask(self._address, port, _NFS, 0)
                return True
        except (OSError, EOFError, TimeoutError):
            return False

    async def _end(self, volume: str, seconds: float = _SYNC_SECONDS) -> None:
        """End a server for good; its image is whole then. Nothing happens where there is none."""
        # Before it ends: whose packets are dropped tries again within a second, who is refused waits for longer.
        await self._withdraw(volume, None)
        server = self._servers.pop(volume, None)
        if server is None:
            return
        try:
            await _kill(server, seconds)
        finally:
            _forget(server)
        self._cgroups.remove(volume)
        shutil.rmtree(self._root / volume, ignore_errors=True)

    def _keep(self, server: _Server) -> None:
        self._servers[server.volume] = server
        asyncio.get_running_loop().add_reader(server.pidfd, self._ended, server)

    def _ended(self, server: _Server) -> None:
        asyncio.get_running_loop().remove_reader(server.pidfd)
        if self._servers.get(server.volume) is server:
            self._revive_later(server)

    def _revive_later(self, server: _Server) -> None:
        task = asyncio.ensure_future(self._revive(server))
        self._revivals.add(task)
        task.add_done_callback(self._revivals.discard)

    async def _revive(self, server: _Server) -> None:
        """Start a server that ended by itself anew: guests wait for it. Until somebody wants something else."""
        early = time.monotonic() - server.started < _STEADY_SECONDS
        await asyncio.sleep(server.backoff())
        while True:
            async with self._lock(server.volume):
                if self._servers.get(server.volume) is not server:
                    return
                said = server.log_tail().removeprefix(": ")
                log.warning("the server of a volume ended: starting it anew", volume=server.volume, said=said)
                try:
                    await _kill(server, _SYNC_SECONDS)  # It has ended; its image may not be whole yet.
                    await self._start(server.volume, server.wanted)
                except (GatewayError, OSError) as error:
                    log.error("a volume cannot be served", volume=server.volume, reason=str(error))
                else:
                    self._servers[server.volume].early_ends = server.early_ends + 1 if early else 0
                    _forget(server)
                    return
            await asyncio.sleep(_REVIVE_SECONDS)

    # -- who may use them -------------------------------------------------------------------------------------------

    async def _admit(self, volume: str, access: set[str]) -> None:
        admitted = self._admitted.setdefault(volume, set())
        if new := sorted(access - admitted):
            aliases = [f"{pair} : {self._aliases.of(pair.partition(' ')[0])}" for pair in new]
            # The alias stays when the pair goes: it is the same for life.
            await self._nft(
                f"add element inet {self._table} {VOLUME_ALIASES} {{ {', '.join(aliases)} }}\n"
                f"add element inet {self._table} {VOLUME_ACCESS} {{ {', '.join(new)} }}\n"
            )
            admitted.update(new)

    async def _withdraw(self, volume: str, wanted: _Wanted | None) -> None:
        """Cut off whoever may use the volume and is not in ``wanted``."""
        admitted = self._admitted.get(volume, set())
        if old := admitted - (wanted.access() if wanted else set()):
            await self._nft(f"delete element inet {self._table} {VOLUME_ACCESS} {{ {', '.join(sorted(old))} }}\n")
            admitted -= old
        if not admitted:
            self._admitted.pop(volume, None)

    async def _nft(self, rules: str) -> None:
        await arun(["nft", "-f", "-"], timeout=_NFT_SECONDS, input=rules)

    def _configuration(self, volume: str, wanted: _Wanted) -> tuple[str, str]:
        """A server's configuration, and before it the marker by which it is known."""
        marker = _marker(wanted)
        return marker, configuration(
            self._address, self._gateway, volume, wanted.port, self._aliases.of_all(wanted.clients), marker
        )


class _Aliases:
    """Addresses of sandboxes as servers see them: others for other addresses, and the same in every gateway of a host.

    A guest cannot compute one from the other, for it does not know the host's machine id.
    """

    def __init__(self, network: Network) -> None:
        machine = Path("/etc/machine-id")
        known = machine.read_bytes() if machine.exists() else b""
        digest = hashlib.sha256(known + host_table(network).encode()).digest()
        self._factor = int.from_bytes(digest[:8], "big") | 1  # Odd: no two addresses have the same alias.
        self._offset = int.from_bytes(digest[8:16], "big")

    def of(self, address: str) -> str:
        place = int(ipaddress.IPv4Address(address)) * self._factor + self._offset
        return str(ALIASES[place % ALIASES.num_addresses])

    def of_all(self, clients: Mapping[str, bool]) -> dict[str, bool]:
        return {self.of(address): read_only for address, read_only in clients.items()}


def configuration(address: str, gateway: str, volume: str, port: int, clients: Mapping[str, bool], marker: str) -> str:
    """What nfs-ganesha reads: NFSv3 over TCP at two ports of one address, and who may do what.

    ``gateway``: the address that asks which configuration holds.

    No cache of answered requests: it knows clients by address and request number, and a fork repeats the numbers of
    its source, maybe at an address that another had before. Requests are repeated after a new connection only.
    """
    lines = [
        "NFS_CORE_PARAM {",
        f"    Protocols = 3; Bind_addr = {address}; NFS_Port = {port}; MNT_Port = {port + 1};",
        "    Enable_NLM = false; Enable_RQUOTA = false; Enable_UDP = false;",
        "    DRC_Disabled = true; RPC_Ioq_ThrdMin = 2; RPC_Ioq_ThrdMax = 16;",
        "}",
        "NFS_KRB5 { Active_krb5 = false; }",
        "NFSv4 { Graceless = true; }",
        "MDCACHE { Entries_HWMark = 10000; Chunks_HWMark = 1000; }",
        # Neither D-Bus nor Kerberos is there, which it deplores.
        "LOG { Default_Log_Level = CRIT; Components { DBUS = FATAL; NFS_CB = FATAL; } }",
        # Root in a sandbox is root on the volume: the file system is the sandboxes' own, and nobody else mounts it.
        "EXPORT_DEFAULTS { Access_Type = None; Protocols = 3; Transports = TCP; SecType = sys;"
        " Squash = No_Root_Squash; }",
        "EXPORT {",
        f"    Export_Id = 1; Path = /{volume}; Pseudo = /{volume}; Access_Type = None; FSAL {{ Name = VFS; }}",
        f"    MaxRead = {_PIECE}; PrefRead = {_PIECE}; MaxWrite = {_PIECE}; PrefWrite = {_PIECE};",
    ]
    for access, read_only in (("RW", False), ("RO", True)):
        if some := sorted(client for client in clients if clients[client] is read_only):
            lines.append(f"    CLIENT {{ Clients = {', '.join(some)}; Access_Type = {access}; }}")
    lines.append(f"    CLIENT {{ Clients = {gateway}, {marker}; Access_Type = MDONLY_RO; }}")
    return "\n".join([*lines, "}", ""])


def _marker(wanted: _Wanted) -> str:
    """An address of those that are reserved for ever (240/4): another for each set of clients."""
    digest = hashlib.sha256(json.dumps(sorted(wanted.clients.items())).encode()).digest()
    return str(ipaddress.IPv4Address(0xF0000000 | int.from_bytes(digest[:4], "big") >> 5))


# --- files beside a server -----------------------------------------------------------------------------------------


def _remember(directory: Path, wanted: _Wanted) -> None:
    _replace(directory / _WANTED, json.dumps(asdict(wanted)))


def _recall(directory: Path) -> _Wanted | None:
    try:
        found = json.loads((directory / _WANTED).read_text())
        return _Wanted(str(found["image"]), int(found["port"]), {str(k): bool(v) for k, v in found["clients"].items()})
    except (OSError, ValueError, KeyError, TypeError, AttributeError):
        return None


def _replace(path: Path, text: str) -> None:
    new = path.with_name(f"{path.name}.new")
    new.write_text(text)
    new.rename(path)


def _program(name: str) -> str:
    """The path of a program that is under the same name in the server's own root."""
    found = shutil.which(name)
    if found is None:
        raise BackendFailed(
            f"{name} is not installed: install nfs-ganesha and nfs-ganesha-vfs, or run the kvm_xfs_host role of this "
            "collection"
        )
    return str(Path(found).resolve())


# --- processes and file systems; what may block runs in a thread of its own ----------------------------------------


async def _aside(work: Callable[[], _T], seconds: float, what: str) -> _T:
    """Run ``work`` in a fresh thread: if the kernel holds it up, only its caller waits, and not for long."""
    loop = asyncio.get_running_loop()
    done: asyncio.Future[_T] = loop.create_future()

    def settle(result: _T | None, error: Exception | None) -> None:
        if done.done():
            return
        if error is None:
            done.set_result(result)  # type: ignore[arg-type]
        else:
            done.set_exception(error)

    def body() -> None:
        result: _T | None = None
        error: Exception | None = None
        try:
            result = work()
        except TimeoutError:
            error = Timeout(f"{what} within {seconds:g} s")
        except OSError as raised:
            error = BackendFailed(f"{what}: {raised.strerror or raised}")
        except Exception as raised:
            error = raised
        with contextlib.suppress(RuntimeError):  # The loop is gone: nobody waits any more.
            loop.call_soon_threadsafe(settle, result, error)

    threading.Thread(target=body, name="volume", daemon=True).start()
    try:
        async with asyncio.timeout(seconds):
            return await done
    except TimeoutError:
        raise Timeout(f"{what} within {seconds:g} s") from None


async def _kill(server: _Server, seconds: float) -> None:
    """End the process; returns when everything it had written is in the image and nobody has that mounted."""
    pidfd = os.dup(server.pidfd) if server.pidfd >= 0 else -1  # Ours, should the server be forgotten meanwhile.
    what = f"the server of volume {server.volume} did not end"
    await _aside(lambda: _finish(server, pidfd, seconds), seconds, what)


def _finish(server: _Server, pidfd: int, seconds: float) -> None:
    deadline = time.monotonic() + seconds
    if pidfd >= 0:
        mounted = -1
        with contextlib.suppress(BackendFailed):
            mounted = server.directory()
        try:
            with contextlib.suppress(ProcessLookupError):
                signal.pidfd_send_signal(pidfd, signal.SIGKILL)
            if not _ends(pidfd, seconds):
                raise TimeoutError
            if mounted >= 0:
                _syncfs(mounted)
        finally:
            os.close(pidfd)
            if mounted >= 0:
                os.close(mounted)  # The last to have it: this unmounts.
    if server.wanted.image:
        _wait_for_image(Path(server.wanted.image), deadline)


def _ends(pidfd: int, seconds: float) -> bool:
    """Whether the process ends within that time."""
    waiting = select.poll()
    waiting.register(pidfd, select.POLLIN)
    return bool(waiting.poll(seconds * 1000))


def _wait_for_image(image: Path, deadline: float) -> None:
    """Return when no loop device has it any more: the launcher's lock is gone then. Raises TimeoutError."""
    with contextlib.suppress(FileNotFoundError), image.open("rb") as file:
        while True:
            try:
                fcntl.flock(file, fcntl.LOCK_SH | fcntl.LOCK_NB)
                return
            except BlockingIOError:
                if time.monotonic() > deadline:
                    raise TimeoutError from None
                time.sleep(0.001)


def _forget(server: _Server) -> None:
    """Stop watching a server."""
    if server.pidfd >= 0:
        asyncio.get_running_loop().remove_reader(server.pidfd)
        os.close(server.pidfd)
    if server.log >= 0:
        os.close(server.log)
    server.pidfd = server.log = -1


def _processes(root: Path) -> Iterator[tuple[int, str, bool]]:
    """Processes of servers under ``root``: (pid, volume, whether it serves; else it is still being launched)."""
    for entry in Path("/proc").iterdir():
        if not entry.name.isdigit():
            continue
        with contextlib.suppress(OSError):
            for word in (entry / "cmdline").read_bytes().decode(errors="replace").split("\0"):
                path = Path(word)
                if path.name == volume_launcher.SERVER and path.parent.parent == root:
                    yield int(entry.name), path.parent.name, True
                elif path.parent == root:
                    yield int(entry.name), path.name, False


def _quiet(server: _Server, seconds: float) -> None:
    """Return when every thread of a process that was sent SIGSTOP stands, and what it had written is in the image."""
    deadline = time.monotonic() + seconds
    mounted = server.directory()
    try:
        while not all(_stands(task) for task in Path(f"/proc/{server.pid}/task").iterdir()):
            if time.monotonic() > deadline:
                raise TimeoutError
            time.sleep(0.0002)
        _syncfs(mounted)
    finally:
        os.close(mounted)


def _stands(task: Path) -> bool:
    try:
        return (task / "stat").read_text().rpartition(")")[2].split()[0] in "TtZX"
    except OSError:
        return True


def _sync(server: _Server) -> None:
    mounted = server.directory()
    try:
        _syncfs(mounted)
    finally:
        os.close(mounted)


def _used(server: _Server) -> int:
    mounted = server.directory()
    try:
        found = os.statvfs(mounted)
        return (found.f_blocks - found.f_bfree) * found.f_frsize
    finally:
        os.close(mounted)


def _grow(server: _Server) -> None:
    mounted = server.directory()
    try:
        device = os.fstat(mounted).st_dev
        name = Path(f"/sys/dev/block/{os.major(device)}:{os.minor(device)}").resolve().name
        with Path("/dev", name).open("rb") as loop:
            fcntl.ioctl(loop, _LOOP_SET_CAPACITY, 0)
        blocks = Path(server.wanted.image).stat().st_size // BLOCK
        fcntl.ioctl(mounted, EXT4_IOC_RESIZE_FS, struct.pack("=Q", blocks))
    finally:
        os.close(mounted)


async def _fit(image: Path) -> None:
    """Let the file system fill the image before it is mounted, where that is not allowed to us afterwards."""
    if _may_resize():
        return
    with image.open("rb") as file:
        if block_counts(file.fileno())[0] >= os.fstat(file.fileno()).st_size // BLOCK:
            return
    deadline = time.monotonic() + _END_SECONDS
    await _aside(lambda: _wait_for_image(image, deadline), _END_SECONDS, f"{image} was not let go of")
    checked = await arun(["e2fsck", "-f", "-p", str(image)], timeout=_RESIZE_SECONDS, check=False)
    if checked.returncode > 1:
        raise BackendFailed(f"the file system in {image} is damaged: {checked.stdout.strip()[-500:]}")
    await arun(["resize2fs", str(image)], timeout=_RESIZE_SECONDS)


def _may_resize() -> bool:
    """Whether the kernel lets us grow a mounted ext4: containers may lack the capability."""
    status = Path("/proc/self/status").read_text()
    effective = next(line.split()[1] for line in status.splitlines() if line.startswith("CapEff:"))
    return bool(int(effective, 16) >> _CAP_SYS_RESOURCE & 1)


# --- asking a server: ONC RPC (RFC 5531) without credentials --------------------------------------------------------


async def _ask(address: str, port: int, program: int, procedure: int) -> bytes:
    """Call a procedure without arguments, of version 3; its result. Raises OSError, EOFError."""
    reader, writer = await open_connection(address, port)
    try:
        call = struct.pack(">10I", 1, 0, 2, program, 3, procedure, 0, 0, 0, 0)
        writer.write(struct.pack(">I", len(call) | 1 << 31) + call)
        reply, last = b"", False
        while not last:
            (mark,) = struct.unpack(">I", await reader.readexactly(4))
            last = bool(mark >> 31)
            reply += await reader.readexactly(mark & 0x7FFFFFFF)
            if len(reply) > _LARGEST_ANSWER:
                raise EOFError("it does not end")
    finally:
        writer.close()
    if reply[4:24] != struct.pack(">5I", 1, 0, 0, 0, 0):
        raise EOFError("it refused")
    return reply[24:]


def _opaque(text: str) -> bytes:
    data = text.encode()
    return struct.pack(">I", len(data)) + data + b"\0" * (-len(data) % 4)


def _syncfs(descriptor: int) -> None:
    if _libc.syncfs(descriptor) != 0:
        number = ctypes.get_errno()
        raise OSError(number, os.strerror(number))
