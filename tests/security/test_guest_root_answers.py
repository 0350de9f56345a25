"""Root in a sandbox replaces the agent with another program, whose responses must not affect other sandboxes."""

from __future__ import annotations

import asyncio
import base64
import contextlib
import json
import logging
import struct
import threading
import tracemalloc
from collections.abc import Callable
from pathlib import Path
from typing import Any

import httpx
import pytest

from sandbox_gateway.engine import guest_json
from sandbox_gateway.engine.agent_client import AgentClient
from sandbox_gateway.engine.builds import MAX_LINE_LENGTH, Build, LogWriter
from sandbox_gateway.errors import Invalid, OutputLost
from sandbox_gateway.hosts.rootfs_common import Tree
from tests.security.hostile import (
    MAX_BLOCKED_SECONDS,
    RESPONSE_HEAD,
    LoopMonitor,
    check_loop_is_not_blocked,
    make_chunked_response,
    make_endless_sender,
    make_response,
    replaced_agent,
)
from tests.support import guest_services, memory_host
from tests.support.memory_gateway import MemoryGateway
from tests.support.samples import mark_slow_except
from tests.support.waiting import wait_until

_MB = 1 << 20
_QUADRATIC_BODY = b'"\\' * 100_000
"""Each quote looks like the beginning of a string. Parsing 200 KB of them once took two minutes."""

EntryPoint = Callable[[httpx.Client, str], httpx.Response]

ENTRY_POINTS: dict[str, EntryPoint] = {
    "exec": lambda client, id: client.post(f"/sandboxes/{id}/exec", json={"args": ["true"]}),
    "v1 exec": lambda client, id: client.post(f"/v1/sandboxes/{id}/exec", json={"args": ["true"]}),
    "v1 eval": lambda client, id: client.post(f"/v1/sandboxes/{id}/eval", json={"code": "1"}),
    "v1 ping": lambda client, id: client.post(f"/v1/sandboxes/{id}/ping"),
    "volume": lambda client, id: client.post(f"/sandboxes/{id}/volumes", json={"name": "data", "path": "/srv"}),
    "snapshot": lambda client, id: client.post(f"/sandboxes/{id}/snapshots", json={}),
    "pause": lambda client, id: client.post(f"/sandboxes/{id}/pause", json={"memory": False}),
    "read": lambda client, id: client.get(f"/sandboxes/{id}"),
}
_EXPECTED_STATUSES = {"snapshot": 201, "read": 200}
"""The status of requests that work without the agent; other requests fail with 500."""


@pytest.mark.parametrize("entry", ENTRY_POINTS)
@pytest.mark.parametrize("status", ["200 OK", "500 no"])
def test_unterminated_strings_do_not_delay_other_requests(
    memory_gateway: MemoryGateway, sandbox: dict[str, Any], entry: str, status: str
) -> None:
    with memory_gateway.client() as client:
        client.post("/volumes", json={"name": "data", "sizeMB": 64})
        with replaced_agent(memory_gateway, sandbox, make_response(_QUADRATIC_BODY, status)):
            response = check_loop_is_not_blocked(
                memory_gateway, lambda: ENTRY_POINTS[entry](memory_gateway.client(), sandbox["sandboxID"])
            )
        assert response.status_code == _EXPECTED_STATUSES.get(entry, 500), response.text
        assert len(response.content) < 10_000


