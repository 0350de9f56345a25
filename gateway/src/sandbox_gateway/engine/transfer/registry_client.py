"""A client of the OCI distribution API, for one repository.

It uses httpx: oras-py has no timeouts, reads responses of any size, and follows redirects and token realms to any host.

A registry may be malicious. It is therefore contacted only if the configuration lists it, every response is limited in
size and time, and no response makes the client contact a host that is not configured, or send it a password.
"""

from __future__ import annotations

import asyncio
import base64
import json
import re
import ssl
from collections.abc import AsyncIterator, Awaitable, Callable, Collection, Mapping
from contextlib import asynccontextmanager
from dataclasses import dataclass
from http.cookiejar import CookieJar, DefaultCookiePolicy
from pathlib import Path

import httpx

from sandbox_gateway.config import RegistrySection
from sandbox_gateway.engine.transfer.artifact_format import (
    MANIFEST_TYPE,
    MAX_DOCUMENT_BYTES,
    compute_blob_digest,
    is_blob_digest,
)
from sandbox_gateway.errors import BackendFailed, Conflict, GatewayError, Invalid, NotFound
from sandbox_gateway.image_references import RegistryLogin, Transport, parse_image_reference
from sandbox_gateway.log import Logger

MAX_CONNECTIONS = 4
_CONNECT_SECONDS = 10
_STALL_SECONDS = 60
"""How long a connection may transfer nothing."""
_REQUEST_SECONDS = 60
_MIN_BYTES_PER_SECOND = 64 << 10
"""A request may take this long for each of its bytes, in addition to ``_REQUEST_SECONDS``."""
_RETRY_DELAYS = (0.2, 0.5, 1.0, 2.0, 4.0, 8.0)
"""The waits before a request is sent again, in seconds. Together, a registry may be unavailable for about 15 s."""
_MAX_REDIRECTS = 3
_MAX_ERROR_BYTES = 8 << 10
_MAX_TOKEN_BYTES = 64 << 10
_PIECE_BYTES = 64 << 10
_TOKEN_PATTERN = re.compile(r"[\x21-\x7e]{1,16384}")
_CHALLENGE_PATTERN = re.compile(r'([a-z]+)="([^"]*)"')
_REDIRECT_STATUSES = frozenset({301, 302, 303, 307, 308})

log = Logger("transfers")


@dataclass(frozen=True)
class ArtifactReference:
    """REGISTRY/REPOSITORY with a tag or a digest. ``registry``: HOST or HOST:PORT."""

    registry: str
    repository: str
    tag: str = ""
    digest: str = ""

    def __str__(self) -> str:
        return f"{self.registry}/{self.repository}{f'@{self.digest}' if self.digest else f':{self.tag}'}"


def parse_artifact_reference(text: str, settings: RegistrySection) -> ArtifactReference:
    """Parse REGISTRY/REPOSITORY:TAG or REGISTRY/REPOSITORY@DIGEST. Raises Invalid if the registry is not allowed."""
    form_error = Invalid(
        f"{text[:200]!r} is not a reference to an artifact: use REGISTRY/REPOSITORY:TAG, such as "
        "registry.example/team/env:before"
    )
    try:
        image = parse_image_reference(text)
    except ValueError:
        raise form_error from None
    if image.transport is not Transport.REGISTRY or not text.removeprefix("docker://").startswith(f"{image.registry}/"):
        raise form_error
    if image.registry not in settings.allowed:
        raise Invalid(
            f"the registry {image.registry} is not allowed: use one of {', '.join(settings.allowed) or '(none)'}, or "
            "ask an administrator to add it to registry.allowed in the gateway's configuration"
        )
    repository = image.name.removeprefix(f"{image.registry}/")
    return ArtifactReference(image.registry, repository, tag=image.tag, digest=image.digest)


def read_login(settings: RegistrySection, registry: str) -> RegistryLogin | None:
    """Return the configured credentials for a registry, or None. Raises Invalid if the file cannot be used. Blocks."""
    path = settings.auth_file
    if path is None:
        return None
    try:
        entry = json.loads(path.read_bytes())["auths"].get(registry, {}).get("auth", "")
        username, _, password = base64.b64decode(entry, validate=True).decode().partition(":")
    except (OSError, ValueError, KeyError, TypeError, AttributeError, RecursionError):
        raise Invalid(
            f"the file {path} (registry.auth_file) cannot be used: write it with `skopeo login --authfile {path} "
            f"{registry}`"
        ) from None
    return RegistryLogin(username, password) if username else None


class _Retry(Exception):
    """The request may succeed if it is sent again."""


@dataclass(frozen=True)
class _Response:
    status: int
    headers: httpx.Headers
    body: bytes


