"""The agent put together: options, routes, the listener."""

from __future__ import annotations

import argparse
import os
import signal
import sys
import threading

from sandbox_agent import files, filesystem, system
from sandbox_agent.execute import Execute
from sandbox_agent.freezer import MAX_SECONDS, Freezer
from sandbox_agent.identity import Identity
from sandbox_agent.line import PATH, Line
from sandbox_agent.message import number
from sandbox_agent.process import Table
from sandbox_agent.process_service import ProcessService
from sandbox_agent.server import Route, Server

TYPE_CHECKING = False
if TYPE_CHECKING:
    from sandbox_agent.interpreter import Interpreter
    from sandbox_agent.server import Handler
    from sandbox_agent.wire import Reply, Request

PORT = 49983
CODE_PORT = 49999


class Maintenance:
    """What a capture asks for. ``managed``: whether the root file system is the agent's to freeze."""

    def __init__(self, freezer: Freezer, *, managed: bool) -> None:
        self._freezer = freezer
        self._managed = managed

    def routes(self) -> dict[str, list[Route]]:
        return {
            "/health": [Route(self.health, method="GET", guarded=False)],
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
        """``{seconds}`` → ``{frozen, skipped}``: everything is written out in any case; ``skipped``: why not more."""
        seconds = number(request.json(), "seconds", default=10, most=MAX_SECONDS)
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


def mounting(identity: Identity, *, managed: bool) -> Handler:
    """The handler of ``/mounts``. What it needs is loaded by the first request: most sandboxes never get one."""

    def handle(request: Request, reply: Reply) -> None:
        from sandbox_agent import mounts

        identity.guard_for_gateway(request)
        mounts.handle(request, reply, managed=managed)

    return handle


class Interpreting:
    """The code interpreter, loaded by the first request that needs it: most sandboxes never get one."""

    def __init__(self, identity: Identity) -> None:
        self._identity = identity
        self._lock = threading.Lock()
        self._interpreter: Interpreter | None = None

    def routes(self) -> dict[str, list[Route]]:
        """Those of the agent's port."""
        return {"/eval": [self._route("evaluate")], "/contexts/{}/start": [self._route("start")]}

    def own_routes(self) -> dict[str, list[Route]]:
        """Those of the port where E2B's clients look for it."""
        return {
            "/health": [Route(lambda request, reply: reply.json("OK"), method="GET", guarded=False)],
            "/execute": [self._route("execute")],
            "/contexts": [self._route("list", "GET"), self._route("make")],
            "/contexts/{}": [self._route("remove", "DELETE")],
            "/contexts/{}/restart": [self._route("restart")],
            "/contexts/{}/start": [self._route("start")],
        }

    def _route(self, name: str, method: str = "POST") -> Route:
        def handle(request: Request, reply: Reply) -> None:
            if self._interpreter is None:
                self._load()
            getattr(self._interpreter, name)(request, reply)

        return Route(handle, method=method)

    def _load(self) -> None:
        from sandbox_agent.interpreter import Interpreter

        with self._lock:
            self._interpreter = self._interpreter or Interpreter(self._identity.environment)


def build(address: str, port: int, code_port: int, *, managed: bool, line: str) -> tuple[Server, Server | None]:
    """The agent, listening, its files mounted; and the code interpreter, where its port is free.

    ``line``: the serial port that leads to the host, if there is one.
    """
    identity = Identity(managed=managed)
    interpreting = Interpreting(identity)
    skipped = identity.open()
    if managed and skipped:
        print(f"sandbox-agent: not managed: {'; '.join(skipped)}", file=sys.stderr)
    routes = {
        "/identity": [Route(identity.handle, guarded=False)],
        "/mounts": [Route(mounting(identity, managed=managed), guarded=False)],
        "/exec": [Route(Execute(identity.environment).handle)],
        **Maintenance(Freezer(), managed=managed).routes(),
        **ProcessService(Table(), identity.environment).routes(),
        **filesystem.routes(),
        **files.routes(),
        **interpreting.routes(),
    }
    if managed and system.LINUX:
        threading.Thread(target=identity.listen, args=(Line(line),), daemon=True).start()
    server = Server(address, port, routes, identity.guard)
    try:
        return server, Server(address, code_port, interpreting.own_routes(), identity.guard_code)
    except OSError as error:
        # Whoever has the port shall not keep the agent from its own.
        print(f"sandbox-agent: no code interpreter: {address}:{code_port}: {error}", file=sys.stderr)
        return server, None


def main() -> int:
    parser = argparse.ArgumentParser(prog="sandbox_agent", description="The agent inside a sandbox.")
    parser.add_argument("--port", type=int, default=PORT, help=f"TCP port to listen on (default {PORT})")
    parser.add_argument(
        "--code-port", type=int, metavar="PORT", help=f"the code interpreter's (default {CODE_PORT}; any with --port 0)"
    )
    parser.add_argument("--bind", default="0.0.0.0", metavar="ADDR", help="address to listen on (default all)")
    parser.add_argument(
        "--unmanaged",
        action="store_true",
        help="leave this machine's name, clock, files of /etc and root file system alone; to try the agent out",
    )
    parser.add_argument("--line", default=PATH, help="serial port to the host (default %(default)s)")
    options = parser.parse_args()
    # What the agent ignores, all it starts ignore too: ^C shall end a command, however the agent came to run.
    for interrupt in (signal.SIGINT, signal.SIGQUIT):
        if signal.getsignal(interrupt) is signal.SIG_IGN:
            signal.signal(interrupt, signal.SIG_DFL)
    code_port = options.code_port
    if code_port is None:
        code_port = CODE_PORT if options.port else 0
    try:
        server, code = build(options.bind, options.port, code_port, managed=not options.unmanaged, line=options.line)
    except OSError as error:
        print(f"sandbox-agent: cannot listen on {options.bind}:{options.port}: {error}", file=sys.stderr)
        return 1
    print(f"sandbox-agent: listening on {options.bind}:{server.port}", file=sys.stderr, flush=True)
    if code is not None:
        threading.Thread(target=code.serve, daemon=True).start()
        print(f"sandbox-agent: running code on {options.bind}:{code.port}", file=sys.stderr, flush=True)
    try:
        server.serve()
    except KeyboardInterrupt:
        pass
    return 0
