"""Moves of sandboxes between two hosts of the same kind, with real machines, disks and streams."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from typing import Any

import pytest

from sandbox_gateway.engine.spec import ForkSpec
from sandbox_gateway.engine.transfer.transfers import Export
from sandbox_gateway.errors import Busy, NotFound
from sandbox_gateway.records import Arrival, Sandbox, SandboxState
from tests.support.exported_files import iterate_pieces, read_export
from tests.support.live import EngineRunner
from tests.support.worlds import TEMPLATE, World

MOVE = "0123456789abcdef"
MakeRunner = Callable[..., EngineRunner]


@pytest.fixture
def source(make_runner: MakeRunner) -> EngineRunner:
    """A host with the sandbox `web`, which has a file, and a program that runs."""
    runner = make_runner()
    spec = ForkSpec(names=["web"], metadata={"team": "blue"}, env={"COLOUR": "red"}, timeout=3600)
    runner.do(runner.engine.forks.create(TEMPLATE, spec))
    runner.shell("web", "echo precious >/root/file; sleep 86400 >/dev/null 2>&1 & echo $! >/root/pid")
    return runner


@pytest.fixture
def target(source: EngineRunner, make_runner: MakeRunner) -> EngineRunner:
    runner = make_runner()
    _trust(runner, source)
    return runner


def _trust(runner: EngineRunner, source: EngineRunner) -> None:
    signer = source.engine.transfers.get_signer().fingerprint
    runner.engine.transfers.list_fleet_signers = lambda: [signer]


def _send(source: EngineRunner, target: EngineRunner, *, resumes: bool, after_first_pass: bool = False) -> Sandbox:
    """Let a sandbox depart, and arrive on the target."""
    moves = source.engine.moves
    sandbox = source.do(moves.depart("web", MOVE, "h2"))
    file = source.do(read_export(moves.export(sandbox.id, MOVE, memory=True, after_first_pass=after_first_pass)))

    async def receive() -> None:
        data = moves.describe_for_target(sandbox)
        arriving_sandbox = await target.engine.moves.check_arrival(data, resumes=resumes)
        arrival = Arrival(move=MOVE, source="h1", resumes=resumes)
        await target.engine.moves.receive(arriving_sandbox, arrival, iterate_pieces(file))

    target.do(receive())
    return sandbox


def _list_snapshot_ids(runner: EngineRunner) -> set[str]:
    return {*runner.engine.index.snapshots}


def test_a_running_sandbox_moves(source: EngineRunner, target: EngineRunner, world: World) -> None:
    before = [_list_snapshot_ids(source), _list_snapshot_ids(target)]
    original = source.get_sandbox("web")
    _send(source, target, resumes=True)
    for runner, ref in ((source, original.id), (source, "web"), (target, original.id), (target, "web")):
        with pytest.raises(Busy, match="is being moved to"):
            runner.do(runner.engine.sandboxes.delete(ref))
    sandbox = target.do(target.engine.moves.adopt(original.id, MOVE, must_start=True))
    assert sandbox is not None
    source.do(source.engine.moves.complete_departure(original.id, MOVE))
    with pytest.raises(NotFound):
        source.get_sandbox("web")
    kept = {"id", "name", "metadata", "env", "created_at", "end_at", "timeout", "head", "forked_from", "template_id"}
    assert sandbox.model_dump(include=kept) == original.model_dump(include=kept)
    assert target.shell("web", "cat /root/file; echo $COLOUR") == "precious\nred\n"
    survives = target.shell("web", "kill -0 $(cat /root/pid) 2>/dev/null && echo runs || echo gone").strip()
    assert survives == ("runs" if world.abilities.memory else "gone")
    assert _list_snapshot_ids(source) == before[0]
    # It can be captured and paused as usual, and leaves nothing behind.
    target.do(target.engine.snapshots.create("web", name="taken"))
    target.do(target.engine.sandboxes.pause("web"))
    target.do(target.engine.sandboxes.resume("web"))
    assert target.shell("web", "cat /root/file") == "precious\n"
    target.do(target.engine.sandboxes.delete("web"))
    target.do(target.engine.snapshots.delete("taken"))
    assert _list_snapshot_ids(target) == before[1]


def test_after_a_first_pass_only_what_has_changed_is_sent(
    source: EngineRunner, target: EngineRunner, world: World
) -> None:
    if not source.engine.moves.first_passes.can_send:
        pytest.skip(f"a {world.kind} host cannot send what differs from any other snapshot")
    before = [_list_snapshot_ids(source), _list_snapshot_ids(target)]
    id = source.get_sandbox("web").id
    source.shell("web", "head -c 20M /dev/urandom | tee /root/noise >/dev/shm/noise; sync")
    digests = source.shell("web", "sha256sum /root/noise /dev/shm/noise")
    first_passes = source.engine.moves.first_passes
    sizes: list[int] = []
    export_hidden = source.engine.transfers.export_hidden

    async def send_first_pass() -> Sandbox:
        async with first_passes.captured(id, MOVE, memory=True):
            file = await read_export(first_passes.export(id, MOVE, memory=True))
            receiving = target.engine.moves.first_passes.receive(id, MOVE, iterate_pieces(file))
            await asyncio.to_thread(target.do, receiving)
            sizes.append(sum(map(len, file)))
            await asyncio.to_thread(source.shell, "web", "echo late | tee /root/late >/dev/shm/late; sync")
            return await asyncio.to_thread(_send, source, target, resumes=True, after_first_pass=True)

    async def export_and_measure(snapshot_id: str, **options: Any) -> Export:
        export = await export_hidden(snapshot_id, **options)
        sizes.append(sum(part.data_bytes for part in export.manifest.parts))
        return export

    source.engine.transfers.export_hidden = export_and_measure  # type: ignore[method-assign]
    source.do(send_first_pass())
    whole, whole_file, rest = sizes
    assert whole_file > 40 << 20 < whole and rest < whole / 4, sizes
    target.do(target.engine.moves.adopt(id, MOVE, must_start=True))
    target.do(target.engine.moves.first_passes.forget(id, MOVE))
    source.do(source.engine.moves.complete_departure(id, MOVE))
    assert target.shell("web", "sha256sum /root/noise /dev/shm/noise; cat /root/late /dev/shm/late") == (
        f"{digests}late\nlate\n"
    )
    assert target.shell("web", "kill -0 $(cat /root/pid) && echo runs") == "runs\n"
    assert [_list_snapshot_ids(source), _list_snapshot_ids(target)] == before


def test_a_sandbox_is_taken_back(source: EngineRunner, target: EngineRunner, world: World) -> None:
    before = [_list_snapshot_ids(source), _list_snapshot_ids(target)]
    id = _send(source, target, resumes=True).id
    target.do(target.engine.moves.discard_arrival(id, MOVE))
    source.do(source.engine.moves.take_back(id, MOVE, "its move failed"))
    assert source.get_sandbox("web").state is SandboxState.RUNNING
    assert source.shell("web", "cat /root/file") == "precious\n"
    with pytest.raises(NotFound):
        target.get_sandbox("web")
    assert [_list_snapshot_ids(source), _list_snapshot_ids(target)] == before


def test_both_gateways_are_started_again_during_a_move(
    source: EngineRunner, target: EngineRunner, make_runner: MakeRunner
) -> None:
    id = _send(source, target, resumes=True).id
    for runner in (source, target):
        runner.close()
    source, target = (make_runner(config=runner.config) for runner in (source, target))
    for runner in (source, target):
        with pytest.raises(Busy, match="is being moved to"):
            runner.do(runner.engine.sandboxes.resume("web"))
    assert target.do(target.engine.moves.adopt(id, MOVE, must_start=False))
    source.do(source.engine.moves.complete_departure(id, MOVE))
    assert target.shell("web", "cat /root/file") == "precious\n"
    target.close()
    target = make_runner(config=target.config)
    assert target.get_sandbox("web").state is SandboxState.RUNNING, "the machine is adopted"


def test_a_paused_sandbox_moves(source: EngineRunner, target: EngineRunner) -> None:
    before = _list_snapshot_ids(target)
    source.do(source.engine.sandboxes.pause("web"))
    id = _send(source, target, resumes=False).id
    sandbox = target.do(target.engine.moves.adopt(id, MOVE, must_start=True))
    assert sandbox and sandbox.state is SandboxState.PAUSED
    source.do(source.engine.moves.complete_departure(id, MOVE))
    target.do(target.engine.sandboxes.resume("web"))
    assert target.shell("web", "cat /root/file") == "precious\n"
    target.do(target.engine.sandboxes.delete("web"))
    assert _list_snapshot_ids(target) == before
