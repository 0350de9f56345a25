"""Simulate the hosts of a large fleet in one process: ``python -m benchmarks.simulation.hosts ROOT SECTION SANDBOXES``.

SECTION is [fleet] as JSON, without ``name`` and ``address``. Each host has SANDBOXES sandboxes and the template `base`.

The process reads commands, one a line, and ends with its standard input:

* ``join NUMBER``: hosts join until there are as many. When etcd has all their names, the process prints the number.
* ``count``: the process prints how many transactions with names and ids the hosts have sent.

Engines, memberships, directories and their requests to etcd are real. Machines exist only in memory. Hosts differ from
real ones in three ways: they do not follow the objects of others (``watches.py`` does that for all), so that only the
transactions in etcd keep names unique; they share connections to etcd, with a client that needs less time than the real
one; and they serve only two requests: one creates a sandbox, and the other one checks that the gateway answers.
"""

from __future__ import annotations

import asyncio
import hashlib
import http.client
import json
import resource
import ssl
import sys
import threading
from collections.abc import Iterator, Mapping, Sequence
from datetime import UTC, datetime
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit

import uvicorn
from starlette.responses import JSONResponse
from starlette.types import Receive, Scope, Send
from uvicorn.protocols.http.h11_impl import H11Protocol
from uvicorn.server import ServerState

from sandbox_gateway.config import Config
from sandbox_gateway.engine.engine import Engine
from sandbox_gateway.engine.spec import ForkSpec
from sandbox_gateway.fleet.directory import Directory
from sandbox_gateway.fleet.keys import Keys
from sandbox_gateway.fleet.membership import Membership
from sandbox_gateway.fleet.records import MemberRecord
from sandbox_gateway.fleet.store import Operation, Outcome, Store, StoreUnavailable
from sandbox_gateway.fleet.view import FleetView
from sandbox_gateway.hosts.base import Abilities, Room
from sandbox_gateway.records import Sandbox, SandboxState, Snapshot, SnapshotKind
from tests.fleet.times import PATIENT_TIMES, set_times
from tests.support import session
from tests.support.memory_host import MemoryHost

TEMPLATE = "base"
_STORE_COUNT = 4
_JOINING_AT_ONCE = 8
_TIMEOUT_SECONDS = 30
_CREATED_AT = datetime(2026, 1, 1, tzinfo=UTC)
_MACHINE_BYTES = 256 << 20


class _SharedStore(Store):
    """Sends requests with the standard library, because one process sends those of all hosts."""

    def __init__(self, endpoint: str) -> None:
        super().__init__([endpoint])
        self.name_transactions = 0
        self._address = urlsplit(endpoint)
        self._connections = threading.local()

    async def transact(
        self, compare: Sequence[Operation], success: Sequence[Operation], failure: Sequence[Operation] = ()
    ) -> Outcome:
        if len(success) > 1:  # Otherwise, it only writes a record.
            self.name_transactions += 1
        return await super().transact(compare, success, failure)

    def _send(self, path: str, body: Mapping[str, Any]) -> Any:
        connection = self._connections.__dict__.get("connection")
        if connection is None:
            connection = http.client.HTTPConnection(
                self._address.hostname or "", self._address.port, timeout=_TIMEOUT_SECONDS
            )
            self._connections.connection = connection
        connection.request("POST", f"/v3{path}", json.dumps(body), {"Content-Type": "application/json"})
        response = connection.getresponse()
        data = response.read()
        if response.status != http.client.OK:
            raise StoreUnavailable(f"etcd: {path}: {response.status} {data[:500]!r}")
        return json.loads(data)


class _Machines(MemoryHost):
    """A host with as much memory as its name says, of which each sandbox uses a part."""

    abilities = Abilities(memory=True, resize_on_fork=False, independent_snapshots=True)

    def __init__(self, name: str) -> None:
        super().__init__()
        digest = int.from_bytes(hashlib.sha256(name.encode()).digest()[:4])
        self._memory_total = (128 << 30) + digest % (128 << 30)
        self.sandbox_count = 0

    async def measure_room(self) -> Room:
        used = (self.sandbox_count + len(self.machines)) * _MACHINE_BYTES
        return Room(
            disk_free=1 << 40,
            disk_total=2 << 40,
            memory_free=self._memory_total - used,
            memory_total=self._memory_total,
        )


