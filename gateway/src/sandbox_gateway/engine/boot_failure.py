"""Add the last lines of a guest's console to the error of a failed boot."""

from __future__ import annotations

from sandbox_gateway.control_characters import remove_control_characters
from sandbox_gateway.errors import BackendFailed, GatewayError, Timeout
from sandbox_gateway.hosts.base import Host
from sandbox_gateway.records import Sandbox

MAX_LINES = 12
MAX_LINE_LENGTH = 160
_PANIC_MESSAGE = "Kernel panic - not syncing"


async def add_console(error: BaseException, host: Host, sandbox: Sandbox) -> BaseException:
    """Return a copy of ``error`` with the last lines of the console of ``sandbox``.

    The machine must not have been removed yet. Returns ``error`` itself if the guest is not the cause, or if its
    console is empty or cannot be read.
    """
    if not isinstance(error, BackendFailed | Timeout):
        return error
    try:
        lines = extract_last_lines(await host.read_console(sandbox))
    except GatewayError:
        return error
    if not lines:
        return error
    message = "\n  ".join([f"{error.message}. The last lines of the guest's console:", *lines])
    details = {**error.details, "console": lines}
    return type(error)(message, blockers=error.blockers, details=details)


def extract_last_lines(console: str) -> list[str]:
    """Return the last nonempty lines of a console, shortened and without control characters.

    If the guest's kernel panicked, the panic message is the last line, because the dump after it would displace it.
    """
    # The end of a console can be a long line without a line break.
    text = remove_control_characters(console[-8 * MAX_LINES * MAX_LINE_LENGTH :].replace("\r", "\n"))
    lines = [stripped_line for line in text.split("\n") if (stripped_line := line.strip())]
    panic_index = next((index for index, line in enumerate(lines) if _PANIC_MESSAGE in line), len(lines))
    return [line[-MAX_LINE_LENGTH:] for line in lines[: panic_index + 1]][-MAX_LINES:]
