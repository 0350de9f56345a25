"""Encrypt and decrypt exported files with the program `age`."""

from __future__ import annotations

import contextlib
import os
import re
import selectors
import subprocess
import tempfile
import threading
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import IO, BinaryIO

from sandbox_gateway.cli.failure import ExitCode, Failure, UnusableBody
from sandbox_gateway.control_characters import remove_control_characters

BEGINNINGS = (b"age-encryption.org/v1", b"-----BEGIN AGE ENCRYPTED FILE-----")
BEGINNING_BYTES = max(map(len, BEGINNINGS))
_RECIPIENT_PATTERN = re.compile(r"age1[0-9a-z]{1,2000}|ssh-(ed25519|rsa) [0-9A-Za-z+/=]{1,4000}( [^\x00-\x1f\x7f]*)?")
_SECRET_PREFIX = "AGE-SECRET-KEY-"
_STALLED_SECONDS = 300.0
"""How long `age` may take for one step. It can ask for the passphrase of an identity on the terminal."""
_PIECE_BYTES = 256 << 10
_MAX_LOG_BYTES = 4096
_MAX_REASON_LENGTH = 300


def check_recipients(recipients: Sequence[str]) -> None:
    """Raise Failure unless each recipient has the form of one. `age` itself checks the keys."""
    for each in recipients:
        if each.startswith(_SECRET_PREFIX):
            raise Failure(
                "--age-recipient contains a secret key", ExitCode.USAGE, "`age-keygen -y FILE` prints its public key"
            )
        if not _RECIPIENT_PATTERN.fullmatch(each):
            raise Failure(
                f"{each[:100]!r} is not a recipient",
                ExitCode.USAGE,
                "pass a key that begins with age1, or an SSH public key of the type ssh-ed25519 or ssh-rsa",
            )


def check_identity(identity: str) -> None:
    """Raise Failure if ``identity`` is a key, which anyone on this machine can read in a command line."""
    if identity.startswith(_SECRET_PREFIX):
        raise Failure(
            "--age-identity contains a secret key",
            ExitCode.USAGE,
            "pass the path of the file that contains the key. Replace the key, because other users may have seen it",
        )


def is_encrypted(beginning: bytes) -> bool:
    """Return whether a file with this beginning was encrypted with age."""
    return beginning.startswith(BEGINNINGS)


class Encryption:
    """A running `age` that encrypts what is written to it. Its methods raise Failure."""

    def __init__(self, process: _Process) -> None:
        self._process = process

    def write(self, piece: bytes) -> None:
        self._process.write(piece)

    def finish(self) -> None:
        """Wait until `age` has written everything."""
        self._process.finish()


@contextlib.contextmanager
def encryption_started(recipients: Sequence[str], file: str, descriptor: int) -> Iterator[Encryption]:
    """Run `age` inside this context. It writes to ``descriptor``. ``file``: its name in messages. Raises Failure."""
    args = [option for each in recipients for option in ("-r", each)]
    with _started(args, f"cannot encrypt {file}", stdin=subprocess.PIPE, stdout=descriptor) as process:
        yield Encryption(process)


@contextlib.contextmanager
def decryption_started(identity: str, file: str, source: BinaryIO, beginning: bytes) -> Iterator[Iterator[bytes]]:
    """Yield the decrypted pieces of a file, none of them empty, while `age` runs inside this context.

    ``beginning``: what has already been read from ``source``, which must be a file of the operating system if that is
    nothing. The iterator raises UnusableBody if the identity is wrong, or the file was changed or is incomplete; the
    pieces before are then not the whole file.
    """
    args = ["-d", "-i", str(Path(identity).absolute())]  # "-" would be standard input.
    stdin = subprocess.PIPE if beginning else source
    with _started(args, f"cannot decrypt {file}", stdin=stdin, stdout=subprocess.PIPE) as process:
        if beginning:
            process.start_copying(source, beginning)
        yield process.read_all()


