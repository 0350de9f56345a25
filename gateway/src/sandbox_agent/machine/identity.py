"""Set the identity of this sandbox. Forks of a snapshot are identical until each receives its own identity.

The identity files are in /run and are bind-mounted over the files in /etc. Nothing is written to the disk, so a new
fork does not diverge from its snapshot.
"""

from __future__ import annotations

import json
import os
import socket
import string
import sys
import threading
import time
from contextlib import suppress

from sandbox_agent.failure import Failure, invalid_argument
from sandbox_agent.http.message import get_bytes, get_number, get_variables
from sandbox_agent.http.wire import ConnectionLost, parse_object
from sandbox_agent.machine import system
from sandbox_agent.machine.line import PROBE, REPLY_TIMEOUT_SECONDS

TYPE_CHECKING = False
if TYPE_CHECKING:
    from collections.abc import Callable
    from typing import Any

    from sandbox_agent.http.wire import Reply, Request
    from sandbox_agent.machine.line import SerialPort

RUN_DIRECTORY = "/run/sandbox"
IDENTITY_FILE_NAMES = ("hostname", "machine-id", "resolv.conf")
MIN_ENTROPY_BYTES = 32
MAX_ENTROPY_BYTES = 512
_STATE_FILE_NAME = "agent.json"
_KEY_FILE_NAME = "gateway-key"
_UNMANAGED_REASON = "the agent does not manage this machine"