class RegistryClient:
    """Reads and writes the blobs and manifests of one repository. Its methods raise GatewayError."""

    def __init__(
        self, settings: RegistrySection, reference: ArtifactReference, login: RegistryLogin | None, *, push: bool
    ) -> None:
        """``login``: None for anonymous access. ``push``: ask for the permission to write."""
        self._settings = settings
        self._reference = reference
        self._login = login
        self._actions = "pull,push" if push else "pull"
        self._authorization = ""
        self._token_lock = asyncio.Lock()
        scheme = "http" if reference.registry in settings.plain_http else "https"
        self._origin = httpx.URL(f"{scheme}://{reference.registry}")
        self._base = f"{scheme}://{reference.registry}/v2/{reference.repository}"
        self.sent_bytes = 0
        """The bytes of blobs and manifests that were sent, including those of requests that failed."""
        self.received_bytes = 0
        """The bytes of blobs and manifests that were received."""
        self._client = httpx.AsyncClient(
            verify=_create_tls_context(settings.ca_file),
            # No proxy, netrc file or CA bundle that the environment names.
            trust_env=False,
            follow_redirects=False,
            timeout=httpx.Timeout(_STALL_SECONDS, connect=_CONNECT_SECONDS),
            limits=httpx.Limits(max_connections=MAX_CONNECTIONS),
            cookies=CookieJar(DefaultCookiePolicy(allowed_domains=[])),
            # A compressed response could be arbitrarily large once it is decompressed.
            headers={"Accept-Encoding": "identity", "User-Agent": "sandbox-gateway"},
        )

    async def close(self) -> None:
        await self._client.aclose()

    async def has_blob(self, digest: str) -> bool:
        # Registries that redirect downloads to an object store do so only for blobs that they have.
        accepted_statuses = (200, 404, *_REDIRECT_STATUSES)
        response = await self._call("HEAD", f"{self._base}/blobs/{digest}", accepted=accepted_statuses)
        return response.status != 404

    async def put_blob(self, digest: str, data: bytes) -> None:
        """Upload a blob. After a failure, the whole blob is sent again."""

        async def upload() -> _Response:
            started = await self._send_once("POST", f"{self._base}/blobs/uploads/", accepted=(202,), content=b"")
            location = self._resolve_upload(started.headers.get("location", ""))
            return await self._send_once(
                "PUT", str(location.copy_merge_params({"digest": digest})), accepted=(201,), content=data
            )

        await self._retry(upload)

    async def get_blob(self, digest: str, size: int) -> bytes:
        """Return a blob of exactly ``size`` bytes. Raises Invalid if its digest does not match."""
        response = await self._call(
            "GET", f"{self._base}/blobs/{digest}", accepted=(200, 404), max_bytes=size, may_redirect=True
        )
        if response.status == 404:
            raise Conflict(
                f"the registry {self._reference.registry} no longer has the blob {digest} of {self._reference}: push "
                "the snapshot again"
            )
        if len(response.body) != size or compute_blob_digest(response.body) != digest:
            raise self._create_digest_error(digest)
        return response.body

    async def find_manifest_digest(self, reference: str) -> str:
        """Return the digest of the manifest with this tag or digest, as the registry states it, or ""."""
        response = await self._call(
            "HEAD",
            f"{self._base}/manifests/{reference}",
            accepted=(200, 404),
            headers={"Accept": MANIFEST_TYPE},
        )
        digest = response.headers.get("docker-content-digest", "")
        return digest if response.status == 200 and is_blob_digest(digest) else ""

    async def get_manifest(self) -> bytes:
        """Return the manifest that the reference names. Raises NotFound, or Invalid if its digest does not match."""
        reference = self._reference
        response = await self._call(
            "GET",
            f"{self._base}/manifests/{reference.digest or reference.tag}",
            accepted=(200, 404),
            headers={"Accept": MANIFEST_TYPE},
            max_bytes=MAX_DOCUMENT_BYTES,
        )
        if response.status == 404:
            raise NotFound("artifact", str(reference))
        if reference.digest and compute_blob_digest(response.body) != reference.digest:
            raise self._create_digest_error(reference.digest)
        return response.body

    async def put_manifest(self, data: bytes) -> None:
        """Give the tag of the reference to a manifest, all of whose blobs the registry has."""
        await self._call(
            "PUT",
            f"{self._base}/manifests/{self._reference.tag}",
            accepted=(200, 201),
            headers={"Content-Type": MANIFEST_TYPE},
            content=data,
        )

    async def _call(
        self,
        method: str,
        url: str,
        *,
        accepted: tuple[int, ...],
        headers: Mapping[str, str] | None = None,
        content: bytes | None = None,
        max_bytes: int = 0,
        may_redirect: bool = False,
    ) -> _Response:
        return await self._retry(
            lambda: self._send_once(
                method,
                url,
                accepted=accepted,
                headers=headers,
                content=content,
                max_bytes=max_bytes,
                may_redirect=may_redirect,
            )
        )

    async def _retry(self, send: Callable[[], Awaitable[_Response]]) -> _Response:
        """Send a request until it succeeds, or until the registry has failed for about 15 seconds."""
        for delay in (*_RETRY_DELAYS, None):
            try:
                return await send()
            except _Retry as error:
                if delay is None:
                    raise BackendFailed(
                        f"the registry {self._reference.registry} is not working: {error}. Check the registry, and "
                        "repeat the request: what has been transferred is not transferred again"
                    ) from None
                log.warning("registry request failed", registry=self._reference.registry, reason=str(error))
                await asyncio.sleep(delay)
        raise AssertionError("unreachable")

    async def _send_once(
        self,
        method: str,
        url: str,
        *,
        accepted: tuple[int, ...],
        headers: Mapping[str, str] | None = None,
        content: bytes | None = None,
        max_bytes: int = 0,
        may_redirect: bool = False,
    ) -> _Response:
        """Send a request, and once more if the registry asks for a token. Raises GatewayError and _Retry."""
        seconds = _REQUEST_SECONDS + max(max_bytes, len(content or b"")) / _MIN_BYTES_PER_SECOND
        try:
            async with asyncio.timeout(seconds):
                used_authorization = self._authorization
                response = await self._follow(method, url, headers or {}, content, max_bytes, may_redirect=may_redirect)
                if response.status == 401:
                    await self._authorize(response, used_authorization)
                    response = await self._follow(
                        method, url, headers or {}, content, max_bytes, may_redirect=may_redirect
                    )
        except TimeoutError:
            raise _Retry(f"it did not answer within {seconds:.0f} s") from None
        except httpx.InvalidURL:
            raise self._create_failure("it sent an invalid address") from None
        except httpx.HTTPError as error:
            raise _Retry(str(error) or type(error).__name__) from None
        if response.status in accepted:
            return response
        raise self._explain(method, response)

    async def _follow(
        self,
        method: str,
        url: str,
        headers: Mapping[str, str],
        content: bytes | None,
        max_bytes: int,
        *,
        may_redirect: bool,
    ) -> _Response:
        """Send a request, and follow the redirects of a download. Other hosts than the registry's get no password."""
        target = httpx.URL(url)
        for _ in range(_MAX_REDIRECTS + 1):
            sent_headers = dict(headers)
            if self._authorization and self._is_registry(target):
                sent_headers["Authorization"] = self._authorization
            self.sent_bytes += len(content or b"")
            async with self._client.stream(method, target, headers=sent_headers, content=content) as response:
                is_redirect = response.status_code in _REDIRECT_STATUSES
                if not (is_redirect and may_redirect):
                    is_success = response.is_success and method != "HEAD"
                    body = await self._read(response, max_bytes if is_success else _MAX_ERROR_BYTES, strict=is_success)
                    if is_success and max_bytes:
                        self.received_bytes += len(body)
                    return _Response(response.status_code, response.headers, body)
                target = target.join(response.headers.get("location", ""))
            self._check_download_server(target)
        raise self._create_failure(f"it redirects a download more than {_MAX_REDIRECTS} times")

    async def _read(self, response: httpx.Response, max_bytes: int, *, strict: bool) -> bytes:
        """Read a body. If it is longer than ``max_bytes``, raise BackendFailed if ``strict``, otherwise truncate it."""
        body = bytearray()
        async for piece in response.aiter_raw(_PIECE_BYTES):
            body += piece
            if len(body) > max_bytes:
                if strict and max_bytes:
                    raise self._create_failure(f"it sent more than the {max_bytes} bytes that were expected")
                break
        return bytes(body[:max_bytes])

    def _is_registry(self, url: httpx.URL) -> bool:
        return _get_origin(url) == _get_origin(self._origin)

    def _check_download_server(self, url: httpx.URL) -> None:
        if self._is_registry(url):
            return
        if not _is_listed(url, self._settings.download_servers):
            raise self._create_failure(
                f"it redirects a download to {url.scheme}://{_get_authority(url)[:200]}, which is not allowed: add the "
                "host to registry.download_servers in the gateway's configuration if you trust it"
            )

    def _resolve_upload(self, location: str) -> httpx.URL:
        try:
            url = httpx.URL(self._base).join(location)
        except httpx.InvalidURL:
            raise self._create_failure("it sent an invalid address") from None
        if not location or not self._is_registry(url):
            raise self._create_failure(f"it asks for an upload to another address: {location[:200]!r}")
        return url

    async def _authorize(self, response: _Response, used_authorization: str) -> None:
        """Set the authorization that a 401 response asks for. Raises GatewayError and _Retry."""
        async with self._token_lock:
            if self._authorization != used_authorization:
                return  # Another request has just done so.
            scheme, _, parameters = response.headers.get("www-authenticate", "").partition(" ")
            if scheme.lower() == "bearer":
                self._authorization = f"Bearer {await self._fetch_token(dict(_CHALLENGE_PATTERN.findall(parameters)))}"
            elif scheme.lower() == "basic" and self._login is not None and not used_authorization:
                self._authorization = _encode_basic(self._login)
            else:
                raise self._create_access_error()

    async def _fetch_token(self, challenge: Mapping[str, str]) -> str:
        realm = httpx.URL(challenge.get("realm", ""))
        if not (self._is_registry(realm) or _is_listed(realm, self._settings.token_servers)):
            raise self._create_failure(
                f"it names {realm.scheme}://{_get_authority(realm)[:200]} as its token server, which is not allowed: "
                "add the host to registry.token_servers in the gateway's configuration if you trust it"
            )
        scope = f"repository:{self._reference.repository}:{self._actions}"
        params = {"service": challenge.get("service", "")[:255], "scope": scope}
        headers = {"Authorization": _encode_basic(self._login)} if self._login else {}
        async with self._client.stream("GET", realm.copy_merge_params(params), headers=headers) as response:
            if response.status_code in (401, 403):
                raise self._create_access_error()
            if response.status_code >= 500 or response.status_code == 429:
                raise _Retry(f"its token server answered with status {response.status_code}")
            body = await self._read(response, _MAX_TOKEN_BYTES, strict=True)
        try:
            answer = json.loads(body)
            token = answer.get("token") or answer.get("access_token")
        except (ValueError, RecursionError, AttributeError):
            token = None
        if not isinstance(token, str) or not _TOKEN_PATTERN.fullmatch(token):
            raise self._create_failure(f"its token server answered with status {response.status_code} and no token")
        return token

    def _explain(self, method: str, response: _Response) -> Exception:
        if response.status in (401, 403):
            return self._create_access_error()
        if response.status >= 500 or response.status == 429:
            return _Retry(f"it answered with status {response.status}")
        return self._create_failure(
            f"it answered {method} with status {response.status}{_quote_message(response.body)}"
        )

    def _create_access_error(self) -> GatewayError:
        return Invalid(
            f"the registry {self._reference.registry} refuses access to {self._reference.repository}: check the name, "
            "and pass a user name and a password, or ask an administrator to set registry.auth_file in the gateway's "
            "configuration"
        )

    def _create_failure(self, reason: str) -> GatewayError:
        return BackendFailed(f"the registry {self._reference.registry} cannot be used: {reason}")

    def _create_digest_error(self, digest: str) -> GatewayError:
        return Invalid(
            f"the registry {self._reference.registry} sent data that does not match the digest {digest}: its storage "
            "may be damaged. Push the snapshot again"
        )


