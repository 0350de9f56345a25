"""The port that forkd's class `Sandbox` connects to: one line of JSON per request and per response.

Requests: `{action: "exec", args, timeout}`, `{action: "eval", code}`, `{action: "ping"}`. Anyone who can connect to the
port can run anything in the sandbox: the protocol has no authentication.
"""

from __future__ import annotations

import asyncio
import errno
import ipaddress
import json
import socket
from typing import Any, NoReturn
from urllib.parse import urlsplit

from sandbox_gateway_forkd.gateway import Failure, Gateway

DEFAULT_TARGET = "10.42.0.2:8888"
"""The address that forkd's client connects to by default."""
MAX_LINE_BYTES = 2 << 20
MAX_CONNECTIONS = 32
IDLE_TIMEOUT_SECONDS = 30.0
"""How long a client may take to send a request or to read a response."""
DEFAULT_TIMEOUT_SECONDS = 30.0
_MARGIN_SECONDS = 35.0
"""Extra time that the gateway may take beyond a command's timeout."""
_MAX_TIMEOUT_SECONDS = 604_800.0


def bind(target: str, *, allow_remote: bool) -> socket.socket:
    """Bind a socket to an address, but do not listen yet. Raises Failure.

    ``allow_remote``: allow an address that other machines can reach.
    """
    try:
        parts = urlsplit(f"//{target}")
        host, port = parts.hostname, parts.port
    except ValueError:
        host, port = None, None
    if not host or port is None:
        raise Failure(f"{target!r} is not a valid address: use HOST:PORT, such as 127.0.0.1:8888")
    try:
        family, kind, protocol, _, address = socket.getaddrinfo(host, port, type=socket.SOCK_STREAM)[0]
    except OSError as error:
        raise Failure(
            f"the host name in {target} cannot be resolved ({error}): use an IP address, or check the name"
        ) from None
    listener = socket.socket(family, kind, protocol)
    try:
        listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        listener.bind(address)
        if not allow_remote and not ipaddress.ip_address(str(address[0]).partition("%")[0]).is_loopback:
            raise Failure(
                f"other machines can reach {target}, and this port has no authentication: set "
                "FORKD_TARGET=127.0.0.1:8888, or allow it with --remote or FORKD_REMOTE=1"
            )
    except OSError as error:
        listener.close()
        _raise_bind_failure(target, error)
    except BaseException:
        listener.close()
        raise
    return listener


def _raise_bind_failure(target: str, error: OSError) -> NoReturn:
    if error.errno == errno.EADDRNOTAVAIL:
        raise Failure(f"{target} is not an address of this machine: set FORKD_TARGET=127.0.0.1:8888") from None
    if error.errno == errno.EADDRINUSE:
        raise Failure(
            f"another program already listens on {target}, perhaps for another sandbox: stop it, or set "
            "FORKD_TARGET to a different port"
        ) from None
    raise Failure(f"cannot listen on {target} ({error.strerror}): set FORKD_TARGET to a different address") from None


class Port:
    """A server that forwards requests to one sandbox."""

    def __init__(self, gateway: Gateway, sandbox: str) -> None:
        self._gateway = gateway
        self._sandbox = sandbox
        self._connections = 0

    async def listen(self, listener: socket.socket) -> asyncio.Server:
        return await asyncio.start_server(self._serve_connection, sock=listener, limit=MAX_LINE_BYTES)

    async def _serve_connection(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        self._connections += 1
        try:
            if self._connections > MAX_CONNECTIONS:
                await _send_response(
                    writer,
                    _create_error(f"the limit of {MAX_CONNECTIONS} connections has been reached: try again later"),
                )
            else:
                await self._serve_requests(reader, writer)
            writer.close()
        except (OSError, TimeoutError):
            # The client disconnected, or neither sends nor reads.
            writer.transport.abort()
        finally:
            self._connections -= 1

    async def _serve_requests(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        while True:
            try:
                async with asyncio.timeout(IDLE_TIMEOUT_SECONDS):
                    line = await reader.readuntil()
            except asyncio.IncompleteReadError as end:
                line = end.partial
            except asyncio.LimitOverrunError:
                await _send_response(
                    writer, _create_error(f"the request is longer than {MAX_LINE_BYTES} bytes: send less at a time")
                )
                return
            if not line:
                return
            if not line.lstrip().startswith(b"{"):
                # It may be HTTP from a web page in someone's browser: its body must not be parsed as a request.
                await _send_response(
                    writer, _create_error("the request is not a line with a JSON object: send one object per line")
                )
                return
            await _send_response(writer, await self.handle_line(line))

    async def handle_line(self, line: bytes) -> dict[str, Any]:
        """Handle a request line as forkd's agent would.

        Supports only the requests that have an equivalent in the gateway.
        """
        try:
            request = json.loads(line, parse_constant=_reject_constant)
            if not isinstance(request, dict):
                raise ValueError("not an object")
        except (ValueError, RecursionError) as error:
            return _create_error(f"the request is not a line with a JSON object ({error}): send one object per line")
        try:
            return await self._perform(request)
        except Failure as failure:
            return _create_error(str(failure))
        except (KeyError, TypeError, ValueError):
            return _create_error(
                "the gateway's response has an unexpected format: check that FORKD_URL is the address of a gateway"
            )

    async def _perform(self, request: dict[str, Any]) -> dict[str, Any]:
        action = request.get("action")
        if action == "ping":
            return dict(await self._call_sandbox("ping", None, DEFAULT_TIMEOUT_SECONDS))
        if action == "exec":
            seconds = request.get("timeout", DEFAULT_TIMEOUT_SECONDS)
            body = {"args": request.get("args"), "timeout_secs": seconds}
            return dict(await self._call_sandbox("exec", body, _compute_timeout(seconds)))
        if action == "eval":
            evaluation = await self._call_sandbox("eval", {"code": request.get("code")}, DEFAULT_TIMEOUT_SECONDS)
            if evaluation["error"] is not None:
                return {"error": evaluation["error"], "exit_code": evaluation["exit_code"] or 1}
            return {"result": evaluation["result"], "exit_code": evaluation["exit_code"]}
        raise Failure(f"unknown action {str(action)[:80]!r}: use exec, eval or ping")

    async def _call_sandbox(self, verb: str, body: dict[str, Any] | None, seconds: float) -> Any:
        return await self._gateway.call_sandbox(self._sandbox, verb, body, seconds=seconds + _MARGIN_SECONDS)


def _compute_timeout(seconds: object) -> float:
    """Return how long to wait for a command. The gateway rejects invalid timeouts."""
    if isinstance(seconds, int | float) and 0 < seconds <= _MAX_TIMEOUT_SECONDS:
        return float(seconds)
    return DEFAULT_TIMEOUT_SECONDS


def _reject_constant(constant: str) -> NoReturn:
    raise ValueError(f"{constant} is not a number")


def _create_error(message: str) -> dict[str, Any]:
    return {"error": message, "exit_code": 1}


async def _send_response(writer: asyncio.StreamWriter, response: dict[str, Any]) -> None:
    writer.write(json.dumps(response).encode() + b"\n")
    async with asyncio.timeout(IDLE_TIMEOUT_SECONDS):
        await writer.drain()
