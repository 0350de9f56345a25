"""Measure how long a move to another host pauses a virtual machine, and how much is sent meanwhile."""

from __future__ import annotations

import asyncio
import time
from collections import defaultdict
from typing import Literal

from benchmarks.context import Context, KvmXfs, create_busy_program
from benchmarks.guest_memory import count_changed_bytes
from benchmarks.measure import Result, Target
from sandbox_gateway.engine.engine import Engine
from sandbox_gateway.hosts.kvm_xfs.files.layout import Layout
from sandbox_gateway.hosts.kvm_xfs.host import KvmXfsHost
from sandbox_gateway.records import Arrival, Sandbox, Snapshot
from tests.support.exported_files import iterate_pieces, read_export
from tests.support.live import EngineRunner

_MOVE = "0123456789abcdef"
_DIRTY_MB = 2
_TIMEOUT_SECONDS = 600
_IMAGES: tuple[Literal["memory"], Literal["disk"]] = ("memory", "disk")


class Move:
    name = "move"
    title = "a move of a running virtual machine to another gateway"

    def run(self, ctx: Context) -> Result:
        rounds = ctx.choose(full=20, quick=2)
        result = Result(self.name, self.title, {"rounds": rounds, "guest_rewrites_mb": _DIRTY_MB})
        result.notes.append("both gateways are on this machine, and no network is between them")
        samples: dict[str, list[float]] = defaultdict(list)
        host, program = ctx.kvm_xfs, create_busy_program(_DIRTY_MB, pause_seconds=0.1)
        config = host.create_config(host.mount_point / "bench-target")
        target = EngineRunner(KvmXfsHost(config), config)
        try:
            target.engine.transfers.list_fleet_signers = lambda: [host.live.engine.transfers.get_signer().fingerprint]
            with host.temporary_snapshot(program) as snapshot, ctx.showing_progress("moves", rounds) as steps:
                for _ in range(rounds):
                    samples["floor"].append(_pause_and_resume(host, snapshot))
                    for key, has_first_pass in (("pause", True), ("whole", False)):
                        move = _Move(host, target, host.create_sandbox(snapshot.id), samples, key, has_first_pass)
                        host.live.do(move.run(), timeout=_TIMEOUT_SECONDS)
                    steps.advance()
        finally:
            target.remove_all()
            target.close()
        result.add_measure("floor", "floor: a pause and a resume on one host", samples=samples["floor"])
        title = "the pause of a move, after a first pass"
        result.add_measure("pause", title, samples=samples["pause"], floor="floor")
        result.add_measure("whole", "the pause of a move without a first pass", samples=samples["whole"], floor="floor")
        result.add_measure("first", "the first pass, while the machine runs", samples=samples["first"])
        title = "floor: what differs from the first pass, and the state of the devices"
        result.add_measure("differs", title, "bytes", samples=samples["differs"])
        target_ratio = Target("ratio", 1.1)
        result.add_measure(
            "sent", "sent in the pause", "bytes", samples=samples["sent"], floor="differs", target=target_ratio
        )
        result.add_measure("sent_whole", "sent without a first pass", "bytes", samples=samples["sent_whole"])
        return result


def _pause_and_resume(host: KvmXfs, snapshot: Snapshot) -> float:
    sandbox = host.create_sandbox(snapshot.id)
    time.sleep(1)
    start = time.perf_counter()
    host.live.do(host.live.engine.sandboxes.pause(sandbox.id))
    host.live.do(host.live.engine.sandboxes.resume(sandbox.id))
    elapsed = (time.perf_counter() - start) * 1000
    host.delete_sandboxes(sandbox)
    return elapsed


class _Move:
    """One move. The two gateways have event loops of their own; the methods run in that of the source."""

    def __init__(
        self,
        host: KvmXfs,
        target: EngineRunner,
        sandbox: Sandbox,
        samples: dict[str, list[float]],
        key: str,
        has_first_pass: bool,
    ) -> None:
        self._host = host
        self._source: Engine = host.live.engine
        self._target = target
        self._id = sandbox.id
        self._samples = samples
        self._key = key
        self._has_first_pass = has_first_pass

    async def run(self) -> None:
        await asyncio.sleep(1)
        if not self._has_first_pass:
            self._samples["sent_whole"].append(await self._send_rest())
        else:
            first_passes, start = self._source.moves.first_passes, time.perf_counter()
            async with first_passes.captured(self._id, _MOVE, memory=True) as captured:
                file = await read_export(first_passes.export(self._id, _MOVE, memory=True))
                receiving = self._target.engine.moves.first_passes.receive(self._id, _MOVE, iterate_pieces(file))
                await asyncio.to_thread(self._target.do, receiving)
                self._samples["first"].append((time.perf_counter() - start) * 1000)
                self._samples["sent"].append(await self._send_rest(captured))
        await asyncio.to_thread(self._target.do, self._target.engine.moves.first_passes.forget(self._id))
        await self._source.moves.complete_departure(self._id, _MOVE)
        await asyncio.to_thread(self._target.do, self._target.engine.sandboxes.delete(self._id))

    async def _send_rest(self, captured: Snapshot | None = None) -> int:
        """Pause the sandbox, and start it on the target. Returns the number of bytes that were sent."""
        moves, start = self._source.moves, time.perf_counter()
        sandbox = await moves.depart(self._id, _MOVE, "target")
        is_rest = captured is not None
        file = await read_export(moves.export(self._id, _MOVE, memory=True, after_first_pass=is_rest))
        await asyncio.to_thread(self._target.do, self._receive(sandbox, file))
        self._samples[self._key].append((time.perf_counter() - start) * 1000)
        if captured is not None:
            assert sandbox.departure is not None
            snapshot = self._source.index.get_any_snapshot(sandbox.departure.snapshot)
            changed = sum(count_changed_bytes(self._host, captured, snapshot, file=file) for file in _IMAGES)
            layout = Layout(self._host.config.host.state_root)
            self._samples["differs"].append(changed + layout.snapshot(snapshot).device_state.stat().st_size)
        return sum(map(len, file))

    async def _receive(self, sandbox: Sandbox, file: list[bytes]) -> None:
        moves = self._target.engine.moves
        arriving_sandbox = await moves.check_arrival(self._source.moves.describe_for_target(sandbox), resumes=True)
        await moves.receive(arriving_sandbox, Arrival(move=_MOVE, source="source", resumes=True), iterate_pieces(file))
        await moves.adopt(self._id, _MOVE, must_start=True)
