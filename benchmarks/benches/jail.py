"""Measure the jail/ZFS host: fork (next to the bare commands that it issues), snapshot, rollback, kill, n at once."""

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

from benchmarks.answers import Answers, watching
from benchmarks.context import Context
from benchmarks.measure import Result, Target
from benchmarks.timers import Span, Stop, Timers, milliseconds, shares
from sandbox_gateway.config import Config
from sandbox_gateway.engine.spec import ForkSpec
from sandbox_gateway.hosts.addresses import AGENT_PORT
from sandbox_gateway.hosts.jail_zfs.command_runner import SECONDS, CommandRunner
from sandbox_gateway.hosts.jail_zfs.host import JailZfsHost
from sandbox_gateway.hosts.jail_zfs.jail import identity
from sandbox_gateway.hosts.jail_zfs.jail.jails import Jails
from sandbox_gateway.hosts.jail_zfs.jail.rctl import Limits
from sandbox_gateway.hosts.jail_zfs.network.epair import Bridge
from sandbox_gateway.hosts.jail_zfs.network.pf import Pf
from sandbox_gateway.hosts.jail_zfs.running_machines import Machine
from sandbox_gateway.hosts.jail_zfs.storage.instances import InstanceStorage
from sandbox_gateway.records import Sandbox
from sandbox_gateway.zfs import run as zfs_run
from tests.jail_zfs import pools
from tests.support.jail_world import ShimHost, jail_zfs_world, shim_environment
from tests.support.live import Live
from tests.support.worlds import TEMPLATE

_DOUBLED = (
    "ZFS is zfs-fuse, and tests/freebsd_shim emulates FreeBSD's commands (jail, ifconfig, route, rctl, "
    "pfctl, jls, pkill) on Linux: on FreeBSD all times differ, the floor's as well"
)
_BETWEEN_SECONDS = 0.5
_WATCHED: dict[str, Stop] = {
    "fork": (JailZfsHost, "fork"),
    "clone": (InstanceStorage, "clone"),
    "epair": (Bridge, "create"),
    "pf": (Pf, "apply"),
    "limits": (Limits, "apply"),
    "jail": (Jails, "create"),
    "loopback": (Jails, "configure_loopback"),
    "connect": (Jails, "configure_interface"),
}
_PARTS = {
    "clone": "zfs clone, in parallel with the next three",
    "epair": "epair and bridge, if slower",
    "pf": "packet filter, if slower",
    "limits": "limits, if slower",
    "jail": "create the jail, start its agent",
    "connect": "address and route, in parallel with the loopback",
    "loopback": "loopback, if slower",
    "rest": "everything else",
}
_RECORDED: dict[str, Stop] = {"zfs": (zfs_run, "execute"), "command": (CommandRunner, "_run")}


class JailZfs:
    name = "jail"
    title = "jail/ZFS host, FreeBSD's commands emulated on Linux"

    def run(self, ctx: Context) -> Result:
        rounds = ctx.rounds(full=12, quick=3)
        settings = {"rounds": rounds, "zfs": "zfs-fuse", "freebsd": "tests/freebsd_shim"}
        result = Result(self.name, self.title, settings, notes=[_DOUBLED])
        with _engine(ctx) as (live, host), watching() as answers:
            settings["concurrency"] = live.config.limits.concurrency
            raw = RawCommands.recorded(live, host)
            settings["floor_commands"] = len(raw.commands)
            _forks(ctx, live, raw, answers, rounds, result)
            _captures(ctx, live, answers, rounds, result)
            _at_once(ctx, live, answers, {1: 2, 4: 1} if ctx.quick else {1: 5, 10: 2, 50: 1}, result)
        return result


