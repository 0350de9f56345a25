"""Measure the jail/ZFS host: fork, snapshot, rollback, removal, and n forks at the same time."""

from __future__ import annotations

import contextlib
import itertools
import os
import re
import socket
import subprocess
import time
from collections import defaultdict
from collections.abc import Iterator
from pathlib import Path

import zfs_core
from zfs_core import run as zfs_run

from benchmarks.answers import Answers, recording_answers
from benchmarks.context import Context
from benchmarks.measure import Result, Target
from benchmarks.timers import FunctionRef, Span, Timers, split_time, time_call
from sandbox_gateway.config import Config
from sandbox_gateway.engine.spec import ForkSpec
from sandbox_gateway.hosts.connect import AGENT_PORT
from sandbox_gateway.hosts.jail_zfs.commands import TIMEOUT_SECONDS, CommandRunner
from sandbox_gateway.hosts.jail_zfs.host import JailZfsHost
from sandbox_gateway.hosts.jail_zfs.jail import identity
from sandbox_gateway.hosts.jail_zfs.jail.jails import Jails
from sandbox_gateway.hosts.jail_zfs.jail.rctl import Limits
from sandbox_gateway.hosts.jail_zfs.machine_register import Machine
from sandbox_gateway.hosts.jail_zfs.network.epair import Bridge
from sandbox_gateway.hosts.jail_zfs.network.pf import Pf
from sandbox_gateway.hosts.jail_zfs.storage.instances import InstanceStorage
from sandbox_gateway.records import Sandbox
from tests.support import pools
from tests.support.jail_world import ShimHost, jail_zfs_world, make_shim_environment
from tests.support.live import EngineRunner
from tests.support.worlds import TEMPLATE

_EMULATION_NOTE = (
    "tests/freebsd_shim emulates FreeBSD's commands (jail, ifconfig, route, rctl, "
    "pfctl, jls, pkill) on Linux. On FreeBSD all times differ, including the floor's"
)
_COOLDOWN_SECONDS = 0.5
_TIMED_FUNCTIONS: dict[str, FunctionRef] = {
    "fork": (JailZfsHost, "fork"),
    "clone": (InstanceStorage, "clone"),
    "epair": (Bridge, "create"),
    "pf": (Pf, "apply"),
    "limits": (Limits, "apply"),
    "jail": (Jails, "create"),
    "loopback": (Jails, "configure_loopback"),
    "connect": (Jails, "configure_interface"),
}
_PART_TITLES = {
    "clone": "zfs clone, in parallel with the next three",
    "epair": "epair and bridge, if slower",
    "pf": "packet filter, if slower",
    "limits": "limits, if slower",
    "jail": "create the jail, start its agent",
    "connect": "address and route, in parallel with the loopback",
    "loopback": "loopback, if slower",
    "rest": "everything else",
}
_COMMAND_FUNCTIONS: dict[str, FunctionRef] = {"zfs": (zfs_run, "execute"), "command": (CommandRunner, "_run")}


def describe_zfs() -> str:
    """Return the name and the version of the installed ZFS."""
    version = ".".join(map(str, zfs_core.detect_capabilities().version))
    return f"OpenZFS {version}" if zfs_core.detect_capabilities().atomic_snapshots else f"zfs-fuse {version}"


class JailZfs:
    name = "jail"
    title = "jail/ZFS host, FreeBSD's commands emulated on Linux"

    def run(self, ctx: Context) -> Result:
        rounds = ctx.choose(full=12, quick=3)
        with _running_engine(ctx) as (live, host), recording_answers() as answers:
            settings = {"rounds": rounds, "zfs": describe_zfs(), "freebsd": "tests/freebsd_shim"}
            settings["concurrency"] = live.config.limits.concurrency
            result = Result(self.name, self.title, settings, notes=[_EMULATION_NOTE])
            raw = RawCommands.record(live, host)
            settings["floor_commands"] = len(raw.commands)
            _measure_forks(ctx, live, raw, answers, rounds, result)
            _measure_captures(ctx, live, answers, rounds, result)
            _measure_concurrent_forks(ctx, live, answers, {1: 2, 4: 1} if ctx.quick else {1: 5, 10: 2, 50: 1}, result)
        return result


