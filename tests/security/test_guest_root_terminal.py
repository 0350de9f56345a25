"""Root in a sandbox controls text that the gateway passes on and that a user reads in a terminal."""

from __future__ import annotations

import json
import sys
from collections.abc import Iterator
from typing import Any

import pytest

from sandbox_gateway.cli import failure, progress, render
from sandbox_gateway.cli import main as sandboxctl
from sandbox_gateway.control_characters import escape_control_characters, remove_control_characters
from sandbox_gateway.errors import BackendFailed

HOSTILE_TEXT = "\x1b]0;owned\x07\x1b[2J\x1b[31mred\x1b[0m \x9b2J\r\x08\x7f\u202eevil\u2066\u200b\u2028\x00\udc80 text"


def _check_printable(text: str) -> None:
    assert all(char.isprintable() or char in "\n\t" for char in text), ascii(text)


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("plain: ä € 😀 \t\n", "plain: ä € 😀 \t\n"),
        ("\x1b[1;31mred\x1b[0m", "red"),
        ("\x1b]8;;http://evil\x1b\\link\x1b]8;;\x07", "link"),
        ("\x1b]0;never ended", ""),
        ("\x1bPdevice\x1b\\control", "control"),
        ("a\x1b[", "a"),
        ("\x1b\x1b[31m", ""),
        ("\r\nline", "\nline"),
        (HOSTILE_TEXT, "red 2Jevil text"),
    ],
)
def test_terminal_codes_are_removed(text: str, expected: str) -> None:
    assert remove_control_characters(text) == expected
    _check_printable(remove_control_characters(text))


@pytest.mark.parametrize("piece", ["\x1b[", "\x1b]", "\x1b", "\x1b[0", "\x1b]\x1b", "\x1b[;", "\x1bP\x1b]"])
def test_removing_terminal_codes_takes_linear_time(piece: str) -> None:
    """A quadratic algorithm would take hours."""
    assert len(remove_control_characters(piece * (4_000_000 // len(piece)))) < 4_000_000


def test_gateway_errors_contain_no_terminal_codes() -> None:
    error = BackendFailed(f"the agent refused: {HOSTILE_TEXT}")
    assert str(error) == error.message == "the agent refused: red 2Jevil text"


def test_escaped_json_has_the_same_meaning() -> None:
    document = json.dumps({"a": HOSTILE_TEXT + "\U000e0041ä"}, ensure_ascii=False)
    _check_printable(escape_control_characters(document))
    assert json.loads(escape_control_characters(document)) == json.loads(document)
    assert "ä" in escape_control_characters(document)


@pytest.fixture
def hostile_gateway(monkeypatch: pytest.MonkeyPatch) -> None:
    """A gateway whose responses all contain hostile text, because older gateways may not remove it."""

    def return_hostile_fields(_: object, method: str, route: str, *__: Any, **___: Any) -> Any:
        if route.endswith("/exec"):
            return {"exitCode": 0, "stdout": "\x1b[31mred\x1b[0m", "stderr": "\x1b[0m", "timedOut": False}
        if method == "DELETE":
            raise failure.create_failure_from_response(
                409, {"kind": "in_use", "message": HOSTILE_TEXT, "blockers": [HOSTILE_TEXT]}
            )
        return {
            "name": "one",
            "description": HOSTILE_TEXT,
            "stuck": [HOSTILE_TEXT],
            "metadata": {HOSTILE_TEXT: HOSTILE_TEXT},
            "names": [HOSTILE_TEXT],
        }

    def yield_hostile_events(*_: Any) -> Iterator[tuple[str, dict[str, Any]]]:
        yield "sandbox.stopped", {"at": "2026-01-01T00:00:00", "reason": f"{HOSTILE_TEXT}\n00:00:00 forged"}

    monkeypatch.setattr("sandbox_gateway.cli.client.Client.call", return_hostile_fields)
    monkeypatch.setattr("sandbox_gateway.cli.client.Client.stream_events", yield_hostile_events)


@pytest.mark.parametrize(
    "arguments", ["show one", "--json show one", "events", "--json events", "kill a b", "kill a", "template show x"]
)
def test_sandboxctl_prints_no_terminal_codes(
    hostile_gateway: None, arguments: str, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(sys, "argv", ["sandboxctl", "--url", "http://127.0.0.1:1", *arguments.split()])
    with pytest.raises(SystemExit):
        sandboxctl.main()
    out, err = capsys.readouterr()
    assert "text" in out + err
    _check_printable(out + err)
    if arguments == "events":
        assert len(out.splitlines()) == 1


def test_exec_output_is_printed_unchanged(
    hostile_gateway: None, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(sys, "argv", ["sandboxctl", "--url", "http://127.0.0.1:1", "exec", "one", "--", "ls"])
    with pytest.raises(SystemExit):
        sandboxctl.main()
    assert capsys.readouterr() == ("\x1b[31mred\x1b[0m", "\x1b[0m")


def test_lists_trees_and_logs_contain_no_terminal_codes(capsys: pytest.CaptureFixture[str]) -> None:
    time_fields = {"createdAt": "2026-01-01T00:00:00Z", "endAt": "2026-01-01T00:00:00Z"}
    render.print_sandboxes(
        [
            {
                "name": HOSTILE_TEXT,
                "sandboxID": HOSTILE_TEXT,
                "state": HOSTILE_TEXT,
                "templateID": HOSTILE_TEXT,
                "forkedFrom": HOSTILE_TEXT,
                "cpuCount": 1,
            }
            | {"memoryMB": 1, **time_fields}
        ]
    )
    render.print_tree([{"kind": "sandbox", "names": [HOSTILE_TEXT], "id": HOSTILE_TEXT, "depth": 0}])
    render.print_note(HOSTILE_TEXT)
    progress.follow_log(iter([HOSTILE_TEXT]), "building")
    out, err = capsys.readouterr()
    assert out.count("text") >= 6 and err.count("text") == 2
    _check_printable(out + err)
