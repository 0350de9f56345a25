"""The languages of the code interpreter: their programs and their protocols."""

from __future__ import annotations

import json
import os
import string
import sys
import time

from sandbox_agent.failure import invalid
from sandbox_agent.interpreter.kernel_protocol import DONE, EVENT, HEAD, MAX_SIZE, SIZE, SYNC

TYPE_CHECKING = False
if TYPE_CHECKING:
    from collections.abc import Iterator

_START = (
    "import sys; kept = sys.path[0], sys.dont_write_bytecode; "
    "sys.path[0], sys.dont_write_bytecode = sys.argv.pop(), True; from sandbox_agent.interpreter.kernel import main; "
    "sys.path[0], sys.dont_write_bytecode = kept; main()"
)
_MAX_STATUS = 4096
_NAME = frozenset(string.ascii_letters + string.digits + "_")


class Cell:
    """Code to run.

    ``env``: variables for this run; ``changes``: permanent variables, None removes one; ``plain``: text only.
    """

    def __init__(self, code: str, env: dict[str, str], *, plain: bool = False) -> None:
        self.code = code
        self.env = env
        self.changes: dict[str, str | None] = {}
        self.plain = plain


class Language:
    """The protocol of one kernel. Buffers incomplete frames."""

    name = ""
    reports_begin = False
    """Whether the kernel reports the start of a cell. It must not be interrupted before that."""

    def environment(self) -> dict[str, str]:
        """Return the variables that the program needs."""
        return {}

    def programs(self) -> list[list[str]]:
        """Return the commands that can run the kernel, the preferred one first."""
        raise NotImplementedError

    def startup_cell(self) -> Cell | None:
        """Return the first cell of a new kernel; its output is discarded."""
        return None

    def check(self, cell: Cell) -> None:
        """Raise Failure if the cell cannot run."""

    def encode_cell(self, cell: Cell, count: int) -> bytes:
        raise NotImplementedError

    def parse(self, data: bytes) -> Iterator[tuple[str, bytes]]:
        """Parse received bytes: ``event`` or ``sync`` with a line, ``done`` with a status, ``begun`` or ``broken``."""
        raise NotImplementedError

    def acknowledge(self) -> bytes:
        return b""

    def after_interrupt(self) -> bytes:
        return b""


class Python(Language):
    name = "Python"

    def __init__(self) -> None:
        self._received = bytearray()
        self._number = b""
        self._interrupts = 0

    def programs(self) -> list[list[str]]:
        folder = os.path.dirname(os.path.dirname(os.path.dirname(os.path.abspath(__file__))))
        # Prefer the Python in the user's PATH, with the packages installed for it.
        return [[python, "-c", _START, folder] for python in ("python3", sys.executable)]

    def encode_cell(self, cell: Cell, count: int) -> bytes:
        self._number = b"%d" % count
        request = {
            "code": cell.code,
            "count": count,
            "changes": cell.changes,
            "env": cell.env,
            "plain": cell.plain,
            "sent": time.monotonic(),
            "interrupts": self._interrupts,
        }
        data = json.dumps(request).encode()
        return SIZE.pack(len(data)) + data

    def parse(self, data: bytes) -> Iterator[tuple[str, bytes]]:
        heard = self._received
        heard += data
        while len(heard) >= HEAD.size:
            letter, size = HEAD.unpack_from(heard)
            kind = {EVENT: "event", SYNC: "sync", DONE: "done"}.get(letter, "broken")
            if size > MAX_SIZE or (kind == "done" and size > _MAX_STATUS):
                kind = "broken"
            if kind != "broken" and len(heard) < HEAD.size + size:
                return
            content = bytes(heard[HEAD.size : HEAD.size + size])
            del heard[: HEAD.size + size]
            if kind != "done":
                yield kind, content
            elif content == self._number:  # ignore a repeated report of another cell
                yield kind, b"0"

    def acknowledge(self) -> bytes:
        return SIZE.pack(0)

    def after_interrupt(self) -> bytes:
        self._interrupts += 1
        return b""


