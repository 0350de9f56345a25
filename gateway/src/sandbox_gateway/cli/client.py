"""An HTTP client for the gateway, over its Unix socket or TCP. Imports only modules that load quickly."""

from __future__ import annotations

import base64
import http.client
import json
import os
import socket
import ssl
from collections.abc import Callable, Iterable, Iterator, Mapping
from urllib.parse import quote, unquote, urlencode, urlsplit

from sandbox_gateway.cli.failure import ExitCode, Failure, UnusableBody, create_failure_from_response

TYPE_CHECKING = False
if TYPE_CHECKING:
    from typing import Any

DEFAULT_URL = "unix:///run/sandbox-gateway/gateway.sock"
CONNECT_SECONDS = 10.0
_PIECE_BYTES = 256 << 10
_INVALID_RECORD_BYTES = 4 << 20
"""More than any record of a snapshot file has, with what the gateway collects before it looks at it."""
_REFUSAL_SECONDS = 30.0


def build_path(*parts: str) -> str:
    """Build a path from ``parts``, quoting each: `build_path("sandboxes", "a b")` is "/sandboxes/a%20b"."""
    return "".join(f"/{quote(part, safe='')}" for part in parts)


class Client:
    """An HTTP client whose methods return parsed JSON, and raise Failure."""

    def __init__(self, url: str, token: str = "", options: Mapping[str, str] | None = None) -> None:
        """``options``: the options that replace fields in messages, as returned by ``map_options``."""
        self.url = url
        self._address = _Address(url)
        self._options = {} if options is None else options
        self._headers = {**self._address.headers, **({"X-API-Key": token} if token else {})}
        self._connection: http.client.HTTPConnection | None = None
        """The connection for all requests except streams. It is reused."""
        self.missing_hosts: set[str] = set()
        """The hosts of a fleet that did not answer when lists were requested."""

    def call(
        self,
        method: str,
        route: str,
        body: Mapping[str, Any] | None = None,
        params: Mapping[str, Any] | None = None,
        headers: Mapping[str, str] | None = None,
    ) -> Any:
        """Send a request, and return the parsed JSON of the response, or None if it is empty."""
        params = params if body is None else {**(params or {}), "strict": True}
        return self._call_with_headers(method, route, body, params, headers)[0]

    def get(self, route: str, **params: Any) -> Any:
        return self.call("GET", route, params=_remove_empty_params(params))

    def get_all(self, route: str, **params: Any) -> list[Any]:
        """Return the items of all pages of a list."""
        items: list[Any] = []
        next_token = ""
        while True:
            page, headers = self._call_with_headers(
                "GET", route, None, _remove_empty_params({**params, "limit": 1000, "nextToken": next_token})
            )
            items += page
            if missing_hosts := headers.get("x-sandbox-hosts-missing", ""):
                from sandbox_gateway.cli import render

                self.missing_hosts.update(missing_hosts.split(","))
                render.print_note(f"the list lacks the objects of these hosts, which do not answer: {missing_hosts}")
            next_token = headers.get("x-next-token", "")
            if not next_token:
                return items

    def stream_lines(self, route: str, **params: Any) -> Iterator[str]:
        """Yield the lines of a response as they arrive, over a connection of its own."""
        connection = self._address.create_connection()
        try:
            response = self._request(connection, "GET", route, None, _remove_empty_params(params))
            if not 200 <= response.status < 300:
                raise create_failure_from_response(response.status, _parse(self._read(response)), self._options)
            while line := self._read(response, line=True):
                yield line.decode(errors="replace").rstrip("\r\n")
        finally:
            connection.close()

    def download(
        self,
        route: str,
        write: Callable[[bytes], object],
        on_start: Callable[[int], object] = lambda status: None,
        **params: Any,
    ) -> None:
        """Pass the pieces of a response to ``write`` as they arrive, over a connection of its own.

        ``on_start`` gets the status of a successful response before. Raises Failure if the response is not complete.
        """
        connection = self._address.create_connection()
        try:
            response = self._request(connection, "GET", route, None, _remove_empty_params(params))
            if not 200 <= response.status < 300:
                raise create_failure_from_response(response.status, _parse(self._read(response)), self._options)
            on_start(response.status)
            while piece := self._read(response, size=_PIECE_BYTES):
                write(piece)
        finally:
            connection.close()

    def upload(self, route: str, pieces: Iterable[bytes], **params: Any) -> Any:
        """POST a body that is read while it is sent, over a connection of its own. Return the response's JSON.

        If reading it raises UnusableBody, the gateway keeps nothing of the body.
        """
        return self._upload(route, pieces, None, params)

    def put_file(self, route: str, pieces: Iterable[bytes], size: int) -> None:
        """PUT a body of ``size`` bytes, like ``upload``."""
        self._upload(route, pieces, size, {})

    def _upload(self, route: str, pieces: Iterable[bytes], size: int | None, params: Mapping[str, Any]) -> Any:
        """Send a body. ``size``: the size of the body of a PUT request. None: a POST request of any size."""
        method = "POST" if size is None else "PUT"
        length = {"Transfer-Encoding": "chunked"} if size is None else {"Content-Length": str(size)}
        connection = self._address.create_connection()
        try:
            self._connect(connection)
            try:
                connection.putrequest(method, self._build_target(route, _remove_empty_params(params)))
                for name, value in {**self._headers, **length}.items():
                    connection.putheader(name, value)
                connection.endheaders()
                for piece in pieces:
                    connection.send(piece if size is not None else b"%x\r\n%s\r\n" % (len(piece), piece))
                if size is None:
                    connection.send(b"0\r\n\r\n")
            except (BrokenPipeError, ConnectionResetError):
                pass  # The gateway has refused the request without reading all of it: its response says why.
            except UnusableBody:
                _make_refused(connection)
                raise
            try:
                response = connection.getresponse()
            except (OSError, http.client.HTTPException) as error:
                raise self._create_connection_failure(error) from None
            value = _parse(self._read(response))
            if not 200 <= response.status < 300 or (value is None and size is None):
                raise create_failure_from_response(response.status, value, self._options)
            return value
        finally:
            connection.close()

    def stream_events(self, operation: str = "") -> Iterator[tuple[str, dict[str, Any]]]:
        """Yield the type and the data of each event as it happens.

        The first item is ("connected", {}); from then on, no event is missed.
        """
        event_type = ""
        for line in self.stream_lines("/events", operation=operation):
            if line == ": connected":
                yield "connected", {}
            elif line.startswith("event: "):
                event_type = line.removeprefix("event: ")
            elif line.startswith("data: "):
                yield event_type, json.loads(line.removeprefix("data: "))

    def _call_with_headers(
        self,
        method: str,
        route: str,
        body: Mapping[str, Any] | None,
        params: Mapping[str, Any] | None,
        headers: Mapping[str, str] | None = None,
    ) -> tuple[Any, http.client.HTTPMessage]:
        """Send a request. Return the parsed JSON of the response (None if it is empty) and its headers."""
        if self._connection is None:
            self._connection = self._address.create_connection()
        response = self._request(self._connection, method, route, body, params, headers)
        content = self._read(response)
        value = _parse(content)
        if not 200 <= response.status < 300 or (content and value is None and content.strip() != b"null"):
            raise create_failure_from_response(response.status, value, self._options)
        return value, response.headers

    def _request(
        self,
        connection: http.client.HTTPConnection,
        method: str,
        route: str,
        body: Mapping[str, Any] | None = None,
        params: Mapping[str, Any] | None = None,
        headers: Mapping[str, str] | None = None,
    ) -> http.client.HTTPResponse:
        target = self._build_target(route, params)
        sent_headers = {**self._headers, **(headers or {})}
        content = None
        if body is not None:
            content, sent_headers["Content-Type"] = json.dumps(body).encode(), "application/json"
        self._connect(connection)
        try:
            connection.request(method, target, content, sent_headers)
            return connection.getresponse()
        except (OSError, http.client.HTTPException) as error:
            raise self._create_connection_failure(error) from None
        except ValueError:  # A header must be Latin-1 text without line breaks.
            raise Failure(
                "the API key contains characters that are not allowed in a header",
                ExitCode.USAGE,
                "check the key, or its file",
            ) from None

    def _build_target(self, route: str, params: Mapping[str, Any] | None) -> str:
        target = self._address.prefix + route
        if params:
            target += f"?{urlencode({key: _format_param(value) for key, value in params.items()}, doseq=True)}"
        return target

    def _connect(self, connection: http.client.HTTPConnection) -> None:
        if connection.sock is not None:
            return
        try:
            connection.connect()
        except TimeoutError:
            raise Failure(
                f"the gateway at {self.url} did not respond in time", ExitCode.UNREACHABLE, "try again"
            ) from None
        except (OSError, http.client.HTTPException) as error:
            message = f"cannot reach the gateway at {self.url}: {_extract_failure_reason(error)}"
            raise Failure(message, ExitCode.UNREACHABLE, _find_failure_hint(error)) from None
        assert connection.sock is not None
        connection.sock.settimeout(None)  # A request may take as long as the operation that it starts.

    def _read(self, response: http.client.HTTPResponse, *, line: bool = False, size: int = 0) -> bytes:
        try:
            if size:
                return response.read1(size)
            return response.readline() if line else response.read()
        except (OSError, http.client.HTTPException) as error:
            raise self._create_connection_failure(error) from None

    def _create_connection_failure(self, error: Exception) -> Failure:
        return Failure(
            f"the connection to the gateway at {self.url} was lost: {error or type(error).__name__}",
            ExitCode.UNREACHABLE,
            "the gateway may have restarted: check the result of the request, then try again",
        )


