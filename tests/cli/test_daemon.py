"""`sandbox-gateway`: start, failures at start, stop."""

from __future__ import annotations

import asyncio
import os
import signal
import socket
import ssl
import subprocess
import sys
import threading
import time
from pathlib import Path
from typing import Any

import httpx
import pytest

from sandbox_gateway.config import Config, Server
from sandbox_gateway.errors import Invalid
from sandbox_gateway.server import config_docs, serving
from tests.api.memory_gateway import ADMIN_KEY, MemoryGateway

DAEMON = [sys.executable, "-m", "sandbox_gateway.server.daemon"]
STAND_IN = """
import asyncio, sys
from pathlib import Path
from sandbox_gateway.server import serving
from sandbox_gateway.config import load
from tests.api.memory_host import MemoryHost
serving.make_host = lambda config: MemoryHost()
asyncio.run(serving.run(load(Path(sys.argv[1]))))
"""
"""The daemon's own start from its configuration, above a host in memory."""


def server_config(tmp_path: Path, **more: Any) -> Server:
    return Server.model_validate({"socket": "", **more})


@pytest.fixture
def keys(tmp_path: Path) -> Path:
    file = tmp_path / "keys"
    file.write_text(f"ops admin {ADMIN_KEY}\n")
    file.chmod(0o600)
    return file


def test_loopback_needs_no_tls(tmp_path: Path, keys: Path) -> None:
    for listen in ("127.0.0.1:8700", "[::1]:8700", "localhost:8700"):
        _, address, tls = serving.prepare(server_config(tmp_path, listen=listen, key_file=keys))
        assert address and address.loopback and tls is None


def test_an_open_address_needs_keys_and_tls(tmp_path: Path, keys: Path) -> None:
    empty = tmp_path / "empty"
    empty.write_text("# nobody yet\n")
    empty.chmod(0o600)
    for listen in ("0.0.0.0:8700", ":8700", "[::]:8700", "192.0.2.1:8700"):
        for file in (None, empty):
            with pytest.raises(Invalid, match=r"set server\.key_file"):
                serving.prepare(server_config(tmp_path, listen=listen, key_file=file, allow_plaintext=True))
        with pytest.raises(Invalid, match=r"server\.tls_cert.*allow_plaintext"):
            serving.prepare(server_config(tmp_path, listen=listen, key_file=keys))
        serving.prepare(server_config(tmp_path, listen=listen, key_file=keys, allow_plaintext=True))


@pytest.mark.parametrize("listen", ["8700", "host:", "127.0.0.1:x", "127.0.0.1:70000", "nowhere.invalid:80"])
def test_invalid_addresses(tmp_path: Path, listen: str) -> None:
    with pytest.raises(Invalid, match=r"server\.listen"):
        serving.prepare(server_config(tmp_path, listen=listen))


def test_incomplete_tls_settings(tmp_path: Path, keys: Path) -> None:
    junk = tmp_path / "cert.pem"
    junk.write_text("junk")
    with pytest.raises(Invalid, match="both"):
        serving.prepare(server_config(tmp_path, listen="127.0.0.1:1", tls_cert=junk))
    with pytest.raises(Invalid, match="cannot be loaded"):
        serving.prepare(server_config(tmp_path, listen="127.0.0.1:1", tls_cert=junk, tls_key=junk))


def test_a_configuration_without_addresses(tmp_path: Path) -> None:
    with pytest.raises(Invalid, match=r"neither server\.socket nor server\.listen"):
        serving.prepare(server_config(tmp_path))


def test_sockets(tmp_path: Path) -> None:
    path = tmp_path / "run" / "gateway.sock"
    with serving.unix_socket(path, "") as bound:
        bound.listen()
        assert path.stat().st_mode & 0o777 == 0o600
        with pytest.raises(Invalid, match="another gateway"), serving.unix_socket(path, ""):
            pass
    assert not path.exists()
    stale = socket.socket(socket.AF_UNIX)
    stale.bind(str(path))
    stale.close()
    group = "daemon"
    with serving.unix_socket(path, group):
        assert path.stat().st_mode & 0o777 == 0o660 and path.group() == group
    path.write_text("mine")
    with pytest.raises(Invalid, match="is not a socket"), serving.unix_socket(path, ""):
        pass
    assert path.read_text() == "mine"
    with pytest.raises(Invalid, match="groupadd"), serving.unix_socket(tmp_path / "x.sock", "no-such-group"):
        pass
    with pytest.raises(Invalid, match="cannot be created"), serving.unix_socket(tmp_path / ("x" * 200), ""):
        pass


@pytest.mark.parametrize(
    ("config", "words"),
    [
        (None, "does not exist"),
        ("server = ", "cannot be read"),
        ("[server]\nlistn = 'x'\n", "listn: unknown key"),
        ("[server]\nlisten = '0.0.0.0:0'\nsocket = ''\n", "server.key_file"),
        ("[server]\nkey_file = '/nowhere/keys'\n", "the key file /nowhere/keys does not exist"),
    ],
)
@pytest.mark.parametrize("command", ["serve", "check"])
def test_startup_failures_are_one_sentence(tmp_path: Path, command: str, config: str | None, words: str) -> None:
    file = tmp_path / "config.toml"
    if config is not None:
        file.write_text(config)
    ended = subprocess.run([*DAEMON, command, "--config", str(file)], capture_output=True, text=True, timeout=60)
    assert ended.returncode == 2
    assert words in ended.stderr and "Traceback" not in ended.stderr and len(ended.stderr.splitlines()) == 1


