"""Live logs on standard error, and progress bars if standard error is a terminal."""

from __future__ import annotations

import secrets
import sys
import threading
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from typing import Any

from sandbox_gateway.cli.client import Client
from sandbox_gateway.cli.failure import Failure
from sandbox_gateway.control_characters import remove_control_characters

_SUBSCRIBE_TIMEOUT_SECONDS = 5


def follow_log(lines: Iterable[str], title: str) -> None:
    """Print ``lines`` as they arrive and, on a terminal, the elapsed time below them."""
    lines = map(remove_control_characters, lines)
    if not sys.stderr.isatty():
        for line in lines:
            print(line, file=sys.stderr, flush=True)
        return
    from rich.console import Console
    from rich.progress import Progress, SpinnerColumn, TextColumn, TimeElapsedColumn
    from rich.text import Text

    columns = (SpinnerColumn(), TextColumn("{task.description}"), TimeElapsedColumn())
    with Progress(*columns, console=Console(stderr=True), transient=True) as bar:
        bar.add_task(title)
        for line in lines:
            bar.console.print(Text(line, style="dim"))


@contextmanager
def progress_shown(title: str, total: int | None = None) -> Iterator[Callable[[int], None]]:
    """Show a progress bar inside this context. Yields a function that adds a number of transferred bytes.

    ``total``: the number of bytes, if it is known.
    """
    if not sys.stderr.isatty():
        yield lambda size: None
        return
    from rich.console import Console
    from rich.progress import BarColumn, DownloadColumn, Progress, TextColumn, TransferSpeedColumn

    columns = (TextColumn("{task.description}"), BarColumn(), DownloadColumn(), TransferSpeedColumn())
    with Progress(*columns, console=Console(stderr=True), transient=True) as bar:
        task_id = bar.add_task(title, total=total)
        yield lambda size: bar.advance(task_id, size)


@contextmanager
def items_shown(title: str) -> Iterator[Callable[[int, int], None]]:
    """Show a progress bar on a terminal. Yields a function that sets the completed and the total number of items."""
    if not sys.stderr.isatty():
        yield lambda completed, total: None
        return
    from rich.console import Console
    from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn

    columns = (TextColumn("{task.description}"), BarColumn(), MofNCompleteColumn(), TimeElapsedColumn())
    with Progress(*columns, console=Console(stderr=True), transient=True) as bar:
        task_id = bar.add_task(title, total=None)
        yield lambda completed, total: bar.update(task_id, completed=completed, total=total or None)


def create_forks(client: Client, route: str, body: dict[str, Any], count: int, title: str) -> Any:
    """POST ``body`` to ``route``, with a progress bar if it creates more than one fork."""
    if count < 2 or not sys.stderr.isatty():
        return client.call("POST", route, body)
    from rich.console import Console
    from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn

    operation_id = secrets.token_hex(8)
    columns = (TextColumn("{task.description}"), BarColumn(), MofNCompleteColumn(), TimeElapsedColumn())
    with Progress(*columns, console=Console(stderr=True), transient=True) as bar:
        task_id = bar.add_task(title, total=count)
        subscribed_event = threading.Event()

        def listen() -> None:
            # Ignore errors here: the request itself reports them.
            try:
                for kind, data in client.stream_events(operation_id):
                    subscribed_event.set()
                    if kind == "fork.progress":
                        bar.update(task_id, completed=data["done"], total=data["total"])
            except (Failure, RuntimeError):
                subscribed_event.set()

        threading.Thread(target=listen, daemon=True).start()
        subscribed_event.wait(_SUBSCRIBE_TIMEOUT_SECONDS)
        return client.call("POST", route, body, headers={"X-Operation-Id": operation_id})
