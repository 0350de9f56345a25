"""A malicious registry gets no password, no request to another host, and no unlimited response."""

from __future__ import annotations

import asyncio
import base64
import hashlib
import json
import ssl
import threading
from collections.abc import Callable, Iterator, Mapping
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any
from urllib.parse import parse_qs, urlsplit

import pytest

from sandbox_gateway.config import RegistrySection
from sandbox_gateway.engine.transfer import registry_client
from sandbox_gateway.engine.transfer.registry_client import RegistryClient, parse_artifact_reference
from sandbox_gateway.errors import BackendFailed, GatewayError, Invalid, NotFound
from sandbox_gateway.image_references import RegistryLogin
from tests.support.certificates import create_certificate

LOGIN = RegistryLogin("joe", "secret")
BLOB = b"the contents of a blob"
DIGEST = f"sha256:{hashlib.sha256(BLOB).hexdigest()}"
BASIC = f"Basic {base64.b64encode(b'joe:secret').decode()}"

Answer = tuple[int, Mapping[str, str], bytes]


class LyingServer:
    """A server whose answers the test chooses. ``requests``: the method, path and authorization of each request."""

    def __init__(self, answer: Callable[[str, str], Answer], context: ssl.SSLContext | None = None) -> None:
        self.answer = answer
        self.requests: list[tuple[str, str, str]] = []
        outer = self

        class Handler(BaseHTTPRequestHandler):
            protocol_version = "HTTP/1.1"

            def _handle(self) -> None:
                self.rfile.read(int(self.headers.get("Content-Length") or 0))
                outer.requests.append((self.command, self.path, self.headers.get("Authorization", "")))
                status, headers, body = outer.answer(self.command, self.path)
                self.send_response(status)
                for name, value in {"Content-Length": str(len(body)), **headers}.items():
                    self.send_header(name, value)
                self.end_headers()
                if self.command != "HEAD":
                    self.wfile.write(body)

            do_GET = do_HEAD = do_POST = do_PUT = _handle

            def log_message(self, *_: Any) -> None:
                pass

        class Server(ThreadingHTTPServer):
            daemon_threads = True

            def handle_error(self, *_: Any) -> None:
                pass  # The client may close the connection.

        self._server = Server(("127.0.0.1", 0), Handler)
        if context is not None:
            self._server.socket = context.wrap_socket(self._server.socket, server_side=True)
        self.port: int = self._server.server_address[1]
        self.address = f"{'127.0.0.1' if context is None else 'localhost'}:{self.port}"
        self._thread = threading.Thread(target=self._server.serve_forever, kwargs={"poll_interval": 0.02}, daemon=True)
        self._thread.start()

    def end(self) -> None:
        self._server.shutdown()
        self._thread.join()
        self._server.server_close()


@pytest.fixture
def start_server() -> Iterator[Callable[..., LyingServer]]:
    servers: list[LyingServer] = []

    def start(answer: Callable[[str, str], Answer], context: ssl.SSLContext | None = None) -> LyingServer:
        servers.append(LyingServer(answer, context))
        return servers[-1]

    yield start
    for server in servers:
        server.end()


