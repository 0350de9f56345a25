"""A client tries to break the parser with deeply nested, huge or invalid bodies on every route."""

from __future__ import annotations

import json
import resource
import threading
from collections.abc import Callable
from typing import Any

import httpx
import pytest

from sandbox_gateway.api.access.limits import MAX_BODY_BYTES
from sandbox_gateway.server.serving import build_openapi_document
from tests.security.hostile import LoopMonitor
from tests.security.routes import Target
from tests.support.guest_services import wait_until
from tests.support.memory_gateway import ADMIN_KEY, EXEC_KEY

MAX_BLOCK_SECONDS = 1.0
"""Maximum CPU time that the event loop needs for one request, most of it to parse JSON. The attacks took 12 s."""
LARGE_BYTES, MEDIUM_BYTES = MAX_BODY_BYTES - 256, 64 << 10
MAX_GROWTH_KIB = 256 << 10
"""Maximum growth of the whole process. Parsing a body of 4 MiB creates about 100 MiB of Python objects."""


def make_object(pair: bytes, size: int = LARGE_BYTES) -> bytes:
    """Return a JSON object of about ``size`` bytes. ``pair`` is the format of each member, with %d for its number."""
    count = size // (len(pair % 0) + 7)
    return b"{" + b",".join(pair % number for number in range(count)) + b"}"


