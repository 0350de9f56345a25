"""Moves of sandboxes between two hosts of the same kind, with real machines, disks and streams."""

from __future__ import annotations

from collections.abc import AsyncIterator, Callable

import pytest

from sandbox_gateway.engine.spec import ForkSpec
from sandbox_gateway.errors import Busy, NotFound
from sandbox_gateway.records import Arrival, Sandbox, SandboxState
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


def _send(source: EngineRunner, target: EngineRunner, *, resumes: bool) -> Sandbox:
    """Let a sandbox depart, and arrive on the target."""
    sandbox = source.do(source.engine.moves.depart("web", MOVE, "h2"))

    async def read_file() -> list[bytes]:
        export = await source.engine.moves.export(sandbox.id, MOVE, memory=True)
        try:
            return [piece async for piece in export.read_pieces()]
        finally:
            await export.close()

    file = source.do(read_file())

    async def receive() -> None:
        async def read_pieces() -> AsyncIterator[bytes]:
            for piece in file:
                yield piece

        data = source.engine.moves.describe_for_target(sandbox)
        arriving_sandbox = await target.engine.moves.check_arrival(data, resumes=resumes)
        arrival = Arrival(move=MOVE, source="h1", resumes=resumes)
        await target.engine.moves.receive(arriving_sandbox, arrival, read_pieces())

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