@pytest.fixture(autouse=True)
def _short_delays(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(registry_client, "_RETRY_DELAYS", (0.01, 0.01))


def use(
    server: LyingServer,
    work: Callable[[RegistryClient], Any],
    *,
    login: RegistryLogin | None = LOGIN,
    plain: bool = True,
    **settings: Any,
) -> Any:
    """Do ``work`` with a client, and return its result."""
    plain_http = [server.address] if plain else []
    section = RegistrySection(allowed=[server.address], plain_http=plain_http, **settings)

    async def run() -> Any:
        client = RegistryClient(section, parse_artifact_reference(f"{server.address}/a:b", section), login, push=True)
        try:
            return await work(client)
        finally:
            await client.close()

    return asyncio.run(run())


def test_a_blob_of_the_wrong_size_or_content_is_refused(start_server: Callable[..., LyingServer]) -> None:
    body = BLOB
    server = start_server(lambda method, path: (200, {}, body))
    assert use(server, lambda client: client.get_blob(DIGEST, len(BLOB))) == BLOB
    for new_body, error in (
        (BLOB + b"!", BackendFailed),
        (BLOB[:-1], Invalid),
        (BLOB[:-1] + b"!", Invalid),
        (bytes(1 << 20), BackendFailed),
    ):
        body = new_body
        with pytest.raises(error):
            use(server, lambda client: client.get_blob(DIGEST, len(BLOB)))


def test_an_endless_manifest_is_refused(start_server: Callable[..., LyingServer]) -> None:
    server = start_server(lambda method, path: (200, {}, bytes(5 << 20)))
    with pytest.raises(BackendFailed, match="more than the 4194304 bytes"):
        use(server, lambda client: client.get_manifest())


def test_a_compressed_response_is_not_decompressed(start_server: Callable[..., LyingServer]) -> None:
    import gzip

    body = gzip.compress(bytes(50 << 20))
    server = start_server(lambda method, path: (200, {"Content-Encoding": "gzip"}, body))
    assert use(server, lambda client: client.get_manifest()) == body


def test_a_response_that_breaks_off_is_requested_again(start_server: Callable[..., LyingServer]) -> None:
    answers = iter([(200, {"Content-Length": "22", "Connection": "close"}, BLOB[:5]), (503, {}, b""), (200, {}, BLOB)])
    server = start_server(lambda method, path: next(answers))
    # The server sends fewer bytes than it announces, and closes the connection.
    assert use(server, lambda client: client.get_blob(DIGEST, len(BLOB))) == BLOB
    assert len(server.requests) == 3


@pytest.mark.parametrize("status", [301, 302, 303, 307, 308])
def test_a_redirect_to_another_host_is_followed_only_if_it_is_allowed(
    start_server: Callable[..., LyingServer], tmp_path: Path, status: int
) -> None:
    certificate, key = create_certificate(tmp_path)
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
    context.load_cert_chain(certificate, key)
    storage = start_server(lambda method, path: (200, {}, BLOB), context)
    plain_storage = start_server(lambda method, path: (200, {}, BLOB))
    location = f"https://{storage.address}/storage"
    challenge = {"WWW-Authenticate": "Basic realm=x"}
    server = start_server(
        lambda method, path: (
            (401, challenge, b"") if server.requests[-1][2] == "" else (status, {"Location": location}, b"")
        )
    )
    get: Callable[[RegistryClient], Any] = lambda client: client.get_blob(DIGEST, len(BLOB))  # noqa: E731
    with pytest.raises(BackendFailed, match=r"registry\.download_servers"):
        use(server, get)
    assert storage.requests == []
    assert use(server, get, download_servers=[storage.address], ca_file=certificate) == BLOB
    assert storage.requests == [("GET", "/storage", "")], "the other host gets no password"
    for new_location in (
        f"http://{plain_storage.address}/",
        "file:///etc/passwd",
        "http://169.254.169.254/",
        "//x/",
        "",
    ):
        location = new_location
        with pytest.raises(GatewayError):
            use(server, get, download_servers=["169.254.169.254", storage.address, plain_storage.address, "x"])
    assert plain_storage.requests == []
    # Manifests and uploads are not redirected at all.
    location = f"https://{storage.address}/storage"
    for work in (
        lambda client: client.get_manifest(),
        lambda client: client.put_blob(DIGEST, BLOB),
    ):
        with pytest.raises(BackendFailed, match=f"with status {status}"):
            use(server, work, download_servers=[storage.address])
    request_count = len(storage.requests)
    assert use(server, lambda client: client.has_blob(DIGEST)), "it is in the other storage"
    assert len(storage.requests) == request_count


def test_redirects_do_not_go_in_circles(start_server: Callable[..., LyingServer]) -> None:
    server = start_server(lambda method, path: (307, {"Location": path}, b""))
    with pytest.raises(BackendFailed, match="more than 3 times"):
        use(server, lambda client: client.get_blob(DIGEST, 5))
    assert len(server.requests) == 4


@pytest.mark.parametrize("location", ["https://evil.example/upload", "http://127.0.0.1:1/upload", "//evil/x", ""])
def test_an_upload_goes_only_to_the_registry(start_server: Callable[..., LyingServer], location: str) -> None:
    server = start_server(lambda method, path: (202, {"Location": location}, b""))
    with pytest.raises(BackendFailed, match="upload to another address"):
        use(server, lambda client: client.put_blob(DIGEST, BLOB))


@pytest.mark.parametrize("location", ["http://[::1", "http://h:port/", "https://" + "a" * 70_000])
def test_an_invalid_upload_address_is_refused(start_server: Callable[..., LyingServer], location: str) -> None:
    server = start_server(lambda method, path: (202, {"Location": location}, b""))
    with pytest.raises(BackendFailed, match="invalid address"):
        use(server, lambda client: client.put_blob(DIGEST, BLOB))


@pytest.mark.parametrize("host", ["https://registry.example", "registry.example/team", "registry.example:99999", ""])
def test_the_configuration_lists_only_hosts(host: str) -> None:
    for key in ("allowed", "plain_http", "token_servers", "download_servers"):
        with pytest.raises(ValueError, match="use HOST or HOST:PORT"):
            RegistrySection.model_validate({key: [host]})
        RegistrySection.model_validate({key: ["registry.example", "[::1]:5000", "localhost:443"]})


def test_the_default_port_may_be_listed() -> None:
    url = registry_client.httpx.URL("https://auth.example/token")
    assert all(registry_client._is_listed(url, [each]) for each in ("auth.example", "auth.example:443"))
    assert not any(registry_client._is_listed(url, [each]) for each in ("auth.example:444", "example", "x"))


def test_an_upload_keeps_the_state_of_the_registry(start_server: Callable[..., LyingServer]) -> None:
    def answer(method: str, path: str) -> Answer:
        if method == "POST":
            return 202, {"Location": "/v2/a/blobs/uploads/1?_state=a%2Bb%3D%3D"}, b""
        query = parse_qs(urlsplit(path).query)
        return (201, {}, b"") if query == {"_state": ["a+b=="], "digest": [DIGEST]} else (400, {}, b"")

    use(start_server(answer), lambda client: client.put_blob(DIGEST, BLOB))


def test_a_token_comes_only_from_an_allowed_server(start_server: Callable[..., LyingServer], tmp_path: Path) -> None:
    certificate, key = create_certificate(tmp_path)
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
    context.load_cert_chain(certificate, key)
    token_answer: Any = {"token": "abc"}
    issuer = start_server(lambda method, path: (200, {}, json.dumps(token_answer).encode()), context)
    realm = f"https://{issuer.address}/token"

    def answer(method: str, path: str) -> Answer:
        if server.requests[-1][2] == "Bearer abc":
            return 200, {}, BLOB
        return 401, {"WWW-Authenticate": f'Bearer realm="{realm}",service="s",scope="everything"'}, b""

    server = start_server(answer)
    get: Callable[[RegistryClient], Any] = lambda client: client.get_blob(DIGEST, len(BLOB))  # noqa: E731
    with pytest.raises(BackendFailed, match=r"registry\.token_servers"):
        use(server, get)
    assert issuer.requests == []
    allowed: Any = {"token_servers": [issuer.address], "ca_file": certificate}
    assert use(server, get, **allowed) == BLOB
    ((_, path, authorization),) = issuer.requests
    assert authorization == BASIC and BASIC not in [request[2] for request in server.requests]
    assert parse_qs(urlsplit(path).query) == {"service": ["s"], "scope": ["repository:a:pull,push"]}
    for new_answer in ({"token": "a\r\nX-Evil: 1"}, {"token": "x" * 20_000}, {"token": 5}, {}, []):
        token_answer = new_answer
        with pytest.raises(BackendFailed, match="no token"):
            use(server, get, **allowed)
    token_answer = {"token": "wrong"}
    with pytest.raises(Invalid, match="refuses access"):
        use(server, get, **allowed)
    realm = f"http://{issuer.address}/token"
    with pytest.raises(BackendFailed, match="not allowed"):
        use(server, get, **allowed)


def test_a_password_is_sent_only_on_request_and_only_once(start_server: Callable[..., LyingServer]) -> None:
    server = start_server(lambda method, path: (401, {"WWW-Authenticate": 'Basic realm="x"'}, b""))
    with pytest.raises(Invalid, match="refuses access"):
        use(server, lambda client: client.has_blob(DIGEST))
    assert [request[2] for request in server.requests] == ["", BASIC]
    with pytest.raises(Invalid, match="refuses access"):
        use(server, lambda client: client.has_blob(DIGEST), login=None)
    assert [request[2] for request in server.requests[2:]] == [""]


def test_the_certificate_is_checked(start_server: Callable[..., LyingServer], tmp_path: Path) -> None:
    certificate, key = create_certificate(tmp_path)
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
    context.load_cert_chain(certificate, key)
    server = start_server(lambda method, path: (200, {}, BLOB), context)
    with pytest.raises(BackendFailed, match="certificate"):
        use(server, lambda client: client.has_blob(DIGEST), plain=False)
    assert use(server, lambda client: client.has_blob(DIGEST), plain=False, ca_file=certificate)
    with pytest.raises(Invalid, match=r"registry\.ca_file"):
        use(server, lambda client: client.has_blob(DIGEST), plain=False, ca_file=tmp_path / "missing")


def test_a_registry_that_stays_away_is_reported(start_server: Callable[..., LyingServer]) -> None:
    server = start_server(lambda method, path: (503, {}, b""))
    with pytest.raises(BackendFailed, match="is not working: it answered with status 503"):
        use(server, lambda client: client.has_blob(DIGEST))
    assert len(server.requests) == 3


def test_a_slow_response_ends(start_server: Callable[..., LyingServer], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(registry_client, "_REQUEST_SECONDS", 0.2)
    ended = threading.Event()

    def answer(method: str, path: str) -> Answer:
        ended.wait(5)
        return 200, {}, BLOB

    server = start_server(answer)
    try:
        with pytest.raises(BackendFailed, match="did not answer within"):
            use(server, lambda client: client.get_blob(DIGEST, len(BLOB)))
    finally:
        ended.set()


def test_the_message_of_a_registry_is_quoted(start_server: Callable[..., LyingServer]) -> None:
    message = json.dumps({"errors": [{"code": "X", "message": "bad\x1b[31m name " * 100}]}).encode()
    server = start_server(lambda method, path: (400, {}, message))
    with pytest.raises(BackendFailed, match="with status 400: bad") as failure:
        use(server, lambda client: client.put_manifest(b"{}"))
    assert len(failure.value.message) < 400 and "\x1b" not in failure.value.message


def test_a_missing_manifest_is_not_found(start_server: Callable[..., LyingServer]) -> None:
    server = start_server(lambda method, path: (404, {}, b""))
    with pytest.raises(NotFound):
        use(server, lambda client: client.get_manifest())


def test_cookies_are_not_kept(start_server: Callable[..., LyingServer]) -> None:
    server = start_server(lambda method, path: (200, {"Set-Cookie": "a=b"}, b""))

    async def ask(client: RegistryClient) -> int:
        await client.has_blob(DIGEST)
        return len(client._client.cookies.jar)

    assert use(server, ask) == 0
