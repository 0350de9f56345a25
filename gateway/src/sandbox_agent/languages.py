"""The languages of code: which program runs it, and what is said to it and by it over its channel."""

from __future__ import annotations

import json
import os
import string
import sys
import time

from sandbox_agent.failure import invalid
from sandbox_agent.kernel_protocol import DONE, EVENT, HEAD, MOST, SIZE, SYNC

TYPE_CHECKING = False
if TYPE_CHECKING:
    from collections.abc import Iterator

_START = (
    "import sys; kept = sys.path[0], sys.dont_write_bytecode; "
    "sys.path[0], sys.dont_write_bytecode = sys.argv.pop(), True; from sandbox_agent.kernel import main; "
    "sys.path[0], sys.dont_write_bytecode = kept; main()"
)
_WORD = 4096
_NAME = frozenset(string.ascii_letters + string.digits + "_")


class Cell:
    """Code to run. ``env``: variables for this run; ``changes``: for good, None removes one; ``plain``: only text."""

    def __init__(self, code: str, env: dict[str, str], *, plain: bool = False) -> None:
        self.code = code
        self.env = env
        self.changes: dict[str, str | None] = {}
        self.plain = plain


class Language:
    """One kernel's; it remembers what was half heard."""

    name = ""
    says_begun = False
    """Whether it tells when it begins with a cell; before that it must not be interrupted."""

    def environment(self) -> dict[str, str]:
        """Variables that its program needs."""
        return {}

    def programs(self) -> list[list[str]]:
        """Commands, best first."""
        raise NotImplementedError

    def greeting(self) -> Cell | None:
        """What a new kernel has to run before all else; its output is nobody's."""
        return None

    def check(self, cell: Cell) -> None:
        """Raises Failure where it cannot be run."""

    def ask(self, cell: Cell, count: int) -> bytes:
        raise NotImplementedError

    def hear(self, data: bytes) -> Iterator[tuple[str, bytes]]:
        """``event`` and ``sync`` with a line, ``done`` with a status, ``begun``, or ``broken``."""
        raise NotImplementedError

    def passed_on(self) -> bytes:
        return b""

    def after_interrupt(self) -> bytes:
        return b""


class Python(Language):
    name = "Python"

    def __init__(self) -> None:
        self._heard = bytearray()
        self._turn = b""
        self._interrupts = 0

    def programs(self) -> list[list[str]]:
        folder = os.path.dirname(os.path.dirname(os.path.abspath(__file__)))
        # The Python that the user would get by its name, with what is installed for it.
        return [[python, "-c", _START, folder] for python in ("python3", sys.executable)]

    def ask(self, cell: Cell, count: int) -> bytes:
        self._turn = b"%d" % count
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

    def hear(self, data: bytes) -> Iterator[tuple[str, bytes]]:
        heard = self._heard
        heard += data
        while len(heard) >= HEAD.size:
            letter, size = HEAD.unpack_from(heard)
            kind = {EVENT: "event", SYNC: "sync", DONE: "done"}.get(letter, "broken")
            if size > MOST or (kind == "done" and size > _WORD):
                kind = "broken"
            if kind != "broken" and len(heard) < HEAD.size + size:
                return
            content = bytes(heard[HEAD.size : HEAD.size + size])
            del heard[: HEAD.size + size]
            if kind != "done":
                yield kind, content
            elif content == self._turn:  # not some other cell's, told twice
                yield kind, b"0"

    def passed_on(self) -> bytes:
        return SIZE.pack(0)

    def after_interrupt(self) -> bytes:
        self._interrupts += 1
        return b""


class Shell(Language):
    """bash, or sh where there is no bash, reading commands as if they were typed: an interrupt then ends the command
    and not the shell.

    Its channel is its standard input, which what it runs does not have. After each cell it is asked for the status.
    """

    name = "bash"
    says_begun = True  # half a line that is dropped would leave the other half to be run

    def __init__(self) -> None:
        self._heard = b""
        self._turn = 0
        self._restore = ""
        self._status = b""
        self._awaited = b""

    def programs(self) -> list[list[str]]:
        return [["bash", "--norc", "--noprofile", "--noediting", "-i"], ["sh", "-i"]]

    def environment(self) -> dict[str, str]:
        return {"PS1": "", "PS2": ""}

    def greeting(self) -> Cell:
        return Cell(
            "set +o history 2>/dev/null; (set +H) 2>/dev/null && set +H; unset HISTFILE PROMPT_COMMAND ENV PS1 PS2; "
            "PS1= PS2=",
            {},
        )

    def check(self, cell: Cell) -> None:
        for name in cell.env:
            if not _is_name(name):
                raise invalid(f"{name!r} is not a name that a variable of the shell can have")

    def ask(self, cell: Cell, count: int) -> bytes:
        self._turn += 1
        self._heard = b""
        before, after = [], []
        for name, value in cell.changes.items():
            if _is_name(name):
                before.append(f"unset {name}" if value is None else f"export {name}={_quoted(value)}")
        if cell.env:
            before.append("_agent_kept=1")
            after.append("unset _agent_kept")
        for name, value in cell.env.items():
            before.append(f"_agent_set_{name}=${{{name}+1}} _agent_was_{name}=${{{name}-}}")
            before.append(f"export {name}={_quoted(value)}")
            after.append(f'if [ "$_agent_set_{name}" ]; then {name}=$_agent_was_{name}; else unset {name}; fi')
            after.append(f"unset _agent_set_{name} _agent_was_{name}")
        self._restore = f'if [ "${{_agent_kept-}}" ]; then {"; ".join(after)}; fi; ' if after else ""
        self._status, self._awaited = b"", b"%d" % self._turn
        prepare = _bytes(f"{{ {'; '.join(before)}; }} 2>/dev/null\n") if before else b""
        # "command": sh would drop the rest of what it has read when the code is not well formed.
        begun = f"{{ printf '{self._turn}\\n' >&0; }} 2>/dev/null; "
        return prepare + _bytes(f"{begun}command eval {_quoted(cell.code)} </dev/null\n") + self._report()

    def _report(self) -> bytes:
        """Has it say how the cell went. The empty line brings bash's parser to its senses after code that ends within
        quotes."""
        status = f"printf '%s %s\\n' {self._awaited.decode()} \"$_agent_status\" >&0"
        return _bytes(f"\n{{ _agent_status=$?; {self._restore}{status}; }} 2>/dev/null\n")

    def hear(self, data: bytes) -> Iterator[tuple[str, bytes]]:
        *lines, self._heard = (self._heard + data).split(b"\n")
        if len(self._heard) > _WORD:
            yield "broken", b""
        for line in lines:
            turn, _, status = line.partition(b" ")
            if turn == b"%d" % self._turn and not status:
                yield "begun", b""
            elif status.isdigit() and len(status) < 4 and turn.rstrip(b"!") == b"%d" % self._turn:
                self._status = self._status or status
                if turn == self._awaited:
                    yield "done", self._status

    def after_interrupt(self) -> bytes:
        # Asked again: some shells forget then what they have read ahead; and what comes next is not to be hit.
        self._awaited = b"%d!" % self._turn
        return self._report()


LANGUAGES: dict[str, type[Language]] = {"python": Python, "bash": Shell}


def _quoted(text: str) -> str:
    return "'" + text.replace("'", "'\\''") + "'"


def _is_name(name: str) -> bool:
    return set(name) <= _NAME and not name[0].isdigit()


def _bytes(text: str) -> bytes:
    return text.encode("utf-8", "replace")
