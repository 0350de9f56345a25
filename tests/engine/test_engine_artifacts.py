"""Pushing snapshots to a registry and pulling them, with real disks, memory and ZFS streams."""

from __future__ import annotations

import contextlib
import json
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from sandbox_gateway.engine.spec import ForkSpec
from sandbox_gateway.engine.transfer import bases
from sandbox_gateway.engine.transfer.artifacts import ArtifactTransfer
from sandbox_gateway.records import MemoryMode
from tests.support import session
from tests.support.crash import KILLED_EXIT_CODE, OperationRunner
from tests.support.images import running_registry
from tests.support.live import EngineRunner
from tests.support.worlds import TEMPLATE, World

MIB = 1 << 20


@pytest.fixture(scope="module")
def registry(tmp_path_factory: pytest.TempPathFactory) -> Iterator[str]:
    port = session.allocate_port()
    with running_registry(tmp_path_factory.mktemp("registry") / "files", port=port) as address:
        yield address


def push(runner: EngineRunner, ref: str, reference: str, **options: Any) -> ArtifactTransfer:
    return finish(runner, runner.do(runner.engine.artifacts.push(ref, reference, **options)))


def pull(runner: EngineRunner, reference: str, **options: Any) -> ArtifactTransfer:
    return finish(runner, runner.do(runner.engine.artifacts.pull(reference, **options)))


def finish(runner: EngineRunner, transfer: ArtifactTransfer) -> ArtifactTransfer:
    async def wait() -> None:
        assert transfer.task is not None
        await transfer.task

    runner.do(wait())
    assert transfer.status == "ready", transfer.error
    return transfer


def measure_changed_chunks(runner: EngineRunner, ref: str, other_ref: str) -> int:
    """Return the bytes in the chunks of 1 MiB of a snapshot's disk that differ from another snapshot's disk."""

    async def compare() -> int:
        sources = [
            await runner.engine.host.open_snapshot(runner.engine.snapshots.get(each), memory=False)
            for each in (ref, other_ref)
        ]
        with contextlib.ExitStack() as stack:
            for source in sources:
                stack.callback(source.close)
            changed_bytes = 0
            for part, size in sources[0].sizes.items():
                for offset in range(0, size, MIB):
                    length = min(MIB, size - offset)
                    one, other = (source.read(part, offset, length) for source in sources)
                    changed_bytes += length if one != other else 0
            return changed_bytes

    return runner.do(compare())


def test_a_pulled_snapshot_is_forked_and_the_next_push_sends_what_has_changed(
    make_runner: Callable[..., EngineRunner], world: World, registry: str
) -> None:
    runner = make_runner(registry={"allowed": [registry], "plain_http": [registry]})
    reference = f"{registry}/{world.kind.replace('_', '-')}/env"
    runner.do(runner.engine.forks.create(TEMPLATE, ForkSpec(names=["source"])))
    runner.shell("source", "head -c 3000000 /dev/urandom >/root/blob && ln -s blob /root/link && sync")
    digest = runner.shell("source", "sha256sum /root/link")
    one = runner.do(runner.engine.snapshots.create("source", name="one"))
    first_push = push(runner, "one", f"{reference}:one")
    assert first_push.transferred_bytes > 3_000_000
    assert push(runner, "one", f"{reference}:one").transferred_bytes == 0

    if world.kind == "kvm_xfs":  # The streams of jails share nothing.
        disk_push = push(runner, "one", f"{reference}:one-disk", memory=False)
        assert disk_push.transferred_bytes < MIB, "only the config and the manifest: the chunks are the same"
        runner.shell("source", "echo changed >/root/new && sync")
        runner.do(runner.engine.snapshots.create("source", name="two"))
        changed_bytes = measure_changed_chunks(runner, "two", "one")
        second_push = push(runner, "two", f"{reference}:two-disk", memory=False)
        assert 0 < second_push.transferred_bytes <= changed_bytes + 256 * 1024
        assert second_push.transferred_bytes < first_push.transferred_bytes / 4
        with_memory = push(runner, "two", f"{reference}:two")
        assert with_memory.transferred_bytes < first_push.transferred_bytes
        # The chunks of the disk and most of the memory are in the snapshot `one`.
        pulled = pull(runner, f"{reference}:two", name="two-copy")
        assert pulled.transferred_bytes < first_push.transferred_bytes / 2
        runner.do(runner.engine.forks.create("two-copy", ForkSpec(names=["two-fork"])))
        assert runner.shell("two-fork", "cat /root/new") == "changed\n"

    for name in ("source", "two-fork")[: 1 + (world.kind == "kvm_xfs")]:
        runner.do(runner.engine.sandboxes.delete(name))
    for snapshot in runner.engine.snapshots.list():
        runner.do(runner.engine.snapshots.delete(snapshot.id))
    pull(runner, f"{reference}:one", name="pulled")
    snapshot = runner.engine.snapshots.get("pulled")
    assert snapshot.imported and snapshot.imported.snapshot == one.id
    assert (snapshot.memory is not MemoryMode.NONE) == world.abilities.memory
    config = runner.config
    runner.close()
    runner = make_runner(config=config)
    runner.do(runner.engine.forks.create("pulled", ForkSpec(names=["fork"])))
    assert runner.shell("fork", "sha256sum /root/link") == digest
    assert list((config.host.state_root / "pulled-blobs").iterdir()) == []


