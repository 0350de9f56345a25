"""A host that simulates its machines in memory, for tests of the layers above hosts.

A machine is a small HTTP server with the agent's API, on its own loopback address. Its `/exec` supports `write KEY
VALUE`, `read KEY`, `sleep SECONDS`, `exit CODE`, and `env`. The contents of an uploaded file are the value of its path.
Written values are part of a capture, except for keys below the path of a mounted volume, which belong to the volume. As
on hosts of virtual machines, a volume is available once the agent has mounted it, and only while the host grants the
machine access to it.
"""

from __future__ import annotations

import asyncio
import base64
import itertools
import json
import os
import struct
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any
from urllib.parse import parse_qs, urlsplit

from sandbox_gateway.errors import BackendFailed, Conflict, Invalid, Unsupported
from sandbox_gateway.hosts.base import (
    MACHINE_PARTS,
    MEMORY_PARTS,
    Abilities,
    Endpoint,
    GuestMount,
    ImportBase,
    Load,
    Log,
    Room,
    Scan,
    SnapshotPart,
    StorageCommands,
    StreamEncoding,
    Usage,
    VolumeState,
)
from sandbox_gateway.hosts.disk_queries import DiskQueries
from sandbox_gateway.hosts.network_policy import build_egress_rules
from sandbox_gateway.image_references import RegistryLogin
from sandbox_gateway.recipes import Recipe, compute_source_digest
from sandbox_gateway.records import MemoryMode, Mount, NetworkPolicy, Sandbox, Snapshot, Volume, VolumeSnapshot

AGENT_PORT = 49983
_slot_numbers = itertools.count()


def _choose_next_address() -> str:
    """Return a loopback address that no other concurrent test run on this machine uses."""
    slot, pid = next(_slot_numbers), os.getpid()
    return f"127.{64 + pid % 150}.{(pid // 150 + slot // 250) % 250}.{slot % 250 + 2}"


