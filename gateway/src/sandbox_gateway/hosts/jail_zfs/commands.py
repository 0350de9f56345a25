"""Run FreeBSD's commands from coroutines. Cancelling the caller does not interrupt a command."""

from __future__ import annotations

from collections.abc import Mapping
from subprocess import CompletedProcess

from sandbox_gateway.command import run_async
from sandbox_gateway.errors import BackendFailed
from sandbox_gateway.tasks import finish_despite_cancellation

TIMEOUT_SECONDS = 60.0


class CommandRunner:
    """Runs commands with the environment variables of ``build_child_environment`` and those in ``environment``."""

    def __init__(self, environment: Mapping[str, str] | None = None) -> None:
        self._environment = dict(environment or {})

    async def __call__(self, *argv: str, input: str | None = None, silent: bool = False) -> str:
        """Run a command and return its standard output. Raises BackendFailed, with the command's message, if it fails.

        ``silent``: do not raise if the command fails without a message, which means that it found nothing.
        """
        result = await self._run(argv, input=input, check=not silent)
        if result.returncode != 0 and _find_error_message(result):
            raise _create_command_error(argv, result)
        return result.stdout

    async def run_removal(self, *argv: str, absent_messages: tuple[str, ...]) -> bool:
        """Run a command that removes something. Returns False if there was nothing to remove.

        ``absent_messages``: if the command's error message contains one of these texts, there was nothing to remove.
        """
        result = await self._run(argv, input=None, check=False)
        if result.returncode == 0:
            return True
        if any(text in _find_error_message(result) for text in absent_messages):
            return False
        raise _create_command_error(argv, result)

    async def _run(self, argv: tuple[str, ...], *, input: str | None, check: bool) -> CompletedProcess[str]:
        coroutine = run_async(argv, timeout=TIMEOUT_SECONDS, input=input, check=check, env=self._environment)
        return await finish_despite_cancellation(coroutine)


def _find_error_message(result: CompletedProcess[str]) -> str:
    return result.stderr.strip() or result.stdout.strip()


def _create_command_error(argv: tuple[str, ...], result: CompletedProcess[str]) -> BackendFailed:
    return BackendFailed(
        f"{' '.join(argv)} failed ({result.returncode}): {_find_error_message(result)[-1000:] or 'no message'}"
    )
