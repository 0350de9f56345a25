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
from tests.api.served import ADMIN_KEY, EXEC_KEY
from tests.security.routes import Target

FULL, SOME = MAX_BODY_BYTES - 256, 64 << 10
MEMORY = 256 << 10
"""KiB that the whole process may grow by: a body of 4 MiB becomes some 100 MiB of Python objects while it is parsed."""


def members(pair: bytes, size: int = FULL) -> bytes:
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
    "only what nobody knows": members(b'"%d":1'),
    "a list as each value": members(b'"%d":[]'),
}
"""Objects that do not describe a valid sandbox."""


def with_bodies() -> list[tuple[str, str, dict[str, Any]]]:
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


def holding(schema: dict[str, Any]) -> dict[str, str]:
    """The fields that hold many values: `array` or `object`."""
    found = {}
    for name, field in schema["properties"].items():
        for choice in (field, *field.get("anyOf", ())):
            if choice.get("type") == "array" or "additionalProperties" in choice:
                found[name] = choice["type"]
    return found


ROUTES = with_bodies()
MANY = [(method, path, name, kind) for method, path, schema in ROUTES for name, kind in holding(schema).items()]


def client(there: Target, key: str = ADMIN_KEY) -> httpx.Client:
    # Loading the CA certificates takes clients longer than most requests here.
    return httpx.Client(base_url=there.served.url, headers={"X-API-Key": key}, verify=False, timeout=60)


def attack(asking: httpx.Client, there: Target, method: str, path: str, body: bytes) -> httpx.Response:
    return asking.request(method, there.real(path), content=body, headers={"Content-Type": "application/json"})


def grown(work: Callable[[], None]) -> int:
    """The growth of the process's peak memory in KiB."""
    before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    work()
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - before


def test_there_is_something_to_attack() -> None:
    assert len(ROUTES) >= 20 and len(MANY) >= 15
    assert {("POST", "/sandboxes/{ref}/exec", "env", "object"), ("POST", "/templates", "setup", "array")} <= set(MANY)


def refuses(asking: httpx.Client, there: Target, method: str, path: str, body: bytes) -> None:
    answer = attack(asking, there, method, path, body)
    told = f"{method} {path}: {answer.status_code} {answer.text[:200]}"
    assert answer.status_code in (400, 413) and len(answer.content) < 16 << 10, told
    assert asking.get("/health").status_code == 200


@pytest.mark.parametrize("body", BROKEN)
def test_what_is_no_object_is_refused_at_every_route(there: Target, body: str) -> None:
    def work() -> None:
        for method, path, _ in ROUTES:
            refuses(asking, there, method, path, BROKEN[body])

    with client(there) as asking:
        assert grown(work) < MEMORY


@pytest.mark.parametrize("body", ODD)
def test_what_makes_no_sandbox_is_refused(there: Target, body: str) -> None:
    with client(there) as asking:
        assert grown(lambda: refuses(asking, there, "POST", "/sandboxes", ODD[body])) < MEMORY


@pytest.mark.parametrize(("method", "path", "field", "kind"), MANY, ids=lambda value: str(value))
def test_as_many_wrong_members_as_fit_cost_little(there: Target, method: str, path: str, field: str, kind: str) -> None:
    """Each wrong member is an error, but a million errors are useless."""
    wrong = members(b'"%d":1') if kind == "object" else b"[" + b"1," * (FULL // 2 - 2) + b"1]"
    body = b'{"%s":%s}' % (field.encode(), wrong)
    statuses: list[int] = []
    healthy = 0

    def work() -> None:
        nonlocal healthy
        thread = threading.Thread(target=lambda: statuses.append(attack(asking, there, method, path, body).status_code))
        thread.start()
        while thread.is_alive():
            healthy += probing.get("/health").status_code == 200
        thread.join()

    with client(there) as asking, client(there) as probing:
        assert grown(work) < MEMORY
    assert statuses == [400] and healthy


def test_many_clients_with_full_bodies_have_nobody_wait(there: Target) -> None:
    body = json.dumps({"args": ["true"], "env": {}}).encode()[:-1] + b', "x":' + members(b'"%d":1', 1 << 20) + b"}"
    done: list[int] = []

    def send() -> None:
        with client(there, EXEC_KEY) as asking:
            for _ in range(2):
                done.append(attack(asking, there, "POST", "/sandboxes/{ref}/exec", body).status_code)

    threads = [threading.Thread(target=send) for _ in range(4)]
    for thread in threads:
        thread.start()
    healthy = 0
    while len(done) < 8 and any(thread.is_alive() for thread in threads):
        with client(there) as probing:
            healthy += probing.get("/health").status_code == 200
    eventually(lambda: not any(thread.is_alive() for thread in threads))
    assert done == [200] * 8 and healthy >= 3
