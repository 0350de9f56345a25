"""Run external commands with a timeout. Errors contain the command and its output."""

from __future__ import annotations

import asyncio
import contextlib
import os
import select
import selectors
import signal
import subprocess
import time
from collections.abc import Mapping, Sequence
from subprocess import CompletedProcess
from typing import IO, cast

from sandbox_gateway.errors import BackendFailed

_MAX_MESSAGE_LENGTH = 2000
_MAX_OUTPUT_BYTES = 512 << 20
"""The default limit of a command's output. The records of many sandboxes on a jail host need hundreds of MiB."""
_MAX_ERROR_BYTES = 64 << 10
_CHUNK_BYTES = 64 << 10
_KILL_WAIT_SECONDS = 2.0
_INHERITED_VARIABLES = ("PATH", "TMPDIR")
_PROXY_VARIABLES = ("http_proxy", "https_proxy", "ftp_proxy", "all_proxy", "no_proxy")


class CommandTimeout(BackendFailed):
    """A command did not finish in time."""


def build_child_environment(**variables: str) -> dict[str, str]:
    """Return the environment for a child process: a few inherited variables, the C locale, and ``variables``.

    The rest of the gateway's environment is not passed on, because it may contain keys and proxy passwords, and a
    guest may take over a process that serves it.
    """
    inherited_variables = {name: os.environ[name] for name in _INHERITED_VARIABLES if name in os.environ}
    return {**inherited_variables, "LC_ALL": "C", **variables}


def read_proxy_settings() -> dict[str, str]:
    """Return the proxy variables from the gateway's environment, for a child that downloads packages."""
    names = [*_PROXY_VARIABLES, *map(str.upper, _PROXY_VARIABLES)]
    return {name: os.environ[name] for name in names if name in os.environ}


class _Output:
    """The output of a command, of limited size. ``keeps_end``: keep the last bytes of a larger output."""

    def __init__(self, max_bytes: int, *, keeps_end: bool = False) -> None:
        self._data = bytearray()
        self._max_bytes = max_bytes
        self._keeps_end = keeps_end
        self.is_too_large = False

    def add(self, chunk: bytes) -> None:
        if self._keeps_end:
            self._data += chunk
            if len(self._data) > 2 * self._max_bytes:
                del self._data[: -self._max_bytes]
        elif not self.is_too_large:
            self._data += chunk
            self.is_too_large = len(self._data) > self._max_bytes

    def read(self) -> bytes:
        return bytes(self._data[-self._max_bytes :])


def run(
    argv: Sequence[str],
    *,
    timeout: float,
    input: str | None = None,
    check: bool = True,
    env: Mapping[str, str] | None = None,
    pass_fds: Sequence[int] = (),
    max_output_bytes: int = _MAX_OUTPUT_BYTES,
) -> CompletedProcess[str]:
    """Run ``argv`` without a shell, for at most ``timeout`` seconds. ``env`` extends ``build_child_environment``.

    The result contains the last 64 KiB of the error output. Raises BackendFailed if the program is not installed, times
    out, prints more than ``max_output_bytes``, or (with ``check``) exits with a nonzero code.
    """
    try:
        process = subprocess.Popen(
            argv,
            stdin=subprocess.DEVNULL if input is None else subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            env=build_child_environment(**(env or {})),
            pass_fds=pass_fds,
        )
    except FileNotFoundError:
        raise BackendFailed(format_missing_program_message(argv[0])) from None
    output, errors = _Output(max_output_bytes), _Output(_MAX_ERROR_BYTES, keeps_end=True)
    with process:
        try:
            _communicate(process, (input or "").encode(), output, errors, timeout)
        except subprocess.TimeoutExpired:
            process.kill()
            raise CommandTimeout(_format_timeout_message(argv, timeout)) from None
        except BaseException:
            process.kill()
            raise
    return _check_status(argv, _decode(_create_result(argv, process.returncode, output, errors)), check)


def _communicate(
    process: subprocess.Popen[bytes], input: bytes, output: _Output, errors: _Output, timeout: float
) -> None:
    """Like ``Popen.communicate``, but store the output in objects that limit its size."""
    deadline = time.monotonic() + timeout
    pending_input = memoryview(input)
    with selectors.DefaultSelector() as selector:
        assert process.stdout is not None and process.stderr is not None
        selector.register(process.stdout, selectors.EVENT_READ, output)
        selector.register(process.stderr, selectors.EVENT_READ, errors)
        if process.stdin is not None:
            selector.register(process.stdin, selectors.EVENT_WRITE)
        while selector.get_map():
            if time.monotonic() >= deadline:
                raise subprocess.TimeoutExpired(process.args, timeout)
            for key, _ in selector.select(max(0.0, deadline - time.monotonic())):
                if key.data is None:
                    try:
                        pending_input = pending_input[os.write(key.fd, pending_input[: select.PIPE_BUF]) :]
                    except BrokenPipeError:
                        pending_input = pending_input[:0]
                    is_finished = not pending_input
                else:
                    chunk = os.read(key.fd, _CHUNK_BYTES)
                    key.data.add(chunk)
                    is_finished = not chunk
                if is_finished:
                    selector.unregister(key.fileobj)
                    cast(IO[bytes], key.fileobj).close()
            if output.is_too_large:
                process.kill()
                return
    process.wait(max(0.0, deadline - time.monotonic()))


