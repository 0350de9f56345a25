"""The commands `forkd fork` and `forkd attach`."""

from __future__ import annotations

import argparse
import asyncio
import contextlib
import os
import signal
import socket
import sys
from collections.abc import Coroutine, Sequence
from typing import Any, TypeVar

from sandbox_gateway_forkd import __version__
from sandbox_gateway_forkd.gateway import DEFAULT_URL, Failure, Gateway
from sandbox_gateway_forkd.port import DEFAULT_TARGET, Port, bind

LEASE_SECONDS = 60.0
"""How long sandboxes outlive this program if it is killed."""
EXIT_TIMEOUT_SECONDS = 4.0
"""Time limit for removing the sandboxes on exit; forkd's client waits five seconds."""
_EXIT_FAILURE = 1
_WARNING = (
    "Anyone who can connect to the port can run anything in the sandbox, because the protocol has no "
    "authentication. The port is bound to loopback addresses only, unless --remote (or FORKD_REMOTE=1) allows others."
)
_ENVIRONMENT = (
    f"FORKD_URL: the gateway, unix:///path, http:// or https:// (default {DEFAULT_URL}). FORKD_TOKEN: its key. "
    f"FORKD_TARGET: where to listen, HOST:PORT (default {DEFAULT_TARGET}, like forkd's client)."
)
_REFUSED_COMMANDS = {
    "pack": "the gateway has its own file format: use `sandboxctl snapshot export`",
    "unpack": "the gateway has its own file format: use `sandboxctl snapshot import`",
    "compact": "every snapshot is complete: create sandboxes from it directly",
}
"""Commands of the original program, and why this one refuses them."""
Result = TypeVar("Result")


def main(argv: Sequence[str] | None = None) -> int:
    arguments = sys.argv[1:] if argv is None else argv
    if arguments and arguments[0] in _REFUSED_COMMANDS:
        print(f"forkd: {arguments[0]} is not supported, because {_REFUSED_COMMANDS[arguments[0]]}", file=sys.stderr)
        return _EXIT_FAILURE
    options = _build_parser().parse_args(arguments)
    try:
        asyncio.run(options.run(options))
    except Failure as failure:
        print(f"forkd: {failure}", file=sys.stderr)
        return _EXIT_FAILURE
    return 0


def _build_parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog="forkd", description="Serve a gateway's sandboxes to forkd's Python client.", epilog=_ENVIRONMENT
    )
    parser.add_argument("--version", action="version", version=__version__)
    commands = parser.add_subparsers(required=True, metavar="COMMAND")
    port = argparse.ArgumentParser(add_help=False)
    port.add_argument(
        "--listen",
        metavar="HOST:PORT",
        default=os.environ.get("FORKD_TARGET") or DEFAULT_TARGET,
        help="address that forkd's client connects to (default: $FORKD_TARGET)",
    )
    port.add_argument(
        "--remote",
        action="store_true",
        default=os.environ.get("FORKD_REMOTE", "") not in ("", "0"),
        help="allow an address that other machines can reach",
    )
    fork = commands.add_parser(
        "fork",
        parents=[port],
        help="create sandboxes, serve the port of the first, and remove them on exit",
        description=f"Creates sandboxes from a snapshot or template and serves the port of the first. {_WARNING}",
        epilog=_ENVIRONMENT,
    )
    fork.add_argument("--tag", required=True, help="id or name of the snapshot or template")
    fork.add_argument("-n", type=_parse_count, default=1, metavar="N", help="number of sandboxes (default 1)")
    fork.add_argument(
        "--settle-secs", type=_parse_seconds, metavar="S", help="exit after S seconds (default: run until stopped)"
    )
    fork.set_defaults(run=_fork)
    attach = commands.add_parser(
        "attach",
        parents=[port],
        help="serve the port of an existing sandbox",
        description=f"Serves the port of an existing sandbox, which remains when this command exits. {_WARNING}",
        epilog=_ENVIRONMENT,
    )
    attach.add_argument("sandbox", metavar="SANDBOX", help="id or name of the sandbox")
    attach.set_defaults(run=_attach)
    return parser


def _parse_count(text: str) -> int:
    if not text.isascii() or not text.isdigit() or not 1 <= int(text) <= 1000:
        raise argparse.ArgumentTypeError(
            f"{text!r} is not a valid number of sandboxes: use a whole number from 1 to 1000"
        )
    return int(text)


