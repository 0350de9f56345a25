"""Who this sandbox is: after a fork siblings share everything, and must differ.

Nothing is written to the disk, which a fork shares with its snapshot until it diverges: the files that carry the
identity live in /run and are mounted over those in /etc.
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

from sandbox_agent import system
from sandbox_agent.failure import Failure, invalid
from sandbox_agent.line import ASK, TOLD_WITHIN
from sandbox_agent.message import decoded, number, variables
from sandbox_agent.wire import Gone, parse_object

TYPE_CHECKING = False
if TYPE_CHECKING:
    from collections.abc import Callable
    from typing import Any

    from sandbox_agent.line import Line
    from sandbox_agent.wire import Reply, Request

RUN = "/run/sandbox"
FILES = ("hostname", "machine-id", "resolv.conf")
MIN_ENTROPY = 32
MAX_ENTROPY = 512
_KEPT = "agent.json"
_KEY = "gateway-key"
_UNMANAGED = "the agent does not manage this machine"


class Identity:
    """``managed``: whether the machine's own name, clock and files are the agent's to set."""

    def __init__(self, *, managed: bool = True, run: str = RUN, etc: str = "/etc") -> None:
        self._managed = managed
        self._run = run
        self._etc = etc
        self._lock = threading.Lock()
        self._token = b""
        self._gateway = ""
        self._key = b""
        self._env: dict[str, str] = {}
        self._sandbox_id = ""
        self._start = os.urandom(16).hex()
        self._mounted: dict[str, str] = {}

    def open(self) -> list[str]:
        """Mount the files of /run over those of /etc, contents unchanged; returns what could not be, and why."""
        self._key = self._read_key()
        for name in FILES:
            self._mounted[name] = self._mount(name)
        if self._volatile():
            self._recall()
        return [f"{name}: {reason}" for name, reason in self._mounted.items() if reason]

    def _mount(self, name: str) -> str:
        """Why it could not be mounted; "" where it is."""
        if not self._managed:
            return _UNMANAGED
        if not system.LINUX:
            return "no bind mounts on this system"
        if not self._volatile():
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

    # -- what others ask ---------------------------------------------------------------------------------------------

    def environment(self) -> dict[str, str]:
        """Variables that every process gets."""
        known = {"E2B_SANDBOX": "true", "E2B_SANDBOX_ID": self._sandbox_id} if self._sandbox_id else {}
        return {**known, **self._env}

    def guard(self, request: Request) -> None:
        """Raises Failure unless the request carries the access token, once there is one.

        A request that comes while the identity is being changed waits for that.
        """
        with self._lock:
            pass
        self._require_token()
        if self._token and not _same(self._token, request.headers.get("x-access-token", "")):
            raise Failure("unauthenticated", "the X-Access-Token header is missing or wrong")

    def guard_code(self, request: Request) -> None:
        """As ``guard``, on the code interpreter's port: there a token of its own will do, which is good for no other.

        While no agent runs, any program of the sandbox can take that port, and is sent what was meant for the agent.
        """
        with self._lock:
            pass
        self._require_token()
        given = request.headers.get("x-access-token", "")
        if self._token and not (_same(_code_token(self._token), given) or _same(self._token, given)):
            raise Failure("unauthenticated", "the X-Access-Token header is missing or wrong")

    def guard_for_gateway(self, request: Request) -> None:
        """Raises Failure unless the request is the gateway's, or carries the access token, which there must be then."""
        if self._is_gateway(request):
            with self._lock:
                return
        if not self._token:
            raise Failure("permission_denied", "only the gateway may ask for this")
        self.guard(request)

    def _is_gateway(self, request: Request) -> bool:
        """Whether the gateway asks: it has the key, or, where there is none, the address of the host."""
        if self._key:
            return _same(self._key, request.headers.get("x-gateway-key", ""))
        return request.peer == self._gateway_address()

    def _require_token(self) -> None:
        """Where a key says who the gateway is, nobody is obeyed before the gateway has set the access token."""
        if self._key and not self._token:
            raise Failure("unauthenticated", "the gateway has not set the access token of this sandbox yet")

    def _read_key(self) -> bytes:
        """What the host put there where every user of it has the gateway's address: see jail_zfs."""
        try:
            with open(os.path.join(self._run, _KEY), "rb") as file:
                return file.read().strip()
        except OSError:
            return b""

    # -- /identity ---------------------------------------------------------------------------------------------------

    def handle(self, request: Request, reply: Reply) -> None:
        """``{sandboxID, hostname, machineID, time, entropy, accessToken, env, dns, growDisk, wait}``, all optional.

        → ``{hostname, machineID, bootID, skipped}``. An absent field leaves its matter as it is. What the system would
        not do is listed in ``skipped`` as "step: why". With ``wait: false`` the answer is ``{accepted: true}``, before
        the steps are done; requests that follow wait for them.
        """
        if (self._key or self._token) and not self._is_gateway(request):
            self.guard(request)
        received = time.monotonic()
        message = request.json()
        with self._lock:
            steps = self._steps(message, received)
            if message.get("wait") is False:
                with suppress(Gone):  # whoever asked may be dead by now: it is done all the same
                    reply.json({"accepted": True})
            skipped = self._take(steps, message)
        if message.get("wait") is False:
            return
        reply.json(
            {
                "hostname": socket.gethostname(),
                "machineID": self._machine_id(),
                "bootID": system.boot_id() or self._start,
                "skipped": skipped,
            }
        )

    def listen(self, line: Line) -> None:
        """Serve the line to the host, for ever: answer who asks, then become what it says.

        The answer is sent before anything else is done. Requests that come in from then on wait until it is known
        who this is, and done; the host says nothing that would be refused.
        """
        while True:
            frame = line.read()
            if frame[:1] != ASK:
                continue  # What was said to the machine this one was forked from.
            with self._lock:
                while frame[:1] == ASK:
                    line.write(frame)
                    frame = line.read(TOLD_WITHIN)
                received = time.monotonic()
                try:
                    message = parse_object(frame[1:])
                    self._take(self._steps(message, received), message)
                except Exception as error:  # The line, and this thread, are there for the next fork too.
                    print(f"sandbox-agent: identity: {error}", file=sys.stderr)

    def _take(self, steps: list[tuple[str, Callable[[], None]]], message: dict[str, Any]) -> list[str]:
        """Become what the checked ``message`` says; returns what was skipped, and why."""
        # A machine whose /run is on its disk was not built as a sandbox: leave it as it is.
        ours = self._managed and (self._volatile() or not system.LINUX)
        skipped = [reason for reason in (_attempt(name, step, ours) for name, step in steps) if reason]
        self._adopt(message)
        self._gateway_address()
        if ours:
            system.heed_generation()
        return skipped

    def _gateway_address(self) -> str:
        """Looked up when there is time for it: the first request after a fork is the one that matters."""
        self._gateway = self._gateway or system.gateway_address()
        return self._gateway

    def _steps(self, message: dict[str, Any], received: float) -> list[tuple[str, Callable[[], None]]]:
        """What is to be done to the machine, all of it checked before any of it is done.

        ``received``: when, on the monotonic clock, the time in ``message`` was right.
        """
        steps: list[tuple[str, Callable[[], None]]] = []
        entropy = decoded(message, "entropy")
        if entropy:
            if not MIN_ENTROPY <= len(entropy) <= MAX_ENTROPY:
                raise invalid(f"entropy must be {MIN_ENTROPY} to {MAX_ENTROPY} bytes")
            steps.append(("entropy", lambda: system.add_entropy(entropy)))
        now = number(message, "time", default=0, most=1 << 33)
        if now:
            steps.append(("time", lambda: system.set_clock(now + time.monotonic() - received)))
        hostname = _checked(message, "hostname", string.ascii_letters + string.digits + "-.", 64)
        if hostname:
            steps.append(("hostname", lambda: socket.sethostname(hostname)))
            steps.append(("hostname file", lambda: self._write("hostname", hostname + "\n")))
        machine_id = _checked(message, "machineID", string.hexdigits, 32)
        if machine_id:
            if len(machine_id) != 32:
                raise invalid("machineID must be 32 hexadecimal digits")
            steps.append(("machine-id", lambda: self._write("machine-id", machine_id.lower() + "\n")))
        resolvers = _addresses(message.get("dns"))
        if resolvers:
            text = "".join(f"nameserver {address}\n" for address in resolvers)
            steps.append(("resolv.conf", lambda: self._write("resolv.conf", text)))
        if message.get("growDisk"):
            steps.append(("growDisk", system.grow))
        variables(message, "env")
        _checked(message, "accessToken", string.printable[:95], 1024)
        _checked(message, "sandboxID", string.ascii_letters + string.digits + "-_.", 64)
        return steps

    def _adopt(self, message: dict[str, Any]) -> None:
        """Take over what concerns the agent alone, and keep it for an agent that is started anew."""
        if message.get("accessToken") is not None:
            self._token = message["accessToken"].encode()
        if message.get("sandboxID"):
            self._sandbox_id = message["sandboxID"]
        if message.get("env") is not None:
            self._env = variables(message, "env")
        if self._volatile():
            kept = {"accessToken": self._token.decode(), "sandboxID": self._sandbox_id, "env": self._env}
            _overwrite(os.path.join(self._run, _KEPT), json.dumps(kept).encode(), mode=0o600)

    def _recall(self) -> None:
        """Take over what an agent before this one kept: a sandbox must not lose its token with its agent."""
        try:
            with open(os.path.join(self._run, _KEPT), "rb") as file:
                kept = json.load(file)
            self._token = kept["accessToken"].encode()
            self._sandbox_id = kept["sandboxID"]
            self._env = kept["env"]
        except FileNotFoundError:
            pass

    def _volatile(self) -> bool:
        """Whether the directory may be written to: it is the agent's, and not on the disk."""
        return self._managed and os.path.ismount(os.path.dirname(self._run))

    def _write(self, name: str, content: str) -> None:
        reason = self._mounted.get(name, "not mounted")
        if reason:
            raise OSError(0, reason)
        _overwrite(os.path.join(self._run, name), content.encode())

    def _machine_id(self) -> str:
        try:
            with open(os.path.join(self._etc, "machine-id")) as file:
                return file.read().strip()
        except OSError:
            return ""


