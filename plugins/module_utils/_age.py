# Copyright (c) 2026, The grove.sandbox authors
# GNU General Public License v3.0+ (see COPYING or https://www.gnu.org/licenses/gpl-3.0.txt)
# SPDX-License-Identifier: GPL-3.0-or-later

"""Encrypt and decrypt exported files with the program `age`."""

from __future__ import annotations

import contextlib
import os
import re
import selectors
import subprocess
import tempfile
from collections.abc import Iterable, Iterator, Sequence
from pathlib import Path
from typing import IO, Any

from ansible_collections.grove.sandbox.plugins.module_utils._failure import (
    Failure,
    UnusableBody,
    make_printable,
)

_BEGINNINGS = (b"age-encryption.org/v1", b"-----BEGIN AGE ENCRYPTED FILE-----")
BEGINNING_BYTES = max(map(len, _BEGINNINGS))
_RECIPIENT_PATTERN = re.compile(r"age1[0-9a-z]{1,2000}|ssh-(ed25519|rsa) [0-9A-Za-z+/=]{1,4000}( [^\x00-\x1f\x7f]*)?")
_SECRET_PREFIX = "AGE-SECRET-KEY-"
_PIECE_BYTES = 256 << 10
_MAX_LOG_BYTES = 4096
_MAX_REASON_LENGTH = 300


def parse_recipients(option: Iterable[str] | None) -> tuple[str, ...]:
    """Return the recipients sorted, without repetitions, and without the comments of SSH keys. Raises Failure."""
    if option is None:
        return ()
    recipients = set()
    for each in map(str.strip, option):
        if contains_secret_key(each):
            raise Failure(
                "age_recipients contains a secret key: list its public key, which `age-keygen -y FILE` prints"
            )
        if not _RECIPIENT_PATTERN.fullmatch(each):
            raise Failure(
                f"age_recipients contains {each[:100]!r}, which is not a recipient: list keys that begin with age1, or "
                "SSH public keys of the type ssh-ed25519 or ssh-rsa"
            )
        recipients.add(" ".join(each.split(" ")[:2]))
    if not recipients:
        raise Failure("age_recipients is empty: list at least one recipient, or omit it to export without encryption")
    return tuple(sorted(recipients))


def parse_identity(option: str | None) -> str:
    """Return the path of the file with the key, or "". Raises Failure if the option contains a key."""
    if contains_secret_key(option):
        raise Failure(
            "age_identity contains a secret key: set it to the path of the file that contains the key, and replace the "
            "key, because other users of the host may have seen it"
        )
    return option or ""


def contains_secret_key(option: Any) -> bool:
    """Return whether the value of an option contains a secret key of age."""
    return _SECRET_PREFIX in str(option)


def is_encrypted(beginning: bytes) -> bool:
    """Return whether a file with this beginning was encrypted with age."""
    return beginning.startswith(_BEGINNINGS)


def check_recipients(recipients: Sequence[str], timeout: float) -> None:
    """Let `age` encrypt nothing for the recipients. Raises Failure if it refuses one of them, or is not installed."""
    with _started(_build_options(recipients), "age_recipients cannot be used", timeout, subprocess.DEVNULL) as process:
        process.finish()


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
def encryption_started(recipients: Sequence[str], path: str, descriptor: int, timeout: float) -> Iterator[Encryption]:
    """Run `age` inside this context. It writes to ``descriptor``, which belongs to ``path``. Raises Failure.

    ``timeout``: how many seconds it may take for each step.
    """
    with _started(_build_options(recipients), f"{path} cannot be encrypted", timeout, descriptor) as process:
        yield Encryption(process)


def decrypt(path: str, identity: str, timeout: float) -> Iterator[bytes]:
    """Yield the decrypted pieces of a file, none of them empty. Raises OSError if the file cannot be opened.

    Raises UnusableBody, perhaps after the last piece, if the identity is wrong, or the file was changed or is
    incomplete. ``timeout``: how many seconds `age` may take for each step.
    """
    options = ["-d", "-i", str(Path(identity).absolute())]  # "-" would be standard input.
    with Path(path).open("rb") as file, _started(
        options, f"{path} cannot be decrypted", timeout, subprocess.PIPE, file
    ) as process:
        yield from process.read_all()