INVALID_RESPONSES = {
    "nothing but quotes": make_response(b'"' * 200_000),
    "escapes without an end": make_response(b'{"a": "' + b"\\" * 200_000),
    "deep lists": make_response(b'{"exitCode": ' + b"[" * 200_000),
    "a little too deep": make_response(b'{"exitCode": ' + b"[" * 20 + b"]" * 20 + b"}"),
    "many members": make_response(b'{"exitCode": [' + b"0," * 100_000 + b"0]}"),
    "many strings": make_response(b'{"exitCode": 0, "stdout": [' + b'"",' * 100_000 + b'""]}'),
    "a number of 4000 digits": make_response(b'{"exitCode": ' + b"9" * 4000 + b"}"),
    "a number of 100,000 digits": make_response(b'{"exitCode": ' + b"9" * 100_000 + b"}"),
    "a number that is too large": make_response(b'{"exitCode": 256}'),
    "not a number": make_response(b'{"exitCode": NaN}'),
    "infinity": make_response(b'{"exitCode": 1e999}'),
    "a boolean instead of a number": make_response(b'{"exitCode": true}'),
    "a list instead of output": make_response(b'{"exitCode": 0, "stdout": [65]}'),
    "output that is not base64": make_response(b'{"exitCode": 0, "stdout": "' + b"!" * 300_000 + b'"}'),
    "output with padding in the middle": make_response(b'{"exitCode": 0, "stdout": "YQ==YQ=="}'),
    "a wrong length": RESPONSE_HEAD + b"Content-Length: 3\r\n\r\n{}",
    "two lengths": RESPONSE_HEAD + b"Content-Length: 2\r\nContent-Length: 3\r\n\r\n{}",
    "chunks of one byte": make_chunked_response(*[b"["] * 20_000),
    "an endless chunk extension": RESPONSE_HEAD + b"Transfer-Encoding: chunked\r\n\r\n1;" + b"a" * 200_000,
    "endless headers": RESPONSE_HEAD + b"a: b\r\n" * 100_000,
    "one endless header": RESPONSE_HEAD + b"a: " + b"b" * 500_000,
    "endless interim responses": b"HTTP/1.1 100 Continue\r\n\r\n" * 100_000,
}


@pytest.mark.parametrize("case", INVALID_RESPONSES)
def test_an_invalid_response_fails_only_its_command(
    memory_gateway: MemoryGateway, sandbox: dict[str, Any], case: str
) -> None:
    with replaced_agent(memory_gateway, sandbox, INVALID_RESPONSES[case], next_handler=_hang_up):
        response = check_loop_is_not_blocked(
            memory_gateway, lambda: ENTRY_POINTS["exec"](memory_gateway.client(), sandbox["sandboxID"])
        )
        assert (response.status_code, response.json()["kind"]) == (500, "backend_failed"), response.text
        assert len(response.content) < 2000


async def _hang_up(_: Any, writer: Any) -> None:
    writer.close()


@pytest.mark.parametrize("field", ["exitCode", "exit_code"])
def test_numbers_from_a_guest_are_checked(memory_gateway: MemoryGateway, sandbox: dict[str, Any], field: str) -> None:
    route = "exec" if field == "exitCode" else "v1 eval"
    text_fields = {"stdout": "", "stderr": "", "result": "", "error": ""}
    with memory_gateway.client() as client:
        for number in (256, -256, 10**300, 0.5, True, None, "0", [0], 10**4000):
            body = json.dumps({**text_fields, field: number} if number != 10**4000 else text_fields).encode()
            if number == 10**4000:
                body = body.replace(b"{", b'{"%s": %s, ' % (field.encode(), b"1" + b"0" * 4000), 1)
            with replaced_agent(memory_gateway, sandbox, make_response(body)):
                response = ENTRY_POINTS[route](client, sandbox["sandboxID"])
            assert response.status_code == 500 and len(response.content) < 1000, (number, response.text)