class RawCommands:
    """The floor: ``zfs clone``, ``ifconfig …`` and ``jail -c …`` as the host issued them for one fork, with new names.

    They run one after the other, in the order in which the host started them.
    """

    def __init__(self, live: Live, host: JailZfsHost, sandbox: Sandbox, commands: list[tuple[str, ...]]) -> None:
        self._live = live
        self._host = host
        self._sandbox = sandbox
        self._epair = host._bridge.epair(int(sandbox.host["number"]))
        self._numbers = itertools.count()
        self.commands = commands

    @classmethod
    def recorded(cls, live: Live, host: JailZfsHost) -> RawCommands:
        """Record the commands that the host runs for one fork."""
        timers = Timers()
        with timers.watching(_RECORDED):
            sandbox = live.do(live.engine.forks.create(TEMPLATE, ForkSpec()))
        assert isinstance(sandbox, Sandbox)
        spans = timers.take()
        issued = [(span.start, ("zfs", *span.args[0])) for span in spans.get("zfs", [])]
        issued += [(span.start, tuple(span.args[1])) for span in spans.get("command", [])]
        commands = [
            argv for _, argv in sorted(issued) if argv[:2] == ("zfs", "clone") or argv[0] in ("ifconfig", "jail")
        ]
        if {argv[0] for argv in commands} != {"zfs", "ifconfig", "jail"}:
            raise RuntimeError(f"only some of the host's commands were recorded: {commands}")
        live.do(live.engine.sandboxes.delete(sandbox.id))
        return cls(live, host, sandbox, commands)

    def fork(self) -> tuple[float, float]:
        """Run the commands. Returns their milliseconds, and those until the jail's agent accepts.

        Removes everything afterwards.
        """
        host, number = self._host, next(self._numbers)
        instance = f"raw{number}"
        # The end of the subnet: the host assigns addresses from its beginning.
        epair = host._bridge.epair(host._bridge.capacity + 1 - number)
        exchanged = {self._sandbox.instance: instance} | {
            getattr(self._epair, end): getattr(epair, end) for end in ("outer", "inner", "address", "mac")
        }
        dns = host.name_servers()
        machine = Machine(f"{self._live.config.network.prefix}-{instance}", epair, host._disks.path(instance))
        try:
            # Everything outside the floor is prepared before the clock starts. Without rules, a jail is unreachable.
            identity.write_identity(host._identities.path(instance), self._sandbox, dns)
            self._live.do(host._pf.apply(machine.jail, epair, self._sandbox.network, dns))
            start = time.perf_counter()
            for argv in self.commands:
                said = _run_command(tuple(_replace_names(word, exchanged) for word in argv))
                if argv[:3] == ("ifconfig", "epair", "create"):
                    made = said.strip().removesuffix("a")
                    exchanged |= self._epairs(made)
            done = time.perf_counter()
            _wait_until_connected(epair.address)
            return (done - start) * 1000, (time.perf_counter() - start) * 1000
        finally:
            self._wait_until_removed(machine, instance)

    def _epairs(self, made: str) -> dict[str, str]:
        """Map both ends of the recorded epair, whose names contain its number, to those of ``made``."""
        words = itertools.chain.from_iterable(self.commands)
        ends = {word for word in words if re.fullmatch(r"epair\d+[ab]", word)}
        return {end: f"{made}{end[-1]}" for end in ends}

    def _wait_until_removed(self, machine: Machine, instance: str) -> None:
        self._live.do(self._host._runner.clean_up(machine, instance))
        pools.destroy_all(self._host._storage.instances.dataset(instance))


def _wait_until_connected(address: str) -> None:
    """Return once the agent accepts a connection."""
    deadline = time.monotonic() + SECONDS
    while True:
        try:
            socket.create_connection((address, AGENT_PORT), timeout=1).close()
            return
        except OSError as error:
            if time.monotonic() > deadline:
                raise RuntimeError(
                    f"the agent of a jail that the bare commands made does not accept connections: {error}"
                ) from None
            time.sleep(0.001)


def _replace_names(word: str, exchanged: dict[str, str]) -> str:
    """Replace every word that is a key of ``replacements``, but not parts of longer words."""
    keys = "|".join(re.escape(key) for key in sorted(exchanged, key=len, reverse=True))
    return re.sub(rf"(?<![0-9A-Za-z])({keys})(?![0-9A-Za-z])", lambda found: exchanged[found[1]], word)


def _run_command(argv: tuple[str, ...]) -> str:
    """Run a command that must succeed, and return its standard output."""
    turn = zfs_run.mount_lock(argv[1], SECONDS, None) if argv[0] == "zfs" else contextlib.nullcontext()
    env = {**os.environ, "LC_ALL": "C", **shim_environment()}
    with turn:
        done = subprocess.run(argv, env=env, capture_output=True, text=True, timeout=SECONDS, check=False)
    if done.returncode != 0:
        raise RuntimeError(f"{' '.join(argv)} failed ({done.returncode}): {done.stderr.strip()}")
    return done.stdout


@contextlib.contextmanager
def _engine(ctx: Context) -> Iterator[tuple[Live, ShimHost]]:
    """Run an engine with its own pool and a template. Removes everything at the end."""
    ctx.say("building the jail's template on a separate pool (zfs-fuse, FreeBSD's commands emulated)")
    with jail_zfs_world() as world:
        config: Config = world.config()
        host = ShimHost(config)
        live = Live(host, config)
        try:
            yield live, host
        finally:
            live.remove_all()
            live.close()
            world.forget(config)


def _forks(ctx: Context, live: Live, raw: RawCommands, answers: Answers, rounds: int, result: Result) -> None:
    """Run raw commands and forks in turns. Kills each fork afterwards."""
    found: dict[str, list[float]] = defaultdict(list)
    timers = Timers()
    with timers.watching(_WATCHED), ctx.steps("forks", rounds) as steps:
        for _ in range(rounds):
            bare, accepted = raw.fork()
            found["floor"].append(bare)
            found["floor_agent"].append(accepted)
            time.sleep(_BETWEEN_SECONDS)
            _fork(live, timers, answers, found)
            time.sleep(_BETWEEN_SECONDS)
            steps.done()
    title = "floor: zfs clone, ifconfig, jail -c one after the other, no gateway"
    result.measure("floor", title, samples=found["floor"])
    result.measure("floor_agent", "the same until the jail's agent accepts", samples=found["floor_agent"])
    result.measure("fork", "host.fork", samples=found["fork"], floor="floor", target=Target("ratio", 1.3))
    result.parts("fork", _PARTS, {key: found[f"fork.{key}"] for key in _PARTS})
    title = "engine.forks.create, until the agent answered"
    result.measure("answered", title, samples=found["answered"], floor="floor_agent")
    result.measure("kill", "engine.sandboxes.delete", samples=found["kill"])
    if timers.missing:
        result.notes.append(f"not found, and so not measured separately: {', '.join(timers.missing)}")


