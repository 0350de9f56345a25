"""The entry point of the agent, with its command-line options, routes and listeners."""

from __future__ import annotations

import argparse
import os
import signal
import sys
import threading

from sandbox_agent.files import contents, filesystem
from sandbox_agent.http.message import get_number
from sandbox_agent.http.server import Route, Server
from sandbox_agent.machine import system
from sandbox_agent.machine.freezer import MAX_FREEZE_SECONDS, Freezer
from sandbox_agent.machine.identity import Identity
from sandbox_agent.machine.line import SERIAL_PORT_PATH, SerialPort
from sandbox_agent.processes.execute import ExecHandler
from sandbox_agent.processes.process import ProcessTable
from sandbox_agent.processes.service import ProcessService

TYPE_CHECKING = False
if TYPE_CHECKING:
    from sandbox_agent.http.server import Handler
    from sandbox_agent.http.wire import Reply, Request
    from sandbox_agent.interpreter.service import Interpreter

PORT = 49983
CODE_PORT = 49999


class MaintenanceHandlers:
    """Handlers for health checks, and for the requests that the gateway sends during a capture.

    ``managed``: whether the agent may freeze the root file system.
    """

    def __init__(self, freezer: Freezer, *, managed: bool) -> None:
        self._freezer = freezer
        self._managed = managed

    def build_routes(self) -> dict[str, list[Route]]:
        return {
            "/health": [Route(self.health, method="GET", is_guarded=False)],
            "/sync": [Route(self.sync)],
            "/freeze": [Route(self.freeze)],
            "/thaw": [Route(self.thaw)],
        }

    def health(self, request: Request, reply: Reply) -> None:
        reply.send(204)

    def sync(self, request: Request, reply: Reply) -> None:
        os.sync()
        reply.json({})

    def freeze(self, request: Request, reply: Reply) -> None:
        """Freeze the root file system, or only sync it if it cannot be frozen.

        ``{seconds}`` → ``{frozen, skipped}``. ``skipped``: why the file system was not frozen.
        """
        seconds = get_number(request.json(), "seconds", default=10, maximum=MAX_FREEZE_SECONDS)
        try:
            if not self._managed:
                raise OSError(0, "the agent does not manage this machine")
            self._freezer.freeze(seconds)
        except OSError as error:
            os.sync()
            reply.json({"frozen": False, "skipped": [f"freeze: {error.strerror or error}"]})
        else:
            reply.json({"frozen": True, "skipped": []})

    def thaw(self, request: Request, reply: Reply) -> None:
        if self._managed:
            try:
                self._freezer.thaw()
            except OSError as error:
                reply.json({"skipped": [f"thaw: {error.strerror or error}"]})
                return
        reply.json({"skipped": []})


def make_mounts_handler(identity: Identity, *, managed: bool) -> Handler:
    """Return a handler for ``/mounts`` that imports its module on demand, because most sandboxes never use it."""

    def handle(request: Request, reply: Reply) -> None:
        from sandbox_agent.machine import mounts

        identity.require_gateway_or_token(request)
        mounts.handle(request, reply, managed=managed)

    return handle


class LazyInterpreter:
    """The code interpreter, which is imported on the first request, because most sandboxes never use it."""

    def __init__(self, identity: Identity) -> None:
        self._identity = identity
        self._lock = threading.Lock()
        self._interpreter: Interpreter | None = None

    def build_routes(self) -> dict[str, list[Route]]:
        """Return the routes on the agent's port."""
        return {"/eval": [self._make_route("evaluate")], "/contexts/{}/start": [self._make_route("start")]}

    def build_code_routes(self) -> dict[str, list[Route]]:
        """Return the routes on the port that E2B's clients use to run code."""
        return {
            "/health": [Route(lambda request, reply: reply.json("OK"), method="GET", is_guarded=False)],
            "/execute": [self._make_route("execute")],
            "/contexts": [self._make_route("list", "GET"), self._make_route("create")],
            "/contexts/{}": [self._make_route("remove", "DELETE")],
            "/contexts/{}/restart": [self._make_route("restart")],
            "/contexts/{}/start": [self._make_route("start")],
        }

    def _make_route(self, name: str, method: str = "POST") -> Route:
        def handle(request: Request, reply: Reply) -> None:
            if self._interpreter is None:
                self._load_interpreter()
            getattr(self._interpreter, name)(request, reply)

        return Route(handle, method=method)

    def _load_interpreter(self) -> None:
        from sandbox_agent.interpreter.service import Interpreter

        with self._lock:
            self._interpreter = self._interpreter or Interpreter(self._identity.environment)


