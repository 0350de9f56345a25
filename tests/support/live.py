"""A real engine with a real host inside the test's process, for tests that are not coroutine functions."""

from __future__ import annotations

import asyncio
import contextlib
import threading
import time
from collections.abc import Callable, Coroutine, Iterator
from typing import TYPE_CHECKING, Any, TypeVar

from sandbox_gateway.config import Config
from sandbox_gateway.engine.builds import Build
from sandbox_gateway.engine.engine import Engine
from sandbox_gateway.hosts.base import Host
from sandbox_gateway.records import Sandbox, Volume
from tests.support.waiting import wait_until

if TYPE_CHECKING:
    from tests.support.worlds import World

T = TypeVar("T")
_SETTLE_TIMEOUT_SECONDS = 20


class EngineRunner:
    """An open engine on its own event loop. ``do`` runs a coroutine there and returns its result."""

    def __init__(self, host: Host, config: Config) -> None:
        self._loop = asyncio.new_event_loop()
        self._thread = threading.Thread(target=self._loop.run_forever, daemon=True)
        self._thread.start()
        self.config = config
        self.is_closed = False
        try:
            self.engine = self.do(_open(host, config))
        except BaseException:
            self._stop_loop()
            raise

    def do(self, work: Coroutine[Any, Any, T], *, timeout: float = 180) -> T:
        return asyncio.run_coroutine_threadsafe(work, self._loop).result(timeout)

    def follow(self, build: Build, timeout: float) -> list[str]:
        """Wait until a build has finished, and return the lines of its log."""

        async def collect() -> list[str]:
            return [line async for line in build.follow()]

        return self.do(collect(), timeout=timeout)

    def shell(self, ref: str, command: str, *, timeout: float = 60) -> str:
        """Run a command inside a sandbox, check that it succeeds, and return its standard output."""
        result = self.do(self.engine.commands.exec(ref, ["sh", "-c", command], timeout=timeout))
        assert result.exit_code == 0, (command, result)
        return result.stdout.decode()

    def call(self, function: Any, *args: Any, **kwargs: Any) -> Any:
        """Run a plain function on the loop's thread."""

        async def run_on_loop() -> Any:
            return function(*args, **kwargs)

        return self.do(run_on_loop())

    def wait_for(self, check: Any, *args: Any) -> None:
        """Repeat a check on the loop's thread until it passes. Raises AssertionError if it does not pass in time."""
        deadline = time.monotonic() + _SETTLE_TIMEOUT_SECONDS
        while True:
            try:
                return self.call(check, *args)
            except AssertionError:
                if time.monotonic() > deadline:
                    raise
            time.sleep(0.1)

    def collect(self) -> None:
        """Remove unused snapshots and volumes now."""
        self.do(self.engine.sandboxes._collector.collect())

    def remove_all(self) -> None:
        """Remove all sandboxes and volumes, and all snapshots except templates."""
        for sandbox in self.engine.sandboxes.list():
            self.do(self.engine.sandboxes.delete(sandbox.id))
        self.collect()
        self.stop_prewarming()
        objects = [*self.engine.snapshots.list(), *self.engine.volumes.list()]
        for each in sorted(objects, key=lambda each: each.created_at, reverse=True):  # descendants first
            if isinstance(each, Volume):
                self.do(self.engine.volumes.delete(each.id, with_snapshots=True))
            else:
                self.do(self.engine.snapshots.delete(each.id))
        self.collect()

    def stop_prewarming(self) -> None:
        """Stop keeping forks ready, and wait until their machines have stopped."""
        for snapshot in [*self.engine.index.snapshots.values()]:
            if snapshot.prewarm:
                self.do(self.engine.prewarm.set_target(snapshot.id, 0))
        wait_until(lambda: self.engine.prewarm.get_total_level().ready == 0)

    def get_sandbox(self, ref: str) -> Sandbox:
        return self.engine.sandboxes.get(ref)

    def close(self) -> None:
        self.is_closed = True
        self.do(self.engine.close())
        self._stop_loop()

    def _stop_loop(self) -> None:
        self._loop.call_soon_threadsafe(self._loop.stop)
        self._thread.join(10)
        self._loop.close()


@contextlib.contextmanager
def engines(world: World) -> Iterator[Callable[..., EngineRunner]]:
    """Yield the function ``make_runner``. At the end, remove everything that its engines left on the machine.

    ``make_runner(limits={…})`` uses a new state root, and ``make_runner(config=config)`` uses an existing one.
    """
    opened_engines: list[EngineRunner] = []

    def make_runner(config: Config | None = None, **sections: Any) -> EngineRunner:
        config = config or world.make_config(**sections)
        opened_engines.append(EngineRunner(world.make_host(config), config))
        return opened_engines[-1]

    yield make_runner
    latest_by_root = {runner.config.host.state_root: runner for runner in opened_engines}
    for runner in opened_engines:
        if not runner.is_closed and runner not in latest_by_root.values():
            runner.close()
    for runner in latest_by_root.values():
        if runner.is_closed:
            runner = EngineRunner(world.make_host(runner.config), runner.config)
        runner.remove_all()
        runner.close()
        world.clean_up(runner.config)


async def _open(host: Host, config: Config) -> Engine:
    engine = Engine(host, config)
    try:
        await engine.open()
    except BaseException:
        await engine.close()
        raise
    return engine
