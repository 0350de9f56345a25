"""Export snapshots of sandboxes and volumes to files, and import them.

No part of a file is used before its head has been checked, and no snapshot or volume exists before the whole file has
been checked. Until the parts are committed, they are in a directory or dataset that the host removes at its next start.
"""

from __future__ import annotations

import asyncio
import contextlib
import hashlib
import os
from array import array
from collections import deque
from collections.abc import AsyncIterator, Awaitable, Callable, Collection, Iterable, Iterator, Sequence
from dataclasses import dataclass
from functools import partial
from typing import TYPE_CHECKING, Literal, TypeVar

from sandbox_gateway import __version__
from sandbox_gateway.control_characters import remove_control_characters
from sandbox_gateway.engine.collector import Collector
from sandbox_gateway.engine.context import Context
from sandbox_gateway.engine.durations import measured, set_memory_mode
from sandbox_gateway.engine.name_claims import NameClaim
from sandbox_gateway.engine.names import require_valid_name
from sandbox_gateway.engine.room import PendingImport, RoomMonitor
from sandbox_gateway.engine.secret import load_secret
from sandbox_gateway.engine.transfer.bases import Bases, set_lineage
from sandbox_gateway.engine.transfer.interrupted import Continuation, InterruptedImports, ReceivedFile
from sandbox_gateway.errors import Busy, Conflict, Invalid, NoSpace, Unsupported, Untrusted
from sandbox_gateway.hosts.base import (
    MEMORY_PARTS,
    ImportBase,
    ImportTarget,
    PartSource,
    ResumableTarget,
    SharingTarget,
    SnapshotPart,
    SnapshotSource,
)
from sandbox_gateway.log import Logger
from sandbox_gateway.records import (
    ImportOrigin,
    MemoryMode,
    Resources,
    Snapshot,
    SnapshotKind,
    Volume,
    VolumeSnapshot,
)
from sandbox_gateway.tasks import finish_despite_cancellation

if TYPE_CHECKING:
    # Only hosts that can transfer snapshots need the libraries of these modules.
    from sandbox_gateway.engine.transfer.artifact_format import Place
    from sandbox_gateway.engine.transfer.container import Decoder
    from sandbox_gateway.engine.transfer.manifest import Manifest, Part, VolumeManifest
    from sandbox_gateway.engine.transfer.signing import Signer

_BATCH_BYTES = 1 << 20
"""How much of a file is processed at a time. Switching to a thread takes longer than processing a small piece."""
_COMPRESSION_THREADS = min(os.cpu_count() or 1, 8)
_MAX_NAMES = 16
_MAX_DESCRIPTION_LENGTH = 4096

_Source = TypeVar("_Source", bound=PartSource)

log = Logger("engine")


