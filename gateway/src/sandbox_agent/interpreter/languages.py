"""The languages of the code interpreter, with their programs and protocols."""

from __future__ import annotations

import json
import os
import string
import sys
import time

from sandbox_agent.failure import invalid_argument
from sandbox_agent.interpreter.kernel_protocol import (
    AGENT_FRAME_HEAD,
    DONE,
    EVENT,
    KERNEL_FRAME_HEAD,
    MAX_EVENT_BYTES,
    SYNC,
)

TYPE_CHECKING = False
if TYPE_CHECKING:
    from collections.abc import Iterator

_START_CODE = (
    "import sys; saved = sys.path[0], sys.dont_write_bytecode; "
    "sys.path[0], sys.dont_write_bytecode = sys.argv.pop(), True; from sandbox_agent.interpreter.kernel import main; "
    "sys.path[0], sys.dont_write_bytecode = saved; main()"
)
_MAX_STATUS_BYTES = 4096
_NAME_CHARACTERS = frozenset(string.ascii_letters + string.digits + "_")


class Cell:
    """Code for a kernel to run.

    ``env``: variables for this run; ``changes``: variables to change permanently (None removes a variable); ``plain``:
    whether results contain only text.
    """

    def __init__(self, code: str, env: dict[str, str], *, plain: bool = False) -> None:
        self.code = code
        self.env = env
        self.changes: dict[str, str | None] = {}
        self.plain = plain


class Language:
    """A language, and the protocol of its kernel. Each kernel has its own ``Language``, which buffers frames."""

    name = ""
    reports_begin = False
    """Whether the kernel reports the start of a cell. If so, it must not be interrupted earlier."""

    def environment(self) -> dict[str, str]:
        """Return the environment variables that the program needs."""
        return {}

    def programs(self) -> list[list[str]]:
        """Return the commands that can run the kernel, in order of preference."""
        raise NotImplementedError

    def startup_cell(self) -> Cell | None:
        """Return the first cell of a new kernel, whose output is discarded; None if there is none."""
        return None

    def check_cell(self, cell: Cell) -> None:
        """Raise Failure if the cell cannot run."""

    def encode_cell(self, cell: Cell, count: int) -> bytes:
        raise NotImplementedError

    def parse(self, data: bytes) -> Iterator[tuple[str, bytes]]:
        """Parse received bytes. Yields (kind, contents).

        ``event`` and ``sync`` contain a line, and ``done`` contains a status. ``begun`` and ``broken`` are empty.
        """
        raise NotImplementedError

    def encode_acknowledgement(self) -> bytes:
        return b""

    def handle_interrupt(self) -> bytes:
        return b""


class Python(Language):
    name = "Python"

    def __init__(self) -> None:
        self._received_data = bytearray()
        self._number = b""
        self._interrupt_count = 0

    def programs(self) -> list[list[str]]:
        import_directory = os.path.dirname(os.path.dirname(os.path.dirname(os.path.abspath(__file__))))
        # Prefer the Python in the user's PATH, because the user's packages are installed for it.
        return [[python, "-c", _START_CODE, import_directory] for python in ("python3", sys.executable)]

    def encode_cell(self, cell: Cell, count: int) -> bytes:
        self._number = b"%d" % count
        request = {
            "code": cell.code,
            "count": count,
            "changes": cell.changes,
            "env": cell.env,
            "plain": cell.plain,
            "sent": time.monotonic(),
            "interrupts": self._interrupt_count,
        }
        data = json.dumps(request).encode()
        return AGENT_FRAME_HEAD.pack(len(data)) + data

    def parse(self, data: bytes) -> Iterator[tuple[str, bytes]]:
        buffer = self._received_data
        buffer += data
        while len(buffer) >= KERNEL_FRAME_HEAD.size:
            letter, size = KERNEL_FRAME_HEAD.unpack_from(buffer)
            kind = {EVENT: "event", SYNC: "sync", DONE: "done"}.get(letter, "broken")
            if size > MAX_EVENT_BYTES or (kind == "done" and size > _MAX_STATUS_BYTES):
                kind = "broken"
            if kind != "broken" and len(buffer) < KERNEL_FRAME_HEAD.size + size:
                return
            contents = bytes(buffer[KERNEL_FRAME_HEAD.size : KERNEL_FRAME_HEAD.size + size])
            del buffer[: KERNEL_FRAME_HEAD.size + size]
            if kind != "done":
                yield kind, contents
            elif contents == self._number:  # ignore repeated reports of other cells
                yield kind, b"0"

    def encode_acknowledgement(self) -> bytes:
        return AGENT_FRAME_HEAD.pack(0)

    def handle_interrupt(self) -> bytes:
        self._interrupt_count += 1
        return b""


