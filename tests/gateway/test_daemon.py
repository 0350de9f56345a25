"""Test how the daemon `sandbox-gateway` starts, fails to start, and stops."""

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
from typing import Any, get_args

import httpx
import pytest

from sandbox_gateway.config import Config, Server
from sandbox_gateway.errors import Invalid
from sandbox_gateway.server import config_docs, serving
from tests.support.memory_gateway import ADMIN_KEY, MemoryGateway

DAEMON_COMMAND = [sys.executable, "-m", "sandbox_gateway.server.daemon"]
DAEMON_SCRIPT = """
import asyncio, sys
from pathlib import Path
from sandbox_gateway.server import serving
from sandbox_gateway.config import load
from tests.support.memory_host import MemoryHost
serving.make_host = lambda config: MemoryHost()
asyncio.run(serving.run(load(Path(sys.argv[1]))))
"""
"""Starts the daemon from its configuration, with an in-memory host."""


def make_server_config(tmp_path: Path, **settings: Any) -> Server:
    return Server.model_validate({"socket": "", **settings})


@pytest.fixture
def key_file(tmp_path: Path) -> Path:
    file = tmp_path / "keys"
    file.write_text(f"ops admin {ADMIN_KEY}\n")
    file.chmod(0o600)
    return file


def test_loopback_needs_no_tls(tmp_path: Path, key_file: Path) -> None:
    for listen in ("127.0.0.1:8700", "[::1]:8700", "localhost:8700"):
        _, address, tls = serving.load_listener_settings(make_server_config(tmp_path, listen=listen, key_file=key_file))
        assert address and address.is_loopback and tls is None


def test_a_non_loopback_address_needs_keys_and_tls(tmp_path: Path, key_file: Path) -> None:
    empty_key_file = tmp_path / "empty"
    empty_key_file.write_text("# no keys\n")
    empty_key_file.chmod(0o600)
    for listen in ("0.0.0.0:8700", ":8700", "[::]:8700", "192.0.2.1:8700"):
        for file in (None, empty_key_file):
            with pytest.raises(Invalid, match=r"set server\.key_file"):
                serving.load_listener_settings(
                    make_server_config(tmp_path, listen=listen, key_file=file, allow_plaintext=True)
                )
        with pytest.raises(Invalid, match=r"server\.tls_cert.*allow_plaintext"):
            serving.load_listener_settings(make_server_config(tmp_path, listen=listen, key_file=key_file))
        serving.load_listener_settings(
            make_server_config(tmp_path, listen=listen, key_file=key_file, allow_plaintext=True)
        )


@pytest.mark.parametrize("listen", ["8700", "host:", "127.0.0.1:x", "127.0.0.1:70000", "nowhere.invalid:80"])
def test_invalid_addresses_are_refused(tmp_path: Path, listen: str) -> None:
    with pytest.raises(Invalid, match=r"server\.listen"):
        serving.load_listener_settings(make_server_config(tmp_path, listen=listen))


def test_incomplete_tls_settings_are_refused(tmp_path: Path, key_file: Path) -> None:
    invalid_file = tmp_path / "cert.pem"
    invalid_file.write_text("junk")
    with pytest.raises(Invalid, match="both"):
        serving.load_listener_settings(make_server_config(tmp_path, listen="127.0.0.1:1", tls_cert=invalid_file))
    with pytest.raises(Invalid, match="cannot be loaded"):
        serving.load_listener_settings(
            make_server_config(tmp_path, listen="127.0.0.1:1", tls_cert=invalid_file, tls_key=invalid_file)
        )


def test_a_configuration_without_addresses_is_refused(tmp_path: Path) -> None:
    with pytest.raises(Invalid, match=r"neither server\.socket nor server\.listen"):
        serving.load_listener_settings(make_server_config(tmp_path))


def test_the_unix_socket_is_created_and_removed(tmp_path: Path) -> None:
    socket_path = tmp_path / "run" / "gateway.sock"
    with serving.unix_socket_bound(socket_path, "") as listener:
        listener.listen()
        assert socket_path.stat().st_mode & 0o777 == 0o600
        with pytest.raises(Invalid, match="another gateway"), serving.unix_socket_bound(socket_path, ""):
            pass
    assert not socket_path.exists()
    stale_socket = socket.socket(socket.AF_UNIX)
    stale_socket.bind(str(socket_path))
    stale_socket.close()
    group = "daemon"
    with serving.unix_socket_bound(socket_path, group):
        assert socket_path.stat().st_mode & 0o777 == 0o660 and socket_path.group() == group
    socket_path.write_text("mine")
    with pytest.raises(Invalid, match="is not a socket"), serving.unix_socket_bound(socket_path, ""):
        pass
    assert socket_path.read_text() == "mine"
    with pytest.raises(Invalid, match="groupadd"), serving.unix_socket_bound(tmp_path / "x.sock", "no-such-group"):
        pass
    with pytest.raises(Invalid, match="cannot be created"), serving.unix_socket_bound(tmp_path / ("x" * 200), ""):
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
def test_startup_failures_are_reported_in_one_line(
    tmp_path: Path, command: str, config: str | None, words: str
) -> None:
    config_file = tmp_path / "config.toml"
    if config is not None:
        config_file.write_text(config)
    result = subprocess.run(
        [*DAEMON_COMMAND, command, "--config", str(config_file)], capture_output=True, text=True, timeout=60
    )
    assert result.returncode == 2
    assert words in result.stderr and "Traceback" not in result.stderr and len(result.stderr.splitlines()) == 1


