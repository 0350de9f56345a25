"""Test parts of the connection plugin: exit codes, quoting of paths, and errors when connections break."""

from __future__ import annotations

import http.client
import io
import json
import socket
import struct
from typing import Any
from urllib.parse import parse_qs, urlsplit

import pytest
from ansible_collections.grove.sandbox.plugins.connection.sandbox import _Escalation
from ansible_collections.grove.sandbox.plugins.module_utils._failure import Failure
from ansible_collections.grove.sandbox.plugins.plugin_utils import _stream


@pytest.mark.parametrize(
    ("end_event", "code"),
    [
        ({"exitCode": 0, "exited": True}, 0),
        ({"exited": True}, 0),
        ({"exitCode": 255, "exited": True}, 255),
        ({"exitCode": -1, "exited": False, "status": "signal: killed"}, 137),
        ({"exitCode": -1, "exited": False, "status": "signal: terminated"}, 143),
        ({"exitCode": -1, "exited": False, "status": "signal: 35"}, 163),
        ({"exitCode": -1, "exited": False, "status": "signal: unheard of"}, 255),
        ({"exitCode": -1, "exited": False}, 255),
    ],
)
def test_exit_codes_match_those_of_a_shell(end_event: dict[str, Any], code: int) -> None:
    assert _stream._parse_exit_code(end_event) == code


@pytest.mark.parametrize("path", ["/a b", "/q'\"&=?#%41+;", "/grün/日本", "/line\nbreak", "/not-utf8-\udcff"])
def test_paths_are_quoted_in_the_url(path: str) -> None:
    url_parts = urlsplit(_stream._make_files_target(path))
    assert url_parts.path == "/files" and not url_parts.fragment
    (decoded_path,) = parse_qs(url_parts.query, strict_parsing=True, errors="surrogateescape")["path"]
    assert decoded_path == path


class FakeResponse:
    """A fake HTTP response whose body is ``data``."""

    def __init__(self, data: bytes) -> None:
        self._file = io.BytesIO(data)
        self.read = self._file.read
        self.will_close = True

    def isclosed(self) -> bool:
        return False


def make_frames(*messages: tuple[int, bytes]) -> bytes:
    return b"".join(struct.pack(">BI", flags, len(data)) + data for flags, data in messages)


def make_process(data: bytes) -> _stream.Process:
    response: Any = FakeResponse(data)
    channel = _stream.Channel("web", url="http://localhost:1")
    return _stream.Process(channel, http.client.HTTPConnection("localhost"), response)


START_FRAME = (0, b'{"event":{"start":{"pid":7}}}')
OUTPUT_FRAME = (0, b'{"event":{"data":{"stdout":"AAH/"}}}')
END_FRAME = (0, b'{"event":{"end":{"exitCode":4,"exited":true}}}')


def test_output_is_decoded() -> None:
    process = make_process(
        make_frames(START_FRAME, (0, b'{"event":{"keepalive":{}}}'), OUTPUT_FRAME, END_FRAME, (2, b"{}"))
    )
    assert list(process.read_output()) == [("", b""), ("", b""), ("stdout", b"\0\x01\xff")]
    assert process.pid == 7 and process.exit_code == 4


@pytest.mark.parametrize(
    ("data", "message", "kind"),
    [
        (make_frames(START_FRAME, OUTPUT_FRAME), "was closed", "unreachable"),
        (make_frames(START_FRAME, OUTPUT_FRAME, END_FRAME)[:-3], "was closed", "unreachable"),
        (
            make_frames(START_FRAME, OUTPUT_FRAME, (2, b"{}")),
            "did not report the exit code",
            _stream.AGENT_FAILURE_KIND,
        ),
        (
            make_frames((2, b'{"error":{"code":"internal","message":"no such user"}}')),
            "no such user",
            _stream.AGENT_FAILURE_KIND,
        ),
    ],
)
def test_truncated_or_invalid_output_raises_a_failure(data: bytes, message: str, kind: str) -> None:
    with pytest.raises(Failure, match=message) as error_info:
        list(make_process(data).read_output())
    assert error_info.value.kind == kind


@pytest.mark.parametrize(
    ("failure", "is_killed"),
    [
        (Failure("process 7 has closed its input", _stream.AGENT_FAILURE_KIND, status=400), False),
        (Failure("process 7 is not reading its input", _stream.AGENT_FAILURE_KIND, status=504), True),
        (Failure("gone", "unreachable"), True),
    ],
    ids=["closed", "not read", "unreachable"],
)
def test_undelivered_input_kills_the_process(
    monkeypatch: pytest.MonkeyPatch, failure: Failure, is_killed: bool
) -> None:
    methods: list[str] = []

    def call_unary(self: Any, method: str, message: dict[str, Any], extra_timeout: float = 0) -> None:
        methods.append(method)
        if method == "SendInput":
            raise failure

    monkeypatch.setattr(_stream.Channel, "call_unary", call_unary)
    process = make_process(make_frames(START_FRAME, END_FRAME, (2, b"{}")))
    process.feed(b"data")
    assert process._feeder
    process._feeder.join()
    assert ("SendSignal" in methods) is is_killed
    if is_killed:
        with pytest.raises(Failure, match=failure.message):
            list(process.read_output())
    else:
        assert list(process.read_output()) and process.exit_code == 4