class Identity:
    """The sandbox's identity. ``managed``: whether the agent may set the machine's name, clock and files."""

    def __init__(self, *, managed: bool = True, run: str = RUN_DIRECTORY, etc: str = "/etc") -> None:
        self._managed = managed
        self._run = run
        self._etc = etc
        self._lock = threading.Lock()
        self._token = b""
        self._gateway = ""
        self._key = b""
        self._env: dict[str, str] = {}
        self._sandbox_id = ""
        self._start_id = os.urandom(16).hex()
        self._mount_failures: dict[str, str] = {}

    def mount_files(self) -> list[str]:
        """Mount copies in /run over the files in /etc. Returns "name: reason" for each file that cannot be mounted."""
        self._key = self._read_key()
        for name in IDENTITY_FILE_NAMES:
            self._mount_failures[name] = self._mount_file(name)
        if self._has_volatile_run_directory():
            self._restore_values()
        return [f"{name}: {reason}" for name, reason in self._mount_failures.items() if reason]

    def _mount_file(self, name: str) -> str:
        """Mount one file. Returns the reason if this fails, "" otherwise."""
        if not self._managed:
            return _UNMANAGED_REASON
        if not system.IS_LINUX:
            return "this system has no bind mounts"
        if not self._has_volatile_run_directory():
            return f"{os.path.dirname(self._run)} is on the disk"
        source, target = os.path.join(self._run, name), os.path.join(self._etc, name)
        try:
            os.makedirs(self._run, mode=0o755, exist_ok=True)
            if not (os.path.exists(source) and os.path.samefile(source, target)):
                with open(target, "rb") as file:
                    _overwrite(source, file.read())
                system.bind_mount(source, target)
        except OSError as error:
            return str(error)
        return ""

    # -- requests ----------------------------------------------------------------------------------------------------

    def environment(self) -> dict[str, str]:
        """Return the environment variables that every process receives."""
        variables = {"E2B_SANDBOX": "true", "E2B_SANDBOX_ID": self._sandbox_id} if self._sandbox_id else {}
        return {**variables, **self._env}

    def guard(self, request: Request) -> None:
        """Raise Failure if an access token is set and the request does not carry it.

        First waits until any change to the identity is complete.
        """
        with self._lock:
            pass
        self._require_token()
        if self._token and not _is_equal(self._token, request.headers.get("x-access-token", "")):
            raise Failure(
                "unauthenticated", "the X-Access-Token header is missing or wrong: send the access token of the sandbox"
            )

    def guard_code_port(self, request: Request) -> None:
        """Do the same as ``guard``, but also accept the token that is valid only on the port of the code interpreter.

        The separate token is needed because any program in the sandbox can listen on this port while the agent is not
        running, and would then receive the tokens that clients send.
        """
        with self._lock:
            pass
        self._require_token()
        token = request.headers.get("x-access-token", "")
        if self._token and not (_is_equal(_derive_code_token(self._token), token) or _is_equal(self._token, token)):
            raise Failure(
                "unauthenticated", "the X-Access-Token header is missing or wrong: send the access token of the sandbox"
            )

    def require_gateway_or_token(self, request: Request) -> None:
        """Raise Failure if the request neither comes from the gateway nor carries the access token."""
        if self._is_from_gateway(request):
            with self._lock:
                return
        if not self._token:
            raise Failure("permission_denied", "only the gateway may send this request")
        self.guard(request)

    def _is_from_gateway(self, request: Request) -> bool:
        """Return whether the gateway sent the request.

        If there is a gateway key, the request must carry it. Otherwise, the request must come from the host's address.
        """
        if self._key:
            return _is_equal(self._key, request.headers.get("x-gateway-key", ""))
        return request.peer == self._find_gateway_address()

    def _require_token(self) -> None:
        """Raise Failure if the sandbox has a gateway key but no access token yet."""
        if self._key and not self._token:
            raise Failure(
                "unauthenticated", "the gateway has not set the access token of this sandbox yet: try again later"
            )

    def _read_key(self) -> bytes:
        """Return the gateway key; b"" if there is none.

        Only hosts whose users share the address of the gateway provide a key (see jail_zfs).
        """
        try:
            with open(os.path.join(self._run, _KEY_FILE_NAME), "rb") as file:
                return file.read().strip()
        except OSError:
            return b""

    # -- /identity ---------------------------------------------------------------------------------------------------

    def handle(self, request: Request, reply: Reply) -> None:
        """Set the identity of the sandbox.

        ``{sandboxID, hostname, machineID, time, entropy, accessToken, env, dns, growDisk, wait}``, all optional, →
        ``{hostname, machineID, bootID, skipped}``. An absent field changes nothing. ``skipped`` lists the steps that
        failed, as "step: reason". With ``wait: false``, the response ``{accepted: true}`` is sent before the steps run,
        and later requests wait until the steps are complete.
        """
        if (self._key or self._token) and not self._is_from_gateway(request):
            self.guard(request)
        received_at = time.monotonic()
        message = request.json()
        with self._lock:
            steps = self._plan_steps(message, received_at)
            if message.get("wait") is False:
                with suppress(ConnectionLost):  # run the steps even if the client hung up
                    reply.json({"accepted": True})
            skipped = self._apply_steps(steps, message)
        if message.get("wait") is False:
            return
        reply.json(
            {
                "hostname": socket.gethostname(),
                "machineID": self._read_machine_id(),
                "bootID": system.read_boot_id() or self._start_id,
                "skipped": skipped,
            }
        )

    def serve_serial_port(self, line: SerialPort) -> None:
        """Serve the serial port forever: answer each probe of the host, then apply the identity that the host sends.

        After the answer, HTTP requests wait until the identity is set. The host sends only valid identities.
        """
        while True:
            frame = line.read()
            if frame[:1] != PROBE:
                continue  # The frame was for the machine from which this one was forked.
            with self._lock:
                while frame[:1] == PROBE:
                    line.write(frame)
                    frame = line.read(REPLY_TIMEOUT_SECONDS)
                received_at = time.monotonic()
                try:
                    message = parse_object(frame[1:])
                    self._apply_steps(self._plan_steps(message, received_at), message)
                except Exception as error:  # The next fork also needs this thread.
                    print(f"sandbox-agent: identity: {error}", file=sys.stderr)

    def _apply_steps(self, steps: list[tuple[str, Callable[[], None]]], message: dict[str, Any]) -> list[str]:
        """Run the steps and store the values of ``message``. Returns "step: reason" for each step that failed."""
        # A machine whose /run is on disk is not a sandbox: do not change it.
        is_sandbox = self._managed and (self._has_volatile_run_directory() or not system.IS_LINUX)
        skipped = [reason for reason in (_run_step(name, step, is_sandbox) for name, step in steps) if reason]
        self._store_values(message)
        self._find_gateway_address()
        if is_sandbox:
            system.set_generation_interrupt()
        return skipped

    def _find_gateway_address(self) -> str:
        """Return the host's address, which is cached because the first request after a fork must be fast."""
        self._gateway = self._gateway or system.find_gateway_address()
        return self._gateway

    def _plan_steps(self, message: dict[str, Any], received_at: float) -> list[tuple[str, Callable[[], None]]]:
        """Check the whole ``message``, and return the steps that apply it to the machine.

        ``received_at``: the time on the monotonic clock at which the ``time`` in ``message`` was correct.
        """
        steps: list[tuple[str, Callable[[], None]]] = []
        entropy = get_bytes(message, "entropy")
        if entropy:
            if not MIN_ENTROPY_BYTES <= len(entropy) <= MAX_ENTROPY_BYTES:
                raise invalid_argument(
                    f"the field 'entropy' must be {MIN_ENTROPY_BYTES} to {MAX_ENTROPY_BYTES} bytes long"
                )
            steps.append(("entropy", lambda: system.add_entropy(entropy)))
        current_time = get_number(message, "time", default=0, maximum=1 << 33)
        if current_time:
            steps.append(("time", lambda: system.set_clock(current_time + time.monotonic() - received_at)))
        hostname = _check_text(message, "hostname", string.ascii_letters + string.digits + "-.", 64)
        if hostname:
            steps.append(("hostname", lambda: socket.sethostname(hostname)))
            steps.append(("hostname file", lambda: self._write_file("hostname", hostname + "\n")))
        machine_id = _check_text(message, "machineID", string.hexdigits, 32)
        if machine_id:
            if len(machine_id) != 32:
                raise invalid_argument("the field 'machineID' must consist of 32 hexadecimal digits")
            steps.append(("machine-id", lambda: self._write_file("machine-id", machine_id.lower() + "\n")))
        resolvers = _check_addresses(message.get("dns"))
        if resolvers:
            resolv_conf = "".join(f"nameserver {address}\n" for address in resolvers)
            steps.append(("resolv.conf", lambda: self._write_file("resolv.conf", resolv_conf)))
        if message.get("growDisk"):
            steps.append(("growDisk", system.grow_file_system))
        get_variables(message, "env")
        _check_text(message, "accessToken", string.printable[:95], 1024)
        _check_text(message, "sandboxID", string.ascii_letters + string.digits + "-_.", 64)
        return steps

    def _store_values(self, message: dict[str, Any]) -> None:
        """Set the agent's token, id and variables, and save them so that they survive a restart of the agent."""
        if message.get("accessToken") is not None:
            self._token = message["accessToken"].encode()
        if message.get("sandboxID"):
            self._sandbox_id = message["sandboxID"]
        if message.get("env") is not None:
            self._env = get_variables(message, "env")
        if self._has_volatile_run_directory():
            state = {"accessToken": self._token.decode(), "sandboxID": self._sandbox_id, "env": self._env}
            _overwrite(os.path.join(self._run, _STATE_FILE_NAME), json.dumps(state).encode(), mode=0o600)

    def _restore_values(self) -> None:
        """Load the values that a previous agent saved, because a sandbox keeps its token when its agent restarts."""
        try:
            with open(os.path.join(self._run, _STATE_FILE_NAME), "rb") as file:
                state = json.load(file)
            self._token = state["accessToken"].encode()
            self._sandbox_id = state["sandboxID"]
            self._env = state["env"]
        except FileNotFoundError:
            pass

    def _has_volatile_run_directory(self) -> bool:
        """Return whether the agent may write to its run directory, which must be in memory, not on the disk."""
        return self._managed and os.path.ismount(os.path.dirname(self._run))

    def _write_file(self, name: str, contents: str) -> None:
        reason = self._mount_failures.get(name, "not mounted")
        if reason:
            raise OSError(0, reason)
        _overwrite(os.path.join(self._run, name), contents.encode())

    def _read_machine_id(self) -> str:
        try:
            with open(os.path.join(self._etc, "machine-id")) as file:
                return file.read().strip()
        except OSError:
            return ""