class _Process:
    def __init__(self, process: subprocess.Popen[bytes], log: IO[bytes], problem: str) -> None:
        """``log``: the standard error of the process. ``problem``: the beginning of messages."""
        self._process = process
        self._log = log
        self._problem = problem
        self._is_copying = False

    def write(self, piece: bytes) -> None:
        assert self._process.stdin is not None
        descriptor, rest = self._process.stdin.fileno(), memoryview(piece)
        while rest:
            self._wait_until_ready(descriptor, selectors.EVENT_WRITE)
            try:
                rest = rest[os.write(descriptor, rest) :]
            except BlockingIOError:
                continue
            except OSError:
                self._require_success()
                raise self._create_failure("age has ended too early") from None

    def finish(self) -> None:
        if self._process.stdin is not None:
            self._process.stdin.close()
        self._require_success()

    def read_all(self) -> Iterator[bytes]:
        assert self._process.stdout is not None
        descriptor = self._process.stdout.fileno()
        while True:
            self._wait_until_ready(descriptor, selectors.EVENT_READ)
            piece = os.read(descriptor, _PIECE_BYTES)
            if not piece:
                self._require_success()
                return
            yield piece

    def start_copying(self, source: BinaryIO, beginning: bytes) -> None:
        """Pass ``beginning`` and the rest of ``source`` to the process in another thread."""
        stdin = self._process.stdin
        assert stdin is not None
        os.set_blocking(stdin.fileno(), True)
        self._is_copying = True

        def copy() -> None:
            # If something fails here, the encrypted file is incomplete, which `age` detects.
            with contextlib.suppress(OSError, ValueError), stdin:
                stdin.write(beginning)
                while piece := source.read(_PIECE_BYTES):
                    stdin.write(piece)

        threading.Thread(target=copy, daemon=True).start()

    def stop(self) -> None:
        if self._process.poll() is None:
            self._process.kill()
            with contextlib.suppress(subprocess.TimeoutExpired):
                self._process.wait(_STALLED_SECONDS)
        if self._process.stdin is not None and not self._is_copying:
            self._process.stdin.close()
        if self._process.stdout is not None:
            self._process.stdout.close()

    def _wait_until_ready(self, descriptor: int, event: int) -> None:
        with selectors.DefaultSelector() as selector:
            selector.register(descriptor, event)
            if not selector.select(_STALLED_SECONDS):
                raise self._create_failure(f"age has done nothing for {_STALLED_SECONDS:g} seconds")

    def _require_success(self) -> None:
        try:
            code = self._process.wait(_STALLED_SECONDS)
        except subprocess.TimeoutExpired:
            raise self._create_failure(f"age has not ended after {_STALLED_SECONDS:g} seconds") from None
        if code:
            raise self._create_failure(self._read_reason() or f"age failed with status {code}")

    def _read_reason(self) -> str:
        """Return the last error message of `age`."""
        self._log.seek(max(0, self._log.seek(0, os.SEEK_END) - _MAX_LOG_BYTES))
        lines = remove_control_characters(self._log.read().decode(errors="replace")).splitlines()
        lines = [each for each in lines if each.strip() and not each.startswith("age: report ")]
        errors = [each for each in lines if each.startswith("age: error: ")] or lines
        return errors[-1].removeprefix("age: error: ")[:_MAX_REASON_LENGTH] if errors else ""

    def _create_failure(self, reason: str) -> Failure:
        message = f"{self._problem}: {reason}"
        if self._process.stdout is None:
            return Failure(message, ExitCode.FAILED, "check the recipients, and the free space")
        return UnusableBody(message, ExitCode.FAILED, "check the identity; if it is the right one, copy the file again")


@contextlib.contextmanager
def _started(args: Sequence[str], problem: str, *, stdin: int | BinaryIO, stdout: int) -> Iterator[_Process]:
    """Run `age` inside this context. Raises Failure if it is not installed."""
    with tempfile.TemporaryFile() as log:
        try:
            child = subprocess.Popen(["age", *args], stdin=stdin, stdout=stdout, stderr=log)
        except FileNotFoundError:
            raise Failure(
                f"{problem}: the program age is not installed", ExitCode.FAILED, "install the package age"
            ) from None
        except OSError as error:
            raise Failure(f"{problem}: cannot start age: {error.strerror or error}") from None
        process = _Process(child, log, problem)
        try:
            if child.stdin is not None:
                os.set_blocking(child.stdin.fileno(), False)
            yield process
        finally:
            process.stop()
