"""Twenty clients at once: each sandbox answers with its own secret, nothing fails, no connection remains.

For two minutes: ``GROVE_LOAD_SECONDS=120 ./dev test tests/sdk/test_load.py``.
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

from tests.sdk.conftest import Server
from tests.sdk.test_cubesandbox import address as cubesandbox_address
from tests.sdk.test_e2b import address as e2b_address
from tests.sdk.test_e2b import wait

__all__ = ["cubesandbox_address", "e2b_address"]

CLIENTS = 20
SECONDS = float(os.environ.get("GROVE_LOAD_SECONDS", "20"))
_FAILED = re.compile(r'^sandbox_gateway_request_seconds_count\{[^}]*status="5\d\d"[^}]*\} (\S+)', re.MULTILINE)


class Client:
    """One agent with one sandbox, whose secret is in its environment, its files and its interpreter."""

    def __init__(self, sandbox: Any, secret: str, dice: random.Random) -> None:
        self.sandbox = sandbox
        self.secret = secret
        self.dice = dice
        self.done: Counter[str] = Counter()
        sandbox.files.write("/root/secret", secret)
        sandbox.run_code(f"secret = {secret!r}; counter = 0")
        self.counted = 0

    def work(self, until: float) -> Counter[str]:
        verbs: list[Callable[[], None]] = [
            self.check_command,
            self.check_file,
            self.check_code,
            self.check_code,
            self.check_large_output,
        ]
        while time.monotonic() < until:
            verb = self.dice.choice(verbs)
            verb()
            self.done[verb.__name__] += 1
        return self.done

    def end(self) -> None:
        self.sandbox.__exit__(None, None, None)

    def check_command(self) -> None:
        assert self.sandbox.commands.run("cat /root/secret; echo $SECRET").stdout == f"{self.secret}{self.secret}\n"

    def check_file(self) -> None:
        path = f"/tmp/{self.dice.randrange(10)}"
        self.sandbox.files.write(path, self.secret * 1000)
        assert self.sandbox.files.read(path) == self.secret * 1000

    def check_code(self) -> None:
        self.counted += 1
        assert self.sandbox.run_code("counter += 1; (secret, counter)").text == repr((self.secret, self.counted))

    def check_large_output(self) -> None:
        output = self.sandbox.commands.run("for i in $(seq 2000); do echo $SECRET; done").stdout
        assert output == f"{self.secret}\n" * 2000


def make_client(number: int) -> Client:
    secret = uuid.uuid4().hex
    make = cubesandbox.Sandbox.create if number % 2 else e2b_code_interpreter.Sandbox.create
    sandbox = make(os.environ["CUBE_TEMPLATE_ID"], envs={"SECRET": secret})
    return Client(sandbox, secret, random.Random(number))


def count_failures(server: Server) -> float:
    """The number of answers of 500 and above from the gateway."""
    return sum(float(count) for count in _FAILED.findall(server.gateway.client.get("/metrics").text))


def count_sockets(server: Server) -> int:
    """The number of connections that the gateway holds."""
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
def clients(server, e2b_address, cubesandbox_address):
    with ThreadPoolExecutor(4) as pool:
        made = list(pool.map(make_client, range(CLIENTS)))
    yield made
    for each in made:
        each.end()


def test_twenty_clients_at_once(server, request):
    # In this order: the request for failures opens this test's own connection, which counts before and after.
    failed, before = count_failures(server), count_sockets(server) - _kept_alive(server)
    clients: list[Client] = request.getfixturevalue("clients")
    until = time.monotonic() + SECONDS
    with ThreadPoolExecutor(CLIENTS) as pool:
        done = list(pool.map(lambda each: each.work(until), clients))
    assert all(sum(each.values()) > 0 for each in done)
    print("verbs done:", dict(sum(done, Counter())))
    assert count_failures(server) == failed
    for each in clients:
        each.end()
    wait(lambda: count_sockets(server) - _kept_alive(server) <= before)


def _kept_alive(server: Server) -> int:
    """Idle connections in the clients' own pools: the clients have to close them, not the gateway."""
    mine = set()
    for family in ("tcp", "tcp6"):
        for line in Path(f"/proc/self/net/{family}").read_text().splitlines()[1:]:
            fields = line.split()
            if fields[2].endswith(f":{server.port:04X}") and fields[3] == "01":
                mine.add(fields[1])
    return len(mine)