class _Address:
    """The address of a gateway: how to connect to it, and the path prefix and headers of each request."""

    def __init__(self, url: str) -> None:
        self.prefix = ""
        self.headers: dict[str, str] = {}
        self._socket_path = url.removeprefix("unix://") if url.startswith("unix://") else ""
        if self._socket_path:
            return
        try:
            parts = urlsplit(url)
            self._host, self._port = parts.hostname or "", parts.port
        except ValueError as error:
            raise _create_invalid_url_failure(url, f": {error}") from None
        if parts.scheme not in ("http", "https") or not self._host:
            raise _create_invalid_url_failure(url)
        self._is_tls = parts.scheme == "https"
        self.prefix = parts.path.rstrip("/")
        if parts.username is not None:
            credentials = f"{unquote(parts.username)}:{unquote(parts.password or '')}"
            self.headers["Authorization"] = f"Basic {base64.b64encode(credentials.encode()).decode()}"
        self._proxy = _find_proxy(parts.scheme, self._host)
        if self._proxy and not self._is_tls:
            self.prefix = f"http://{parts.netloc.rpartition('@')[2]}{self.prefix}"

    def create_connection(self) -> http.client.HTTPConnection:
        if self._socket_path:
            return _UnixConnection(self._socket_path)
        create = _create_tls_connection if self._is_tls else http.client.HTTPConnection
        if not self._proxy:
            return create(self._host, self._port, timeout=CONNECT_SECONDS)
        proxy = urlsplit(self._proxy if "//" in self._proxy else f"//{self._proxy}")
        connection = create(proxy.hostname or "", proxy.port or 80, timeout=CONNECT_SECONDS)
        if self._is_tls:
            connection.set_tunnel(self._host, self._port or 443)
        return connection