class Transfers:
    def __init__(self, context: Context, collector: Collector, room: RoomMonitor) -> None:
        self._context = context
        self._host = context.host
        self._index = context.index
        self._collector = collector
        self._room = room
        self._active_count = 0
        self.interrupted_imports = InterruptedImports(context)
        self.bases = Bases(context, collector)
        self.list_fleet_signers: Callable[[], Collection[str]] = tuple
        """Returns the fingerprints of the other hosts of a fleet, whose files and artifacts are trusted, too."""

    def get_signer(self) -> Signer:
        """Return the key with which this gateway signs files. Raises Unsupported."""
        self.require_ability()
        from sandbox_gateway.engine.transfer.signing import Signer

        return Signer(self._load_seed())

    def open(self) -> None:
        """Create the key with which this gateway signs files, if the host can transfer snapshots."""
        if self._host.abilities.transfer:
            self._load_seed()

    def _load_seed(self) -> bytes:
        path = self._context.config.host.state_root / "signing-key"
        return load_secret(path, "trust its new key wherever its files are imported")

    async def export(self, ref: str, *, memory: bool = True, since: str = "", resume_token: str = "") -> Export:
        """Open a snapshot or template for an export. ``memory``: include its memory, if it has any.

        ``since``: export only what differs from this snapshot or template. ``resume_token``: export only what the
        ``InterruptedImport`` with this token lacks. The caller calls ``Export.read_pieces``, and must call
        ``Export.close``.
        """
        snapshot, base, guid = await self._resolve_export(ref, since=since, resume_token=resume_token)
        return await self._export(snapshot, base, guid, memory=memory, resume_token=resume_token)

    async def export_hidden(self, id: str, *, memory: bool = True, since: str = "") -> Export:
        """Open a snapshot of any kind for an export, like ``export``."""
        snapshot = self._index.get_any_snapshot(id)
        self.require_ability()
        self.require_exportable(snapshot)
        base = self._index.get_any_snapshot(since) if since else None
        guid = 0 if base is None else await self.bases.require_export_base(snapshot, base)
        return await self._export(snapshot, base, guid, memory=memory)

    async def _export(
        self, snapshot: Snapshot, base: Snapshot | None = None, guid: int = 0, *, memory: bool, resume_token: str = ""
    ) -> Export:
        memory = memory and snapshot.memory is not MemoryMode.NONE
        create_manifest = partial(
            _create_manifest,
            snapshot,
            self.bases.list_ancestors(snapshot),
            base=None if base is None else (base, guid),
            continues=bool(resume_token),
        )

        async def open_source() -> SnapshotSource:
            return await self._host.open_snapshot(snapshot, memory=memory, base=base, resume_token=resume_token)

        return await self._open_export([snapshot] if base is None else [snapshot, base], open_source, create_manifest)

    async def check_export(self, ref: str, *, since: str = "") -> None:
        """Raise the error of ``export`` that these arguments cause, as far as it is known before the export."""
        await self._resolve_export(ref, since=since)

    async def _resolve_export(
        self, ref: str, *, since: str, resume_token: str = ""
    ) -> tuple[Snapshot, Snapshot | None, int]:
        """Return the snapshot to export, the one since which it is exported, if any, and the guid of that."""
        snapshot = self._index.get_snapshot(ref)
        self.require_ability()
        self.require_exportable(snapshot)
        if not since:
            return snapshot, None, 0
        if resume_token:
            raise Invalid(
                "an import of what has changed since another snapshot does not continue with a resume token: omit "
                "'resumeToken' or 'since'"
            )
        base = self._index.get_snapshot(since)
        return snapshot, base, await self.bases.require_export_base(snapshot, base)

    def require_exportable(self, snapshot: Snapshot) -> None:
        """Raise Unsupported if a file or an artifact cannot contain all of the snapshot."""
        if snapshot.volumes:
            raise Unsupported(
                f"snapshot {snapshot.id} includes volumes, which neither a file nor an artifact can contain: take a "
                "snapshot of the sandbox without volumes, and use that. To export a volume, take a snapshot of the "
                "volume"
            )

    async def export_volume(self, ref: str, snapshot_ref: str) -> Export:
        """Open a snapshot of a volume for an export. See ``export``."""
        volume = self._index.get_volume(ref)
        snapshot = self._index.get_volume_snapshot(snapshot_ref, volume)
        self.require_ability()
        create_manifest = partial(_create_volume_manifest, volume, snapshot)
        return await self._open_export([snapshot], lambda: self._host.open_volume_snapshot(snapshot), create_manifest)

    async def _open_export(
        self,
        used_snapshots: Sequence[Snapshot | VolumeSnapshot],
        open_source: Callable[[], Awaitable[_Source]],
        create_manifest: Callable[[_Source, list[Part]], Manifest | VolumeManifest],
    ) -> Export:
        with contextlib.ExitStack() as stack:
            stack.enter_context(self.slot_held())
            async with self._collector.pinned_then_collected(*used_snapshots):
                source = await open_source()
            stack.callback(source.close)
            export = Export(self.get_signer(), source, partial(create_manifest, source))
            await finish_despite_cancellation(asyncio.to_thread(export.prepare))
            export.on_close = stack.pop_all()
        return export

    @measured("snapshot.import")
    async def import_(
        self,
        pieces: AsyncIterator[bytes],
        *,
        name: str | None = None,
        trust: Collection[str] = (),
        continuation: Continuation | None = None,
        head_only: bool = False,
        origin_id: str = "",
        hidden: HiddenImport | None = None,
    ) -> Snapshot:
        """Create a snapshot or template from the pieces of a file.

        ``name`` replaces its names. ``trust``: the fingerprints of other signers to accept. If the
        memory cannot be restored on this host, only the disk is imported, and ``Snapshot.imported`` says so.
        ``continuation``: the pieces are the rest of a file. ``head_only``: for a plan session. The file may end after
        its head, and its contents are not read. ``origin_id``: the snapshot in the file is itself a copy of this one.
        ``hidden``: make the snapshot a hidden one, without names. Such an import cannot be continued if it is
        interrupted.

        If the client sends only a part of the file, the import may be continued later: see ``interrupted_imports``.
        """
        new_names = [require_valid_name(name)] if name else None
        async with self._opened(pieces, trust, continuation) as file:
            manifest = file.manifest
            if manifest.kind == "volume":
                raise Invalid(
                    "the snapshot file contains a snapshot of a volume, not of a sandbox: import it with "
                    "`sandboxctl volume import`"
                )
            self._host.check_encoding(manifest.encoding)
            received = file.received
            if received is None:
                snapshot = self.create_record(manifest, file.signer)
            else:
                assert isinstance(received.record, Snapshot)
                snapshot = received.record
            if origin_id and snapshot.imported is not None:
                origin_fields = {"snapshot": origin_id, "signed_id": snapshot.imported.snapshot}
                snapshot.imported = snapshot.imported.model_copy(update=origin_fields)
            base = await file.stack.enter_async_context(
                self._import_base_pinned(manifest, snapshot, file.signer, may_be_hidden=hidden is not None)
            )
            snapshot.names = new_names or [*manifest.names]
            if hidden is not None:
                snapshot.kind, snapshot.names, snapshot.template_id, snapshot.origin = hidden.kind, [], "", ""
            has_memory = snapshot.memory is not MemoryMode.NONE
            set_memory_mode(snapshot.memory)
            disk_bytes = manifest.sum_data_bytes(memory=False)
            memory_bytes = manifest.sum_data_bytes(memory=has_memory) - disk_bytes
            if received is not None:
                disk_bytes, memory_bytes = received.missing_disk_bytes, received.missing_memory_bytes
            sizes = manifest.get_part_sizes(memory=has_memory)

            async with self._room.reserved_for_import(disk_bytes, memory_bytes) as pending_import:
                with self._index.reserved(snapshot.names):
                    # Report a name that is taken before an interrupted import is used up.
                    self._context.name_claims.require_claimable([NameClaim(snapshot, snapshot.names)])
                    if received is not None:
                        target = self.interrupted_imports.take(received)
                    else:
                        target = await self.interrupted_imports.begin(
                            snapshot,
                            manifest,
                            sizes,
                            file.signer,
                            authentic=file.decoder.has_signed_chunks,
                            base=base,
                        )
                    try:
                        async with self.names_claimed(snapshot, snapshot.names):
                            if not head_only:
                                async with self._bases_used(target, manifest, has_memory=has_memory):
                                    await _write_chunks(file, target, sizes, pending_import)
                            await self.commit_import(snapshot, target, hidden)
                    except BaseException as error:
                        if snapshot.id not in self._index.snapshots:
                            # A rest that does not fit, or is damaged, is no reason to lose what has arrived before.
                            may_continue = (file.is_waiting or manifest.continues) and not isinstance(error, NoSpace)
                            if hidden is not None:
                                ending = target.discard()
                            elif file.is_cut_off and not isinstance(target, ResumableTarget):
                                ending = self._keep_file(file, snapshot, target, pending_import)
                            else:
                                ending = self.interrupted_imports.keep_or_discard(
                                    snapshot, manifest, target, file.signer, may_continue=may_continue
                                )
                            await finish_despite_cancellation(ending)
                        raise
        if not head_only:
            log.info("imported", snapshot=snapshot.id, signer=file.signer, release=manifest.release)
        return snapshot

    def names_claimed(self, snapshot: Snapshot, names: Sequence[str]) -> contextlib.AbstractAsyncContextManager[None]:
        """Claim the names of a snapshot that arrives; see ``NameClaims.held``."""
        return self._context.name_claims.held([NameClaim(snapshot, names)], may_be_late=not names)

    async def commit_import(self, snapshot: Snapshot, target: ImportTarget, hidden: HiddenImport | None = None) -> None:
        """Commit a snapshot whose parts were written to ``target`` and whose names are reserved."""

        async def commit() -> None:
            await target.commit()
            self._index.put(snapshot)
            if hidden is not None:
                await hidden.complete(snapshot)
            else:
                self._context.events.publish("snapshot.imported", snapshotID=snapshot.id)

        await finish_despite_cancellation(commit())

    @measured("volume.import")
    async def import_volume(
        self,
        pieces: AsyncIterator[bytes],
        *,
        name: str | None = None,
        trust: Collection[str] = (),
        continuation: Continuation | None = None,
        head_only: bool = False,
    ) -> Volume:
        """Create a volume from the pieces of a file with a snapshot of a volume.

        ``name`` replaces the name of the volume in the file. ``import_`` describes the other arguments.
        """
        name = require_valid_name(name) if name else None
        async with self._opened(pieces, trust, continuation) as file:
            manifest = file.manifest
            if manifest.kind != "volume":
                raise Invalid(
                    f"the snapshot file contains a {manifest.kind}, not a snapshot of a volume: import it with "
                    "`sandboxctl snapshot import`"
                )
            self._host.check_volume_origin(manifest.host_kind)
            self._host.check_encoding(manifest.encoding)
            received = file.received
            if received is None:
                origin = ImportOrigin(snapshot=manifest.snapshot_id, signer=file.signer)
                volume = Volume(name=manifest.name, size_mb=manifest.size_mb, imported=origin)
            else:
                assert isinstance(received.record, Volume)
                volume = received.record
            volume.name = name or manifest.name
            (part,) = manifest.parts
            missing_bytes = part.data_bytes if received is None else received.missing_disk_bytes

            async def commit(target: ImportTarget) -> None:
                await target.commit()
                self._index.put(volume)
                self._context.events.publish("volume.imported", volumeID=volume.name, sizeMB=volume.size_mb)

            async with self._room.reserved_for_import(missing_bytes, 0) as pending_import:
                with self._index.reserved([volume.name]):
                    if received is not None:
                        target = self.interrupted_imports.take(received)
                    else:
                        await self.interrupted_imports.discard_older(manifest, file.signer)
                        target = await self._host.begin_volume_import(volume, part.name, part.size)
                    try:
                        async with self._context.name_claims.held([NameClaim(volume, [volume.name])]):
                            if not head_only:
                                await _write_chunks(file, target, [part.name], pending_import)
                            await finish_despite_cancellation(commit(target))
                    except BaseException:
                        if volume.id not in self._index.volumes:
                            ending = (
                                self._keep_file(file, volume, target, pending_import)
                                if file.is_cut_off
                                else target.discard()
                            )
                            await finish_despite_cancellation(ending)
                        raise
        if not head_only:
            log.info("imported", volume=volume.id, signer=file.signer, release=manifest.release)
        return volume

    @contextlib.asynccontextmanager
    async def _bases_used(self, target: ImportTarget, manifest: Manifest, *, has_memory: bool) -> AsyncIterator[None]:
        """Let the target share data with local snapshots inside this context, if it can."""
        if not isinstance(target, SharingTarget):
            yield
            return
        async with self.bases.opened([manifest.snapshot_id, *manifest.ancestors], memory=has_memory) as bases:
            target.use_bases(bases)
            try:
                yield
            finally:
                target.use_bases([])

    @contextlib.asynccontextmanager
    async def _import_base_pinned(
        self, manifest: Manifest, snapshot: Snapshot, signer: str, *, may_be_hidden: bool
    ) -> AsyncIterator[ImportBase | None]:
        """Find the snapshot that the file needs, and prevent its removal inside this context.

        ``snapshot`` becomes its child. Yields None if the file is whole. Raises NotFound.
        """
        if manifest.base is None:
            yield None
            return
        is_own_file = signer == self.get_signer().fingerprint
        base = await self.bases.find_import_base(
            manifest.base, snapshot, signer, is_own_file=is_own_file, may_be_hidden=may_be_hidden
        )
        async with self._collector.pinned_then_collected(base.snapshot):
            set_lineage(snapshot, base.snapshot)
            yield base

    async def _keep_file(
        self, file: _OpenFile, record: Snapshot | Volume, target: ImportTarget, pending_import: PendingImport
    ) -> None:
        size, digest = file.decoder.drop_incomplete_record()
        received = ReceivedFile(
            file.decoder, record, target, size, digest, pending_import.disk_bytes, pending_import.memory_bytes
        )
        await self.interrupted_imports.keep_file(received, file.manifest, file.signer)

    @contextlib.asynccontextmanager
    async def _opened(
        self, pieces: AsyncIterator[bytes], trust: Collection[str], continuation: Continuation | None
    ) -> AsyncIterator[_OpenFile]:
        """Take a slot, read the manifest of a file, and check its signer. Raises GatewayError."""
        self.require_ability()
        from sandbox_gateway.engine.transfer.container import Decoder
        from sandbox_gateway.engine.transfer.signing import check_fingerprint

        trusted_fingerprints = {check_fingerprint(each) for each in trust}
        with self.slot_held():
            received = self.interrupted_imports.find_file(continuation) if continuation is not None else None
            decoder = Decoder() if received is None else received.decoder
            batches = join_into_batches(pieces)
            manifest = decoder.read_manifest() or await _read_manifest(decoder, batches)
            signer = self.require_trusted(decoder.public_key, trusted_fingerprints)
            async with contextlib.AsyncExitStack() as stack:
                yield _OpenFile(decoder, batches, manifest, signer, received, stack)

    def is_trusted(self, fingerprint: str) -> bool:
        """Return whether this gateway, or another host of its fleet, has signed with the key with this fingerprint."""
        return fingerprint == self.get_signer().fingerprint or fingerprint in self.list_fleet_signers()

    def require_trusted(self, public_key: bytes, trusted_fingerprints: Collection[str]) -> str:
        """Return the fingerprint of the signer. Raises Untrusted if it is unknown."""
        from sandbox_gateway.engine.transfer.signing import compute_fingerprint

        fingerprint = compute_fingerprint(public_key)
        if fingerprint not in trusted_fingerprints and not self.is_trusted(fingerprint):
            raise Untrusted(
                f"the snapshot is signed with the key {fingerprint}, which is not this gateway's. Compare the "
                "fingerprint with the output of `sandboxctl snapshot signer` on the gateway that exported or pushed "
                f"it; if they are equal, and you trust that gateway, use 'trust: {fingerprint}'"
            )
        return fingerprint

    def create_record(self, manifest: Manifest, signer: str) -> Snapshot:
        """Create the record of a snapshot that is being imported, from fields that the manifest has validated."""
        platform = manifest.platform.model_dump() if manifest.platform else {}
        problem = self._host.find_import_problem(manifest.host_kind, manifest.architecture, platform)
        has_memory = manifest.has_memory and not problem
        snapshot = Snapshot(
            kind=SnapshotKind(manifest.kind),
            description=manifest.description,
            memory=MemoryMode.FULL if has_memory else MemoryMode.NONE,
            resources=Resources(**manifest.sizes.model_dump()),
            imported=ImportOrigin(
                snapshot=manifest.snapshot_id,
                signer=signer,
                omitted_memory=problem if manifest.has_memory else "",
            ),
        )
        if snapshot.kind is SnapshotKind.TEMPLATE:
            snapshot.template_id = snapshot.origin = snapshot.id
        return snapshot

    def require_ability(self) -> None:
        if not self._host.abilities.transfer:
            raise Unsupported(
                "this gateway can neither export nor import snapshots, because the Python packages cryptography and "
                "zstandard are not installed in its virtual environment: install them there, and restart the gateway"
            )

    def require_free_slot(self) -> None:
        """Raise Busy if all slots for transfers are in use."""
        limit = self._context.config.limits.transfers
        if self._active_count >= limit:
            raise Busy(
                f"{limit} snapshots or archives are being exported, imported or uploaded, which is the maximum "
                "(limits.transfers): try again when one of them is finished"
            )

    @contextlib.contextmanager
    def slot_held(self) -> Iterator[None]:
        """Hold one of the transfer slots. Raises Busy."""
        self.require_free_slot()
        self._active_count += 1
        try:
            yield
        finally:
            self._active_count -= 1


