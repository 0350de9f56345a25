"""HTTP to a gateway, over its unix socket or a URL."""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from typing import Any
from urllib.parse import quote

import httpx

from sandbox_gateway.cli.failure import Exit, Failure, refused

DEFAULT_URL = "unix:///run/sandbox-gateway/gateway.sock"
CONNECT_SECONDS = 10.0


def path(*parts: str) -> str:
    """A path of ``parts``, each quoted: `path("sandboxes", "a b")` is "/sandboxes/a%20b"."""
    return "".join(f"/{quote(part, safe='')}" for part in parts)


class Client:
    """Requests that answer parsed JSON, or raise Failure."""

    def __init__(self, url: str, token: str = "") -> None:
        self.url = url
        headers = {"X-API-Key": token} if token else {}
        timeout = httpx.Timeout(None, connect=CONNECT_SECONDS)
        if url.startswith("unix://"):
            transport = httpx.HTTPTransport(uds=url.removeprefix("unix://"))
            self._http = httpx.Client(
                transport=transport, base_url="http://gateway", headers=headers, timeout=timeout, trust_env=False
            )
        elif url.startswith(("http://", "https://")):
            self._http = httpx.Client(base_url=url, headers=headers, timeout=timeout)
        else:
            raise Failure(f"{url!r} is not a gateway's address", Exit.USAGE, "use unix:///path, http:// or https://")

    def call(
        self,
        method: str,
        route: str,
        body: Mapping[str, Any] | None = None,
        params: Mapping[str, Any] | None = None,
        headers: Mapping[str, str] | None = None,
    ) -> Any:
        """The answer's JSON; None where it has none."""
        with self._reaching():
            answer = self._http.request(method, route, json=body, params=params, headers=headers)
        self._judge(answer)
        return answer.json() if answer.content else None

    def get(self, route: str, **params: Any) -> Any:
        return self.call("GET", route, params=_present(params))

    def all(self, route: str, **params: Any) -> list[Any]:
        """Every page of a list."""
        found: list[Any] = []
        token = ""
        while True:
            with self._reaching():
                answer = self._http.get(route, params=_present({**params, "limit": 1000, "nextToken": token}))
            self._judge(answer)
            found += answer.json()
            token = answer.headers.get("x-next-token", "")
            if not token:
                return found

    def lines(self, route: str, **params: Any) -> Iterator[str]:
        """The lines of an answer as they come."""
        with self._reaching(), self._http.stream("GET", route, params=_present(params)) as answer:
            if answer.is_error:
                answer.read()
            self._judge(answer)
            yield from answer.iter_lines()

    def events(self, operation: str = "") -> Iterator[tuple[str, dict[str, Any]]]:
        """(type, data) of each event as it happens; first ("connected", {}) once nothing will be missed."""
        kind = ""
        for line in self.lines("/events", operation=operation):
            if line == ": connected":
                yield "connected", {}
            elif line.startswith("event: "):
                kind = line.removeprefix("event: ")
            elif line.startswith("data: "):
                yield kind, json.loads(line.removeprefix("data: "))

    @contextmanager
    def _reaching(self) -> Iterator[None]:
        try:
            yield
        except httpx.ConnectError as error:
            message = f"cannot reach the gateway at {self.url}: {_reason(error)}"
            raise Failure(message, Exit.UNREACHABLE, _advice(error)) from None
        except httpx.TimeoutException:
            raise Failure(f"the gateway at {self.url} did not answer in time", Exit.UNREACHABLE, "try again") from None
        except httpx.TransportError as error:
            raise Failure(
                f"the connection to the gateway at {self.url} broke: {error}",
                Exit.UNREACHABLE,
                "it may have been restarted: see what came of it, then try again",
            ) from None
        except httpx.InvalidURL as error:
            raise Failure(f"{self.url!r} is not a gateway's address: {error}", Exit.USAGE) from None

    def _judge(self, answer: httpx.Response) -> None:
        if answer.is_success:
            return
        try:
            body = answer.json()
        except ValueError:
            body = None
        raise refused(answer.status_code, body)


def _present(params: Mapping[str, Any]) -> dict[str, Any]:
    return {key: value for key, value in params.items() if value not in (None, "", False)}


def _reason(error: httpx.ConnectError) -> str:
    return str(error).partition("] ")[2] or str(error)


def _advice(error: httpx.ConnectError) -> str:
    text = str(error).lower()
    if "permission denied" in text:
        return "run this as root, or as a member of the socket's group"
    if "certificate" in text:
        return "name the authority that signed its certificate with SSL_CERT_FILE"
    return "start the gateway (`sandbox-gateway serve --config FILE`), or say where it is with --url"