class _UnixConnection(http.client.HTTPConnection):
    def __init__(self, path: str) -> None:
        super().__init__("gateway", timeout=CONNECT_SECONDS)
        self._path = path

    def connect(self) -> None:
        self.sock = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
        try:
            self.sock.settimeout(CONNECT_SECONDS)
            self.sock.connect(self._path)
        except BaseException:
            self.close()
            raise


def _make_refused(connection: http.client.HTTPConnection) -> None:
    """Make the gateway refuse a body of which a part was sent, and wait until it has.

    The body does not end, so the gateway cannot take it for complete. If only the connection were closed, the gateway
    would keep what has arrived for an import that continues.
    """
    import contextlib

    assert connection.sock is not None
    connection.sock.settimeout(_REFUSAL_SECONDS)
    # No record begins with this byte.
    piece = b"\xff" * _INVALID_RECORD_BYTES
    with contextlib.suppress(OSError):
        connection.send(b"%x\r\n%s\r\n" % (len(piece), piece))
    with contextlib.suppress(OSError, http.client.HTTPException):
        connection.getresponse().read()


def _create_tls_connection(host: str, port: int | None, *, timeout: float) -> http.client.HTTPSConnection:
    """Create a connection that trusts the certificate authorities in SSL_CERT_FILE or SSL_CERT_DIR, or the system's."""
    return http.client.HTTPSConnection(host, port, timeout=timeout, context=ssl.create_default_context())


def _find_proxy(scheme: str, host: str) -> str:
    """Return the proxy that HTTP_PROXY, HTTPS_PROXY, ALL_PROXY and NO_PROXY select, or "" if there is none."""
    if not any(name.lower() in (f"{scheme}_proxy", "all_proxy") for name in os.environ):
        return ""
    from urllib.request import getproxies, proxy_bypass

    if proxy_bypass(host):
        return ""
    proxies = getproxies()
    return proxies.get(scheme) or proxies.get("all", "")


def _create_invalid_url_failure(url: str, reason: str = "") -> Failure:
    return Failure(
        f"{url!r} is not the address of a gateway{reason}", ExitCode.USAGE, "use unix:///path, http:// or https://"
    )


def _parse(content: bytes) -> Any:
    try:
        return json.loads(content)
    except ValueError:
        return None


def _format_param(value: Any) -> str | list[str]:
    if isinstance(value, list):
        return [str(each) for each in value]
    return str(value).lower() if isinstance(value, bool) else str(value)


def _remove_empty_params(params: Mapping[str, Any]) -> dict[str, Any]:
    return {key: value for key, value in params.items() if value not in (None, "", False, [])}


def _extract_failure_reason(error: Exception) -> str:
    return str(error).partition("] ")[2] or str(error)


def _find_failure_hint(error: Exception) -> str:
    text = str(error).lower()
    if "permission denied" in text:
        return "run this as root, or as a member of the socket's group"
    if "certificate" in text:
        return "set SSL_CERT_FILE to the certificate of the authority that signed the gateway's certificate"
    return "start the gateway (`sandbox-gateway serve --config FILE`), or specify a different gateway with --url"