def _attempt(name: str, step: Callable[[], None], managed: bool) -> str:
    """Why a step was skipped; "" where it was done."""
    if not managed:
        return f"{name}: {_UNMANAGED}"
    try:
        step()
    except Exception as error:
        return f"{name}: {getattr(error, 'strerror', None) or error or type(error).__name__}"
    return ""


def _overwrite(path: str, content: bytes, mode: int = 0o644) -> None:
    """Replace a file's content in place: the mount is of this very file. No reader finds it empty."""
    fd = os.open(path, os.O_WRONLY | os.O_CREAT, mode)
    try:
        os.pwrite(fd, content, 0)
        os.ftruncate(fd, len(content))
    finally:
        os.close(fd)


def _code_token(token: bytes) -> bytes:
    from hashlib import sha256

    return sha256(b"code " + token).hexdigest().encode()


def _same(expected: bytes, given: str) -> bool:
    from hmac import compare_digest

    return compare_digest(expected, given.encode("latin-1"))


def _checked(message: dict[str, Any], key: str, letters: str, most: int) -> str:
    value = message.get(key)
    if value is None:
        return ""
    if not isinstance(value, str) or len(value) > most or not set(value) <= set(letters):
        raise invalid(f"{key} is not allowed: at most {most} characters of {letters!r}")
    return value


def _addresses(value: Any) -> list[str]:
    if value is None:
        return []
    if not isinstance(value, list):
        raise invalid("dns must be a list of addresses")
    for address in value:
        for family in (socket.AF_INET, socket.AF_INET6):
            try:
                socket.inet_pton(family, address)
                break
            except (OSError, TypeError, ValueError):
                continue
        else:
            raise invalid(f"dns: {address!r} is not an address")
    return value
