"""An HTTP client of the gateway, over its unix socket or TCP."""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from typing import Any
from urllib.parse import quote

import httpx

from sandbox_gateway.cli.failure import Exit, Failure, failure_from_response

DEFAULT_URL = "unix:///run/sandbox-gateway/gateway.sock"
CONNECT_SECONDS = 10.0


def path(*parts: str) -> str:
    """Build a path from ``parts``, quoting each: `path("sandboxes", "a b")` is "/sandboxes/a%20b"."""
    return "".join(f"/{quote(part, safe='')}" for part in parts)


class Client:
    """An HTTP client whose requests return parsed JSON. Raises Failure."""

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
            raise Failure(
                f"{url!r} is not the address of a gateway", Exit.USAGE, "use unix:///path, http:// or https://"
            )

    def call(
        self,
        method: str,
        route: str,
        body: Mapping[str, Any] | None = None,
        params: Mapping[str, Any] | None = None,
        headers: Mapping[str, str] | None = None,
    ) -> Any:
        """Send a request. Returns the JSON of the response; None if it is empty."""
        params = params if body is None else {**(params or {}), "strict": True}
        with self._errors_translated():
            response = self._http.request(method, route, json=body, params=params, headers=headers)
        self._raise_for_error(response)
        return response.json() if response.content else None

    def get(self, route: str, **params: Any) -> Any:
        return self.call("GET", route, params=_remove_empty(params))

    def get_all(self, route: str, **params: Any) -> list[Any]:
        """Return the items of all pages of a list."""
        items: list[Any] = []
        token = ""
        while True:
            with self._errors_translated():
                response = self._http.get(route, params=_remove_empty({**params, "limit": 1000, "nextToken": token}))
            self._raise_for_error(response)
            items += response.json()
            token = response.headers.get("x-next-token", "")
            if not token:
                return items

    def lines(self, route: str, **params: Any) -> Iterator[str]:
        """Yield the lines of a response as they arrive."""
        with self._errors_translated(), self._http.stream("GET", route, params=_remove_empty(params)) as response:
            if response.is_error:
                response.read()
            self._raise_for_error(response)
            yield from response.iter_lines()

    def events(self, operation: str = "") -> Iterator[tuple[str, dict[str, Any]]]:
        """Yield (type, data) of each event as it happens. The first is ("connected", {}): no later event is missed."""
        kind = ""
        for line in self.lines("/events", operation=operation):
            if line == ": connected":
                yield "connected", {}
            elif line.startswith("event: "):
                kind = line.removeprefix("event: ")
            elif line.startswith("data: "):
                yield kind, json.loads(line.removeprefix("data: "))

    @contextmanager
    def _errors_translated(self) -> Iterator[None]:
        try:
            yield
        except httpx.ConnectError as error:
            message = f"cannot reach the gateway at {self.url}: {_connect_failure_reason(error)}"
            raise Failure(message, Exit.UNREACHABLE, _connect_failure_hint(error)) from None
        except httpx.TimeoutException:
            raise Failure(f"the gateway at {self.url} did not respond in time", Exit.UNREACHABLE, "try again") from None
        except httpx.TransportError as error:
            raise Failure(
                f"the connection to the gateway at {self.url} was lost: {error}",
                Exit.UNREACHABLE,
                "the gateway may have restarted: check the result of the request, then try again",
            ) from None
        except httpx.InvalidURL as error:
            raise Failure(
                f"{self.url!r} is not the address of a gateway: {error}",
                Exit.USAGE,
                "use unix:///path, http:// or https://",
            ) from None

    def _raise_for_error(self, response: httpx.Response) -> None:
        if response.is_success:
            return
        try:
            body = response.json()
        except ValueError:
            body = None
        raise failure_from_response(response.status_code, body)


def _remove_empty(params: Mapping[str, Any]) -> dict[str, Any]:
    return {key: value for key, value in params.items() if value not in (None, "", False)}


def _connect_failure_reason(error: httpx.ConnectError) -> str:
    return str(error).partition("] ")[2] or str(error)


def _connect_failure_hint(error: httpx.ConnectError) -> str:
    text = str(error).lower()
    if "permission denied" in text:
        return "run this as root, or as a member of the socket's group"
    if "certificate" in text:
        return "set SSL_CERT_FILE to the certificate of the authority that signed the gateway's"
    return "start the gateway (`sandbox-gateway serve --config FILE`), or name another one with --url"