def _run_step(name: str, step: Callable[[], None], managed: bool) -> str:
    """Run a step. Returns "name: reason" if it fails or is skipped, "" otherwise."""
    if not managed:
        return f"{name}: {_UNMANAGED_REASON}"
    try:
        step()
    except Exception as error:
        return f"{name}: {getattr(error, 'strerror', None) or error or type(error).__name__}"
    return ""


def _overwrite(path: str, contents: bytes, mode: int = 0o644) -> None:
    """Replace the contents of a file in place, because its inode is mounted. Readers never see an empty file."""
    fd = os.open(path, os.O_WRONLY | os.O_CREAT, mode)
    try:
        os.pwrite(fd, contents, 0)
        os.ftruncate(fd, len(contents))
    finally:
        os.close(fd)


def _derive_code_token(token: bytes) -> bytes:
    from hashlib import sha256

    return sha256(b"code " + token).hexdigest().encode()


def _is_equal(expected_token: bytes, token: str) -> bool:
    from hmac import compare_digest

    return compare_digest(expected_token, token.encode("latin-1"))


def _check_text(message: dict[str, Any], key: str, alphabet: str, max_length: int) -> str:
    value = message.get(key)
    if value is None:
        return ""
    if not isinstance(value, str) or len(value) > max_length or not set(value) <= set(alphabet):
        raise invalid_argument(f"the field '{key}' is not valid: use at most {max_length} characters from {alphabet!r}")
    return value


def _check_addresses(value: Any) -> list[str]:
    if value is None:
        return []
    if not isinstance(value, list):
        raise invalid_argument("the field 'dns' must be a list of IP addresses")
    for address in value:
        for family in (socket.AF_INET, socket.AF_INET6):
            try:
                socket.inet_pton(family, address)
                break
            except (OSError, TypeError, ValueError):
                continue
        else:
            raise invalid_argument(f"the field 'dns' contains {address!r}, which is not an IP address")
    return value
