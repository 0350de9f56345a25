"""Clients that send bodies to break a parser: deep, huge, with many members, in no valid encoding, at every route."""

from __future__ import annotations

import json
import resource
import threading
from collections.abc import Callable
from typing import Any

import httpx
import pytest

from sandbox_gateway.api.access.limits import MAX_BODY_BYTES
from sandbox_gateway.server.serving import document
from tests.api.inside import eventually
from tests.api.memory_gateway import ADMIN_KEY, EXEC_KEY
from tests.security.routes import Target

FULL, SOME = MAX_BODY_BYTES - 256, 64 << 10
MEMORY = 256 << 10
"""KiB that the whole process may grow by: a body of 4 MiB becomes some 100 MiB of Python objects while it is parsed."""


def make_members(pair: bytes, size: int = FULL) -> bytes:
    """As many members as fit; ``pair`` has %d in it."""
    count = size // (len(pair % 0) + 7)
    return b"{" + b",".join(pair % number for number in range(count)) + b"}"


BROKEN: dict[str, bytes] = {
    "lists in lists": b"[" * SOME,
    "lists in lists, closed": b"[" * (SOME // 2) + b"]" * (SOME // 2),
    "objects in objects": b'{"a":' * (SOME // 5),
    "a field of lists in lists": b'{"a":' + b"[" * 100_000 + b"]" * 100_000 + b"}",
    "a list of nothing": b"[" + b"{}," * (SOME // 3 - 2) + b"{}]",
    "a number without end": b'{"a":' + b"1" * SOME + b"}",
    "a number below zero without end": b'{"a":-' + b"1" * SOME + b"}",
    "a string without end": b'{"a":"' + b"a" * SOME,
    "escapes without end": b'{"a":"' + b"\\" * SOME,
    "quotes without end": b'"' * SOME,
    "blanks without end": b" " * SOME,
    "no UTF-8": b'{"a":"\xff\xfe\xc0\xaf"}',
    "overlong UTF-8": b'{"a":"\xe0\x80\xaf"}',
    "NUL bytes": b"\x00" * SOME,
    "a mark of bytes' order": b"\xef\xbb\xbf{",
    "comments": b'/* */ {"a": "x"} // x',
    "two objects": b'{"a":"x"}{"a":"y"}',
    "a comma more": b'{"a":1,}',
    "a list": b"[]",
    "a string": b'"text"',
    "a number": b"1",
    "more than is read": b'{"a":"' + b"a" * (MAX_BODY_BYTES + 1) + b'"}',
}
"""Never a valid JSON object."""

ODD: dict[str, bytes] = {
    "a field that is as deep as can be read": b'{"metadata":{"a":' + b'{"a":' * 900 + b"1" + b"}" * 902,
    "a fraction without end": b'{"timeout":0.' + b"1" * FULL + b"}",
    "a power without end": b'{"timeout":1e' + b"9" * FULL + b"}",
    "infinite": b'{"timeout":Infinity}',
    "below infinite": b'{"timeout":-Infinity}',
    "not a number": b'{"timeout":NaN}',
    "a size without end": b'{"cpuCount":' + b"9" * 4000 + b"}",
    "a size that is a fraction": b'{"memoryMB":64.5}',
    "half characters": b'{"name":"\\ud800"}',
    "half characters as names of members": b'{"metadata":{"\\udfff":1}}',
    "a NUL in a name": b'{"name":"a\\u0000b"}',
    "a name of megabytes": b'{"name":"' + b"a" * FULL + b'"}',
    "UTF-16": '{"name": "../x"}'.encode("utf-16"),
    "UTF-32": '{"name": "../x"}'.encode("utf-32"),
    "a name twice, the last one bad": b'{"name":"good","name":"../bad"}',
    "no template": b"{}",
    "only what nobody knows": make_members(b'"%d":1'),
    "a list as each value": make_members(b'"%d":[]'),
}
"""Objects that do not describe a valid sandbox."""


def routes_with_bodies() -> list[tuple[str, str, dict[str, Any]]]:
    """(method, path, schema of the body) of each route that has one."""
    whole = document()
    found = []
    for path, item in whole["paths"].items():
        for method, operation in item.items():
            if "requestBody" in operation:
                schema = operation["requestBody"]["content"]["application/json"]["schema"]
                for choice in (schema, *schema.get("anyOf", ())):
                    if "$ref" in choice:
                        name = choice["$ref"].rpartition("/")[2]
                        found.append((method.upper(), path, whole["components"]["schemas"][name]))
    return found


def container_fields(schema: dict[str, Any]) -> dict[str, str]:
    """The fields that hold many values: `array` or `object`."""
    found = {}
    for name, field in schema["properties"].items():
        for choice in (field, *field.get("anyOf", ())):
            if choice.get("type") == "array" or "additionalProperties" in choice:
                found[name] = choice["type"]
    return found


ROUTES = routes_with_bodies()
MANY = [
    (method, path, name, kind) for method, path, schema in ROUTES for name, kind in container_fields(schema).items()
]


def make_client(there: Target, key: str = ADMIN_KEY) -> httpx.Client:
    # Loading the CA certificates takes clients longer than most requests here.
    return httpx.Client(base_url=there.gateway.url, headers={"X-API-Key": key}, verify=False, timeout=60)


def send_attack(asking: httpx.Client, there: Target, method: str, path: str, body: bytes) -> httpx.Response:
    return asking.request(method, there.fill_in(path), content=body, headers={"Content-Type": "application/json"})


def memory_growth(work: Callable[[], None]) -> int:
    """The growth of the process's peak memory in KiB."""
    before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    work()
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - before


def test_some_routes_accept_bodies() -> None:
    assert len(ROUTES) >= 20 and len(MANY) >= 15
    assert {("POST", "/sandboxes/{ref}/exec", "env", "object"), ("POST", "/templates", "setup", "array")} <= set(MANY)


def check_refused(asking: httpx.Client, there: Target, method: str, path: str, body: bytes) -> None:
    answer = send_attack(asking, there, method, path, body)
    told = f"{method} {path}: {answer.status_code} {answer.text[:200]}"
    assert answer.status_code in (400, 413) and len(answer.content) < 16 << 10, told
    assert asking.get("/health").status_code == 200


@pytest.mark.parametrize("body", BROKEN)
def test_a_body_that_is_not_an_object_is_refused_at_every_route(target: Target, body: str) -> None:
    def work() -> None:
        for method, path, _ in ROUTES:
            check_refused(asking, target, method, path, BROKEN[body])

    with make_client(target) as asking:
        assert memory_growth(work) < MEMORY


@pytest.mark.parametrize("body", ODD)
def test_invalid_sandbox_options_are_refused(target: Target, body: str) -> None:
    with make_client(target) as asking:
        assert memory_growth(lambda: check_refused(asking, target, "POST", "/sandboxes", ODD[body])) < MEMORY


@pytest.mark.parametrize(("method", "path", "field", "kind"), MANY, ids=lambda value: str(value))
def test_many_invalid_members_cost_little(target: Target, method: str, path: str, field: str, kind: str) -> None:
    """Each invalid member is an error, but nobody needs a million errors."""
    wrong = make_members(b'"%d":1') if kind == "object" else b"[" + b"1," * (FULL // 2 - 2) + b"1]"
    body = b'{"%s":%s}' % (field.encode(), wrong)
    statuses: list[int] = []
    healthy = 0

    def work() -> None:
        nonlocal healthy
        thread = threading.Thread(
            target=lambda: statuses.append(send_attack(asking, target, method, path, body).status_code)
        )
        thread.start()
        while thread.is_alive():
            healthy += probing.get("/health").status_code == 200
        thread.join()

    with make_client(target) as asking, make_client(target) as probing:
        assert memory_growth(work) < MEMORY
    assert statuses == [400] and healthy


def test_many_large_bodies_do_not_delay_others(target: Target) -> None:
    body = json.dumps({"args": ["true"], "env": {}}).encode()[:-1] + b', "x":' + make_members(b'"%d":1', 1 << 20) + b"}"
    done: list[int] = []

    def send() -> None:
        with make_client(target, EXEC_KEY) as asking:
            for _ in range(2):
                done.append(send_attack(asking, target, "POST", "/sandboxes/{ref}/exec", body).status_code)

    threads = [threading.Thread(target=send) for _ in range(4)]
    for thread in threads:
        thread.start()
    healthy = 0
    while len(done) < 8 and any(thread.is_alive() for thread in threads):
        with make_client(target) as probing:
            healthy += probing.get("/health").status_code == 200
    eventually(lambda: not any(thread.is_alive() for thread in threads))
    assert done == [200] * 8 and healthy >= 3