NON_OBJECTS: dict[str, bytes] = {
    "lists in lists": b"[" * MEDIUM_BYTES,
    "lists in lists, closed": b"[" * (MEDIUM_BYTES // 2) + b"]" * (MEDIUM_BYTES // 2),
    "objects in objects": b'{"a":' * (MEDIUM_BYTES // 5),
    "a field of lists in lists": b'{"a":' + b"[" * 100_000 + b"]" * 100_000 + b"}",
    "a list of empty objects": b"[" + b"{}," * (MEDIUM_BYTES // 3 - 2) + b"{}]",
    "a number without end": b'{"a":' + b"1" * MEDIUM_BYTES + b"}",
    "a negative number without end": b'{"a":-' + b"1" * MEDIUM_BYTES + b"}",
    "a string without end": b'{"a":"' + b"a" * MEDIUM_BYTES,
    "escapes without end": b'{"a":"' + b"\\" * MEDIUM_BYTES,
    "quotes without end": b'"' * MEDIUM_BYTES,
    "spaces without end": b" " * MEDIUM_BYTES,
    "invalid UTF-8": b'{"a":"\xff\xfe\xc0\xaf"}',
    "overlong UTF-8": b'{"a":"\xe0\x80\xaf"}',
    "NUL bytes": b"\x00" * MEDIUM_BYTES,
    "a byte order mark": b"\xef\xbb\xbf{",
    "comments": b'/* */ {"a": "x"} // x',
    "two objects": b'{"a":"x"}{"a":"y"}',
    "a trailing comma": b'{"a":1,}',
    "a list": b"[]",
    "a string": b'"text"',
    "a number": b"1",
    "more than the limit": b'{"a":"' + b"a" * (MAX_BODY_BYTES + 1) + b'"}',
}
"""Bodies that are not a valid JSON object."""

INVALID_OBJECTS: dict[str, bytes] = {
    "a field of the maximum depth": b'{"metadata":{"a":' + b'{"a":' * 900 + b"1" + b"}" * 902,
    "a fraction without end": b'{"timeout":0.' + b"1" * LARGE_BYTES + b"}",
    "an exponent without end": b'{"timeout":1e' + b"9" * LARGE_BYTES + b"}",
    "infinity": b'{"timeout":Infinity}',
    "negative infinity": b'{"timeout":-Infinity}',
    "not a number": b'{"timeout":NaN}',
    "a size without end": b'{"cpuCount":' + b"9" * 4000 + b"}",
    "a fraction as a size": b'{"memoryMB":64.5}',
    "half a surrogate pair": b'{"name":"\\ud800"}',
    "half a surrogate pair as a key": b'{"metadata":{"\\udfff":1}}',
    "a NUL in a name": b'{"name":"a\\u0000b"}',
    "a name of megabytes": b'{"name":"' + b"a" * LARGE_BYTES + b'"}',
    "UTF-16": '{"name": "../x"}'.encode("utf-16"),
    "UTF-32": '{"name": "../x"}'.encode("utf-32"),
    "a repeated name, the last one invalid": b'{"name":"good","name":"../bad"}',
    "no template": b"{}",
    "only unknown fields": make_object(b'"%d":1'),
    "a list as each value": make_object(b'"%d":[]'),
}
"""Objects that do not describe a valid sandbox."""


def list_routes_with_bodies() -> list[tuple[str, str, dict[str, Any]]]:
    """Return (method, path, schema of the body) for each route that accepts a JSON body."""
    openapi_document = build_openapi_document()
    routes = []
    for path, item in openapi_document["paths"].items():
        for method, operation in item.items():
            content = operation.get("requestBody", {}).get("content", {})
            if "application/json" in content:
                schema = content["application/json"]["schema"]
                for choice in (schema, *schema.get("anyOf", ())):
                    if "$ref" in choice:
                        name = choice["$ref"].rpartition("/")[2]
                        routes.append((method.upper(), path, openapi_document["components"]["schemas"][name]))
    return routes


SCHEMAS: dict[str, dict[str, Any]] = build_openapi_document()["components"]["schemas"]


def find_container_fields(schema: dict[str, Any], prefix: str = "") -> dict[str, str]:
    """Return {field: type} for all fields whose type is `array` or `object`, at any depth.

    The name of a nested field is that of each field above it, with `[]` for those that are arrays, and its own:
    `steps[].args`.
    """
    type_by_field: dict[str, str] = {}
    for name, field in schema.get("properties", {}).items():
        for choice in (field, *field.get("anyOf", ()), *field.get("allOf", ())):
            if choice.get("type") == "array" or isinstance(choice.get("additionalProperties"), dict):
                type_by_field[prefix + name] = choice["type"]
            for nested, suffix in ((choice, "."), (choice.get("items", {}), "[].")):
                if "$ref" in nested:
                    nested_schema = SCHEMAS[nested["$ref"].rpartition("/")[2]]
                    type_by_field |= find_container_fields(nested_schema, f"{prefix}{name}{suffix}")
    return type_by_field


def make_container(field: str, kind: str, size: int) -> bytes:
    """Return a JSON object of about ``size`` bytes, in which ``field`` has as many invalid members as possible."""
    name, _, rest = field.partition(".")
    if rest and name.endswith("[]"):
        # As many entries, with as many members, as the longest lists may have.
        entry = make_container(rest, kind, min(size // 1000, 3900))
        contents = b"[" + b",".join([entry] * 1000) + b"]"
    elif rest:
        contents = make_container(rest, kind, size)
    elif kind == "object":
        contents = make_object(b'"%d":1', size)
    else:
        contents = b"[" + b"1," * (size // 2 - 2) + b"1]"
    return b'{"%s":%s}' % (name.removesuffix("[]").encode(), contents)


ROUTES = list_routes_with_bodies()
CONTAINER_FIELDS = [
    (method, path, name, kind)
    for method, path, schema in ROUTES
    for name, kind in find_container_fields(schema).items()
]


def make_client(target: Target, key: str = ADMIN_KEY) -> httpx.Client:
    # Do not load CA certificates, which takes longer than most requests here.
    return httpx.Client(base_url=target.gateway.url, headers={"X-API-Key": key}, verify=False, timeout=60)


def send_attack(client: httpx.Client, target: Target, method: str, path: str, body: bytes) -> httpx.Response:
    return client.request(
        method, target.fill_template(path), content=body, headers={"Content-Type": "application/json"}
    )


def measure_growth_kib(work: Callable[[], None]) -> int:
    """Return how much ``work`` increases the peak memory of this process, in KiB."""
    peak_before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    work()
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - peak_before


def test_some_routes_accept_bodies() -> None:
    assert len(ROUTES) >= 20 and len(CONTAINER_FIELDS) >= 15
    assert {
        ("POST", "/sandboxes/{ref}/exec", "env", "object"),
        ("POST", "/templates", "setup", "array"),
        ("POST", "/sandboxes", "placement.labels", "object"),
        ("POST", "/v2/templates/{ref}/builds/{build}", "steps[].args", "array"),
    } <= set(CONTAINER_FIELDS)


def check_body_is_refused(client: httpx.Client, target: Target, method: str, path: str, body: bytes) -> None:
    response = send_attack(client, target, method, path, body)
    details = f"{method} {path}: {response.status_code} {response.text[:200]}"
    assert response.status_code in (400, 413) and len(response.content) < 16 << 10, details
    assert client.get("/health").status_code == 200


@pytest.mark.parametrize("body", NON_OBJECTS)
def test_a_body_that_is_not_an_object_is_refused_on_every_route(target: Target, body: str) -> None:
    def send_to_all_routes() -> None:
        for method, path, _ in ROUTES:
            check_body_is_refused(client, target, method, path, NON_OBJECTS[body])

    with make_client(target) as client:
        assert measure_growth_kib(send_to_all_routes) < MAX_GROWTH_KIB


@pytest.mark.parametrize("body", INVALID_OBJECTS)
def test_invalid_sandbox_options_are_refused(target: Target, body: str) -> None:
    with make_client(target) as client:
        assert (
            measure_growth_kib(
                lambda: check_body_is_refused(client, target, "POST", "/sandboxes", INVALID_OBJECTS[body])
            )
            < MAX_GROWTH_KIB
        )


@pytest.mark.parametrize(("method", "path", "field", "kind"), CONTAINER_FIELDS, ids=lambda value: str(value))
def test_many_invalid_members_use_little_memory(target: Target, method: str, path: str, field: str, kind: str) -> None:
    """Every member is invalid, but the gateway must not collect a million errors."""
    body = make_container(field, kind, LARGE_BYTES - 20_000)
    statuses: list[int] = []
    success_count = 0

    def send_body() -> None:
        nonlocal success_count
        thread = threading.Thread(
            target=lambda: statuses.append(send_attack(client, target, method, path, body).status_code)
        )
        thread.start()
        while thread.is_alive():
            success_count += probe.get("/health").status_code == 200
        thread.join()

    with make_client(target) as client, make_client(target) as probe, LoopMonitor(target.gateway) as monitor:
        assert measure_growth_kib(send_body) < MAX_GROWTH_KIB
    assert statuses == [400] and success_count
    assert monitor.longest_block_seconds < MAX_BLOCK_SECONDS


def test_many_large_bodies_do_not_delay_other_clients(target: Target) -> None:
    body = (
        json.dumps({"args": ["true"], "env": {}}).encode()[:-1]
        + b', "x":'
        + make_object(b'"%d":"' + b"a" * 60 + b'"', 1 << 20)
        + b"}"
    )
    statuses: list[int] = []

    def send_bodies() -> None:
        with make_client(target, EXEC_KEY) as client:
            for _ in range(2):
                statuses.append(send_attack(client, target, "POST", "/sandboxes/{ref}/exec", body).status_code)

    threads = [threading.Thread(target=send_bodies) for _ in range(4)]
    for thread in threads:
        thread.start()
    success_count = 0
    while len(statuses) < 8 and any(thread.is_alive() for thread in threads):
        with make_client(target) as probe:
            success_count += probe.get("/health").status_code == 200
    wait_until(lambda: not any(thread.is_alive() for thread in threads))
    assert statuses == [200] * 8 and success_count >= 3
