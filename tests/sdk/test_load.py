"""Test twenty concurrent clients: each sandbox returns its own secret, nothing fails, and no connection stays open.

``GROVE_LOAD_SECONDS=120 ./dev test tests/sdk/test_load.py`` runs the test for two minutes.
"""

from __future__ import annotations

import os
import random
import re
import time
import uuid
from collections import Counter
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import cubesandbox
import e2b_code_interpreter
import pytest

from tests.sdk.servers import Server
from tests.sdk.test_cubesandbox import client_environment as cubesandbox_environment
from tests.sdk.test_e2b import client_environment as e2b_environment
from tests.sdk.test_e2b import wait_until

__all__ = ["cubesandbox_environment", "e2b_environment"]

CLIENT_COUNT = 20
LOAD_SECONDS = float(os.environ.get("GROVE_LOAD_SECONDS", "20"))
_FAILURE_COUNT_PATTERN = re.compile(
    r'^sandbox_gateway_request_seconds_count\{[^}]*status="5\d\d"[^}]*\} (\S+)', re.MULTILINE
)


class Client:
    """A client of one sandbox, whose environment, files and interpreter contain the client's secret."""

    def __init__(self, sandbox: Any, secret: str, rng: random.Random) -> None:
        self.sandbox = sandbox
        self.secret = secret
        self.rng = rng
        self.check_counts: Counter[str] = Counter()
        sandbox.files.write("/root/secret", secret)
        sandbox.run_code(f"secret = {secret!r}; counter = 0")
        self.expected_counter = 0

    def run_checks(self, deadline: float) -> Counter[str]:
        checks: list[Callable[[], None]] = [
            self.check_command,
            self.check_file,
            self.check_code,
            self.check_code,
            self.check_large_output,
        ]
        while time.monotonic() < deadline:
            check = self.rng.choice(checks)
            check()
            self.check_counts[check.__name__] += 1
        return self.check_counts

    def remove_sandbox(self) -> None:
        self.sandbox.__exit__(None, None, None)

    def check_command(self) -> None:
        assert self.sandbox.commands.run("cat /root/secret; echo $SECRET").stdout == f"{self.secret}{self.secret}\n"

    def check_file(self) -> None:
        path = f"/tmp/{self.rng.randrange(10)}"
        self.sandbox.files.write(path, self.secret * 1000)
        assert self.sandbox.files.read(path) == self.secret * 1000

    def check_code(self) -> None:
        self.expected_counter += 1
        assert self.sandbox.run_code("counter += 1; (secret, counter)").text == repr(
            (self.secret, self.expected_counter)
        )

    def check_large_output(self) -> None:
        output = self.sandbox.commands.run("for i in $(seq 2000); do echo $SECRET; done").stdout
        assert output == f"{self.secret}\n" * 2000


def make_client(number: int) -> Client:
    secret = uuid.uuid4().hex
    create_sandbox = cubesandbox.Sandbox.create if number % 2 else e2b_code_interpreter.Sandbox.create
    sandbox = create_sandbox(os.environ["CUBE_TEMPLATE_ID"], envs={"SECRET": secret})
    return Client(sandbox, secret, random.Random(number))


def count_failures(server: Server) -> float:
    """Return the number of responses with a 5xx status that the gateway has sent."""
    return sum(float(count) for count in _FAILURE_COUNT_PATTERN.findall(server.gateway.client.get("/metrics").text))


def count_sockets(server: Server) -> int:
    """Return the number of sockets that the gateway has open."""
    process = server.gateway.process
    assert process is not None
    links = (each for each in Path(f"/proc/{process.pid}/fd").iterdir())
    return sum(_is_socket(link) for link in links)


def _is_socket(link: Path) -> bool:
    try:
        return str(link.readlink()).startswith("socket:")
    except FileNotFoundError:
        return False


@pytest.fixture
def clients(server, e2b_environment, cubesandbox_environment):
    with ThreadPoolExecutor(4) as pool:
        new_clients = list(pool.map(make_client, range(CLIENT_COUNT)))
    yield new_clients
    for client in new_clients:
        client.remove_sandbox()


@pytest.mark.slow
def test_twenty_concurrent_clients_see_only_their_own_secrets(server, request):
    # Call count_failures first: it opens this test's own connection, which is then counted both times.
    failure_count_before = count_failures(server)
    connection_count_before = count_sockets(server) - _count_idle_connections(server)
    clients: list[Client] = request.getfixturevalue("clients")
    deadline = time.monotonic() + LOAD_SECONDS
    with ThreadPoolExecutor(CLIENT_COUNT) as pool:
        check_counts = list(pool.map(lambda client: client.run_checks(deadline), clients))
    assert all(sum(count.values()) > 0 for count in check_counts)
    print("checks:", dict(sum(check_counts, Counter())))
    assert count_failures(server) == failure_count_before
    for client in clients:
        client.remove_sandbox()
    wait_until(lambda: count_sockets(server) - _count_idle_connections(server) <= connection_count_before)


def _count_idle_connections(server: Server) -> int:
    """Return the number of connections in the clients' pools, which the clients rather than the gateway must close."""
    addresses = set()
    for family in ("tcp", "tcp6"):
        for line in Path(f"/proc/self/net/{family}").read_text().splitlines()[1:]:
            fields = line.split()
            if fields[2].endswith(f":{server.port:04X}") and fields[3] == "01":
                addresses.add(fields[1])
    return len(addresses)