@dataclass(frozen=True)
class HiddenImport:
    """An import of a snapshot that only one object uses.

    ``complete`` is called with the committed snapshot, and creates that object. A cancellation does not interrupt it.
    If it fails, it must remove the snapshot.
    """

    kind: SnapshotKind
    complete: Callable[[Snapshot], Awaitable[None]]


@dataclass
class _OpenFile:
    """A file that is being imported. ``batches``: the rest of it. ``signer``: a fingerprint, which is trusted.

    ``received``: what an interrupted import has received of it. ``stack``: closed when the import ends.
    ``is_waiting``: whether the client has to send more of it. ``is_cut_off``: whether the connection to the client was
    lost while the gateway waited for more.
    """

    decoder: Decoder
    batches: AsyncIterator[bytes]
    manifest: Manifest | VolumeManifest
    signer: str
    received: ReceivedFile | None
    stack: contextlib.AsyncExitStack
    is_waiting: bool = False
    is_cut_off: bool = False


class Export:
    """An export of one snapshot. ``create_manifest``: creates the manifest from its parts."""

    def __init__(
        self, signer: Signer, source: PartSource, create_manifest: Callable[[list[Part]], Manifest | VolumeManifest]
    ) -> None:
        self._signer = signer
        self._source = source
        self._create_manifest = create_manifest
        self._pending_tasks: deque[asyncio.Task[bytes]] = deque()
        """Chunks that threads are reading and compressing, in the order of the file."""
        self._pieces: AsyncIterator[bytes] | None = None
        self._skipped_piece_rest = b""
        self.on_close = contextlib.ExitStack()

    def prepare(self) -> None:
        """Measure the parts. This blocks the calling thread."""
        from sandbox_gateway.engine.transfer.manifest import Part

        source = self._source
        # List the extents only once: reading a file can change where the kernel says that it has data.
        self._extents = {
            part: _join_extents(source.extents(part), source.sizes[part])
            for part in SnapshotPart
            if part in source.sizes
        }
        parts = [
            Part(
                name=part,
                size=source.sizes[part],
                data_bytes=sum(end - start for start, end in _iterate_pairs(extents)),
            )
            for part, extents in self._extents.items()
        ]
        self.manifest: Manifest | VolumeManifest = self._create_manifest(parts)

    async def skip(self, size: int, digest: str) -> None:
        """Create the first ``size`` bytes of the file, which a client has already received, without yielding them.

        Raises Conflict unless ``digest`` is their SHA-256.
        """
        hasher, remaining_bytes, piece = hashlib.sha256(), size, b""
        self._pieces = self._create_pieces()
        while remaining_bytes and (piece := await anext(self._pieces, b"")):
            await asyncio.to_thread(hasher.update, piece[:remaining_bytes])
            self._skipped_piece_rest = piece[remaining_bytes:]
            remaining_bytes -= len(piece) - len(self._skipped_piece_rest)
        if remaining_bytes or hasher.hexdigest() != digest:
            raise Conflict(
                f"the file does not begin with these {size} bytes: export the snapshot from the beginning, without an "
                "offset"
            )

    async def read_pieces(self) -> AsyncIterator[bytes]:
        """Yield the bytes of the file that ``skip`` has not skipped. Only a few chunks are in memory."""
        if self._skipped_piece_rest:
            yield self._skipped_piece_rest
        async for piece in self._pieces or self._create_pieces():
            yield piece

    async def _create_pieces(self) -> AsyncIterator[bytes]:
        """Yield the bytes of the file. Several threads compress chunks."""
        from sandbox_gateway.engine.transfer.container import Encoder

        encoder = Encoder(self._signer)
        yield encoder.encode_head(self.manifest)
        for place in self._iterate_chunk_locations():
            self._pending_tasks.append(asyncio.create_task(asyncio.to_thread(self._compress, *place)))
            if len(self._pending_tasks) > _COMPRESSION_THREADS and (contents := await self._take_first_chunk()):
                yield await asyncio.to_thread(encoder.encode_chunk, contents)
        while self._pending_tasks:
            if contents := await self._take_first_chunk():
                yield await asyncio.to_thread(encoder.encode_chunk, contents)
        yield encoder.encode_end()

    def list_places(self) -> tuple[Manifest, list[Place]]:
        """Return the manifest of a sandbox's snapshot, and the places of the chunks of its artifact."""
        from sandbox_gateway.engine.transfer.artifact_format import list_places
        from sandbox_gateway.engine.transfer.manifest import Manifest

        assert isinstance(self.manifest, Manifest)
        return self.manifest, list_places(
            self.manifest, {part: _iterate_pairs(extents) for part, extents in self._extents.items()}
        )

    def read(self, place: Place) -> bytes:
        """Return the data of a chunk of an artifact. Blocks. ``close`` must not be called before it returns."""
        return self._source.read(place.part, place.offset, place.length)

    async def _take_first_chunk(self) -> bytes:
        """Wait for the first pending chunk, even if the caller is cancelled, and return its contents."""
        contents = await finish_despite_cancellation(self._pending_tasks[0])
        self._pending_tasks.popleft()
        return contents

    def _iterate_chunk_locations(self) -> Iterator[tuple[int, SnapshotPart, int, int]]:
        """Yield the index of the part, the part, the offset and the length of each chunk."""
        from sandbox_gateway.engine.transfer.container import CHUNK_BYTES

        for index, part in enumerate(self.manifest.parts):
            for start, end in _iterate_pairs(self._extents[part.name]):
                for offset in range(start, end, CHUNK_BYTES):
                    yield index, part.name, offset, min(CHUNK_BYTES, end - offset)

    def _compress(self, index: int, part: SnapshotPart, offset: int, length: int) -> bytes:
        """Return the contents of a chunk's record, or b"" for a chunk of zeros, which the file omits.

        Of a relative part, it contains them: the base may have other bytes there.
        """
        from sandbox_gateway.engine.transfer.container import compress_chunk

        data = self._source.read(part, offset, length)
        is_omitted = part not in self._source.relative_parts and data == bytes(length)
        return b"" if is_omitted else compress_chunk(index, offset, data)

    async def close(self) -> None:
        try:
            # No thread may read from the source when it is closed.
            await finish_despite_cancellation(asyncio.gather(*self._pending_tasks, return_exceptions=True))
        finally:
            self.on_close.close()