def _parse_seconds(text: str) -> float:
    try:
        seconds = float(text)
    except ValueError:
        seconds = -1
    if not 0 <= seconds <= 1e9:
        raise argparse.ArgumentTypeError(f"{text!r} is not a valid time: use a number of seconds from 0 to 1e9")
    return seconds


def _open_gateway() -> Gateway:
    return Gateway(os.environ.get("FORKD_URL") or DEFAULT_URL, os.environ.get("FORKD_TOKEN", ""))


async def _fork(options: argparse.Namespace) -> None:
    stop = _create_stop_event()
    with contextlib.closing(bind(options.listen, allow_remote=options.remote)) as listener:
        async with _open_gateway() as gateway:
            sandboxes = await _run_unless_stopped(stop, gateway.spawn(options.tag, options.n, LEASE_SECONDS))
            if sandboxes is None:
                return
            try:
                print(*sandboxes, sep="\n", flush=True)
                await _serve(gateway, sandboxes, listener, stop, options.settle_secs)
            finally:
                await _remove_sandboxes(gateway, sandboxes)


async def _serve(
    gateway: Gateway, sandboxes: list[str], listener: socket.socket, stop: asyncio.Event, seconds: float | None
) -> None:
    """Serve the port until ``stop`` is set or ``seconds`` have passed.

    Raises Failure if the first sandbox has been removed.
    """
    server = await Port(gateway, sandboxes[0]).listen(listener)
    stop_task, renewal = asyncio.create_task(stop.wait()), asyncio.create_task(_renew_leases(gateway, sandboxes))
    try:
        done_tasks, _ = await asyncio.wait({stop_task, renewal}, timeout=seconds, return_when=asyncio.FIRST_COMPLETED)
        if renewal in done_tasks:
            renewal.result()
    finally:
        server.close()
        stop_task.cancel()
        renewal.cancel()


async def _renew_leases(gateway: Gateway, sandboxes: list[str]) -> None:
    """Renew the sandboxes' leases. Raises Failure if the first sandbox has been removed.

    Tolerates restarts of the gateway.
    """
    while True:
        await asyncio.sleep(LEASE_SECONDS / 3)
        for failure in await gateway.renew_leases(sandboxes[:1], LEASE_SECONDS):
            if failure.status == 404:
                raise failure
        await gateway.renew_leases(sandboxes[1:], LEASE_SECONDS)


async def _remove_sandboxes(gateway: Gateway, sandboxes: list[str]) -> None:
    """Remove the sandboxes. Raises Failure if any remain. Ignores sandboxes that no longer exist."""
    try:
        async with asyncio.timeout(EXIT_TIMEOUT_SECONDS):
            failures = [failure for failure in await gateway.kill(sandboxes) if failure.status != 404]
    except TimeoutError:
        failures = [Failure("the gateway did not respond in time")]
    if failures:
        raise Failure(f"some sandboxes could not be removed ({failures[0]}): the gateway removes them within a minute")


async def _attach(options: argparse.Namespace) -> None:
    stop = _create_stop_event()
    with contextlib.closing(bind(options.listen, allow_remote=options.remote)) as listener:
        async with _open_gateway() as gateway:
            ping = gateway.call_sandbox(options.sandbox, "ping", seconds=EXIT_TIMEOUT_SECONDS)
            if await _run_unless_stopped(stop, ping) is None:
                return
            server = await Port(gateway, options.sandbox).listen(listener)
            print(f"listening on {options.listen}", flush=True)
            try:
                await stop.wait()
            finally:
                server.close()


def _create_stop_event() -> asyncio.Event:
    stop = asyncio.Event()
    for number in (signal.SIGTERM, signal.SIGINT):
        asyncio.get_running_loop().add_signal_handler(number, stop.set)
    return stop


async def _run_unless_stopped(stop: asyncio.Event, work: Coroutine[Any, Any, Result]) -> Result | None:
    """Return the result of ``work``, or None if ``work`` was cancelled because ``stop`` was set first."""
    worker, stop_task = asyncio.create_task(work), asyncio.create_task(stop.wait())
    await asyncio.wait({worker, stop_task}, return_when=asyncio.FIRST_COMPLETED)
    stop_task.cancel()
    worker.cancel()
    await asyncio.wait({worker})
    return None if worker.cancelled() else worker.result()