class Machine:
    """A running machine, with its agent and the values written to it."""

    def __init__(self, state: dict[str, str], volumes: dict[str, dict[str, str]]) -> None:
        self.state = dict(state)
        self.volumes = volumes
        self.names: dict[str, Any] = {}
        """The names in its interpreter."""
        self.allowed: dict[str, bool] = {}
        """The volumes to which the host grants access, and whether each access is read-only."""
        self.mounted_volumes: dict[str, str] = {}
        """The agent's mounts: path → volume."""
        self.address = ""
        self.identity: dict[str, Any] = {}
        self.forwarded_requests: list[tuple[str, dict[str, str], bytes]] = []
        """(request line, headers, body) of each request that did not come from the engine."""
        self.sync_count = 0
        """The number of times the engine made the guest write its cache to its disk."""
        self._server: asyncio.Server | None = None
        self._connections: set[asyncio.Task[None]] = set()

    async def start(self) -> None:
        while True:
            self.address = _choose_next_address()
            try:
                self._server = await asyncio.start_server(self._serve, self.address, AGENT_PORT)
                return
            except OSError:
                continue

    async def stop(self) -> None:
        if self._server is not None:
            self._server.close()
        for connection in self._connections:
            connection.cancel()
        await asyncio.gather(*self._connections, return_exceptions=True)
        self._server = None

    @property
    def connection_count(self) -> int:
        return len(self._connections)

    async def _serve(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        task = asyncio.current_task()
        assert task is not None
        self._connections.add(task)
        try:
            while await self._serve_request(reader, writer):
                pass
        except (OSError, ValueError, asyncio.IncompleteReadError):
            pass
        finally:
            self._connections.discard(task)
            writer.transport.abort() if task.cancelling() else writer.close()

    async def _serve_request(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> bool:
        head = (await reader.readuntil(b"\r\n\r\n")).decode("latin-1")
        request_line, *fields = head.strip().split("\r\n")
        headers = {name.strip().lower(): value.strip() for name, value in (field.split(":", 1) for field in fields)}
        body = await _read_body(reader, headers)
        _, target, _ = request_line.split(" ")
        await self._handle_request(request_line, target, headers, body, writer)
        await writer.drain()
        return headers.get("connection", "") != "close"

    async def _handle_request(
        self, line: str, target: str, headers: dict[str, str], body: bytes, writer: asyncio.StreamWriter
    ) -> None:
        if target == "/identity":
            self.identity = json.loads(body)
            _send(writer, 200, json.dumps({"skipped": []}).encode())
        elif target.startswith(("/echo", "/stream", "/hang")):
            self.forwarded_requests.append((line, headers, body))
            await self._respond_to_client(target, headers, body, writer)
        elif headers.get("x-access-token") != self.identity.get("accessToken"):
            _send(writer, 401, b'{"message": "wrong token"}')
        elif target.startswith("/files?"):
            self.state[parse_qs(urlsplit(target).query)["path"][0]] = body.decode("latin-1")
            _send(writer, 200, b"[]")
        elif target == "/exec":
            _send(writer, 200, json.dumps(await self._exec(json.loads(body))).encode())
        elif target == "/eval":
            _send(writer, 200, json.dumps(self._eval(json.loads(body)["code"])).encode())
        elif target == "/mounts":
            status, result = self._set_mounts(json.loads(body)["mounts"])
            _send(writer, status, json.dumps(result).encode())
        elif target == "/process.Process/Start":
            _send(writer, 200, self._start_process(body), "application/connect+json")
        else:
            self.sync_count += target == "/sync"
            _send(writer, 200, b'{"frozen": true}')

    async def _respond_to_client(
        self, target: str, headers: dict[str, str], body: bytes, writer: asyncio.StreamWriter
    ) -> None:
        if target.startswith("/echo"):
            echo = {"target": target, "headers": headers, "length": len(body), "body": body[:100].decode("latin-1")}
            _send(writer, 201, json.dumps(echo).encode(), extra_fields="X-Inside: yes\r\nKeep-Alive: timeout=5\r\n")
        elif target.startswith("/stream"):
            writer.write(b"HTTP/1.1 200 OK\r\nTransfer-Encoding: chunked\r\n\r\n")
            for number in itertools.count():
                writer.write(b"%x\r\n%s\r\n" % (len(b"tick %d\n" % number), b"tick %d\n" % number))
                await writer.drain()
                await asyncio.sleep(0.02)
        else:
            await asyncio.sleep(3600)

    def _set_mounts(self, mounts: list[dict[str, Any]]) -> tuple[int, dict[str, Any]]:
        for mount in mounts:
            if mount["source"] not in self.allowed:
                return 500, {"message": f"{mount['source']} cannot be mounted on {mount['path']}: access denied"}
        previous_mounts, self.mounted_volumes = (
            self.mounted_volumes,
            {mount["path"]: mount["source"] for mount in mounts},
        )
        return 200, {
            "mounted": [path for path, source in self.mounted_volumes.items() if previous_mounts.get(path) != source],
            "unmounted": [path for path, source in previous_mounts.items() if self.mounted_volumes.get(path) != source],
        }

    def _resolve(self, key: str) -> tuple[dict[str, str], str, bool]:
        """Return the mapping that contains ``key``, the key in that mapping, and whether the mapping is writable."""
        for path, volume in self.mounted_volumes.items():
            if key.startswith(f"{path}/"):
                if volume not in self.allowed:
                    return {}, key, False
                return self.volumes[volume], key.removeprefix(path), not self.allowed[volume]
        return self.state, key, True

    async def _exec(self, request: dict[str, Any]) -> dict[str, Any]:
        verb, *words = request["args"]
        exit_code, stdout, stderr, timed_out = 0, "", "", False
        if verb == "write":
            mapping, key, is_writable = self._resolve(words[0])
            if is_writable:
                mapping[key] = words[1]
            else:
                exit_code, stderr = 1, "Read-only file system\n"
        elif verb == "read":
            mapping, key, _ = self._resolve(words[0])
            exit_code, stdout = (0, mapping[key]) if key in mapping else (1, "")
        elif verb == "sleep":
            timed_out = float(words[0]) > request["timeout"]
            await asyncio.sleep(min(float(words[0]), request["timeout"]))
            exit_code = 137 if timed_out else 0
        elif verb == "exit":
            exit_code, stderr = int(words[0]), "leaving\n"
        elif verb == "cat":
            stdout = base64.b64decode(request.get("stdin", "")).decode()
        elif verb == "env":
            stdout = json.dumps({"env": request["env"], "cwd": request.get("cwd"), "user": request.get("user")})
        elif verb == "/bin/sh":
            exit_code, stderr = self._run_shell_command(words[1])
        else:
            exit_code, stderr = 127, f"{verb}: not found\n"
        return {
            "exitCode": exit_code,
            "stdout": base64.b64encode(stdout.encode()).decode(),
            "stderr": base64.b64encode(stderr.encode()).decode(),
            "timedOut": timed_out,
            "truncated": False,
        }

    def _run_shell_command(self, text: str) -> tuple[int, str]:
        """Return the exit code and stderr of a shell command: `true`, or a command of the template builder."""
        command, *words = text.split()
        if command == "test":
            return (0 if words[-1] in self.state else 1), ""
        return (0, "") if command in ("true", "chmod") else (127, f"{command}: not found\n")

    def _eval(self, code: str) -> dict[str, Any]:
        try:
            try:
                value = eval(compile(code, "code", "eval"), self.names)
            except SyntaxError:
                value = exec(compile(code, "code", "exec"), self.names)
        except Exception as error:
            return {"result": "", "error": f"{type(error).__name__}: {error}", "exit_code": 1}
        return {"result": repr(value), "error": "", "exit_code": 0}

    def _start_process(self, body: bytes) -> bytes:
        """Return the Connect stream of a process that prints its command, and exits with 1 if that is `fail`."""
        command = json.loads(body[5:])["process"]["args"][1]
        encoded_output = base64.b64encode(f"ran {command}\n".encode()).decode()
        events: list[dict[str, Any]] = [{"start": {"pid": 1}}, {"data": {"stdout": encoded_output}}]
        events.append({"end": {"exitCode": 1 if command == "fail" else 0, "exited": True}})
        frames = [(0, {"event": event}) for event in events] + [(2, {})]
        return b"".join(_encode_frame(flag, message) for flag, message in frames)


def _encode_frame(flag: int, message: dict[str, Any]) -> bytes:
    payload = json.dumps(message).encode()
    return struct.pack(">BI", flag, len(payload)) + payload


async def _read_body(reader: asyncio.StreamReader, headers: dict[str, str]) -> bytes:
    if headers.get("transfer-encoding") != "chunked":
        return await reader.readexactly(int(headers.get("content-length", 0)))
    body = b""
    while size := int(await reader.readline(), 16):
        body += await reader.readexactly(size)
        await reader.readline()
    await reader.readline()
    return body


def _send(
    writer: asyncio.StreamWriter,
    status: int,
    body: bytes,
    content_type: str = "application/json",
    extra_fields: str = "",
) -> None:
    head = f"HTTP/1.1 {status} X\r\nContent-Type: {content_type}\r\nContent-Length: {len(body)}\r\n{extra_fields}\r\n"
    writer.write(head.encode() + body)


class MemorySource:
    """A ``hosts.base.SnapshotSource`` of a snapshot in memory. Its disk contains the written values as JSON."""

    architecture = "test"
    encoding = StreamEncoding.PLAIN

    def __init__(
        self, state: dict[str, str], snapshot: Snapshot, memory: bool, base: dict[str, str] | None = None
    ) -> None:
        if base is not None:
            state = {key: value for key, value in state.items() if base.get(key) != value}
        self.relative_parts = frozenset() if base is None else frozenset({SnapshotPart.DISK})
        self.platform = {"accelerator": "a", "cpu_model": "b", "machine": "c", "qemu_version": "1"} if memory else {}
        self.line = False
        self.contents = dict.fromkeys(MACHINE_PARTS | MEMORY_PARTS if memory else MACHINE_PARTS, b"x")
        self.contents[SnapshotPart.DISK] = json.dumps(state).encode()
        self.sizes = {part: len(contents) for part, contents in self.contents.items()}
        if memory:
            self.sizes[SnapshotPart.MEMORY] = snapshot.resources.memory_mb << 20
        self.is_closed = False

    def extents(self, part: SnapshotPart) -> Iterator[tuple[int, int]]:
        yield 0, len(self.contents[part])

    def read(self, part: SnapshotPart, offset: int, length: int) -> bytes:
        return self.contents[part][offset : offset + length].ljust(length, b"\0")

    def close(self) -> None:
        self.is_closed = True


class MemoryVolumeSource:
    """A ``hosts.base.PartSource`` of a volume in memory. Its image contains the values in the volume as JSON."""

    encoding = StreamEncoding.PLAIN
    relative_parts: frozenset[SnapshotPart] = frozenset()

    def __init__(self, files: dict[str, str], size_mb: int) -> None:
        self.contents = json.dumps(files).encode()
        self.sizes = {SnapshotPart.VOLUME: size_mb << 20}
        self.is_closed = False

    def extents(self, part: SnapshotPart) -> Iterator[tuple[int, int]]:
        yield 0, len(self.contents)

    def read(self, part: SnapshotPart, offset: int, length: int) -> bytes:
        return self.contents[offset : offset + length].ljust(length, b"\0")

    def close(self) -> None:
        self.is_closed = True


class MemoryVolumeTarget:
    """A ``hosts.base.ImportTarget``, which adds a volume with the values in its image when it is committed."""

    def __init__(self, volume: Volume, host: MemoryHost) -> None:
        self.volume = volume
        self.host = host
        self.contents = bytearray()
        host.partial_imports.add(volume.id)

    def write(self, part: SnapshotPart, offset: int, data: bytes) -> None:
        self.contents[offset : offset + len(data)] = data

    async def commit(self) -> None:
        self.host.files[self.volume.id] = json.loads(self.contents.rstrip(b"\0"))
        self.host.volumes[self.volume.id] = self.volume
        self.host.partial_imports.discard(self.volume.id)

    async def discard(self) -> None:
        self.host.files.pop(self.volume.id, None)
        self.host.volumes.pop(self.volume.id, None)
        self.host.partial_imports.discard(self.volume.id)


class MemoryTarget:
    """A ``hosts.base.ImportTarget``, which adds the values on its disk to ``disks`` when it is committed."""

    def __init__(self, snapshot: Snapshot, host: MemoryHost, base: ImportBase | None = None) -> None:
        self.snapshot = snapshot
        self.state = {} if base is None or not base.parts else dict(host.disks[base.snapshot.id])
        self.host = host
        self.contents: dict[SnapshotPart, bytearray] = {part: bytearray() for part in SnapshotPart}
        host.partial_imports.add(snapshot.id)

    def write(self, part: SnapshotPart, offset: int, data: bytes) -> None:
        self.contents[part][offset : offset + len(data)] = data

    async def commit(self) -> None:
        self.host.disks[self.snapshot.id] = self.state | json.loads(self.contents[SnapshotPart.DISK])
        self.host.partial_imports.discard(self.snapshot.id)

    async def discard(self) -> None:
        self.host.disks.pop(self.snapshot.id, None)
        self.host.partial_imports.discard(self.snapshot.id)


class MemoryHost:
    """An in-memory ``hosts.base.Host``.

    A fork takes ``fork_seconds``, and fails if the sandbox's name is in ``failing_names``. ``blocked_paths`` cannot be
    used as mount points. If ``failed_boot_console`` is set, machines end while they boot, with this console output.
    """

    kind = "memory"
    abilities = Abilities(
        memory=True,
        resize_on_fork=False,
        independent_snapshots=True,
        prewarm=True,
        can_stall=True,
        transfer=True,
        incremental_transfer=True,
        any_transfer_base=True,
    )
    boot_seconds = resume_seconds = 20.0
    machine_type = Machine

    def __init__(self) -> None:
        self.machines: dict[str, Machine] = {}
        self.disks: dict[str, dict[str, str]] = {}
        self.mounts_by_snapshot: dict[str, dict[str, str]] = {}
        """The agents' mounts, by the snapshot that contains their memory."""
        self.names: dict[str, dict[str, Any]] = {}
        """The names in interpreters, by the snapshot that contains their memory."""
        self.saved_sandboxes: dict[str, Sandbox] = {}
        self.volumes: dict[str, Volume] = {}
        self.volume_snapshots: dict[str, VolumeSnapshot] = {}
        self.files: dict[str, dict[str, str]] = {}
        """The contents of volumes and of their snapshots."""
        self.fork_seconds = 0.0
        self.build_seconds = 0.0
        self.failing_names: set[str] = set()
        self.disk_queries = DiskQueries()
        self.blocked_paths: set[str] = set()
        self.failed_boot_console: str | None = None
        self.available_room = Room(disk_free=50 << 30, disk_total=100 << 30, memory_free=8 << 30, memory_total=16 << 30)
        self.current_storage_commands: StorageCommands | None = None
        self.import_problem = ""
        self.partial_imports: set[str] = set()
        """Ids of the snapshots that are being imported."""
        self.sources: list[MemorySource | MemoryVolumeSource] = []
        """The snapshots that have been opened for an export."""
        self.memory_problems: dict[str, str] = {}
        """Why the memory of a snapshot is unavailable, by id."""
        self.stalled_instances: set[str] = set()
        """Instances whose machines are stalled."""
        self.fork_count = 0
        self.claim_count = 0
        self._exit: Callable[[str], None] = lambda _: None

    async def open(self) -> None:
        pass

    async def close(self) -> None:
        for machine in self.machines.values():
            await machine.stop()

    async def scan(self) -> Scan:
        return Scan()

    def describe_platform(self) -> Mapping[str, str]:
        return {"accelerator": "memory"}

    async def measure_room(self) -> Room:
        return self.available_room

    def get_storage_commands(self) -> StorageCommands | None:
        return self.current_storage_commands

    async def find_stalled_instances(self) -> set[str]:
        return set(self.stalled_instances)

    async def resume_stalled(self, sandbox: Sandbox) -> None:
        self.stalled_instances.discard(sandbox.instance)

    def compute_guest_digest(self) -> str:
        return "guest"

    async def check_recipe(self, recipe: Recipe) -> None:
        pass

    async def compute_source_digest(self, recipe: Recipe, login: RegistryLogin | None = None) -> str:
        return await asyncio.to_thread(compute_source_digest, recipe)

    def read_step_programs(self) -> Mapping[str, str]:
        return {"/opt/sandbox/start": "start", "/opt/sandbox/copy": "copy"}

    async def build_base(
        self, base: Snapshot, recipe: Recipe, source_digest: str, log: Log, login: RegistryLogin | None = None
    ) -> str:
        log(f"making a file system of {len(recipe.packages)} packages")
        await asyncio.sleep(self.build_seconds)
        self.disks[base.id] = {}
        return ""

    async def fork(self, snapshot: Snapshot, sandbox: Sandbox, *, with_memory: bool, hold: bool = False) -> None:
        self.fork_count += 1
        await asyncio.sleep(self.fork_seconds)
        if sandbox.name in self.failing_names:
            raise BackendFailed(f"no machine for {sandbox.name}")
        self.disks[sandbox.instance] = self.disks[snapshot.id]
        await self.boot(sandbox)
        if with_memory:
            self.machines[sandbox.instance].mounted_volumes = dict(self.mounts_by_snapshot.get(snapshot.id, {}))
            self.machines[sandbox.instance].names = dict(self.names.get(snapshot.id, {}))

    async def flush_fork(self, fork: Sandbox) -> None:
        assert fork.instance in self.machines

    async def claim(self, fork: Sandbox, sandbox: Sandbox) -> None:
        self.claim_count += 1
        if sandbox.name in self.failing_names:
            await self.discard(fork)
            raise BackendFailed(f"no machine for {sandbox.name}")
        sandbox.instance, sandbox.host = fork.instance, fork.host

    async def boot(self, sandbox: Sandbox) -> None:
        machine = self.machine_type(self.disks[sandbox.instance], self.files)
        machine.allowed = {mount.volume: mount.read_only for mount in sandbox.mounts}
        await machine.start()
        if self.failed_boot_console is not None:
            await machine.stop()
        self.machines[sandbox.instance] = machine

    async def capture(
        self, sandbox: Sandbox, snapshot: Snapshot, *, memory: bool, volumes: Sequence[VolumeSnapshot] = ()
    ) -> Snapshot:
        for volume_snapshot in volumes:
            await self.capture_volume(self.volumes[volume_snapshot.volume], volume_snapshot)
        machine = self.machines[sandbox.instance]
        self.disks[snapshot.id] = dict(machine.state)
        if memory:
            self.mounts_by_snapshot[snapshot.id] = dict(machine.mounted_volumes)
            self.names[snapshot.id] = dict(machine.names)
        changes = {"memory": MemoryMode.INCREMENTAL if memory else MemoryMode.NONE, "resources": sandbox.resources}
        measurements = {"pause_ms": 6.25, "memory_bytes_written": 4096, "disk_bytes_unique": 1536}
        return snapshot.model_copy(update=changes | measurements)

    async def save(self, sandbox: Sandbox) -> None:
        self.saved_sandboxes[sandbox.id] = sandbox

    async def save_snapshot(self, snapshot: Snapshot) -> None:
        pass

    async def stop(self, sandbox: Sandbox) -> None:
        if machine := self.machines.pop(sandbox.instance, None):
            self.disks[sandbox.instance] = machine.state
            await machine.stop()

    async def discard(self, sandbox: Sandbox) -> None:
        await self.stop(sandbox)
        self.disks.pop(sandbox.instance, None)

    async def remove(self, sandbox: Sandbox) -> None:
        self.saved_sandboxes.pop(sandbox.id, None)
        await self.discard(sandbox)

    def get_file_paths(self, snapshot: Snapshot) -> dict[str, str]:
        return {"dir": f"/memory/{snapshot.id}"}

    def find_memory_problem(self, snapshot: Snapshot) -> str:
        return self.memory_problems.get(snapshot.id, "")

    async def find_export_bases(self, snapshot: Snapshot) -> Mapping[str, int]:
        return {}

    async def open_snapshot(
        self, snapshot: Snapshot, *, memory: bool, base: Snapshot | None = None, resume_token: str = ""
    ) -> MemorySource:
        base_state = None if base is None else self.disks[base.id]
        source = MemorySource(self.disks[snapshot.id], snapshot, memory, base_state)
        self.sources.append(source)
        return source

    def find_import_problem(self, host_kind: str, architecture: str, platform: Mapping[str, str]) -> str:
        return self.import_problem

    def check_encoding(self, encoding: StreamEncoding) -> None:
        pass

    async def find_import_bases(self, guid: int, origin_id: str) -> Sequence[str]:
        return []

    async def begin_import(
        self,
        snapshot: Snapshot,
        sizes: Mapping[SnapshotPart, int],
        *,
        line: bool,
        authentic: bool = False,
        base: ImportBase | None = None,
    ) -> MemoryTarget:
        return MemoryTarget(snapshot, self, base)

    async def remove_snapshot(self, snapshot: Snapshot) -> None:
        self.disks.pop(snapshot.id, None)
        self.mounts_by_snapshot.pop(snapshot.id, None)
        self.names.pop(snapshot.id, None)

    async def create_volume(self, volume: Volume, source: VolumeSnapshot | None = None) -> None:
        self.files[volume.id] = dict(self.files[source.id]) if source else {}
        self.volumes[volume.id] = volume

    async def grow_volume(self, volume: Volume, size_mb: int) -> None:
        volume.size_mb = size_mb

    async def remove_volume(self, volume: Volume) -> None:
        for snapshot in [each for each in self.volume_snapshots.values() if each.volume == volume.id]:
            await self.remove_volume_snapshot(snapshot)
        del self.volumes[volume.id], self.files[volume.id]

    async def read_volume_state(self, volume: Volume) -> VolumeState:
        return VolumeState(used_bytes=sum(map(len, self.files[volume.id].values())))

    async def capture_volume(self, volume: Volume, snapshot: VolumeSnapshot) -> None:
        self.files[snapshot.id] = dict(self.files[volume.id])
        self.volume_snapshots[snapshot.id] = snapshot

    async def remove_volume_snapshot(self, snapshot: VolumeSnapshot) -> None:
        del self.volume_snapshots[snapshot.id], self.files[snapshot.id]

    async def rollback_volume(self, volume: Volume, snapshot: VolumeSnapshot) -> None:
        self.files[volume.id] = dict(self.files[snapshot.id])

    async def open_volume_snapshot(self, snapshot: VolumeSnapshot) -> MemoryVolumeSource:
        source = MemoryVolumeSource(self.files[snapshot.id], snapshot.size_mb)
        self.sources.append(source)
        return source

    def check_volume_origin(self, host_kind: str) -> None:
        if host_kind != "kvm_xfs":
            raise Unsupported(f"the snapshot comes from a {host_kind} host: use a {host_kind} host")

    async def begin_volume_import(self, volume: Volume, part: SnapshotPart, size: int) -> MemoryVolumeTarget:
        return MemoryVolumeTarget(volume, self)

    async def attach(self, sandbox: Sandbox, mount: Mount) -> None:
        if mount.path in self.blocked_paths:
            raise Invalid(f"{mount.path} is not a directory: choose a different path")
        self.machines[sandbox.instance].allowed[mount.volume] = mount.read_only

    async def detach(self, sandbox: Sandbox, mount: Mount) -> None:
        self.machines[sandbox.instance].allowed.pop(mount.volume, None)

    def list_guest_mounts(self, sandbox: Sandbox) -> list[GuestMount]:
        return [GuestMount(each.path, each.volume, "double", "", each.read_only) for each in sandbox.mounts]

    async def has_diverged(self, sandbox: Sandbox, head: Snapshot) -> bool:
        return await self.disk_queries.run(sandbox.instance, lambda: self.compare(sandbox, head))

    async def compare(self, sandbox: Sandbox, head: Snapshot) -> bool:
        machine = self.machines.get(sandbox.instance)
        if machine is None:
            raise Conflict(f"sandbox {sandbox.id} is gone")
        return machine.state != self.disks[head.id]

    async def measure_usage(self, sandbox: Sandbox, *, with_disk: bool = True) -> Usage:
        disk_bytes = await self.disk_queries.run(sandbox.instance, self.measure_disk) if with_disk else 0
        return Usage(disk_bytes=disk_bytes, memory_bytes=3 << 20)

    async def measure_disk(self) -> int:
        return 200_000

    async def measure_loads(self, sandboxes: Sequence[Sandbox]) -> dict[str, Load]:
        return {
            each.instance: Load(memory_bytes=3 << 20, disk_bytes=200_000, cpu_seconds=1.0, running_seconds=10.0)
            for each in sandboxes
            if each.instance in self.machines
        }

    async def read_console(self, sandbox: Sandbox) -> str:
        return self.failed_boot_console or ""

    def find_end_reason(self, sandbox: Sandbox) -> str:
        return "" if sandbox.instance in self.machines and self.failed_boot_console is None else "its machine stopped"

    def check_network(self, policy: NetworkPolicy) -> None:
        build_egress_rules(policy, self.list_name_servers())

    async def apply_network(self, sandbox: Sandbox, policy: NetworkPolicy) -> None:
        pass

    def list_name_servers(self) -> list[str]:
        return []

    def get_endpoint(self, sandbox: Sandbox) -> Endpoint:
        return Endpoint(self.machines[sandbox.instance].address)

    def on_exit(self, callback: Callable[[str], None]) -> None:
        self._exit = callback


class DependentSnapshotsHost(MemoryHost):
    """A host that cannot remove a snapshot while sandboxes or volumes that were created from it exist."""

    abilities = Abilities(memory=True, resize_on_fork=True, independent_snapshots=False, atomic_capture=True)