class RawCommands:
    """Runs the floor: the commands ``zfs clone``, ``ifconfig``, ``arp`` and ``jail -c`` that the host ran for one fork.

    The names in the commands are replaced with new ones. The commands run one after another, in the order in which the
    host started them.
    """

    def __init__(
        self, live: EngineRunner, host: JailZfsHost, sandbox: Sandbox, commands: list[tuple[str, ...]]
    ) -> None:
        self._live = live
        self._host = host
        self._sandbox = sandbox
        self._epair = host._network.bridge.epair(int(sandbox.host["number"]))
        self._numbers = itertools.count()
        self.commands = commands

    @classmethod
    def record(cls, live: EngineRunner, host: JailZfsHost) -> RawCommands:
        """Record the commands that the host runs for one fork."""
        timers = Timers()
        with timers.recording(_COMMAND_FUNCTIONS):
            sandbox = live.do(live.engine.forks.create(TEMPLATE, ForkSpec()))
        assert isinstance(sandbox, Sandbox)
        spans = timers.take()
        recorded_commands = [(span.start, ("zfs", *span.args[0])) for span in spans.get("zfs", [])]
        recorded_commands += [(span.start, tuple(span.args[1])) for span in spans.get("command", [])]
        commands = [
            argv
            for _, argv in sorted(recorded_commands)
            if argv[:2] == ("zfs", "clone") or argv[0] in ("ifconfig", "arp", "jail")
        ]
        if {argv[0] for argv in commands} != {"zfs", "ifconfig", "arp", "jail"}:
            raise RuntimeError(f"only some of the host's commands were recorded ({commands}): adapt _COMMAND_FUNCTIONS")
        live.do(live.engine.sandboxes.delete(sandbox.id))
        return cls(live, host, sandbox, commands)

    def fork(self) -> tuple[float, float]:
        """Run the commands. Return the milliseconds until they have finished and until the agent accepts a connection.

        Removes everything afterwards.
        """
        host, number = self._host, next(self._numbers)
        instance = f"raw{number}"
        # Use the end of the subnet, because the host assigns addresses from its beginning.
        epair = host._network.bridge.epair(host._network.bridge.capacity + 1 - number)
        replacements = {self._sandbox.instance: instance} | {
            getattr(self._epair, end): getattr(epair, end) for end in ("outer_end", "inner_end", "address", "mac")
        }
        machine = Machine(f"{self._live.config.network.prefix}-{instance}", epair, host._disks.path(instance))
        try:
            # Everything outside the floor is prepared before the clock starts. Without rules, a jail is unreachable.
            identity.write_identity(host._identities.path(instance), self._sandbox, host.list_name_servers())
            self._live.do(host._network._load_rules(machine.jail, epair, self._sandbox.network))
            start = time.perf_counter()
            for argv in self.commands:
                output = run_command(tuple(_replace_names(word, replacements) for word in argv))
                if argv[:3] == ("ifconfig", "epair", "create"):
                    replacements |= self._map_epair(output.strip().removesuffix("a"))
            end = time.perf_counter()
            _wait_until_connected(epair.address)
            return (end - start) * 1000, (time.perf_counter() - start) * 1000
        finally:
            self._remove(machine, instance)

    def _map_epair(self, epair: str) -> dict[str, str]:
        """Map the names of both ends of the recorded epair to the names of the ends of ``epair``."""
        words = itertools.chain.from_iterable(self.commands)
        ends = {word for word in words if re.fullmatch(r"epair\d+[ab]", word)}
        return {end: f"{epair}{end[-1]}" for end in ends}

    def _remove(self, machine: Machine, instance: str) -> None:
        self._live.do(self._host._runner.clean_up(machine, instance))
        pools.destroy_all(self._host._storage.instances.dataset(instance))


def _wait_until_connected(address: str) -> None:
    """Wait until the agent accepts a connection. Raises RuntimeError after a timeout."""
    deadline = time.monotonic() + TIMEOUT_SECONDS
    while True:
        try:
            socket.create_connection((address, AGENT_PORT), timeout=1).close()
            return
        except OSError as error:
            if time.monotonic() > deadline:
                raise RuntimeError(
                    f"the agent in the jail created with bare commands does not accept connections: {error}"
                ) from None
            time.sleep(0.001)


def _replace_names(text: str, replacements: dict[str, str]) -> str:
    """Replace every word in ``text`` that is a key of ``replacements``, but not parts of longer words."""
    keys = "|".join(re.escape(key) for key in sorted(replacements, key=len, reverse=True))
    return re.sub(rf"(?<![0-9A-Za-z])({keys})(?![0-9A-Za-z])", lambda match: replacements[match[1]], text)