def _create_manifest(
    snapshot: Snapshot,
    ancestors: list[str],
    source: SnapshotSource,
    parts: list[Part],
    *,
    base: tuple[Snapshot, int] | None,
    continues: bool,
) -> Manifest:
    """Return the manifest of a file. ``base``: the snapshot that the file needs, and its guid."""
    from sandbox_gateway.engine.transfer.manifest import Base, MachinePlatform, Manifest, Sizes

    sizes = snapshot.resources
    return Manifest(
        snapshot_id=snapshot.id,
        kind="template" if snapshot.kind is SnapshotKind.TEMPLATE else "snapshot",
        names=snapshot.names[:_MAX_NAMES],
        description=remove_control_characters(snapshot.description)[:_MAX_DESCRIPTION_LENGTH],
        release=__version__,
        host_kind=_get_host_kind(source),
        architecture=source.architecture,
        sizes=Sizes(cpus=sizes.cpus, memory_mb=sizes.memory_mb, disk_mb=sizes.disk_mb),
        platform=MachinePlatform(**source.platform) if source.platform else None,
        line=source.line,
        encoding=source.encoding,
        continues=continues,
        base=Base(
            guid=base[1] or None,
            snapshot_id=base[0].id,
            names=base[0].names[:_MAX_NAMES],
            parts=sorted(source.relative_parts),
        )
        if base
        else None,
        ancestors=ancestors if _get_host_kind(source) == "kvm_xfs" else [],
        parts=parts,
    )


