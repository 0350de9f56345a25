"""Add the end of a guest's console to the error of a boot that failed."""

from __future__ import annotations

from sandbox_gateway.control_characters import remove_control_characters
from sandbox_gateway.errors import BackendFailed, GatewayError, Timeout
from sandbox_gateway.hosts.base import Host
from sandbox_gateway.records import Sandbox

MAX_LINES = 12
MAX_LINE_LENGTH = 160


async def with_console(error: BaseException, host: Host, sandbox: Sandbox) -> BaseException:
    """Return ``error`` with the end of the console of ``sandbox``, whose machine was not removed yet.

    Returns ``error`` itself if the guest is not the cause, or if its console is empty or cannot be read.
    """
    if not isinstance(error, BackendFailed | Timeout):
        return error
    try:
        lines = last_lines(await host.console(sandbox))
    except GatewayError:
        return error
    if not lines:
        return error
    message = "\n  ".join([f"{error.message}. The end of its console:", *lines])
    details = {**error.details, "console": lines}
    return type(error)(message, blockers=error.blockers, details=details)


def last_lines(console: str) -> list[str]:
    """Return the last lines of a console that are not empty, shortened and without control characters."""
    # The end of a console can be a long line without a line break.
    text = remove_control_characters(console[-8 * MAX_LINES * MAX_LINE_LENGTH :].replace("\r", "\n"))
    lines = [line.strip() for line in text.split("\n")]
    return [line[-MAX_LINE_LENGTH:] for line in lines if line][-MAX_LINES:]
