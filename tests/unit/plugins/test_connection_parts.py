"""The small parts of the connection: ends of commands, quoting of paths, errors of broken connections."""

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
    ("end", "code"),
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
def test_exit_codes_match_a_shells(end: dict[str, Any], code: int) -> None:
    assert _stream._exit_code(end) == code


@pytest.mark.parametrize("path", ["/a b", "/q'\"&=?#%41+;", "/grün/日本", "/line\nbreak", "/not-utf8-\udcff"])
def test_paths_are_quoted_as_one_argument(path: str) -> None:
    parts = urlsplit(_stream._files(path))
    assert parts.path == "/files" and not parts.fragment
    (given,) = parse_qs(parts.query, strict_parsing=True, errors="surrogateescape")["path"]
    assert given == path


class Answer:
    """A response that holds ``data`` and then ends."""

    def __init__(self, data: bytes) -> None:
        self._file = io.BytesIO(data)
        self.read = self._file.read
        self.will_close = True

    def isclosed(self) -> bool:
        return False


def make_frames(*messages: tuple[int, bytes]) -> bytes:
    return b"".join(struct.pack(">BI", flags, len(data)) + data for flags, data in messages)


def make_process(data: bytes) -> _stream.Process:
    answer: Any = Answer(data)
    channel = _stream.Channel("web", url="http://localhost:1")
    return _stream.Process(channel, http.client.HTTPConnection("localhost"), answer)


START = (0, b'{"event":{"start":{"pid":7}}}')
OUT = (0, b'{"event":{"data":{"stdout":"AAH/"}}}')
END = (0, b'{"event":{"end":{"exitCode":4,"exited":true}}}')


def test_output() -> None:
    running = make_process(make_frames(START, (0, b'{"event":{"keepalive":{}}}'), OUT, END, (2, b"{}")))
    assert list(running.output()) == [("", b""), ("", b""), ("stdout", b"\0\x01\xff")]
    assert running.pid == 7 and running.exit_code == 4


@pytest.mark.parametrize(
    ("data", "says", "kind"),
    [
        (make_frames(START, OUT), "was closed", "unreachable"),
        (make_frames(START, OUT, END)[:-3], "was closed", "unreachable"),
        (make_frames(START, OUT, (2, b"{}")), "did not report how the command ended", _stream.INSIDE),
        (make_frames((2, b'{"error":{"code":"internal","message":"no such user"}}')), "no such user", _stream.INSIDE),
    ],
)
def test_truncated_or_invalid_output(data: bytes, says: str, kind: str) -> None:
    with pytest.raises(Failure, match=says) as caught:
        list(make_process(data).output())
    assert caught.value.kind == kind


@pytest.mark.parametrize(
    ("failure", "killed"),
    [
        (Failure("process 7 has closed its input", _stream.INSIDE, status=400), False),
        (Failure("process 7 does not read its input", _stream.INSIDE, status=504), True),
        (Failure("gone", "unreachable"), True),
    ],
    ids=["closed", "not read", "unreachable"],
)
def test_input_that_is_not_delivered(monkeypatch: pytest.MonkeyPatch, failure: Failure, killed: bool) -> None:
    asked: list[str] = []

    def unary(self: Any, method: str, message: dict[str, Any], patience: float = 0) -> None:
        asked.append(method)
        if method == "SendInput":
            raise failure

    monkeypatch.setattr(_stream.Channel, "unary", unary)
    running = make_process(make_frames(START, END, (2, b"{}")))
    running.feed(b"data")
    assert running._feeder
    running._feeder.join()
    assert ("SendSignal" in asked) is killed
    if killed:
        with pytest.raises(Failure, match=failure.message):
            list(running.output())
    else:
        assert list(running.output()) and running.exit_code == 4


def test_errors_after_delivered_input() -> None:
    given = (0, json.dumps({"event": {"start": {"pid": 7, "input": True}}}).encode())
    for first, fed in ((START, False), (given, True)):
        running = make_process(make_frames(first, END, (2, b"{}")))
        assert list(running.output()) and running.fed is fed


def test_a_broken_connection_has_a_message() -> None:
    channel = _stream.Channel("web", url="http://localhost:1", timeout=3)
    for error, says in (
        (TimeoutError(), "neither data nor a heartbeat for 3 s"),
        (http.client.RemoteDisconnected(), "was closed"),
        (ConnectionResetError(), "was closed"),
        (BrokenPipeError(), "was closed"),
    ):
        failure = channel.connection_lost("POST /files", error)
        assert says in failure.message and failure.kind == "unreachable"


def test_a_closed_idle_connection_is_not_used(monkeypatch: pytest.MonkeyPatch) -> None:
    channel = _stream.Channel("web", url="http://localhost:1")
    ours, theirs = socket.socketpair()
    kept = http.client.HTTPConnection("localhost")
    kept.sock = ours
    answer: Any = Answer(b"")
    answer.will_close = False
    channel.keep(kept, answer)
    assert channel.connection() is kept
    channel.keep(kept, answer)
    theirs.close()
    with pytest.raises(Failure, match="no gateway answers"):
        channel.connection()
    assert kept.sock is None, "and it is closed"


def test_the_user_and_the_key_are_headers() -> None:
    channel = _stream.Channel("web", "app", url="http://localhost:1", token="some-key")
    assert channel._headers["Authorization"] == "Basic YXBwOg==" and channel._headers["X-API-Key"] == "some-key"
    assert "X-API-Key" not in _stream.Channel("web", url="unix:///x")._headers


class FakeBecome:
    """The part of a become plugin that the connection uses."""

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
    """Records the input of a process."""

    def __init__(self) -> None:
        self.told = b""
        self.write = lambda data: setattr(self, "told", self.told + data)


@pytest.mark.parametrize("late", [b"", b"\n", b"\nerr\n"])
def test_a_prompt_is_answered_once_and_not_shown(late: bytes) -> None:
    """sudo's output on one stream may arrive after the command's output on the other."""
    escalation, process = _Escalation(FakeBecome(), "web", 60), RecordedProcess()
    told: Any = process
    out, err = bytearray(), bytearray()
    assert escalation.waiting and escalation.keep_waiting(told, out, err)
    err += b"a lecture\npassword for"
    assert escalation.keep_waiting(told, out, err) and process.told == b""
    err += b" me:"
    assert escalation.keep_waiting(told, out, err) and escalation.keep_waiting(told, out, err)
    assert process.told == b"secret\n"
    out += b"BECOME-SUCCESS-x\n"
    assert not escalation.keep_waiting(told, out, err)
    err += late
    assert escalation.without_prompt(bytes(err)) == late[1:]
    assert escalation.without_prompt(bytes(out)) == b"BECOME-SUCCESS-x\n"
    assert escalation.without_prompt(b"password for you:") == b"password for you:"


def test_become_is_disabled() -> None:
    escalation = _Escalation(None, "web", 60)
    assert not escalation.waiting
    assert escalation.without_prompt(b"password for me:") == b"password for me:"