def test_the_agent_acknowledges_input() -> None:
    start_frame_with_input = (0, json.dumps({"event": {"start": {"pid": 7, "input": True}}}).encode())
    for start_frame, is_accepted in ((START_FRAME, False), (start_frame_with_input, True)):
        process = make_process(make_frames(start_frame, END_FRAME, (2, b"{}")))
        assert list(process.read_output()) and process.is_input_accepted is is_accepted


def test_broken_connections_are_described() -> None:
    channel = _stream.Channel("web", url="http://localhost:1", timeout=3)
    for error, message in (
        (TimeoutError(), "neither data nor a heartbeat for 3 s"),
        (http.client.RemoteDisconnected(), "was closed"),
        (ConnectionResetError(), "was closed"),
        (BrokenPipeError(), "was closed"),
    ):
        failure = channel.create_connection_lost_error("POST /files", error)
        assert message in failure.message and failure.kind == "unreachable"


def test_a_closed_idle_connection_is_not_reused(monkeypatch: pytest.MonkeyPatch) -> None:
    channel = _stream.Channel("web", url="http://localhost:1")
    client_socket, server_socket = socket.socketpair()
    connection = http.client.HTTPConnection("localhost")
    connection.sock = client_socket
    response: Any = FakeResponse(b"")
    response.will_close = False
    channel.release(connection, response)
    assert channel.acquire_connection() is connection
    channel.release(connection, response)
    server_socket.close()
    with pytest.raises(Failure, match="no gateway answers"):
        channel.acquire_connection()
    assert connection.sock is None, "the broken connection is closed"


def test_the_user_and_the_key_are_sent_as_headers() -> None:
    channel = _stream.Channel("web", "app", url="http://localhost:1", token="some-key")
    assert channel._headers["Authorization"] == "Basic YXBwOg==" and channel._headers["X-API-Key"] == "some-key"
    assert "X-API-Key" not in _stream.Channel("web", url="unix:///x")._headers


class FakeBecomePlugin:
    """A fake become plugin, with the methods that the connection uses."""

    success = "BECOME-SUCCESS-x"
    prompt = "password for me:"

    def expect_prompt(self) -> bool:
        return True

    def check_success(self, data: bytes) -> bool:
        return self.success.encode() in data

    def check_password_prompt(self, data: bytes) -> bool:
        return self.prompt.encode() in data

    def check_incorrect_password(self, data: bytes) -> bool:
        return b"Sorry" in data

    def get_option(self, name: str) -> str:
        return {"become_pass": "secret"}[name]


class RecordedProcess:
    """A fake process that records its input."""

    def __init__(self) -> None:
        self.input_data = b""
        self.write = lambda data: setattr(self, "input_data", self.input_data + data)


@pytest.mark.parametrize("late_output", [b"", b"\n", b"\nerr\n"])
def test_the_password_is_sent_once_and_the_prompt_is_removed(late_output: bytes) -> None:
    """sudo's prompt on one stream may arrive after the command's output on the other stream."""
    escalation, process = _Escalation(FakeBecomePlugin(), "web", 60), RecordedProcess()
    any_process: Any = process
    out, err = bytearray(), bytearray()
    assert escalation.is_waiting and escalation.handle_output(any_process, out, err)
    err += b"a lecture\npassword for"
    assert escalation.handle_output(any_process, out, err) and process.input_data == b""
    err += b" me:"
    assert escalation.handle_output(any_process, out, err) and escalation.handle_output(any_process, out, err)
    assert process.input_data == b"secret\n"
    out += b"BECOME-SUCCESS-x\n"
    assert not escalation.handle_output(any_process, out, err)
    err += late_output
    assert escalation.strip_prompt(bytes(err)) == late_output[1:]
    assert escalation.strip_prompt(bytes(out)) == b"BECOME-SUCCESS-x\n"
    assert escalation.strip_prompt(b"password for you:") == b"password for you:"


def test_output_is_unchanged_without_become() -> None:
    escalation = _Escalation(None, "web", 60)
    assert not escalation.is_waiting
    assert escalation.strip_prompt(b"password for me:") == b"password for me:"