def test_a_gateway_that_is_killed_during_a_pull_continues_where_it_was(
    make_runner: Callable[..., EngineRunner],
    world: World,
    registry: str,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """It is killed while it fetches, and while it creates the snapshot. The next pull fetches only what is missing."""
    monkeypatch.setattr(bases, "_MAX_BASES", 0)
    runner = make_runner(registry={"allowed": [registry], "plain_http": [registry]})
    config = runner.config
    runner.do(runner.engine.forks.create(TEMPLATE, ForkSpec(names=["source"])))
    runner.shell("source", "head -c 5000000 /dev/urandom >/root/blob && sync")
    digest = runner.shell("source", "sha256sum /root/blob")
    runner.do(runner.engine.snapshots.create("source", name="mark", memory="none"))
    runner.do(runner.engine.sandboxes.delete("source"))
    reference = f"{registry}/team/env:mark"
    push(runner, "mark", reference)
    runner.close()
    operations = OperationRunner(world.host_class)
    output = tmp_path / "output"
    try:
        assert operations.run(config, "pull", 0, output) == 0, output.read_text()
        step_count = json.loads(output.read_text().splitlines()[-1])["steps"]
        runner = make_runner(config=config)
        runner.do(runner.engine.snapshots.delete("new"))
        total_bytes = pull(runner, reference, name="new").transferred_bytes
        blob_count = len(runner.do(runner.engine.artifacts.inspect(reference)).index.layers)
        runner.do(runner.engine.snapshots.delete("new"))
        runner.close()

        # To keep a blob takes three steps, and to remove it takes one. The steps between create the snapshot.
        creation_steps = step_count - 4 * blob_count
        assert creation_steps > 4
        for step in (blob_count, 3 * blob_count + creation_steps // 2):
            assert operations.run(config, "pull", step, output) == KILLED_EXIT_CODE, output.read_text()
            runner = make_runner(config=config)
            moment = f"killed at step {step} of {step_count}"
            assert not any("new" in snapshot.names for snapshot in runner.engine.snapshots.list()), moment
            runner.wait_for(world.check_no_strays, runner.engine, config, moment)
            kept_paths = [*(config.host.state_root / "pulled-blobs").iterdir()]
            assert kept_paths and not any(path.name.startswith(".") for path in kept_paths), moment
            kept_bytes = sum(path.stat().st_size for path in kept_paths)
            assert pull(runner, reference, name="new").transferred_bytes == total_bytes - kept_bytes, moment
            runner.do(runner.engine.forks.create("new", ForkSpec(names=["fork"])))
            assert runner.shell("fork", "sha256sum /root/blob") == digest, moment
            runner.do(runner.engine.sandboxes.delete("fork"))
            runner.do(runner.engine.snapshots.delete("new"))
            runner.close()
        # If the gateway is slow, its background work adds steps, and the last blobs may not have arrived.
        assert kept_bytes > 0.95 * total_bytes, "the second time, everything had arrived"
    finally:
        operations.end()
