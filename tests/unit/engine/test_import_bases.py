"""An import shares data with the local snapshots that probably contain the same data."""

from __future__ import annotations

from collections.abc import AsyncIterator, Mapping, Sequence
from pathlib import Path

import pytest

from sandbox_gateway.engine.engine import Engine
from sandbox_gateway.errors import Conflict
from sandbox_gateway.hosts.base import ImportBase, SnapshotPart, SnapshotSource
from sandbox_gateway.records import Snapshot
from tests.support.memory_engine import create, opened_engine
from tests.support.memory_host import MemoryHost, MemoryTarget

pytestmark = pytest.mark.anyio


class SharingMemoryTarget(MemoryTarget):
    """Records how many open bases it has when it is written to, and when it is committed."""

    def __init__(self, snapshot: Snapshot, host: SharingMemoryHost) -> None:
        super().__init__(snapshot, host)
        self.base_counts: list[int] = []
        self._bases: Sequence[SnapshotSource] = []
        host.targets.append(self)

    def use_bases(self, bases: Sequence[SnapshotSource]) -> None:
        self._bases = bases

    def write(self, part: SnapshotPart, offset: int, data: bytes) -> None:
        assert not any(base.is_closed for base in self._bases)  # type: ignore[attr-defined]
        self.base_counts.append(len(self._bases))
        super().write(part, offset, data)

    async def commit(self) -> None:
        self.base_counts.append(len(self._bases))
        await super().commit()


class SharingMemoryHost(MemoryHost):
    def __init__(self) -> None:
        super().__init__()
        self.targets: list[SharingMemoryTarget] = []

    async def begin_import(
        self,
        snapshot: Snapshot,
        sizes: Mapping[SnapshotPart, int],
        *,
        line: bool,
        authentic: bool = False,
        base: ImportBase | None = None,
    ) -> SharingMemoryTarget:
        return SharingMemoryTarget(snapshot, self)


async def export(engine: Engine, ref: str) -> bytes:
    export = await engine.transfers.export(ref)
    try:
        return b"".join([piece async for piece in export.read_pieces()])
    finally:
        await export.close()


async def import_file(engine: Engine, file: bytes, name: str) -> Snapshot:
    async def read() -> AsyncIterator[bytes]:
        yield file

    return await engine.transfers.import_(read(), name=name)


async def test_bases_are_the_snapshot_itself_and_its_ancestors(tmp_path: Path) -> None:
    first_host, second_host = SharingMemoryHost(), SharingMemoryHost()
    for name in ("a", "b"):
        (tmp_path / name).mkdir()
    async with (
        opened_engine(tmp_path / "a", first_host) as first,
        opened_engine(tmp_path / "b", second_host) as second,
    ):
        second.transfers.list_fleet_signers = lambda: [first.transfers.get_signer().fingerprint]
        await create(first, "a")
        await first.snapshots.create("a", name="s1")
        await first.snapshots.create("a", name="s2")
        files = {name: await export(first, name) for name in ("t", "s1", "s2")}
        expected_counts = {"t": 0, "s1": 1, "s2": 2}
        for name, count in expected_counts.items():
            await import_file(second, files[name], f"{name}-copy")
            target = second_host.targets[-1]
            assert {*target.base_counts[:-1]} == {count} and target.base_counts[-1] == 0
        await import_file(second, files["s2"], "again")
        assert second_host.targets[-1].base_counts[0] == 3
        assert len(second_host.sources) == 1 + 2 + 3
        assert all(source.is_closed for source in second_host.sources)


async def test_a_base_that_cannot_be_opened_is_not_used(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    async def fail(snapshot: Snapshot, **options: object) -> SnapshotSource:
        raise Conflict("it is being removed")

    host = SharingMemoryHost()
    async with opened_engine(tmp_path, host) as engine:
        file = await export(engine, "t")
        monkeypatch.setattr(host, "open_snapshot", fail)
        await import_file(engine, file, "copy")
    assert {*host.targets[0].base_counts} == {0}