@pytest.mark.parametrize(
    "output",
    [b"\0", b"\xff", b"a\xff", "é".encode(), "😀".encode(), b"\n"],
    ids=["nul", "binary", "half binary", "two bytes", "four bytes", "newlines"],
)
def test_the_largest_output_does_not_delay_other_requests(
    memory_gateway: MemoryGateway, sandbox: dict[str, Any], output: bytes
) -> None:
    """Any program in a sandbox can print 16 MiB to stdout and to stderr, without being root."""
    data = output * (16 * _MB // len(output))
    encoded_output = base64.b64encode(data).decode()
    body = json.dumps({"exitCode": 0, "stdout": encoded_output, "stderr": encoded_output, "timedOut": False}).encode()
    with replaced_agent(memory_gateway, sandbox, make_response(body)):
        response = check_loop_is_not_blocked(
            memory_gateway,
            lambda: _make_client_with_long_timeout(memory_gateway).post("/sandboxes/one/exec", json={"args": ["x"]}),
        )
    assert response.status_code == 200
    expected_output = data.decode(errors="replace")
    result = response.json()
    assert result["stdout"] == expected_output and result["stderr"] == expected_output and result["exitCode"] == 0


ESCAPES = {
    "short": b"\\n",
    "short among text": b"a\\n",
    "NUL": b"\\u0000",
    "pairs": b"\\ud83d\\ude00",
    "halves of pairs": b"\\ud83d",
    "backslashes": b"\\\\",
    "two bytes": "é".encode(),
}


@pytest.mark.parametrize("escape", mark_slow_except(("short among text", "two bytes"), ESCAPES))
def test_the_largest_text_does_not_delay_other_requests(
    memory_gateway: MemoryGateway, sandbox: dict[str, Any], escape: str
) -> None:
    escape_count = 40 * _MB // len(ESCAPES[escape])
    body = b'{"result": "' + ESCAPES[escape] * escape_count + b'", "error": "", "exit_code": 0}'
    with replaced_agent(memory_gateway, sandbox, make_response(body)):
        route = "/v1/sandboxes/one/eval"
        response = check_loop_is_not_blocked(
            memory_gateway, lambda: _make_client_with_long_timeout(memory_gateway).post(route, json={"code": "x"})
        )
    assert response.status_code == 200
    expected_text = json.loads(b'"' + ESCAPES[escape] + b'"').encode(errors="replace").decode()
    assert response.json()["result"] == expected_text * escape_count


def _make_client_with_long_timeout(memory_gateway: MemoryGateway) -> httpx.Client:
    client = memory_gateway.client()
    client.timeout = httpx.Timeout(100)
    return client


@pytest.mark.parametrize("entry", ENTRY_POINTS)
def test_an_endless_response_is_cut_off(memory_gateway: MemoryGateway, sandbox: dict[str, Any], entry: str) -> None:
    """Once its size limit is reached, the gateway stops reading the response and allocating memory for it."""
    flood, sent_bytes = make_endless_sender(b"x" * 65536)
    with memory_gateway.client() as client:
        client.post("/volumes", json={"name": "data", "sizeMB": 64})
        endless_response = RESPONSE_HEAD + b'Content-Length: 1000000000000\r\n\r\n{"a": "'
        with replaced_agent(memory_gateway, sandbox, endless_response, next_handler=flood):
            tracemalloc.start()
            try:
                response = check_loop_is_not_blocked(
                    memory_gateway, lambda: ENTRY_POINTS[entry](memory_gateway.client(), sandbox["sandboxID"])
                )
                _, peak_memory = tracemalloc.get_traced_memory()
            finally:
                tracemalloc.stop()
    assert response.status_code == _EXPECTED_STATUSES.get(entry, 500), response.text
    byte_limit = guest_json.MAX_BYTES if entry in ("exec", "v1 exec", "v1 eval") else guest_json.DEFAULT_MAX_BYTES
    assert sent_bytes[0] < byte_limit + 32 * _MB
    assert peak_memory < 2 * byte_limit + 32 * _MB
    assert not guest_json._held_bytes


@pytest.mark.parametrize(
    "piece",
    [b"HTTP/1.1 100 Continue\r\n\r\n" * 2500, b"HTTP/1.1 103 Early Hints\r\na: b\r\n\r\n", b"a: b\r\n" * 10_000],
    ids=["continue", "hints", "headers"],
)
def test_memory_for_endless_service_responses_is_limited(
    memory_gateway: MemoryGateway, sandbox: dict[str, Any], piece: bytes
) -> None:
    """The responses pass through the data plane, on many connections simultaneously."""
    status_line = b"HTTP/1.1 200 OK\r\n" if piece.startswith(b"a") else b""
    flood, sent_bytes = make_endless_sender(piece)

    def attack(statuses: list[int]) -> None:
        with memory_gateway.client() as client:
            response = client.get(
                "/", headers=guest_services.make_port_headers(sandbox, guest_services.PORT), timeout=100
            )
            statuses.append(response.status_code)

    statuses: list[int] = []
    with (
        memory_gateway.client() as client,
        guest_services.raw_service(memory_gateway, sandbox, status_line + piece, next_handler=flood),
    ):
        threads = [threading.Thread(target=attack, args=(statuses,)) for _ in range(10)]
        for thread in threads:
            thread.start()
        sandbox_response = check_loop_is_not_blocked(memory_gateway, lambda: client.get("/sandboxes/one", timeout=100))
        for thread in threads:
            thread.join(100)
    assert sandbox_response.status_code == 200
    assert statuses == [502] * 10
    # The socket buffers can hold this much. Without the limit, the service would send more.
    assert sent_bytes[0] < 200 * _MB


def test_an_interim_response_is_ignored(memory_gateway: MemoryGateway, sandbox: dict[str, Any]) -> None:
    early_hints = b"HTTP/1.1 103 Early Hints\r\nLink: x\r\n\r\n"
    with (
        memory_gateway.client() as client,
        guest_services.raw_service(
            memory_gateway, sandbox, early_hints * 20 + guest_services.make_reply(body=b"x" * 300_000)
        ),
    ):
        for _ in range(3):
            response = client.get("/", headers=guest_services.make_port_headers(sandbox, guest_services.PORT))
            assert (response.status_code, len(response.content)) == (200, 300_000)


def test_reasons_from_a_guest_contain_no_terminal_codes(
    memory_gateway: MemoryGateway, sandbox: dict[str, Any], caplog: pytest.LogCaptureFixture
) -> None:
    hostile_text = "\x1b]0;owned\x07\x1b[2Jno\r\x9b31m\u202e\u2028 disk\x00" + "x" * 100_000
    with memory_gateway.client() as client:
        client.post("/volumes", json={"name": "data", "sizeMB": 64})
        for status in ("400 no", "404 no", "500 no"):
            for entry in ("exec", "v1 eval", "v1 ping", "volume", "pause"):
                body = json.dumps({"message": hostile_text[: 3000 if status == "400 no" else None]}).encode()
                with replaced_agent(memory_gateway, sandbox, make_response(body, status)):
                    response = ENTRY_POINTS[entry](client, sandbox["sandboxID"])
                assert response.is_error
                _check_printable(response.json()["message"])
        with (
            caplog.at_level(logging.WARNING),
            replaced_agent(
                memory_gateway, sandbox, make_response(json.dumps({"message": hostile_text[:3000]}).encode(), "500 no")
            ),
        ):
            assert ENTRY_POINTS["snapshot"](client, sandbox["sandboxID"]).status_code == 201
    reasons = [record.fields["reason"] for record in caplog.records if "reason" in getattr(record, "fields", {})]  # type: ignore[attr-defined]
    assert reasons
    for reason in reasons:
        _check_printable(reason)


def test_build_logs_contain_no_terminal_codes(memory_gateway: MemoryGateway) -> None:
    """A template's setup command prints terminal codes, and its output becomes part of the build log."""
    with memory_gateway.client() as client:
        template = client.post("/templates", json={"name": "evil", "setup": ["\x1b[2J\x07true", "echo \u202e"]}).json()
        route = f"/templates/{template['templateID']}/builds/{template['buildID']}"
        log = client.get(f"{route}/logs", params={"follow": True}).text
        client.delete(f"/templates/{template['templateID']}")
    assert "$ true" in log and "ran true" in log
    _check_printable(log)


def _check_printable(text: str) -> None:
    assert len(text) < 4000
    assert all(char.isprintable() or char in "\n\t" for char in text), ascii(text)


def test_large_responses_of_one_sandbox_are_limited_in_total(
    memory_gateway: MemoryGateway, sandbox: dict[str, Any]
) -> None:
    """Eight commands run simultaneously. Each response almost reaches its size limit, and then stalls."""
    response_bytes = guest_json.MAX_BYTES - 1000
    incomplete_response = (
        RESPONSE_HEAD
        + b"Content-Length: %d\r\n\r\n" % (response_bytes + 100)
        + b'{"stdout": "'
        + b"x" * (response_bytes - 12)
    )

    async def wait_for_disconnect(reader: Any, _: Any) -> None:
        await reader.read()

    statuses: list[int] = []
    retry_flags: list[bool] = []

    def attack() -> None:
        with memory_gateway.client() as client:
            response = client.post("/sandboxes/one/exec", json={"args": ["x"], "timeout": 0.1}, timeout=100)
            statuses.append(response.status_code)
            retry_flags.append("retry-after" in response.headers)

    with (
        memory_gateway.client() as client,
        replaced_agent(memory_gateway, sandbox, incomplete_response, next_handler=wait_for_disconnect),
    ):
        threads = [threading.Thread(target=attack) for _ in range(8)]
        for thread in threads:
            thread.start()
        wait_until(lambda: sum(guest_json._held_bytes.values()) > guest_json.MAX_BYTES // 2)
        assert client.get("/health", timeout=20).status_code == 200
        wait_until(lambda: statuses.count(429) >= 6)
        assert max(guest_json._held_bytes.values()) <= guest_json.MAX_HELD_BYTES
        for thread in threads:
            thread.join(100)
    assert not guest_json._held_bytes
    assert not any(retry_flags), "the client would run the command again"


async def test_responses_of_all_sandboxes_are_limited_in_total(monkeypatch: pytest.MonkeyPatch) -> None:
    """Several sandboxes send responses that never end, but each stays within its own limit."""
    monkeypatch.setattr(guest_json, "MAX_TOTAL_HELD_BYTES", 1 << 20)

    with contextlib.ExitStack() as stack:
        readers = [stack.enter_context(guest_json.ResponseReader(f"sandbox {n}", "x", 1 << 20)) for n in range(5)]
        for reader in readers[:4]:
            await reader.feed(b'"' + b"x" * ((1 << 18) - 1))
        with pytest.raises(OutputLost, match="of all sandboxes"):
            await readers[4].feed(b'"')
    assert not guest_json._held_bytes


def test_a_huge_file_in_an_untrusted_tree_is_refused(tmp_path: Path) -> None:
    """The tree is the root file system of an untrusted template. Its /etc/passwd is a sparse file of 1 TB."""
    (tmp_path / "etc").mkdir()
    with (tmp_path / "etc" / "passwd").open("wb") as file:
        file.truncate(1 << 40)
    (tmp_path / "etc" / "group").write_text("root:x:0:\n")
    tree = Tree(tmp_path)
    with pytest.raises(Invalid, match="/etc/passwd is larger than 1048576 bytes"):
        tree.read("/etc/passwd")
    assert tree.read("/etc/group") == "root:x:0:\n" and tree.read("/etc") == tree.read("/etc/shadow") == ""


def test_an_endless_line_is_truncated() -> None:
    build = Build(template_id="t", names=["t"], digest="d")
    writer = LogWriter(build)
    for _ in range(2000):
        writer.feed(b"x" * 65536)
    assert len(writer._partial_line) <= MAX_LINE_LENGTH
    writer.feed(b"\nend\n")
    assert [len(line) for line in build.lines] == [MAX_LINE_LENGTH, 3]


@pytest.mark.parametrize("line", [b"\n", b"a\n"])
def test_millions_of_lines_from_a_build_do_not_delay_other_requests(
    memory_gateway: MemoryGateway, sandbox: dict[str, Any], line: bytes
) -> None:
    """The agent of a template that is being built sends frames that contain almost nothing but newlines."""
    output = base64.b64encode(line * ((2 * _MB) // len(line))).decode()
    frames = [
        json.dumps({"event": event}).encode() for event in ({"data": {"stdout": output}}, {"end": {"exitCode": 3}})
    ]
    response = make_response(b"".join(struct.pack(">BI", 0, len(frame)) + frame for frame in frames))
    build = Build(template_id="t", names=["t"], digest="d")
    engine = memory_gateway.engine

    async def run_command() -> int:
        agent = AgentClient(engine.host.get_endpoint(engine.index.get_sandbox(sandbox["sandboxID"])), "")
        return await agent.run_shell("true", LogWriter(build).feed, seconds=120)

    with replaced_agent(memory_gateway, sandbox, response), LoopMonitor(memory_gateway) as loop_monitor:
        assert asyncio.run_coroutine_threadsafe(run_command(), memory_gateway.loop).result() == 3
    assert loop_monitor.longest_block_seconds < MAX_BLOCKED_SECONDS
    build.end("error")
    assert len(build.lines) < 20_000 and any("lines omitted" in each for each in build.lines)


def test_retries_stop_when_the_agent_always_hangs_up(
    memory_gateway: MemoryGateway, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The agent of a new sandbox accepts every connection, and closes it without a response."""
    connection_count = 0

    async def hang_up(_: memory_host.Machine, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        nonlocal connection_count
        connection_count += 1
        await reader.read(1)
        writer.close()

    monkeypatch.setattr(memory_host.Machine, "_serve", hang_up)
    monkeypatch.setattr(memory_gateway.host, "boot_seconds", 1)
    monkeypatch.setattr(memory_gateway.host, "resume_seconds", 1)
    with memory_gateway.client() as client:
        response = client.post("/sandboxes", json={"templateID": "base"})
    assert response.status_code == 504 and "closed every connection" in response.json()["message"], response.text
    assert connection_count > 1
