"""Test the serial port of the agent, over which a fork with memory receives its identity."""

from __future__ import annotations

import time
from collections.abc import Iterator

import pytest

from sandbox_gateway.engine.agent_client import AgentClient
from sandbox_gateway.engine.spec import ForkSpec
from tests.support.live import EngineRunner, engines
from tests.support.worlds import TEMPLATE, KvmXfsWorld


@pytest.fixture(scope="module")
def runner(kvm_xfs_world: KvmXfsWorld) -> Iterator[EngineRunner]:
    with engines(kvm_xfs_world) as make_runner:
        yield make_runner()


@pytest.fixture
def connection_times(monkeypatch: pytest.MonkeyPatch) -> list[float]:
    """The times at which the gateway connected to an agent over the network to send the sandbox's identity."""
    times: list[float] = []
    original_connect = AgentClient._connect_when_ready

    async def record_connection(self: AgentClient, *args: object) -> object:
        times.append(time.monotonic())
        return await original_connect(self, *args)  # type: ignore[arg-type]

    monkeypatch.setattr(AgentClient, "_connect_when_ready", record_connection)
    return times


def test_forks_of_forks_receive_their_identity_over_the_line(
    runner: EngineRunner, connection_times: list[float]
) -> None:
    """Each fork is captured immediately, before its agent can answer.

    Therefore, the next fork receives its identity while the previous agent still exchanges messages with the gateway.
    """
    source = runner.do(runner.engine.forks.create(TEMPLATE, ForkSpec(names=["first"], env={"WHO": "first"})))
    for name in ("second", "third"):
        snapshot = runner.do(runner.engine.snapshots.create(source.id))
        source = runner.do(runner.engine.forks.create(snapshot.id, ForkSpec(names=[name], env={"WHO": name})))
    for name in ("first", "second", "third"):
        assert runner.shell(name, "echo $WHO $(hostname)").split() == [name, name]
    assert connection_times == []
    runner.remove_all()


def test_a_long_identity_is_sent_over_the_network(runner: EngineRunner, connection_times: list[float]) -> None:
    runner.do(runner.engine.forks.create(TEMPLATE, ForkSpec(names=["long"], env={"LONG": "x" * 5000})))
    assert len(runner.shell("long", "echo $LONG").strip()) == 5000
    assert connection_times
    runner.remove_all()


def test_forks_have_a_line_even_if_the_source_has_none(runner: EngineRunner, connection_times: list[float]) -> None:
    """After a restart, the gateway has no line to a machine that it adopts, but forks of that machine need one."""
    source = runner.do(runner.engine.forks.create(TEMPLATE, ForkSpec(names=["source"])))
    machine = runner.engine.host._machines.require_running(source).machine  # type: ignore[attr-defined]
    assert machine.line is not None
    runner.call(machine.line.close)
    time.sleep(1)
    snapshot = runner.do(runner.engine.snapshots.create(source.id))
    for name in ("one", "two"):
        runner.do(runner.engine.forks.create(snapshot.id, ForkSpec(names=[name], env={"WHO": name})))
        assert runner.shell(name, "echo $WHO").strip() == name
    assert connection_times == []
    runner.remove_all()


def test_a_machine_that_ignores_its_serial_port_gets_its_identity_over_the_network(
    runner: EngineRunner, connection_times: list[float]
) -> None:
    runner.do(runner.engine.forks.create(TEMPLATE, ForkSpec(names=["source"])))
    # Only the agent can open the port. Unbinding the driver removes the port.
    runner.shell("source", "basename $(readlink -f /sys/class/virtio-ports/*/device) >/run/port")
    runner.shell(
        "source", "d=$(cat /run/port); echo $d >/sys/bus/virtio/drivers/virtio_console/unbind; ! ls /dev/vport*"
    )
    snapshot = runner.do(runner.engine.snapshots.create("source"))
    assert snapshot.host["line"] is False
    start = time.monotonic()
    runner.do(runner.engine.forks.create(snapshot.id, ForkSpec(names=["fork"], env={"WHO": "fork"})))
    assert connection_times and connection_times[0] - start < 2, "the gateway waited for an answer over the line"
    assert runner.shell("fork", "echo $WHO").strip() == "fork"
    runner.remove_all()