@asynccontextmanager
async def opened_client(
    settings: RegistrySection, reference: ArtifactReference, login: RegistryLogin | None, *, push: bool
) -> AsyncIterator[RegistryClient]:
    """Open a client with the login of a request, or with the configured one."""
    if login is None:
        login = await asyncio.to_thread(read_login, settings, reference.registry)
    # Reading the system's certificate authorities blocks.
    client = await asyncio.to_thread(RegistryClient, settings, reference, login, push=push)
    try:
        yield client
    finally:
        await client.close()


def _create_tls_context(ca_file: Path | None) -> ssl.SSLContext:
    """Return a context that trusts the certificate authorities of the system, and those in ``ca_file``."""
    context = ssl.create_default_context()
    if ca_file is not None:
        try:
            context.load_verify_locations(ca_file)
        except (OSError, ssl.SSLError) as error:
            raise Invalid(f"the file {ca_file} (registry.ca_file) cannot be used: {error}") from None
    return context


def _get_origin(url: httpx.URL) -> tuple[str, str, int | None]:
    return url.scheme, url.host, url.port


def _get_authority(url: httpx.URL) -> str:
    """Return HOST, or HOST:PORT if the port is not the default one."""
    return url.netloc.decode("ascii", "replace")


def _is_listed(url: httpx.URL, servers: Collection[str]) -> bool:
    """Return whether the configuration allows HTTPS requests to the server of this URL."""
    return url.scheme == "https" and any(httpx.URL(f"https://{each}").netloc == url.netloc for each in servers)


def _encode_basic(login: RegistryLogin) -> str:
    return f"Basic {base64.b64encode(f'{login.username}:{login.password}'.encode()).decode()}"


def _quote_message(body: bytes) -> str:
    """Return the first message in an error response of a registry, for the end of a sentence."""
    try:
        error = json.loads(body)["errors"][0]
        return f": {str(error.get('message') or error['code'])[:200]}"
    except (ValueError, RecursionError, KeyError, IndexError, TypeError, AttributeError):
        return ""