def run_command(argv: tuple[str, ...]) -> str:
    """Run a command and return its standard output. Raises RuntimeError if it fails."""
    is_zfs = argv[0] == "zfs"
    lock = zfs_run.mount_lock(argv[1], TIMEOUT_SECONDS, None) if is_zfs else contextlib.nullcontext()
    env = {**os.environ, "LC_ALL": "C", **({} if is_zfs else make_shim_environment())}
    with lock:
        result = subprocess.run(argv, env=env, capture_output=True, text=True, timeout=TIMEOUT_SECONDS, check=False)
    if result.returncode != 0:
        raise RuntimeError(f"{' '.join(argv)} failed ({result.returncode}): {result.stderr.strip()}")
    return result.stdout


@contextlib.contextmanager
def _running_engine(ctx: Context) -> Iterator[tuple[EngineRunner, ShimHost]]:
    """Run an engine with a separate pool and a template. Removes everything at the end."""
    # The pool of this world starts zfs-fuse.
    with jail_zfs_world() as world:
        ctx.print_progress(
            f"building the jail's template on a separate pool ({describe_zfs()}, FreeBSD's commands emulated)"
        )
        config: Config = world.make_config()
        host = ShimHost(config)
        live = EngineRunner(host, config)
        try:
            yield live, host
        finally:
            live.remove_all()
            live.close()
            world.clean_up(config)


def _measure_forks(
    ctx: Context, live: EngineRunner, raw: RawCommands, answers: Answers, rounds: int, result: Result
) -> None:
    """Measure raw commands and forks alternately. Removes each fork afterwards."""
    samples: dict[str, list[float]] = defaultdict(list)
    timers = Timers()
    with timers.recording(_TIMED_FUNCTIONS), ctx.showing_progress("forks", rounds) as steps:
        for _ in range(rounds):
            commands_ms, agent_ms = raw.fork()
            samples["floor"].append(commands_ms)
            samples["floor_agent"].append(agent_ms)
            time.sleep(_COOLDOWN_SECONDS)
            _measure_fork(live, timers, answers, samples)
            time.sleep(_COOLDOWN_SECONDS)
            steps.advance()
    title = "floor: zfs clone, ifconfig, arp, jail -c one after the other, no gateway"
    result.add_measure("floor", title, samples=samples["floor"])
    result.add_measure(
        "floor_agent", "floor, until the jail's agent accepts a connection", samples=samples["floor_agent"]
    )
    result.add_measure("fork", "host.fork", samples=samples["fork"], floor="floor", target=Target("ratio", 1.3))
    result.add_parts("fork", _PART_TITLES, {key: samples[f"fork.{key}"] for key in _PART_TITLES})
    title = "engine.forks.create, until the agent answered"
    result.add_measure("answered", title, samples=samples["answered"], floor="floor_agent")
    result.add_measure("kill", "engine.sandboxes.delete", samples=samples["kill"])
    result.notes += timers.describe_missing_functions()


def _measure_fork(live: EngineRunner, timers: Timers, answers: Answers, samples: dict[str, list[float]]) -> None:
    timers.take()
    answers.forget()
    start = time.perf_counter()
    sandbox = live.do(live.engine.forks.create(TEMPLATE, ForkSpec()))
    return_time = time.perf_counter()
    (answer,) = answers.wait(1)
    samples["answered"].append(Span(start, max(return_time, answer.end)).ms)
    spans = timers.take()
    (fork,) = spans["fork"]
    samples["fork"].append(fork.ms)
    parts = {key: spans[key] for key in _PART_TITLES if key in spans}
    for key, value in split_time(fork, parts).items():
        samples[f"fork.{key}"].append(value)
    _, elapsed = time_call(lambda: live.do(live.engine.sandboxes.delete(sandbox.id)))
    samples["kill"].append(elapsed)


