"""Run etcd servers as plain processes."""

from __future__ import annotations

import contextlib
import signal
import subprocess
import time
import urllib.request
from collections.abc import Iterator, Sequence
from pathlib import Path

from tests.support import session
from tests.support.certificates import Certificate


class Etcd:
    """One server, with its own data directory and ports. With ``certificate``, only clients of its authority connect.

    ``address``: the IP address at which clients reach it. ``members``: the peer addresses of all members of its
    cluster, by name. By default, the server is the only member.
    """

    def __init__(
        self,
        directory: Path,
        *,
        certificate: Certificate | None = None,
        name: str = "default",
        address: str = "127.0.0.1",
        members: dict[str, str] | None = None,
    ) -> None:
        self._directory = directory
        self._address = address
        self._certificate = certificate
        self._name = name
        self._members = members or {name: f"http://127.0.0.1:{session.allocate_port()}"}
        self.port = session.allocate_port()
        self._process: subprocess.Popen[bytes] | None = None

    @property
    def endpoint(self) -> str:
        return f"{'https' if self._certificate else 'http'}://{self._address}:{self.port}"

    def start(self, *, wait: bool = True) -> None:
        self._directory.mkdir(exist_ok=True)
        with (self._directory / "log").open("ab") as log:
            self._process = subprocess.Popen(
                ["etcd", *self._list_options()], stdout=log, stderr=log, stdin=subprocess.DEVNULL
            )
        if wait:
            self.wait_until_ready()

    def _list_options(self) -> list[str]:
        peer_url = self._members[self._name]
        options = {
            "name": self._name,
            "data-dir": str(self._directory / "data"),
            "listen-client-urls": self.endpoint,
            "advertise-client-urls": self.endpoint,
            "listen-peer-urls": peer_url,
            "initial-advertise-peer-urls": peer_url,
            "initial-cluster": ",".join(f"{name}={url}" for name, url in self._members.items()),
            "log-level": "error",
        }
        if self._certificate:
            options |= {
                "trusted-ca-file": str(self._certificate.ca),
                "cert-file": str(self._certificate.cert),
                "key-file": str(self._certificate.key),
            }
        flags = ["--client-cert-auth"] if self._certificate else []
        return [*flags, *(part for name, value in options.items() for part in (f"--{name}", value))]

    def wait_until_ready(self) -> None:
        deadline = time.monotonic() + 30
        context = self._certificate.create_client_context() if self._certificate else None
        while True:
            try:
                with urllib.request.urlopen(f"{self.endpoint}/health", timeout=5, context=context):
                    return
            except OSError:
                log = (self._directory / "log").read_text()
                assert self._process and self._process.poll() is None, f"etcd did not start: {log}"
                assert time.monotonic() < deadline, f"etcd does not answer: {log}"
                time.sleep(0.05)

    def stop_answering(self) -> None:
        """Stop the process, so that connections stay open but nothing answers."""
        assert self._process
        self._process.send_signal(signal.SIGSTOP)

    def answer_again(self) -> None:
        assert self._process
        self._process.send_signal(signal.SIGCONT)

    def kill(self) -> None:
        if self._process:
            self._process.kill()
            self._process.wait()
            self._process = None


@contextlib.contextmanager
def running_etcd(directory: Path, certificate: Certificate | None = None) -> Iterator[Etcd]:
    etcd = Etcd(directory, certificate=certificate)
    try:
        etcd.start()
        yield etcd
    finally:
        etcd.kill()


@contextlib.contextmanager
def running_cluster(
    directory: Path, addresses: Sequence[str] = ("127.0.0.1",) * 3, certificates: Sequence[Certificate | None] = ()
) -> Iterator[list[Etcd]]:
    """Run a cluster with a member at each of ``addresses``. The members reach each other at 127.0.0.1.

    ``certificates``: the certificate of each member, if only clients of its authority may connect.
    """
    certificates = certificates or [None] * len(addresses)
    members = {f"m{number}": f"http://127.0.0.1:{session.allocate_port()}" for number in range(len(addresses))}
    servers = [
        Etcd(directory / name, name=name, address=address, certificate=certificate, members=members)
        for name, address, certificate in zip(members, addresses, certificates, strict=True)
    ]
    try:
        for server in servers:
            server.start(wait=False)
        for server in servers:
            server.wait_until_ready()
        yield servers
    finally:
        for server in servers:
            server.kill()
