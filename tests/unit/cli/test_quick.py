"""Queries are interpreted in the same way whether or not the command-line library parses them."""

from __future__ import annotations

import io
import sys
from collections.abc import Sequence
from typing import Any

import pytest
import typer
from hypothesis import given
from hypothesis import strategies as st

from sandbox_gateway.cli import client, quick, render
from sandbox_gateway.cli.app import app
from sandbox_gateway.cli.failure import ExitCode, Failure


def _find_command(name: Sequence[str]) -> Any:
    command: Any = typer.main.get_command(app)
    for word in name:
        command = command.commands[word]
    return command


@pytest.mark.parametrize("name", quick.QUERIES, ids=" ".join)
def test_a_query_has_the_parameters_of_its_command(name: tuple[str, ...]) -> None:
    query, command = quick.QUERIES[name], _find_command(name)
    options = {
        option: parameter.name
        for parameter in command.params
        if parameter.param_type_name == "option"
        for option in parameter.opts
    }
    assert options.pop("--json") == "as_json"
    for help_option in ("-h", "--help"):
        options.pop(help_option, None)
    assert query.options == options
    assert {each.name for each in command.params if each.multiple} == set(query.options.values()) & {
        *quick.REPEATABLE_PARAMETERS
    }
    assert query.operand_count == sum(parameter.param_type_name == "argument" for parameter in command.params)


def _parse_query(*arguments: str) -> Any:
    query: Any = quick.parse(arguments)
    return query and (query.func.__name__, query.args[1:], query.keywords, vars(query.args[0]))


def test_complete_queries_are_parsed(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("SANDBOX_GATEWAY_URL", "http://elsewhere")
    monkeypatch.setenv("SANDBOX_GATEWAY_TOKEN", "key")
    name, operands, parameters, settings = _parse_query("list", "--state=paused", "-m", "a=b", "--metadata", "c=d")
    assert (name, operands, parameters) == ("list_sandboxes", (), {"state": "paused", "metadata": ["a=b", "c=d"]})
    assert (settings["url"], settings["token"], settings["json"]) == ("http://elsewhere", "key", False)
    name, operands, _, settings = _parse_query("--url", "http://here", "snapshot", "show", "one", "--json")
    assert (name, operands, settings["url"], settings["json"]) == ("show_snapshot", ("one",), "http://here", True)
    assert _parse_query("--json", "--token-file", "/key", "list")[3]["token_file"] == "/key"


@pytest.mark.parametrize(
    "line",
    [
        "",
        "--help",
        "--version",
        "list --help",
        "list -h",
        "list one",
        "list --stat paused",
        "list --state",
        "list --state --json",
        "list -ma=b",
        "show",
        "show one two",
        "show -- one",
        "usage --url http://x one",
        "kill one",
        "snapshot",
        "snapshot delete one",
        "--url",
    ],
)
def test_all_other_command_lines_are_left_to_the_library(line: str) -> None:
    assert quick.parse(line.split()) is None


def test_completion_is_left_to_the_library(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("_SANDBOXCTL_COMPLETE", "complete_bash")
    assert quick.parse(["list"]) is None


class _FakeTerminal(io.StringIO):
    def isatty(self) -> bool:
        return True


_cell_strategy = st.text(st.characters(min_codepoint=33, max_codepoint=126), min_size=1, max_size=12)


@given(st.lists(st.tuples(_cell_strategy, _cell_strategy, _cell_strategy), min_size=1, max_size=4))
def test_a_plain_table_matches_the_output_of_rich(rows: list[tuple[str, str, str]]) -> None:
    headers = ("NAME", "ID", "STATE")
    outputs = []
    for is_plain in (True, False):
        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(sys, "stdout", output := io.StringIO())
            if not is_plain:
                patch.setattr(render, "_print_plain_table", lambda rows, **options: False)
            render.print_table(headers, rows, "none")
        outputs.append([line.rstrip() for line in output.getvalue().splitlines()])
    assert outputs[0] == outputs[1]


@pytest.mark.parametrize("cell", ["é", "a\nb", "x" * 300])
def test_a_table_that_needs_rich_is_not_printed_plainly(cell: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert not render._print_plain_table([("NAME",), (cell,)])
    assert capsys.readouterr().out == ""


def test_a_table_on_a_terminal_has_a_bold_header_and_fits_its_width(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("TERM", "xterm")
    monkeypatch.setenv("COLUMNS", "10")
    monkeypatch.setattr(sys, "stdout", output := _FakeTerminal())
    assert render._print_plain_table([("NAME", "ID"), ("one", "1234")])
    assert output.getvalue().splitlines() == ["\x1b[1mNAME  ID\x1b[0m", "one   1234"]
    assert not render._print_plain_table([("NAME", "ID"), ("one", "12345")])


@pytest.mark.parametrize(
    "url", ["ftp://host", "host", "http://", "http://host:port", "http://[::1", "https://host:99999"]
)
def test_invalid_addresses_are_refused(url: str) -> None:
    with pytest.raises(Failure, match="is not the address of a gateway") as error_info:
        client.Client(url)
    assert error_info.value.code is ExitCode.USAGE


def test_a_proxy_is_used_unless_the_environment_excludes_the_host(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("http_proxy", "https_proxy", "all_proxy", "no_proxy", "HTTP_PROXY", "HTTPS_PROXY", "NO_PROXY"):
        monkeypatch.delenv(name, raising=False)
    assert client._find_proxy("http", "host") == ""
    monkeypatch.setenv("http_proxy", "http://proxy:3128")
    assert client._find_proxy("http", "host") == "http://proxy:3128"
    assert client._find_proxy("https", "host") == ""
    monkeypatch.setenv("no_proxy", "host")
    assert client._find_proxy("http", "host") == ""