def _measure_captures(ctx: Context, live: EngineRunner, answers: Answers, rounds: int, result: Result) -> None:
    """Measure snapshots of a sandbox that writes a little data before each one, and rollbacks to them."""
    floor: list[float] = []
    rollback_floor: list[float] = []
    snapshot_times: list[float] = []
    rollback_times: list[float] = []
    sandbox = live.do(live.engine.forks.create(TEMPLATE, ForkSpec()))
    with ctx.showing_progress("snapshots and rollbacks", rounds) as steps:
        for number in range(rounds):
            live.shell(sandbox.id, f"dd if=/dev/urandom of=/root/bench.{number} bs=64k count=16 2>/dev/null")
            snapshot, elapsed = time_call(lambda: live.do(live.engine.snapshots.create(sandbox.id)))
            snapshot_times.append(elapsed)
            live.shell(sandbox.id, "dd if=/dev/urandom of=/root/bench bs=64k count=16 2>/dev/null")
            zfs_snapshot = live.engine.snapshots.get(snapshot.id).host["zfsSnapshot"]
            floor.append(_measure_raw_snapshot(zfs_snapshot, number))
            container = zfs_snapshot.partition("@")[0].rpartition("/")[0]
            rollback_floor.append(measure_raw_rollback(zfs_snapshot, f"{container}/rollback{number}"))
            time.sleep(_COOLDOWN_SECONDS)
            answers.forget()
            start = time.perf_counter()
            live.do(live.engine.sandboxes.rollback(sandbox.id, snapshot.id))
            return_time = time.perf_counter()
            rollback_times.append((max(return_time, answers.wait(1)[-1].end) - start) * 1000)
            steps.advance()
    live.do(live.engine.sandboxes.delete(sandbox.id))
    result.add_measure("floor_snapshot", "floor: zfs snapshot, no gateway", samples=floor)
    title = "engine.snapshots.create (files only, because jails have no memory snapshots)"
    result.add_measure(
        "snapshot", title, samples=snapshot_times, floor="floor_snapshot", target=Target("ratio", 1.3)
    )  # fmt: skip
    title = "floor: zfs rollback in place, without a jail to stop and start, no gateway"
    result.add_measure("floor_rollback", title, samples=rollback_floor)
    title = "engine.sandboxes.rollback (a new clone and jail beside the old ones), until the agent answered"
    result.add_measure("rollback", title, samples=rollback_times, floor="floor_rollback")
    title = "the same, compared with the commands of a fork until the agent accepts a connection"
    result.add_measure("rollback_fork", title, samples=rollback_times, floor="floor_agent")


def _measure_raw_snapshot(snapshot: str, number: int) -> float:
    """Return how many milliseconds another `zfs snapshot` of the same dataset takes. Destroys it afterwards."""
    name = f"{snapshot.partition('@')[0]}@raw{number}"
    _, elapsed = time_call(lambda: run_command(("zfs", "snapshot", name)))
    pools.run("zfs", "destroy", name)
    return elapsed


def measure_raw_rollback(snapshot: str, name: str) -> float:
    """Return how many milliseconds `zfs rollback` takes, on a dataset with the files of a snapshot.

    The dataset ``name`` is a mounted clone of the snapshot, with 1 MiB of new data. It is destroyed afterwards.
    """
    run_command(("zfs", "clone", snapshot, name))
    try:
        run_command(("zfs", "snapshot", f"{name}@raw"))
        mount_point = run_command(("zfs", "get", "-H", "-o", "value", "mountpoint", name)).strip()
        Path(mount_point, "bench-rollback").write_bytes(os.urandom(1 << 20))
        _, elapsed = time_call(lambda: run_command(("zfs", "rollback", f"{name}@raw")))
        return elapsed
    finally:
        pools.destroy_all(name)


def _measure_concurrent_forks(
    ctx: Context, live: EngineRunner, answers: Answers, rounds_by_count: dict[int, int], result: Result
) -> None:
    """Measure how long it takes to create n forks of a snapshot in one all-or-nothing operation."""
    source = live.do(live.engine.forks.create(TEMPLATE, ForkSpec()))
    snapshot = live.do(live.engine.snapshots.create(source.id))
    live.do(live.engine.sandboxes.delete(source.id))
    for count, rounds in rounds_by_count.items():
        return_times: list[float] = []
        total_times: list[float] = []
        with ctx.showing_progress(f"n = {count}", rounds) as steps:
            for _ in range(rounds):
                answers.forget()
                start = time.perf_counter()
                forks = live.do(live.engine.forks.fork(snapshot.id, ForkSpec(count=count)), timeout=900)
                end = time.perf_counter()
                return_times.append((end - start) * 1000)
                total_times.append((max(end, answers.wait(count)[-1].end) - start) * 1000)
                for fork in forks:
                    assert isinstance(fork, Sandbox)
                    live.do(live.engine.sandboxes.delete(fork.id))
                steps.advance()
        result.add_measure(f"returned_{count}", f"fork n = {count}, until the engine returned", samples=return_times)
        result.add_measure(f"total_{count}", f"fork n = {count}, until all have answered", samples=total_times)
        fork_durations = [elapsed / count for elapsed in total_times]
        result.add_measure(f"each_{count}", f"fork n = {count}, per fork", samples=fork_durations, floor="floor_agent")