def wait_for_daemon(path: Path, process: subprocess.Popen[str]) -> httpx.Client:
    client = httpx.Client(transport=httpx.HTTPTransport(uds=str(path)), base_url="http://gateway", timeout=20)
    deadline = time.monotonic() + 30
    while time.monotonic() < deadline and process.poll() is None:
        try:
            client.get("/health").raise_for_status()
            return client
        except httpx.TransportError:
            time.sleep(0.05)
    raise AssertionError(f"the daemon did not start: {process.stderr.read() if process.stderr else ''}")


def test_sigterm_finishes_requests_and_ends_streams(tmp_path: Path, memory_gateway: MemoryGateway) -> None:
    run_dir = Path(memory_gateway.run_directory.name)
    socket_path, notify_path = run_dir / "daemon.sock", run_dir / "notify.sock"
    config_file = tmp_path / "config.toml"
    config_file.write_text(f'[server]\nsocket = "{socket_path}"\n[host]\nstate_root = "{tmp_path}"\n')
    with socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM) as notify_socket:
        notify_socket.bind(str(notify_path))
        notify_socket.settimeout(30)
        repository_path = str(Path(__file__).parents[2])
        environment = {**os.environ, "NOTIFY_SOCKET": str(notify_path), "PYTHONPATH": repository_path}
        process = subprocess.Popen(
            [sys.executable, "-c", DAEMON_SCRIPT, str(config_file)], stderr=subprocess.PIPE, text=True, env=environment
        )
        try:
            client = wait_for_daemon(socket_path, process)
            assert notify_socket.recv(100) == b"READY=1"
            build = client.post("/templates", json={"name": "base"}).json()
            client.get(f"/templates/base/builds/{build['buildID']}/logs", params={"follow": "true"})
            client.post("/sandboxes", json={"templateID": "base", "name": "one"}).raise_for_status()
            results: list[Any] = []

            def run_slow_command() -> None:
                with httpx.Client(
                    transport=httpx.HTTPTransport(uds=str(socket_path)), base_url="http://gateway", timeout=20
                ) as client:
                    results.append(client.post("/sandboxes/one/exec", json={"args": ["sleep", "3"]}).status_code)

            def read_first_event() -> None:
                with (
                    httpx.Client(transport=httpx.HTTPTransport(uds=str(socket_path)), timeout=20) as client,
                    client.stream("GET", "http://gateway/events") as response,
                ):
                    results.append(next(iter(list(response.iter_lines()))))

            threads = [threading.Thread(target=run_slow_command), threading.Thread(target=read_first_event)]
            for thread in threads:
                thread.start()
            time.sleep(2)
            stop_time = time.monotonic()
            process.send_signal(signal.SIGTERM)
            for thread in threads:
                thread.join(20)
            assert process.wait(20) == 0
            assert time.monotonic() - stop_time < serving.GRACE_SECONDS
            assert sorted(results, key=str) == [200, ": connected"]
            assert notify_socket.recv(100) == b"STOPPING=1"
        finally:
            if process.poll() is None:
                process.kill()
                process.wait(30)
            assert process.stderr is not None
            log = process.stderr.read()
            process.stderr.close()
    assert not socket_path.exists()
    assert '"event": "listening"' in log and '"event": "stopped"' in log and "Traceback" not in log


def test_the_gateway_serves_tls(tmp_path: Path, key_file: Path) -> None:
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
    tls_settings = {"tls_cert": str(cert), "tls_key": str(key)}
    gateway = MemoryGateway(tmp_path, server=tls_settings)
    try:
        with httpx.Client(verify=ssl.create_default_context(cafile=str(cert))) as client:
            response = client.get(f"https://127.0.0.1:{gateway.port}/sandboxes", headers={"X-API-Key": ADMIN_KEY})
            assert response.status_code == 200
        with pytest.raises(httpx.TransportError):
            httpx.get(f"http://127.0.0.1:{gateway.port}/health", timeout=5)
    finally:
        gateway.end()


def test_a_stop_during_startup_closes_the_engine() -> None:
    class SlowEngine:
        is_closed = False

        async def open(self) -> None:
            await asyncio.sleep(60)

        async def close(self) -> None:
            self.is_closed = True

    async def serve_until_stopped(engine: Any) -> None:
        stop_event = asyncio.Event()
        asyncio.get_running_loop().call_later(0.1, stop_event.set)
        config = Config.model_validate({"server": {"socket": "/nowhere/gateway.sock"}})
        await asyncio.wait_for(serving.serve(config, engine, stop_event), 5)

    engine = SlowEngine()
    asyncio.run(serve_until_stopped(engine))
    assert engine.is_closed


def test_openapi_is_printed_without_a_host() -> None:
    result = subprocess.run([*DAEMON_COMMAND, "openapi"], capture_output=True, text=True, check=True, timeout=60)
    assert '"/sandboxes/{ref}/rollback"' in result.stdout


def test_the_configuration_page_lists_every_key() -> None:
    page = config_docs.render_page(Config)
    for name, field in Config.model_fields.items():
        # An optional section is a union with None.
        sections = (each for each in get_args(field.annotation) if hasattr(each, "model_fields"))
        section = next(sections, field.annotation)
        fields = getattr(section, "model_fields", {name: field})
        for key, description_field in fields.items():
            assert f"| `{key}` |" in page and (description_field.description or "").split("|")[0] in page
    assert "## `[server]`: where the gateway listens" in page
    assert '| `kind` | `"kvm_xfs"` or `"jail_zfs"` | `"kvm_xfs"` |' in page
    assert "number, ≤ 600, > 0" in page or "number, > 0, ≤ 600" in page
