"""The commands `forkd fork`, `attach`, `pack`, `unpack` and `snapshot-compact`."""

from __future__ import annotations

import argparse
import asyncio
import contextlib
import os
import signal
import socket
import sys
from collections.abc import Coroutine, Sequence
from pathlib import Path
from typing import Any, TypeVar

from sandbox_gateway_forkd import __version__, files
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
_REFUSED_OPTIONS = {
    "pack": {
        "description": "a file has the description that the snapshot has: set it when you create the snapshot",
        "base_image": "a gateway's snapshot knows its template: omit this option",
    },
    "unpack": {
        "force": "an existing snapshot would have to be removed before its successor exists: choose a different --tag, "
        "or delete the snapshot first"
    },
}
"""Options of the original program by command, and why this one refuses them."""
Result = TypeVar("Result")


def main(argv: Sequence[str] | None = None) -> int:
    arguments = sys.argv[1:] if argv is None else argv
    options = _build_parser().parse_args(arguments)
    try:
        _check_options(options)
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
    _add_snapshot_commands(commands)
    return parser


def _add_snapshot_commands(commands: argparse._SubParsersAction[argparse.ArgumentParser]) -> None:
    pack = commands.add_parser(
        "pack",
        help="write a snapshot to a file",
        description="Writes a snapshot or template to a file, with all secrets of its guest. Only you can read the "
        "file. It has the gateway's own format, which `sandboxctl snapshot import` also reads.",
        epilog=_ENVIRONMENT,
    )
    pack.add_argument("--tag", required=True, help="id or name of the snapshot or template")
    pack.add_argument(
        "--out",
        "-o",
        type=Path,
        metavar="FILE",
        help="file to write or replace (default: TAG.forkd-snapshot.tar.zst in this directory)",
    )
    pack.add_argument("--description", help=argparse.SUPPRESS)
    pack.add_argument("--base-image", help=argparse.SUPPRESS)
    pack.set_defaults(command="pack", run=_pack)
    unpack = commands.add_parser(
        "unpack",
        help="read a snapshot from a file",
        description="Reads a snapshot or template from a file that `forkd pack` or `sandboxctl snapshot export` wrote.",
        epilog=_ENVIRONMENT,
    )
    unpack.add_argument("path", type=Path, metavar="FILE")
    unpack.add_argument("--tag", default="", help="name of the new snapshot (default: the names in the file)")
    unpack.add_argument(
        "--trust",
        action="append",
        default=[],
        metavar="FINGERPRINT",
        help="accept a file that the gateway with this fingerprint has signed; repeatable",
    )
    unpack.add_argument("--force", action="store_const", const=True, help=argparse.SUPPRESS)
    unpack.set_defaults(command="unpack", run=_unpack)
    compact = commands.add_parser(
        "snapshot-compact",
        help="give a snapshot another tag",
        description="Gives a snapshot or template another tag, at once: every snapshot is complete, so that nothing "
        "has to be copied.",
        epilog=_ENVIRONMENT,
    )
    compact.add_argument("--from", dest="tag", required=True, metavar="TAG", help="id or name of the snapshot")
    compact.add_argument("--to", required=True, metavar="TAG", help="the new tag")
    compact.set_defaults(run=_compact)


def _check_options(options: argparse.Namespace) -> None:
    """Raise Failure for options of the original program that this one cannot honour."""
    for name, reason in _REFUSED_OPTIONS.get(getattr(options, "command", ""), {}).items():
        if getattr(options, name) is not None:
            raise Failure(f"--{name.replace('_', '-')} is not supported, because {reason}")


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


async def _pack(options: argparse.Namespace) -> None:
    path = options.out or _choose_pack_path(options.tag)
    async with _open_gateway() as gateway:
        await _run_until_stopped(files.pack(gateway, options.tag, path))
    print(path, flush=True)


def _choose_pack_path(tag: str) -> Path:
    """Return the path that the original program chooses."""
    slug = "".join(letter if letter.isalnum() else "-" for letter in tag).strip("-")
    return Path(f"{slug}.forkd-snapshot.tar.zst")


async def _unpack(options: argparse.Namespace) -> None:
    async with _open_gateway() as gateway:
        work = files.unpack(gateway, options.path, options.tag, options.trust)
        tag, omission_reason = await _run_until_stopped(work)
    if omission_reason:
        print(f"forkd: the memory was omitted: {omission_reason}", file=sys.stderr)
    print(tag, flush=True)


async def _compact(options: argparse.Namespace) -> None:
    async with _open_gateway() as gateway:
        snapshot = await gateway.compact(options.tag, options.to)
    print(snapshot, flush=True)


async def _run_until_stopped(work: Coroutine[Any, Any, Result]) -> Result:
    """Return the result of ``work``. Raises Failure, after it has cancelled ``work``, when a signal arrives."""
    result = await _run_unless_stopped(_create_stop_event(), _wrap(work))
    if result is None:
        raise Failure("stopped by a signal before the work was complete: run the command again")
    return result[0]


async def _wrap(work: Coroutine[Any, Any, Result]) -> tuple[Result]:
    """Return the result of ``work`` in a tuple, which differs from None."""
    return (await work,)


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