def _create_volume_manifest(
    volume: Volume, snapshot: VolumeSnapshot, source: PartSource, parts: list[Part]
) -> VolumeManifest:
    from sandbox_gateway.engine.transfer.manifest import VolumeManifest

    # If an enlargement has failed, the image is larger than the volume.
    image_mb = source.sizes.get(SnapshotPart.VOLUME, 0) >> 20
    return VolumeManifest(
        snapshot_id=snapshot.id,
        kind="volume",
        name=volume.name,
        snapshot_name=snapshot.name,
        size_mb=max(snapshot.size_mb, image_mb),
        release=__version__,
        host_kind=_get_host_kind(source),
        encoding=source.encoding,
        parts=parts,
    )


def _get_host_kind(source: PartSource) -> Literal["kvm_xfs", "jail_zfs"]:
    return "jail_zfs" if SnapshotPart.STREAM in source.sizes else "kvm_xfs"


def _join_extents(extents: Iterable[tuple[int, int]], size: int) -> array[int]:
    """Return the alternating starts and ends of ``extents``, extended to whole blocks. Joins extents that then touch.

    A guest can fragment its disk into millions of extents, so they are stored in 16 bytes each.
    """
    from sandbox_gateway.engine.transfer.container import BLOCK_BYTES

    joined_extents = array("Q")
    for start, end in extents:
        start, end = start - start % BLOCK_BYTES, min(end + -end % BLOCK_BYTES, size)
        if joined_extents and start <= joined_extents[-1]:
            joined_extents[-1] = end
        else:
            joined_extents.extend((start, end))
    return joined_extents