def wait_for(path: Path, process: subprocess.Popen[str]) -> httpx.Client:
    client = httpx.Client(transport=httpx.HTTPTransport(uds=str(path)), base_url="http://gateway", timeout=20)
    deadline = time.monotonic() + 30
    while time.monotonic() < deadline and process.poll() is None:
        try:
            client.get("/health").raise_for_status()
            return client
        except httpx.TransportError:
            time.sleep(0.05)
    raise AssertionError(f"it did not start: {process.stderr.read() if process.stderr else ''}")


def test_sigterm_finishes_requests_and_ends_streams(tmp_path: Path, memory_gateway: MemoryGateway) -> None:
    run = Path(memory_gateway.run.name)
    path, notified = run / "daemon.sock", run / "notify.sock"
    config = tmp_path / "config.toml"
    config.write_text(f'[server]\nsocket = "{path}"\n[host]\nstate_root = "{tmp_path}"\n')
    with socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM) as notify:
        notify.bind(str(notified))
        notify.settimeout(30)
        root = str(Path(__file__).parents[2])
        environment = {**os.environ, "NOTIFY_SOCKET": str(notified), "PYTHONPATH": root}
        process = subprocess.Popen(
            [sys.executable, "-c", STAND_IN, str(config)], stderr=subprocess.PIPE, text=True, env=environment
        )
        try:
            client = wait_for(path, process)
            assert notify.recv(100) == b"READY=1"
            started = client.post("/templates", json={"name": "base"}).json()
            client.get(f"/templates/base/builds/{started['buildID']}/logs", params={"follow": "true"})
            client.post("/sandboxes", json={"templateID": "base", "name": "one"}).raise_for_status()
            answers: list[Any] = []

            def slow() -> None:
                with httpx.Client(
                    transport=httpx.HTTPTransport(uds=str(path)), base_url="http://gateway", timeout=20
                ) as own:
                    answers.append(own.post("/sandboxes/one/exec", json={"args": ["sleep", "3"]}).status_code)

            def stream() -> None:
                with (
                    httpx.Client(transport=httpx.HTTPTransport(uds=str(path)), timeout=20) as own,
                    own.stream("GET", "http://gateway/events") as answer,
                ):
                    answers.append(next(iter(list(answer.iter_lines()))))

            threads = [threading.Thread(target=slow), threading.Thread(target=stream)]
            for thread in threads:
                thread.start()
            time.sleep(2)
            begun = time.monotonic()
            process.send_signal(signal.SIGTERM)
            for thread in threads:
                thread.join(20)
            assert process.wait(20) == 0
            assert time.monotonic() - begun < serving.GRACE_SECONDS
            assert sorted(answers, key=str) == [200, ": connected"]
            assert notify.recv(100) == b"STOPPING=1"
        finally:
            if process.poll() is None:
                process.kill()
                process.wait(30)
            assert process.stderr is not None
            log = process.stderr.read()
            process.stderr.close()
    assert not path.exists()
    assert '"event": "listening"' in log and '"event": "stopped"' in log and "Traceback" not in log


def test_tls(tmp_path: Path, keys: Path) -> None:
    cert, key = tmp_path / "cert.pem", tmp_path / "key.pem"
    subprocess.run(
        [
            *("openssl", "req", "-x509", "-newkey", "rsa:2048", "-nodes", "-days", "1", "-subj", "/CN=localhost"),
            *("-addext", "subjectAltName=IP:127.0.0.1", "-keyout", str(key), "-out", str(cert)),
        ],
        check=True,
        capture_output=True,
        timeout=60,
    )
    tls = {"tls_cert": str(cert), "tls_key": str(key)}
    gateway = MemoryGateway(tmp_path, server=tls)
    try:
        with httpx.Client(verify=ssl.create_default_context(cafile=str(cert))) as client:
            answer = client.get(f"https://127.0.0.1:{gateway.port}/sandboxes", headers={"X-API-Key": ADMIN_KEY})
            assert answer.status_code == 200
        with pytest.raises(httpx.TransportError):
            httpx.get(f"http://127.0.0.1:{gateway.port}/health", timeout=5)
    finally:
        gateway.end()


def test_a_stop_during_startup() -> None:
    class Slow:
        closed = False

        async def open(self) -> None:
            await asyncio.sleep(60)

        async def close(self) -> None:
            self.closed = True

    async def was_stopped(engine: Any) -> None:
        stop = asyncio.Event()
        asyncio.get_running_loop().call_later(0.1, stop.set)
        config = Config.model_validate({"server": {"socket": "/nowhere/gateway.sock"}})
        await asyncio.wait_for(serving.serve(config, engine, stop), 5)

    engine = Slow()
    asyncio.run(was_stopped(engine))
    assert engine.closed


def test_openapi_is_printed_without_a_host() -> None:
    ended = subprocess.run([*DAEMON, "openapi"], capture_output=True, text=True, check=True, timeout=60)
    assert '"/sandboxes/{ref}/rollback"' in ended.stdout


def test_the_configuration_page_names_every_key() -> None:
    page = config_docs.page(Config)
    for name, field in Config.model_fields.items():
        section = field.annotation
        names = getattr(section, "model_fields", {name: field})
        for key, described in names.items():
            assert f"| `{key}` |" in page and (described.description or "").split("|")[0] in page
    assert "## `[server]`: where the gateway listens" in page
    assert '| `kind` | `"kvm_xfs"` or `"jail_zfs"` | `"kvm_xfs"` |' in page
    assert "number, ≤ 600, > 0" in page or "number, > 0, ≤ 600" in page
