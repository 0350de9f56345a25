"""The processes of a fleet that survives faults: gateways in network namespaces, and the members of etcd."""

from __future__ import annotations

import contextlib
import json
import os
import pickle
import select
import signal
import subprocess
import sys
import time
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import httpx

from sandbox_gateway.records import Sandbox, Snapshot
from tests.fleet.faults.network import Network, created_network
from tests.support import session
from tests.support.certificates import Authority, Certificate
from tests.support.etcd import Etcd, running_cluster

_START_SECONDS = 60.0
_PORT = 8701
_ETCD_MEMBERS = 3


@dataclass(frozen=True)
class Objects:
    """The objects on the disk of a host. ``disks``: the values on each disk, by the id of an instance or a snapshot."""

    sandboxes: Mapping[str, Sandbox] = field(default_factory=dict)
    snapshots: Mapping[str, Snapshot] = field(default_factory=dict)
    disks: Mapping[str, Mapping[str, str]] = field(default_factory=dict)


class GatewayProcess:
    """A gateway that can be killed, paused and started again."""

    def __init__(self, name: str, root: Path, command: list[str]) -> None:
        """``command``: starts ``durable_process`` for this host."""
        self.name = name
        self.root = root
        self._command = command
        self._process: subprocess.Popen[str] | None = None
        self._socket = ""

    def start(self) -> None:
        """Start the gateway, and wait until it is ready. Raises AssertionError if it does not start."""
        # Killed processes leave the directories of their sockets behind, which are removed together with the run's.
        environment = {**os.environ, "TMPDIR": str(session.get_run_dir())}
        with (self.root / "log").open("a") as log:
            self._process = subprocess.Popen(
                self._command, stdout=subprocess.PIPE, stderr=log, stdin=subprocess.DEVNULL, env=environment, text=True
            )
        assert self._process.stdout
        readable, _, _ = select.select([self._process.stdout], [], [], _START_SECONDS)
        # It prints both lines, its port and its socket, at once.
        lines = [self._process.stdout.readline().strip() for _ in range(2)] if readable else [""]
        assert lines[-1], f"the gateway of {self.name} did not start: {self._read_log_tail()}"
        self._socket = lines[-1]

    def _read_log_tail(self) -> str:
        return (self.root / "log").read_text()[-3000:]

    @property
    def is_alive(self) -> bool:
        process = self._process  # Another thread may kill it.
        return process is not None and process.poll() is None

    def kill(self) -> None:
        if self._process:
            self._process.kill()
            self._process.wait(20)
            assert self._process.stdout
            self._process.stdout.close()
            self._process = None

    def pause(self) -> None:
        self._signal(signal.SIGSTOP)

    def resume(self) -> None:
        self._signal(signal.SIGCONT)

    def _signal(self, number: signal.Signals) -> None:
        if self.is_alive:
            assert self._process
            self._process.send_signal(number)

    def arm(self, steps: int) -> None:
        """Let the process kill itself after so many steps."""
        (self.root / "kill-after").write_text(str(steps))

    def disarm(self) -> None:
        """End what ``arm`` did. The process may be writing the file at the same time."""
        deadline = time.monotonic() + 0.3
        while time.monotonic() < deadline:
            (self.root / "kill-after").unlink(missing_ok=True)
            time.sleep(0.02)

    def shift_clock(self, seconds: float) -> None:
        (self.root / "clock-shift").write_text(str(seconds))

    @contextlib.contextmanager
    def client(self, seconds: float = 30.0) -> Iterator[httpx.Client]:
        """Yield a client with administrator rights, which no partition of the network affects.

        ``seconds``: how long the gateway may stay silent.
        """
        transport = httpx.HTTPTransport(uds=self._socket, verify=False)
        with httpx.Client(transport=transport, base_url="http://gateway", timeout=seconds, trust_env=False) as client:
            yield client

    def get(self, path: str) -> Any:
        """Return the JSON of a successful request. Raises httpx.HTTPError."""
        with self.client() as client:
            response = client.get(path)
            response.raise_for_status()
            return response.json()

    def read_objects(self) -> Objects:
        with contextlib.suppress(FileNotFoundError):
            return Objects(*pickle.loads((self.root / "objects").read_bytes()))
        return Objects()


class FleetProcesses:
    """Gateways of the hosts h1, h2, …, and a cluster of etcd, in one network."""

    def __init__(
        self, root: Path, network: Network, members: list[Etcd], addresses: list[str], certificate: Certificate
    ) -> None:
        """``addresses``: those of the members. ``certificate``: of a client of etcd."""
        self.root = root
        self.etcd_tls = certificate.create_client_context()
        self.network = network
        self.members = members
        self.member_addresses = addresses
        self.gateways: dict[str, GatewayProcess] = {}

    def add(self, name: str, authority: Authority) -> None:
        root = self.root / name
        root.mkdir()
        address = self.network.add(name)
        certificate = authority.issue(f"{name}-{address}", address)
        secret = root / "fleet-secret"
        secret.touch(mode=0o600)
        secret.write_bytes(bytes(range(32)))
        section = {
            "name": name,
            "address": f"{address}:{_PORT}",
            "etcd": [member.endpoint for member in self.members],
            "tls_ca": str(certificate.ca),
            "tls_cert": str(certificate.cert),
            "tls_key": str(certificate.key),
            "secret_file": str(secret),
        }
        module = [sys.executable, "-m", "tests.fleet.durable_process", str(root), json.dumps({"fleet": section})]
        command = [*self.network.get_prefix_command(name), *module, "faults"]
        self.gateways[name] = GatewayProcess(name, root, command)

    def read_machine_log(self) -> list[tuple[str, str, str]]:
        """Return all starts and stops of machines, as (host, event, id of the sandbox), in order."""
        with contextlib.suppress(FileNotFoundError):
            lines = (self.root / "machines").read_text().splitlines()
            return [(host, event, id) for host, event, id in (line.split() for line in lines)]
        return []

    def end(self) -> None:
        for gateway in self.gateways.values():
            gateway.kill()


@contextlib.contextmanager
def running_fleet(root: Path, authority: Authority, host_count: int = 3) -> Iterator[FleetProcesses]:
    """Run a fleet of empty hosts."""
    with contextlib.ExitStack() as stack:
        network = stack.enter_context(created_network())
        addresses = network.create(_ETCD_MEMBERS)
        certificates = [authority.issue(f"etcd-{address}", address) for address in addresses]
        members = stack.enter_context(running_cluster(root, addresses, certificates))
        fleet = FleetProcesses(root, network, members, addresses, certificates[0])
        stack.callback(fleet.end)
        for number in range(1, host_count + 1):
            fleet.add(f"h{number}", authority)
        for gateway in fleet.gateways.values():
            gateway.start()
        yield fleet