def _iterate_pairs(extents: array[int]) -> Iterator[tuple[int, int]]:
    values = iter(extents)
    return zip(values, values, strict=True)


async def join_into_batches(pieces: AsyncIterator[bytes]) -> AsyncIterator[bytes]:
    """Join small pieces, and yield the result when it is large enough to work on."""
    buffer = bytearray()
    async for piece in pieces:
        buffer += piece
        if len(buffer) >= _BATCH_BYTES:
            yield bytes(buffer)
            buffer.clear()
    yield bytes(buffer)


async def _read_manifest(decoder: Decoder, batches: AsyncIterator[bytes]) -> Manifest | VolumeManifest:
    """Read a file until its manifest has arrived. Raises GatewayError."""
    async for batch in batches:
        decoder.feed(batch)
        if (manifest := decoder.read_manifest()) is not None:
            return manifest
    raise decoder.create_incomplete_file_error()


async def _write_chunks(
    file: _OpenFile,
    target: ImportTarget,
    parts: Collection[SnapshotPart],
    pending_import: PendingImport,
) -> None:
    """Read the rest of a file, and write the chunks of ``parts``. All chunks are checked. Raises GatewayError."""

    def write(batch: bytes) -> None:
        file.decoder.feed(batch)
        for chunk in file.decoder.read_chunks():
            if chunk.part.name in parts:
                target.write(chunk.part.name, chunk.offset, chunk.data)
                # A stream is stored in a different location until it is complete.
                if chunk.part.name is not SnapshotPart.STREAM:
                    pending_import.count_written_bytes(len(chunk.data), memory=chunk.part.name in MEMORY_PARTS)

    await finish_despite_cancellation(asyncio.to_thread(write, b""))
    file.is_waiting = file.is_cut_off = True
    async for batch in file.batches:
        file.is_waiting = file.is_cut_off = False
        await finish_despite_cancellation(asyncio.to_thread(write, batch))
        file.is_waiting = file.is_cut_off = True
    file.is_cut_off = False
    file.decoder.close()
    file.is_waiting = False