async def run_async(
    argv: Sequence[str],
    *,
    timeout: float,
    input: str | None = None,
    check: bool = True,
    env: Mapping[str, str] | None = None,
    pass_fds: Sequence[int] = (),
    max_output_bytes: int = _MAX_OUTPUT_BYTES,
) -> CompletedProcess[str]:
    """Run a command like ``run``, without blocking the event loop. If the caller is cancelled, kill the command."""
    result = await run_async_bytes(
        argv,
        timeout=timeout,
        input=None if input is None else input.encode(),
        env=env,
        pass_fds=pass_fds,
        max_output_bytes=max_output_bytes,
    )
    return _check_status(argv, _decode(result), check)


async def run_async_bytes(
    argv: Sequence[str],
    *,
    timeout: float,
    input: bytes | None = None,
    env: Mapping[str, str] | None = None,
    pass_fds: Sequence[int] = (),
    max_output_bytes: int = _MAX_OUTPUT_BYTES,
) -> CompletedProcess[bytes]:
    """Run a command like ``run_async``, but do not decode its output or check its exit code."""
    try:
        process = await asyncio.create_subprocess_exec(
            *argv,
            stdin=subprocess.DEVNULL if input is None else subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            env=build_child_environment(**(env or {})),
            pass_fds=pass_fds,
            start_new_session=True,
        )
    except FileNotFoundError:
        raise BackendFailed(format_missing_program_message(argv[0])) from None
    output, errors = _Output(max_output_bytes), _Output(_MAX_ERROR_BYTES, keeps_end=True)
    assert process.stdout is not None and process.stderr is not None
    try:
        async with asyncio.timeout(timeout):
            await asyncio.gather(
                _write_input(process, input or b""),
                _read_output(process, process.stdout, output),
                _read_output(process, process.stderr, errors),
            )
            await process.wait()
    except (TimeoutError, asyncio.CancelledError) as error:
        _kill_group(process)
        # Do not wait for a process that is stuck in the kernel, because the caller may hold a lock.
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(_KILL_WAIT_SECONDS):
                await process.wait()
        if isinstance(error, TimeoutError):
            raise CommandTimeout(_format_timeout_message(argv, timeout)) from None
        raise
    assert process.returncode is not None
    return _create_result(argv, process.returncode, output, errors)


async def _write_input(process: asyncio.subprocess.Process, input: bytes) -> None:
    if process.stdin is not None:
        process.stdin.write(input)
        with contextlib.suppress(BrokenPipeError, ConnectionResetError):
            await process.stdin.drain()
        process.stdin.close()


async def _read_output(process: asyncio.subprocess.Process, stream: asyncio.StreamReader, output: _Output) -> None:
    while chunk := await stream.read(_CHUNK_BYTES):
        output.add(chunk)
        if output.is_too_large:
            _kill_group(process)


def _kill_group(process: asyncio.subprocess.Process) -> None:
    with contextlib.suppress(ProcessLookupError):
        os.killpg(process.pid, signal.SIGKILL)


def _create_result(argv: Sequence[str], code: int, output: _Output, errors: _Output) -> CompletedProcess[bytes]:
    if output.is_too_large:
        raise BackendFailed(f"{_shorten(argv)} produced too much output and was killed")
    return CompletedProcess(list(argv), code, output.read(), errors.read())


def _decode(result: CompletedProcess[bytes]) -> CompletedProcess[str]:
    stdout, stderr = (data.decode(errors="replace") for data in (result.stdout, result.stderr))
    return CompletedProcess(result.args, result.returncode, stdout, stderr)


def _check_status(argv: Sequence[str], result: CompletedProcess[str], check: bool) -> CompletedProcess[str]:
    if check and result.returncode != 0:
        output = (result.stderr.strip() or result.stdout.strip() or "no output")[-_MAX_MESSAGE_LENGTH:]
        raise BackendFailed(f"{_shorten(argv)} failed ({result.returncode}): {output}")
    return result


def format_missing_program_message(program: str) -> str:
    return f"{program} is not installed: install it, or run the host role of this collection"


def _format_timeout_message(argv: Sequence[str], timeout: float) -> str:
    return f"{_shorten(argv)} did not finish within {timeout:g} s and was killed"


def _shorten(argv: Sequence[str]) -> str:
    return f"{argv[0]} {argv[1] if len(argv) > 1 else ''}"