def _fork(live: Live, timers: Timers, answers: Answers, found: dict[str, list[float]]) -> None:
    timers.take()
    answers.forget()
    start = time.perf_counter()
    sandbox = live.do(live.engine.forks.create(TEMPLATE, ForkSpec()))
    returned = time.perf_counter()
    (answer,) = answers.wait(1)
    found["answered"].append(Span(start, max(returned, answer.end)).ms)
    spans = timers.take()
    (fork,) = spans["fork"]
    found["fork"].append(fork.ms)
    parts = {key: spans[key] for key in _PARTS if key in spans}
    for key, value in shares(fork, parts).items():
        found[f"fork.{key}"].append(value)
    _, taken = milliseconds(lambda: live.do(live.engine.sandboxes.delete(sandbox.id)))
    found["kill"].append(taken)


def _captures(ctx: Context, live: Live, answers: Answers, rounds: int, result: Result) -> None:
    """Take snapshots of a sandbox that writes a little before each snapshot, and roll back to them."""
    floor: list[float] = []
    snapshots: list[float] = []
    rollbacks: list[float] = []
    sandbox = live.do(live.engine.forks.create(TEMPLATE, ForkSpec()))
    with ctx.steps("snapshots and rollbacks", rounds) as steps:
        for number in range(rounds):
            live.shell(sandbox.id, f"dd if=/dev/urandom of=/root/bench.{number} bs=64k count=16 2>/dev/null")
            snapshot, taken = milliseconds(lambda: live.do(live.engine.snapshots.create(sandbox.id)))
            snapshots.append(taken)
            live.shell(sandbox.id, "dd if=/dev/urandom of=/root/bench bs=64k count=16 2>/dev/null")
            floor.append(_raw_snapshot(live.engine.snapshots.get(snapshot.id).host["zfsSnapshot"], number))
            time.sleep(_BETWEEN_SECONDS)
            answers.forget()
            start = time.perf_counter()
            live.do(live.engine.sandboxes.rollback(sandbox.id, snapshot.id))
            returned = time.perf_counter()
            rollbacks.append((max(returned, answers.wait(1)[-1].end) - start) * 1000)
            steps.done()
    live.do(live.engine.sandboxes.delete(sandbox.id))
    result.measure("floor_snapshot", "floor: zfs snapshot, no gateway", samples=floor)
    result.measure("snapshot", "engine.snapshots.create (files; a jail has no memory to keep)", samples=snapshots,
                   floor="floor_snapshot")  # fmt: skip
    title = "engine.sandboxes.rollback, until the agent answered"
    result.measure("rollback", title, samples=rollbacks, floor="floor_agent")


def _raw_snapshot(snapshot: str, number: int) -> float:
    """Take a bare snapshot of the source of ``snapshot`` and return its milliseconds. Destroys it afterwards."""
    name = f"{snapshot.partition('@')[0]}@raw{number}"
    _, taken = milliseconds(lambda: _run_command(("zfs", "snapshot", name)))
    pools.run("zfs", "destroy", name)
    return taken


def _at_once(ctx: Context, live: Live, answers: Answers, plan: dict[int, int], result: Result) -> None:
    """Create Create n forks of a snapshot, all or none."""
    source = live.do(live.engine.forks.create(TEMPLATE, ForkSpec()))
    snapshot = live.do(live.engine.snapshots.create(source.id))
    live.do(live.engine.sandboxes.delete(source.id))
    for count, rounds in plan.items():
        returned: list[float] = []
        total: list[float] = []
        with ctx.steps(f"n = {count}", rounds) as steps:
            for _ in range(rounds):
                answers.forget()
                start = time.perf_counter()
                made = live.do(live.engine.forks.fork(snapshot.id, ForkSpec(count=count)), timeout=900)
                end = time.perf_counter()
                returned.append((end - start) * 1000)
                total.append((max(end, answers.wait(count)[-1].end) - start) * 1000)
                for each in made:
                    assert isinstance(each, Sandbox)
                    live.do(live.engine.sandboxes.delete(each.id))
                steps.done()
        result.measure(f"returned_{count}", f"fork n = {count}, until the engine returned", samples=returned)
        result.measure(f"total_{count}", f"fork n = {count}, until all have answered", samples=total)
        each_ms = [taken / count for taken in total]
        result.measure(f"each_{count}", f"fork n = {count}, per fork", samples=each_ms, floor="floor_agent")