def _build_options(recipients: Sequence[str]) -> list[str]:
    return [option for each in recipients for option in ("-r", each)]


class _Process:
    def __init__(self, process: subprocess.Popen[bytes], log: IO[bytes], problem: str, timeout: float) -> None:
        """``log``: the standard error of the process. ``problem``: the beginning of messages."""
        self._process = process
        self._log = log
        self._problem = problem
        self._timeout = timeout

    def write(self, piece: bytes) -> None:
        descriptor, rest = _get_descriptor(self._process.stdin), memoryview(piece)
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
        descriptor = _get_descriptor(self._process.stdout)
        while True:
            self._wait_until_ready(descriptor, selectors.EVENT_READ)
            piece = os.read(descriptor, _PIECE_BYTES)
            if not piece:
                self._require_success()
                return
            yield piece

    def stop(self) -> None:
        if self._process.poll() is None:
            self._process.kill()
            with contextlib.suppress(subprocess.TimeoutExpired):
                self._process.wait(self._timeout)
        for stream in (self._process.stdin, self._process.stdout):
            if stream is not None:
                stream.close()

    def _wait_until_ready(self, descriptor: int, event: int) -> None:
        with selectors.DefaultSelector() as selector:
            selector.register(descriptor, event)
            if not selector.select(self._timeout):
                raise self._create_failure(f"age has done nothing for {self._timeout:g} seconds", "timeout")

    def _require_success(self) -> None:
        try:
            code = self._process.wait(self._timeout)
        except subprocess.TimeoutExpired:
            raise self._create_failure(f"age has not ended after {self._timeout:g} seconds", "timeout") from None
        if code:
            raise self._create_failure(self._read_reason() or f"age failed with status {code}")

    def _read_reason(self) -> str:
        """Return the last error message of `age`."""
        self._log.seek(max(0, self._log.seek(0, os.SEEK_END) - _MAX_LOG_BYTES))
        lines = make_printable(self._log.read().decode(errors="replace")).splitlines()
        lines = [each for each in lines if each.strip() and not each.startswith("age: report ")]
        prefix = "age: error: "
        errors = [each[len(prefix) :] for each in lines if each.startswith(prefix)] or lines
        return errors[-1][:_MAX_REASON_LENGTH] if errors else ""

    def _create_failure(self, reason: str, kind: str = "invalid") -> Failure:
        message = f"{self._problem} ({reason})"
        if self._process.stdout is None:
            return Failure(f"{message}: correct age_recipients, and check the free space", kind)
        return UnusableBody(f"{message}: check age_identity; if it is the right one, copy the file again", kind)


def _get_descriptor(pipe: IO[bytes] | None) -> int:
    if pipe is None:
        raise ValueError("age was started without this pipe")
    return pipe.fileno()


@contextlib.contextmanager
def _started(
    options: Sequence[str], problem: str, timeout: float, stdout: int, stdin: Any = subprocess.PIPE
) -> Iterator[_Process]:
    """Run `age` inside this context, in a session of its own, so that it cannot ask for a passphrase.

    Raises Failure if it is not installed.
    """
    with tempfile.TemporaryFile() as log:
        try:
            child = subprocess.Popen(["age", *options], stdin=stdin, stdout=stdout, stderr=log, start_new_session=True)
        except FileNotFoundError:
            raise Failure(
                f"{problem}, because the program age is not installed: install the package age on the host where the "
                "module runs",
                "unsupported",
            ) from None
        except OSError as error:
            raise Failure(f"{problem}, because age cannot be started: {error.strerror or error}") from None
        process = _Process(child, log, problem, timeout)
        try:
            if child.stdin is not None:
                os.set_blocking(child.stdin.fileno(), False)
            yield process
        finally:
            process.stop()