class Shell(Language):
    """An interactive bash, or sh if there is no bash. An interrupt stops only the running command.

    The channel is the standard input of the shell; commands read from /dev/null instead. Each cell is followed by
    commands that report its status.
    """

    name = "bash"
    reports_begin = True  # an earlier interrupt would drop half of a line, and the shell would run the other half

    def __init__(self) -> None:
        self._received_data = b""
        self._number = 0
        self._restore_commands = ""
        self._status = b""
        self._awaited_mark = b""

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

    def check_cell(self, cell: Cell) -> None:
        for name in cell.env:
            if not _is_variable_name(name):
                raise invalid_argument(
                    f"{name!r} is not a valid shell variable name: use letters, digits and _, and do not "
                    "start with a digit"
                )

    def encode_cell(self, cell: Cell, count: int) -> bytes:
        self._number += 1
        self._received_data = b""
        setup, teardown = [], []
        for name, value in cell.changes.items():
            if _is_variable_name(name):
                setup.append(f"unset {name}" if value is None else f"export {name}={_quote(value)}")
        if cell.env:
            setup.append("_agent_kept=1")
            teardown.append("unset _agent_kept")
        for name, value in cell.env.items():
            setup.append(f"_agent_set_{name}=${{{name}+1}} _agent_was_{name}=${{{name}-}}")
            setup.append(f"export {name}={_quote(value)}")
            teardown.append(f'if [ "$_agent_set_{name}" ]; then {name}=$_agent_was_{name}; else unset {name}; fi')
            teardown.append(f"unset _agent_set_{name} _agent_was_{name}")
        self._restore_commands = f'if [ "${{_agent_kept-}}" ]; then {"; ".join(teardown)}; fi; ' if teardown else ""
        self._status, self._awaited_mark = b"", b"%d" % self._number
        setup_line = _encode(f"{{ {'; '.join(setup)}; }} 2>/dev/null\n") if setup else b""
        # Use "command", because otherwise sh would drop the rest of its input after a syntax error.
        begin_command = f"{{ printf '{self._number}\\n' >&0; }} 2>/dev/null; "
        return (
            setup_line
            + _encode(f"{begin_command}command eval {_quote(cell.code)} </dev/null\n")
            + self._format_status_commands()
        )

    def _format_status_commands(self) -> bytes:
        """Return commands that report the status of the cell.

        They begin with an empty line, which resets bash's parser after an open quote.
        """
        status_command = f"printf '%s %s\\n' {self._awaited_mark.decode()} \"$_agent_status\" >&0"
        return _encode(f"\n{{ _agent_status=$?; {self._restore_commands}{status_command}; }} 2>/dev/null\n")

    def parse(self, data: bytes) -> Iterator[tuple[str, bytes]]:
        *lines, self._received_data = (self._received_data + data).split(b"\n")
        if len(self._received_data) > _MAX_STATUS_BYTES:
            yield "broken", b""
        for line in lines:
            mark, _, status = line.partition(b" ")
            if mark == b"%d" % self._number and not status:
                yield "begun", b""
            elif status.isdigit() and len(status) < 4 and mark.rstrip(b"!") == b"%d" % self._number:
                self._status = self._status or status
                if mark == self._awaited_mark:
                    yield "done", self._status

    def handle_interrupt(self) -> bytes:
        # Request the status again, because some shells drop their input on an interrupt. The next cell must wait until
        # the shell has handled the interrupt.
        self._awaited_mark = b"%d!" % self._number
        return self._format_status_commands()


LANGUAGES: dict[str, type[Language]] = {"python": Python, "bash": Shell}


def _quote(text: str) -> str:
    return "'" + text.replace("'", "'\\''") + "'"


def _is_variable_name(name: str) -> bool:
    return set(name) <= _NAME_CHARACTERS and not name[0].isdigit()


def _encode(text: str) -> bytes:
    return text.encode("utf-8", "replace")