def build_servers(
    address: str, port: int, code_port: int, *, managed: bool, line_path: str
) -> tuple[Server, Server | None]:
    """Create the servers of the agent and the code interpreter. The interpreter's server is None if its port is in use.

    The returned servers are already listening, and the identity files are mounted. ``line_path``: the path of the
    serial port to the host.
    """
    identity = Identity(managed=managed)
    interpreter = LazyInterpreter(identity)
    failures = identity.mount_files()
    if managed and failures:
        print(f"sandbox-agent: could not mount identity files: {'; '.join(failures)}", file=sys.stderr)
    routes = {
        "/identity": [Route(identity.handle, is_guarded=False)],
        "/mounts": [Route(make_mounts_handler(identity, managed=managed), is_guarded=False)],
        "/exec": [Route(ExecHandler(identity.environment).handle)],
        **MaintenanceHandlers(Freezer(), managed=managed).build_routes(),
        **ProcessService(ProcessTable(), identity.environment).build_routes(),
        **filesystem.build_routes(),
        **contents.build_routes(),
        **interpreter.build_routes(),
    }
    if managed and system.IS_LINUX:
        threading.Thread(target=identity.serve_serial_port, args=(SerialPort(line_path),), daemon=True).start()
    server = Server(address, port, routes, identity.guard)
    try:
        return server, Server(address, code_port, interpreter.build_code_routes(), identity.guard_code_port)
    except OSError as error:
        # A program in the sandbox that uses this port must not prevent the agent from starting.
        print(
            f"sandbox-agent: cannot listen on {address}:{code_port}, running without the code interpreter: {error}",
            file=sys.stderr,
        )
        return server, None


def main() -> int:
    parser = argparse.ArgumentParser(prog="sandbox_agent", description="Run the agent of a sandbox.")
    parser.add_argument("--port", type=int, default=PORT, help=f"TCP port to listen on (default {PORT})")
    parser.add_argument(
        "--code-port",
        type=int,
        metavar="PORT",
        help=f"TCP port of the code interpreter (default {CODE_PORT}, or a free port with --port 0)",
    )
    parser.add_argument("--bind", default="0.0.0.0", metavar="ADDR", help="address to listen on (default: all)")
    parser.add_argument(
        "--unmanaged",
        action="store_true",
        help="do not change the name, clock, /etc or root file system of this machine; for tests",
    )
    parser.add_argument("--line", default=SERIAL_PORT_PATH, help="serial port to the host (default %(default)s)")
    options = parser.parse_args()
    # Child processes inherit ignored signals. Ctrl+C must stop commands even if the agent was started with SIGINT
    # ignored.
    for interrupt in (signal.SIGINT, signal.SIGQUIT):
        if signal.getsignal(interrupt) is signal.SIG_IGN:
            signal.signal(interrupt, signal.SIG_DFL)
    code_port = options.code_port
    if code_port is None:
        code_port = CODE_PORT if options.port else 0
    try:
        server, code_server = build_servers(
            options.bind, options.port, code_port, managed=not options.unmanaged, line_path=options.line
        )
    except OSError as error:
        print(f"sandbox-agent: cannot listen on {options.bind}:{options.port}: {error}", file=sys.stderr)
        return 1
    print(f"sandbox-agent: listening on {options.bind}:{server.port}", file=sys.stderr, flush=True)
    if code_server is not None:
        threading.Thread(target=code_server.serve, daemon=True).start()
        print(
            f"sandbox-agent: code interpreter listening on {options.bind}:{code_server.port}",
            file=sys.stderr,
            flush=True,
        )
    try:
        server.serve()
    except KeyboardInterrupt:
        pass
    return 0