class Shell(Language):
    """bash or else sh, as an interactive shell, so that an interrupt ends the command and not the shell.

    The channel is the shell's standard input; commands get /dev/null instead. After each cell the agent asks for the
    status.
    """

    name = "bash"
    reports_begin = True  # an earlier interrupt drops half a line, and the shell runs the other half

    def __init__(self) -> None:
        self._received = b""
        self._number = 0
        self._restore = ""
        self._status = b""
        self._awaited = b""

    def programs(self) -> list[list[str]]:
        return [["bash", "--norc", "--noprofile", "--noediting", "-i"], ["sh", "-i"]]

    def environment(self) -> dict[str, str]:
        return {"PS1": "", "PS2": ""}

    def startup_cell(self) -> Cell:
        return Cell(
            "set +o history 2>/dev/null; (set +H) 2>/dev/null && set +H; unset HISTFILE PROMPT_COMMAND ENV PS1 PS2; "
            "PS1= PS2=",
            {},
        )

    def check(self, cell: Cell) -> None:
        for name in cell.env:
            if not _is_name(name):
                raise invalid(f"{name!r} is not a name for a shell variable: use letters, digits and _")

    def encode_cell(self, cell: Cell, count: int) -> bytes:
        self._number += 1
        self._received = b""
        before, after = [], []
        for name, value in cell.changes.items():
            if _is_name(name):
                before.append(f"unset {name}" if value is None else f"export {name}={_quote(value)}")
        if cell.env:
            before.append("_agent_kept=1")
            after.append("unset _agent_kept")
        for name, value in cell.env.items():
            before.append(f"_agent_set_{name}=${{{name}+1}} _agent_was_{name}=${{{name}-}}")
            before.append(f"export {name}={_quote(value)}")
            after.append(f'if [ "$_agent_set_{name}" ]; then {name}=$_agent_was_{name}; else unset {name}; fi')
            after.append(f"unset _agent_set_{name} _agent_was_{name}")
        self._restore = f'if [ "${{_agent_kept-}}" ]; then {"; ".join(after)}; fi; ' if after else ""
        self._status, self._awaited = b"", b"%d" % self._number
        prepare = _encode(f"{{ {'; '.join(before)}; }} 2>/dev/null\n") if before else b""
        # "command": otherwise sh would drop the rest of its input after a syntax error.
        begun = f"{{ printf '{self._number}\\n' >&0; }} 2>/dev/null; "
        return prepare + _encode(f"{begun}command eval {_quote(cell.code)} </dev/null\n") + self._ask_status()

    def _ask_status(self) -> bytes:
        """Return commands that report the cell's status. The empty line resets bash's parser after an open quote."""
        status = f"printf '%s %s\\n' {self._awaited.decode()} \"$_agent_status\" >&0"
        return _encode(f"\n{{ _agent_status=$?; {self._restore}{status}; }} 2>/dev/null\n")

    def parse(self, data: bytes) -> Iterator[tuple[str, bytes]]:
        *lines, self._received = (self._received + data).split(b"\n")
        if len(self._received) > _MAX_STATUS:
            yield "broken", b""
        for line in lines:
            turn, _, status = line.partition(b" ")
            if turn == b"%d" % self._number and not status:
                yield "begun", b""
            elif status.isdigit() and len(status) < 4 and turn.rstrip(b"!") == b"%d" % self._number:
                self._status = self._status or status
                if turn == self._awaited:
                    yield "done", self._status

    def after_interrupt(self) -> bytes:
        # Ask again, because some shells drop their input at an interrupt, and the interrupt must not hit the next cell.
        self._awaited = b"%d!" % self._number
        return self._ask_status()


LANGUAGES: dict[str, type[Language]] = {"python": Python, "bash": Shell}


def _quote(text: str) -> str:
    return "'" + text.replace("'", "'\\''") + "'"


def _is_name(name: str) -> bool:
    return set(name) <= _NAME and not name[0].isdigit()


def _encode(text: str) -> bytes:
    return text.encode("utf-8", "replace")
