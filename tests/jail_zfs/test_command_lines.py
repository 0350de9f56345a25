"""Test that the gateway issues every command line in the table of docs/jail_zfs.md, except for rare ones."""

from __future__ import annotations

from sandbox_gateway.engine.spec import ForkSpec, MountSpec
from sandbox_gateway.records import NetworkPolicy
from tests.freebsd_shim import command_lines
from tests.support.jail_world import JailZfsWorld
from tests.support.live import engines
from tests.support.worlds import TEMPLATE


def test_the_command_lines_of_the_table_are_issued(jail_zfs_world: JailZfsWorld) -> None:
    with command_lines.recorded() as recording, engines(jail_zfs_world) as make_runner:
        runner = make_runner()
        engine = runner.engine
        runner.do(engine.volumes.create("data", size_mb=64))
        runner.do(engine.forks.create(TEMPLATE, ForkSpec(names=["one"])))
        runner.do(engine.attachments.attach("one", MountSpec("data", "/data")))
        runner.do(engine.snapshots.create("one", name="s", volumes=["data"]))
        runner.do(engine.sandboxes.get_usage("one"))
        runner.do(engine.host.measure_loads([runner.get_sandbox("one")]))
        runner.do(engine.sandboxes.set_network("one", NetworkPolicy(allow_internet=False)))
        runner.do(engine.attachments.detach("one", "data"))
        runner.do(engine.sandboxes.rollback("one", "s"))
        runner.do(engine.sandboxes.delete("one"))
        runner.close()
    assert recording.unknown_argvs == []
    common_lines = [each for each in command_lines.COMMAND_LINES if not each.is_rare]
    assert [each.form for each in common_lines if each not in recording.known_lines] == []
    assert {"clone", "snapshot", "destroy", "set", "get", "mount"} <= recording.zfs_subcommands
