"""Test the script that checks FreeBSD's behaviour on a real machine, by running it with the shim and zfs-fuse."""

from __future__ import annotations

import re
import shlex
import subprocess
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest

from tests.freebsd_shim.command_lines import COMMAND_LINES, ZFS_COMMANDS
from tests.freebsd_shim.harness import Shim
from tests.support import pools

_SCRIPT = Path(__file__).with_name("verify_on_freebsd.sh")


@contextmanager
def _kept_responsive(directory: Path) -> Iterator[None]:
    """Keep zfs-fuse responsive, as ``pools.pool`` does, for the pool that the script creates under ``directory``."""
    stop_event = threading.Event()

    def watch() -> None:
        while not stop_event.wait(1):
            pools._all_respond(pools._list_mount_points_below(directory), 10)

    thread = threading.Thread(target=watch)
    thread.start()
    try:
        yield
    finally:
        stop_event.set()
        thread.join()


def test_the_shim_passes_the_checks_that_it_can_run(shim: Shim, pool: pools.Pool, tmp_path: Path) -> None:
    environ = {"PATH": f"{shim.environ['PATH']}", "TMPDIR": str(tmp_path)}
    shim.check_ok("pfctl", "-q", "-f", "-", input='nat-anchor "sbx/*"\nanchor "sbx/*"\n')
    pools_before = set(pools.run("zpool", "list", "-H", "-o", "name").stdout.split())
    with _kept_responsive(tmp_path):
        result = shim("sh", str(_SCRIPT), timeout=300, **environ)
    assert result.returncode == 0, result.stdout + result.stderr
    rows = [line.split()[0] for line in result.stdout.splitlines()]
    assert rows.count("ok") >= 30 and "FAILED" not in rows, result.stdout
    # zfs-fuse may still report the script's pool as busy when the script gives up.
    pools.destroy_pools(set(pools.run("zpool", "list", "-H", "-o", "name").stdout.split()) - pools_before)
    assert shim("ifconfig", "-g", "vfy-epair").stdout == "" and "vfy" not in shim.check_ok("jls", "name")


def test_the_script_refuses_other_systems(tmp_path: Path) -> None:
    result = subprocess.run(
        ["sh", str(_SCRIPT)], capture_output=True, text=True, timeout=30, env={"PATH": "/usr/bin:/bin"}, check=False
    )
    assert result.returncode == 2 and ("not FreeBSD" in result.stderr or "as root" in result.stderr)


@pytest.mark.parametrize("argument", ["-x", "report"])
def test_the_script_refuses_unknown_arguments(argument: str) -> None:
    result = subprocess.run(["sh", str(_SCRIPT), argument], capture_output=True, text=True, timeout=30, check=False)
    assert result.returncode == 2 and result.stderr.startswith("usage:")


def _read_commands() -> list[list[str]]:
    """Return the words of the commands in the script, with the values of its global variables.

    ``${N:+WORD}`` becomes WORD, and the helpers of the script are removed. Other variables stay as they are.
    """
    text = _SCRIPT.read_text().replace("\\\n", " ")
    values = dict(re.findall(r"^([A-Z]+)=([\w./:$-]+)", text, re.MULTILINE))
    text = re.sub(r"\$([A-Z]+)\b", lambda match: values.get(match[1], match[0]), text)
    text = re.sub(r"\$\{\d:\+([^}]*)\}", r"\1", text)
    return [words for line in text.splitlines() for words in _split_commands(line)]


def _split_commands(line: str) -> Iterator[list[str]]:
    for substitution in re.findall(r'"\$\(([^"()]*)\)"', line):
        yield from _split_commands(substitution)
    lexer = shlex.shlex(line, posix=True, punctuation_chars="|&;()<>")
    lexer.whitespace_split = True
    try:
        words = list(lexer)
    except ValueError:
        return  # The line is a part of a quoted text.
    command: list[str] = []
    for word in [*words, ";"]:
        if not set(word) <= set("|&;()"):
            command.append(word)
            continue
        while command and re.fullmatch(r"\w+=.*|ok|if|!|then|do", command[0], re.DOTALL):
            del command[0]
        if command[:1] == ["refused"]:
            del command[:2]
        if command[:1] == ["destroy"]:
            command.insert(0, "zfs")
        redirection = next((index for index, each in enumerate(command) if set(each) <= set("<>&")), len(command))
        # A redirection may begin with the number of a descriptor.
        if redirection < len(command) and command[redirection - 1].isdigit():
            redirection -= 1
        if command[:redirection]:
            yield command[:redirection]
        command = []


def test_the_script_runs_every_command_line_of_the_table() -> None:
    """The table is in docs/jail_zfs.md. Of `zfs` and `zpool`, the script uses every option."""
    commands = _read_commands()
    missing_forms = [line.form for line in COMMAND_LINES if not any(map(line.matches, commands))]
    for line in ZFS_COMMANDS:
        matching_commands = [words for words in commands if line.matches(words)]
        if not matching_commands:
            missing_forms.append(line.form)
        used_options = {option for words in matching_commands for option in line.list_options(words)}
        missing_forms += [
            f"{line.program} {line.subcommand} {each}" for each in line.options if each[:2] not in used_options
        ]
    assert missing_forms == []


def test_every_check_of_the_script_is_called() -> None:
    text = _SCRIPT.read_text()
    functions = re.findall(r"^(\w+)\(\) \{", text, re.MULTILINE)
    assert [name for name in functions if len(re.findall(rf"\b{name}\b", text)) < 2] == []


def test_the_script_expects_a_message_for_each_refusal() -> None:
    refusals = re.findall(r"^ *refused (\S+|\"[^\"]*\")", _SCRIPT.read_text(), re.MULTILINE)
    assert len(refusals) > 10 and not {'""', "''"} & set(refusals)