class _Host:
    def __init__(
        self,
        number: int,
        root: Path,
        section: Mapping[str, Any],
        sandbox_count: int,
        store: Store,
        members: dict[str, MemberRecord],
    ) -> None:
        """``members``: the members of all hosts, which determine how often each renews its record."""
        name = f"h{number:04}"
        state_root = root / name
        state_root.mkdir()
        self._port = session.allocate_port()
        fleet = {**section, "name": name, "address": f"127.0.0.1:{self._port}"}
        limits = {"sandboxes": 10_000}
        config = Config.model_validate({"host": {"state_root": str(state_root)}, "fleet": fleet, "limits": limits})
        assert config.fleet
        machines = _Machines(name)
        self._engine = Engine(machines, config)
        self._engine.secret.load(config.secret_path)
        template = Snapshot(kind=SnapshotKind.TEMPLATE, names=[TEMPLATE], recipe_digest="1", created_at=_CREATED_AT)
        machines.disks[template.id] = {}
        machines.sandbox_count = sandbox_count
        self._engine.index.load(_create_sandboxes(name, template, sandbox_count), [template])
        keys = Keys(config.fleet.prefix)
        self._view = FleetView(store, keys, name)
        self._view.members = members
        self._membership = Membership(config.fleet, self._engine, store, keys, self._view)
        self._directory = Directory(self._engine, store, keys, self._view, self._membership)
        self._tasks: list[asyncio.Task[None]] = []

    async def join(self, tls: ssl.SSLContext) -> None:
        """Join, and wait until etcd has all names."""
        await self._serve(tls)
        await self._membership.join()
        self._directory.attach()
        for listener in self._view.load_listeners:
            listener([])
        self._tasks = [
            asyncio.create_task(work)
            for work in (
                self._membership.keep_alive(),
                self._membership.renew_record(),
                self._directory.publish_changes(),
            )
        ]
        # The directory has no event for this.
        while self._directory._changed_ids or not self._membership.lease:  # noqa: ASYNC110
            await asyncio.sleep(0.05)
        assert self._membership._record
        self._view.members[self._membership.name] = self._membership._record

    async def _serve(self, tls: ssl.SSLContext) -> None:
        settings = uvicorn.Config(self._answer, interface="asgi3", lifespan="off", log_config=None, access_log=False)
        settings.load()
        state = ServerState()
        loop = asyncio.get_running_loop()
        await loop.create_server(lambda: H11Protocol(settings, state, {}), "127.0.0.1", self._port, ssl=tls)

    async def _answer(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["path"] == "/health":
            await JSONResponse({})(scope, receive, send)
            return
        sandbox = await self._engine.forks.create(TEMPLATE, ForkSpec())
        await JSONResponse({"sandboxID": sandbox.id}, 201)(scope, receive, send)


def _create_sandboxes(host_name: str, template: Snapshot, count: int) -> Iterator[Sandbox]:
    for number in range(count):
        yield Sandbox(
            name=f"{host_name}-{number}",
            state=SandboxState.PAUSED,
            template_id=template.id,
            forked_from=template.id,
            created_at=_CREATED_AT,
        )


async def _run(root: Path, section: Mapping[str, Any], sandbox_count: int) -> None:
    tls = ssl.create_default_context(ssl.Purpose.CLIENT_AUTH, cafile=section["tls_ca"])
    tls.load_cert_chain(section["tls_cert"], section["tls_key"])
    tls.verify_mode = ssl.CERT_REQUIRED
    stores = [_SharedStore(section["etcd"][0]) for _ in range(_STORE_COUNT)]
    members: dict[str, MemberRecord] = {}
    joining = asyncio.Semaphore(_JOINING_AT_ONCE)

    async def join(number: int) -> _Host:
        async with joining:
            host = _Host(number, root, section, sandbox_count, stores[number % _STORE_COUNT], members)
            await host.join(tls)
            return host

    hosts: list[_Host] = []
    while line := await asyncio.to_thread(sys.stdin.readline):
        command, *arguments = line.split()
        if command == "join":
            hosts += await asyncio.gather(*(join(number) for number in range(len(hosts), int(arguments[0]))))
            print(len(hosts), flush=True)
        else:
            print(sum(store.name_transactions for store in stores), flush=True)


def main() -> None:
    root, section, sandbox_count = sys.argv[1:]
    set_times(PATIENT_TIMES)
    # Each simulated machine and host has sockets in this process.
    _, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    resource.setrlimit(resource.RLIMIT_NOFILE, (hard, hard))
    asyncio.run(_run(Path(root), json.loads(section), int(sandbox_count)))


if __name__ == "__main__":
    main()
