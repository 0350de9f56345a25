"""The gateway issues every command line of the table in docs/jail_zfs.md, except those for rare cases."""

from __future__ import annotations

from sandbox_gateway.engine.spec import ForkSpec, MountSpec
from sandbox_gateway.records import NetworkPolicy
from tests.freebsd_shim import command_lines
from tests.support.jail_world import JailZfsWorld
from tests.support.live import engines
from tests.support.worlds import TEMPLATE


def test_the_command_lines_of_the_table_are_issued(jail_zfs_world: JailZfsWorld) -> None:
    with command_lines.recorded() as recording, engines(jail_zfs_world) as make_live:
        live = make_live()
        engine = live.engine
        live.do(engine.volumes.create("data", size_mb=64))
        live.do(engine.forks.create(TEMPLATE, ForkSpec(names=["one"])))
        live.do(engine.attachments.attach("one", MountSpec("data", "/data")))
        live.do(engine.snapshots.create("one", name="s", volumes=["data"]))
        live.do(engine.sandboxes.get_usage("one"))
        live.do(engine.host.loads([live.sandbox("one")]))
        live.do(engine.sandboxes.set_network("one", NetworkPolicy(allow_internet=False)))
        live.do(engine.attachments.detach("one", "data"))
        live.do(engine.sandboxes.rollback("one", "s"))
        live.do(engine.sandboxes.delete("one"))
        live.close()
    assert recording.unknown == []
    common_lines = [each for each in command_lines.COMMAND_LINES if not each.is_rare]
    assert [each.form for each in common_lines if each not in recording.known] == []
    assert {"clone", "snapshot", "destroy", "set", "get", "mount"} <= recording.zfs
