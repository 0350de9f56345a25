"""Push snapshots to OCI registries as artifacts, and pull them.

A push uploads the chunks that the registry lacks, then the config, then the manifest, so the tag never names an
incomplete artifact. A pull first collects the chunks that no local snapshot has, and then creates the snapshot from
them. Both run in the background, and can be repeated after an interruption: what has arrived is not transferred again.
"""

from __future__ import annotations

import asyncio
import contextlib
import hashlib
import secrets
from collections.abc import Awaitable, Callable, Collection, Container, Iterable, Sequence
from dataclasses import dataclass, field
from datetime import datetime
from typing import TYPE_CHECKING, Literal, TypeVar

from sandbox_gateway.engine.collector import Collector
from sandbox_gateway.engine.context import Context
from sandbox_gateway.engine.durations import measured, set_memory_mode
from sandbox_gateway.engine.name_claims import NameClaim
from sandbox_gateway.engine.names import require_valid_name, require_valid_template_name, shorten
from sandbox_gateway.engine.room import PendingImport, RoomMonitor
from sandbox_gateway.engine.templates import Templates
from sandbox_gateway.engine.transfer.kept_blobs import KeptBlobs
from sandbox_gateway.engine.transfer.transfers import Transfers
from sandbox_gateway.errors import BackendFailed, Conflict, GatewayError, Invalid, NotFound
from sandbox_gateway.hosts.base import MEMORY_PARTS, ImportTarget, SharingTarget, SnapshotPart, SnapshotSource
from sandbox_gateway.image_references import RegistryLogin
from sandbox_gateway.log import Logger
from sandbox_gateway.records import MemoryMode, Snapshot, SnapshotKind, now
from sandbox_gateway.tasks import clean_up, finish_despite_cancellation

if TYPE_CHECKING:
    # Only hosts that can transfer snapshots need the libraries of these modules.
    from sandbox_gateway.engine.transfer.artifact_format import Contents, Descriptor, Index, Place
    from sandbox_gateway.engine.transfer.registry_client import ArtifactReference, RegistryClient
    from sandbox_gateway.engine.transfer.transfers import Export

_WORKERS = 4
"""The number of chunks that a transfer processes at the same time."""
_MAX_FINISHED_TRANSFERS = 100
_SWEEP_INTERVAL_SECONDS = 3600.0
_TITLE = "org.opencontainers.image.title"
_Item = TypeVar("_Item")

log = Logger("transfers")


@dataclass
class ArtifactTransfer:
    """A push or a pull. ``error``: why it failed."""

    action: Literal["push", "pull"]
    reference: str
    snapshot_id: str = ""
    """The snapshot that is pushed, or the one that a finished pull has created."""
    id: str = field(default_factory=lambda: secrets.token_hex(8))
    status: Literal["running", "ready", "error"] = "running"
    error: GatewayError | None = None
    digest: str = ""
    """The digest of the artifact's manifest, as soon as it is known."""
    chunks: int = 0
    """The number of chunks of the snapshot that are not zero, as soon as it is known."""
    chunks_done: int = 0
    chunks_reused: int = 0
    """The number of chunks that were not transferred, because the other side had them."""
    transferred_bytes: int = 0
    """The compressed bytes that were sent or received."""
    started_at: datetime = field(default_factory=now)
    task: asyncio.Task[None] | None = None

    def finish(self, error: GatewayError | None = None) -> None:
        self.error = error
        self.status = "error" if error else "ready"


@dataclass(frozen=True)
class Artifact:
    """A snapshot in a registry, with a valid signature. ``signer``: the key's fingerprint, which may be unknown."""

    reference: ArtifactReference
    digest: str
    contents: Contents
    index: Index
    public_key: bytes

    @property
    def signer(self) -> str:
        from sandbox_gateway.engine.transfer.signing import compute_fingerprint

        return compute_fingerprint(self.public_key)

    @property
    def size(self) -> int:
        """The size of all its blobs, in bytes."""
        return self.index.config.size + sum(layer.size for layer in self.index.layers)


@dataclass(frozen=True)
class _Pull:
    """The plan of a pull. ``names``: the names that the snapshot gets."""

    artifact: Artifact
    snapshot: Snapshot
    names: Sequence[str]
    parts: dict[SnapshotPart, int]
    """The sizes of the parts that are pulled."""
    places: list[tuple[Place, str]]
    layers: dict[str, Descriptor]
    """The blobs of the chunks in ``places``, by the SHA-256 of their data."""


class Artifacts:
    def __init__(
        self, context: Context, collector: Collector, room: RoomMonitor, transfers: Transfers, templates: Templates
    ) -> None:
        self._context = context
        self._host = context.host
        self._index = context.index
        self._collector = collector
        self._room = room
        self._transfers = transfers
        self._templates = templates
        self._settings = context.config.registry
        self._kept_blobs = KeptBlobs(context.config.host.state_root / "pulled-blobs", self._settings.kept_mb << 20)
        self._records: dict[str, ArtifactTransfer] = {}

    def open(self) -> None:
        """Remove what interrupted pulls have left behind, except for blobs that a repeated pull can use."""
        self._kept_blobs.open()

    async def watch(self) -> None:
        """Remove blobs that no pull has used for a day. Never returns."""
        while True:
            await asyncio.sleep(_SWEEP_INTERVAL_SECONDS)
            await clean_up(log, asyncio.to_thread(self._kept_blobs.trim))

    def get_transfer(self, id: str) -> ArtifactTransfer:
        if id not in self._records:
            raise NotFound("transfer", shorten(id))
        return self._records[id]

    def list_transfers(self) -> Sequence[ArtifactTransfer]:
        """Return the running and the last finished transfers, oldest first."""
        return [*self._records.values()]

    async def cancel(self, id: str) -> None:
        """Cancel a running transfer, and wait for it. Does nothing if it has finished."""
        transfer = self.get_transfer(id)
        # A second cancellation would interrupt the clean-up of the first.
        if transfer.task is not None and not transfer.task.cancelling():
            transfer.task.cancel()
            await asyncio.wait([transfer.task])

    async def inspect(self, reference: str, login: RegistryLogin | None = None) -> Artifact:
        """Return what an artifact says about its snapshot. Raises NotFound, Invalid."""
        self._transfers.require_ability()
        from sandbox_gateway.engine.transfer.registry_client import opened_client, parse_artifact_reference

        parsed_reference = parse_artifact_reference(reference, self._settings)
        async with opened_client(self._settings, parsed_reference, login, push=False) as client:
            return await _read_artifact(client, parsed_reference)

    # -- push -------------------------------------------------------------------------------------------------------

    async def push(
        self,
        ref: str,
        reference: str,
        *,
        memory: bool = True,
        login: RegistryLogin | None = None,
        kinds: Collection[SnapshotKind] = (),
        is_planned: bool = False,
    ) -> ArtifactTransfer:
        """Push a snapshot or template in the background. If the tag exists, it then names this snapshot.

        ``memory``: include its memory, if it has any. ``login``: for the registry; it is forgotten afterwards.
        ``kinds``: the kinds that ``ref`` may have. ``is_planned``: for a plan session. Nothing is transferred.
        """
        self._transfers.require_ability()
        from sandbox_gateway.engine.transfer.registry_client import parse_artifact_reference

        noun = "template" if SnapshotKind.TEMPLATE in kinds else "snapshot"
        snapshot = self._index.get_snapshot(ref, noun=noun, kinds=kinds)
        parsed_reference = parse_artifact_reference(reference, self._settings)
        if parsed_reference.digest:
            raise Invalid(f"{reference[:200]!r} names a digest: push to a tag, as in REGISTRY/REPOSITORY:TAG")
        self._transfers.require_exportable(snapshot)
        if not is_planned:
            self._transfers.require_free_slot()
        transfer = self._add_transfer(ArtifactTransfer("push", str(parsed_reference), snapshot.id))
        if is_planned:
            transfer.finish()
        else:
            self._start(transfer, self._push(transfer, snapshot, parsed_reference, memory, login))
        return transfer

    @measured("snapshot.push")
    async def _push(
        self,
        transfer: ArtifactTransfer,
        snapshot: Snapshot,
        reference: ArtifactReference,
        memory: bool,
        login: RegistryLogin | None,
    ) -> None:
        from sandbox_gateway.engine.transfer import artifact_format
        from sandbox_gateway.engine.transfer.registry_client import opened_client

        set_memory_mode(snapshot.memory)
        export = await self._transfers.export(snapshot.id, memory=memory)
        try:
            async with opened_client(self._settings, reference, login, push=True) as client:
                contents, layers = await self._push_chunks(transfer, snapshot, export, client)
                config = await asyncio.to_thread(artifact_format.encode_config, contents, self._transfers.get_signer())
                await _push_blob(client, artifact_format.compute_blob_digest(config), config)
                annotations = {_TITLE: contents.manifest.names[0]} if contents.manifest.names else {}
                index = await asyncio.to_thread(artifact_format.encode_index, config, layers, annotations)
                transfer.digest = artifact_format.compute_blob_digest(index)
                if await client.find_manifest_digest(reference.tag) != transfer.digest:
                    await client.put_manifest(index)
                transfer.transferred_bytes = client.sent_bytes
        finally:
            await export.close()
        self._context.events.publish("snapshot.pushed", snapshotID=snapshot.id, reference=str(reference))
        log.info("pushed", snapshot=snapshot.id, reference=str(reference), bytes=transfer.transferred_bytes)

    async def _push_chunks(
        self, transfer: ArtifactTransfer, snapshot: Snapshot, export: Export, client: RegistryClient
    ) -> tuple[Contents, list[Descriptor]]:
        """Upload the chunks that the registry lacks. Return the contents, and the descriptors of all layers."""
        from sandbox_gateway.engine.transfer import artifact_format

        # A guest can fragment its disk into millions of extents.
        manifest, places = await asyncio.to_thread(export.list_places)
        transfer.chunks = len(places)
        digests = [""] * len(places)
        """The SHA-256 of each chunk; "" for a chunk of zeros."""
        data_bytes = [0] * len(manifest.parts)
        layers: dict[str, Descriptor | None] = {}

        def read(place: Place) -> tuple[bytes, int, str]:
            data = export.read(place)
            size = sum(end - start for start, end in artifact_format.list_data_runs(data))
            return data, size, hashlib.sha256(data).hexdigest() if size else ""

        async def push(item: tuple[int, Place]) -> None:
            number, place = item
            data, size, digest = await finish_despite_cancellation(asyncio.to_thread(read, place))
            digests[number] = digest
            data_bytes[place.index] += size
            if not digest:
                transfer.chunks -= 1
                return
            if digest not in layers:
                layers[digest] = None  # Another worker may have a chunk with the same data.
                blob = await asyncio.to_thread(artifact_format.compress_chunk, data)
                layer = artifact_format.describe_blob(blob, artifact_format.CHUNK_TYPE)
                layers[digest] = layer
                is_uploaded = await _push_blob(client, layer.digest, blob)
            else:
                is_uploaded = False
            transfer.chunks_reused += not is_uploaded
            transfer.chunks_done += 1
            transfer.transferred_bytes = client.sent_bytes

        await _for_each(enumerate(places), push)
        contents = await asyncio.to_thread(
            artifact_format.build_contents,
            manifest,
            data_bytes,
            self._transfers.bases.list_ancestors(snapshot),
            zip(places, digests, strict=True),
        )
        ordered_digests = dict.fromkeys(digest for digest in digests if digest)
        return contents, [layer for digest in ordered_digests if (layer := layers[digest]) is not None]

    # -- pull -------------------------------------------------------------------------------------------------------

    async def pull(
        self,
        reference: str,
        *,
        name: str | None = None,
        trust: Collection[str] = (),
        login: RegistryLogin | None = None,
        kind: SnapshotKind | None = None,
        is_planned: bool = False,
    ) -> ArtifactTransfer:
        """Create a snapshot or template from an artifact, in the background. Raises the errors that its config shows.

        ``name`` and ``trust``: see ``Transfers.import_``. ``kind``: the required kind. If it is TEMPLATE, a different
        template that has the name loses it, as when a template is built. ``is_planned``: for a plan session. Only the
        manifest and the config are read.
        """
        self._transfers.require_ability()
        from sandbox_gateway.engine.transfer.registry_client import opened_client, parse_artifact_reference
        from sandbox_gateway.engine.transfer.signing import check_fingerprint

        parsed_reference = parse_artifact_reference(reference, self._settings)
        trusted_fingerprints = {check_fingerprint(each) for each in trust}
        is_template = kind is SnapshotKind.TEMPLATE
        if name:
            name = require_valid_template_name(name) if is_template else require_valid_name(name)
        self._transfers.require_free_slot()
        async with opened_client(self._settings, parsed_reference, login, push=False) as client:
            artifact = await _read_artifact(client, parsed_reference)
        if kind is not None and artifact.contents.manifest.kind != kind.value:
            raise Invalid(
                f"{reference[:200]!r} is a {artifact.contents.manifest.kind}, not a {kind}: pull it with `sandboxctl "
                f"{artifact.contents.manifest.kind} pull`"
            )
        signer = self._transfers.require_trusted(artifact.public_key, trusted_fingerprints)
        pull = await self._prepare_pull(artifact, signer, name)
        for each in pull.names if is_template else ():
            self._templates.require_available_name(each)
        transfer = ArtifactTransfer("pull", str(parsed_reference), digest=artifact.digest, chunks=len(pull.places))
        if is_planned:
            await self._pull(transfer, pull, login, is_template=is_template, is_planned=True)
            transfer.finish()
            self._add_transfer(transfer)
        else:
            # Raise NameTaken now rather than in the background.
            with self._names_reserved(pull, is_template=is_template):
                self._context.name_claims.require_claimable([NameClaim(pull.snapshot, pull.names)])
            self._add_transfer(transfer)
            self._start(transfer, self._pull(transfer, pull, login, is_template=is_template))
        return transfer

    async def _prepare_pull(self, artifact: Artifact, signer: str, name: str | None) -> _Pull:
        manifest = artifact.contents.manifest
        self._host.check_encoding(manifest.encoding)
        snapshot = self._transfers.create_record(manifest, signer)
        has_memory = snapshot.memory is not MemoryMode.NONE
        parts = manifest.get_part_sizes(memory=has_memory)
        # A guest can fragment its disk into millions of extents.
        places, layers = await asyncio.to_thread(_list_chunks, artifact, parts)
        return _Pull(artifact, snapshot, [name] if name else manifest.names, parts, places, layers)

    def _names_reserved(self, pull: _Pull, *, is_template: bool) -> contextlib.AbstractContextManager[None]:
        # The names of a template are moved to it when it is complete.
        return contextlib.nullcontext() if is_template else self._index.reserved(pull.names)

    @measured("snapshot.pull")
    async def _pull(
        self,
        transfer: ArtifactTransfer,
        pull: _Pull,
        login: RegistryLogin | None,
        *,
        is_template: bool,
        is_planned: bool = False,
    ) -> None:
        snapshot = pull.snapshot
        set_memory_mode(snapshot.memory)
        if not is_template:
            snapshot.names = [*pull.names]
        blobs = {layer.digest for layer in pull.layers.values()}
        with self._transfers.slot_held(), self._names_reserved(pull, is_template=is_template):
            try:
                async with self._transfers.names_claimed(snapshot, [] if is_template else pull.names):
                    with self._kept_blobs.protected(blobs):
                        await self._create_snapshot(transfer, pull, login, is_planned=is_planned)
            except BaseException:
                if snapshot.id in self._index.snapshots:
                    # It was cancelled when the snapshot was being committed, which is too late.
                    await finish_despite_cancellation(
                        self._complete_pull(transfer, pull, blobs, is_template=is_template)
                    )
                elif not is_planned:
                    await clean_up(log, asyncio.to_thread(self._kept_blobs.trim))
                raise
        await finish_despite_cancellation(
            self._complete_pull(transfer, pull, blobs, is_template=is_template, is_planned=is_planned)
        )

    async def _complete_pull(
        self,
        transfer: ArtifactTransfer,
        pull: _Pull,
        blobs: Collection[str],
        *,
        is_template: bool,
        is_planned: bool = False,
    ) -> None:
        """Name the template that a pull has committed, and remove the blobs that it has used."""
        snapshot, manifest = pull.snapshot, pull.artifact.contents.manifest
        if is_template and pull.names:
            try:
                await self._templates.add_names(snapshot.id, pull.names)
            except BaseException:
                await clean_up(log, self._templates.remove(snapshot.id))
                raise
        transfer.snapshot_id = snapshot.id
        if not is_planned:
            await clean_up(log, asyncio.to_thread(self._kept_blobs.remove, blobs))
            log.info("pulled", snapshot=snapshot.id, signer=pull.artifact.signer, release=manifest.release)

    async def _create_snapshot(
        self, transfer: ArtifactTransfer, pull: _Pull, login: RegistryLogin | None, *, is_planned: bool
    ) -> None:
        manifest = pull.artifact.contents.manifest
        async with self._bases_opened(pull, is_planned=is_planned) as bases:
            found_places = await _find_chunks(pull, bases)
            missing = await asyncio.to_thread(self._find_missing_layers, pull, found_places)
            disk_bytes = manifest.sum_data_bytes(memory=False)
            memory_bytes = sum(part.data_bytes for part in manifest.parts if part.name in pull.parts) - disk_bytes
            fetched_bytes = sum(layer.size for layer in missing.values())
            transfer.chunks_done = transfer.chunks_reused = sum(
                pull.layers[digest].digest not in missing for _, digest in pull.places
            )
            async with self._room.reserved_for_import(
                disk_bytes + fetched_bytes, memory_bytes, subject="the pull"
            ) as pending_import:
                if not is_planned:
                    await self._fetch_blobs(transfer, pull, missing, login, pending_import)
                # The signed table contains the digest of each chunk, which is checked before the chunk is written.
                target = await self._host.begin_import(pull.snapshot, pull.parts, line=manifest.line, authentic=True)
                try:
                    if bases and isinstance(target, SharingTarget):
                        target.use_bases(bases)
                    if not is_planned:
                        await self._write_chunks(pull, found_places, target, pending_import)
                    await self._transfers.commit_import(pull.snapshot, target)
                except BaseException:
                    if pull.snapshot.id not in self._index.snapshots:
                        await target.discard()
                    raise

    def _find_missing_layers(self, pull: _Pull, found_digests: Container[str]) -> dict[str, Descriptor]:
        """Return the layers that have to be fetched, by the digest of the blob. Blocks."""
        return {
            layer.digest: layer
            for digest, layer in pull.layers.items()
            if digest not in found_digests and not self._kept_blobs.has(layer.digest, layer.size)
        }

    def _bases_opened(
        self, pull: _Pull, *, is_planned: bool
    ) -> contextlib.AbstractAsyncContextManager[list[SnapshotSource]]:
        """Open the local snapshots that probably share chunks with the artifact."""
        contents = pull.artifact.contents
        # A jail's snapshot shares nothing with the others, and its stream would have to be written to a file first.
        can_share = not is_planned and SnapshotPart.STREAM not in pull.parts
        ids = [contents.manifest.snapshot_id, *contents.ancestors] if can_share else []
        return self._transfers.bases.opened(ids, memory=not MEMORY_PARTS.isdisjoint(pull.parts))

    async def _fetch_blobs(
        self,
        transfer: ArtifactTransfer,
        pull: _Pull,
        layers: dict[str, Descriptor],
        login: RegistryLogin | None,
        pending_import: PendingImport,
    ) -> None:
        from sandbox_gateway.engine.transfer.registry_client import opened_client

        async def fetch(layer: Descriptor) -> None:
            blob = await client.get_blob(layer.digest, layer.size)
            await finish_despite_cancellation(asyncio.to_thread(self._kept_blobs.write, layer.digest, blob))
            pending_import.count_written_bytes(len(blob), memory=False)
            transfer.chunks_done += 1
            transfer.transferred_bytes = client.received_bytes

        async with opened_client(self._settings, pull.artifact.reference, login, push=False) as client:
            await _for_each(layers.values(), fetch)

    async def _write_chunks(
        self,
        pull: _Pull,
        found_places: dict[str, tuple[SnapshotSource, Place]],
        target: ImportTarget,
        pending_import: PendingImport,
    ) -> None:
        """Write all chunks, each of which is checked."""
        from sandbox_gateway.engine.transfer.artifact_format import (
            compute_blob_digest,
            decompress_chunk,
            list_data_runs,
        )

        remaining_bytes = {part.name: part.data_bytes for part in pull.artifact.contents.manifest.parts}

        def read(place: Place, digest: str) -> bytes:
            if digest in found_places:
                base, found_place = found_places[digest]
                data = base.read(found_place.part, found_place.offset, found_place.length)
                if hashlib.sha256(data).hexdigest() == digest:
                    return data
                raise BackendFailed("a local snapshot changed while it was being read: repeat the pull")
            layer = pull.layers[digest]
            blob = self._kept_blobs.read(layer.digest)
            if compute_blob_digest(blob) != layer.digest:
                self._kept_blobs.discard(layer.digest)
                raise BackendFailed(
                    "a chunk of an earlier pull was damaged on this host's disk, and has been removed: repeat the pull"
                )
            return decompress_chunk(blob, place.length, digest)

        def write(place: Place, digest: str) -> None:
            data = read(place, digest)
            for start, end in list_data_runs(data):
                remaining_bytes[place.part] -= end - start
                if remaining_bytes[place.part] < 0:
                    raise Invalid(
                        f"the artifact is damaged: {place.part} has more data than the manifest says. Push the "
                        "snapshot again"
                    )
                target.write(place.part, place.offset + start, data[start:end])
                # A stream is stored in another place until it is complete.
                if place.part is not SnapshotPart.STREAM:
                    pending_import.count_written_bytes(end - start, memory=place.part in MEMORY_PARTS)

        for place, digest in pull.places:
            await finish_despite_cancellation(asyncio.to_thread(write, place, digest))

    # -- records of transfers ---------------------------------------------------------------------------------------

    def _add_transfer(self, transfer: ArtifactTransfer) -> ArtifactTransfer:
        self._records[transfer.id] = transfer
        finished_ids = [each.id for each in self._records.values() if each.status != "running" and each is not transfer]
        for id in finished_ids[: max(0, len(self._records) - _MAX_FINISHED_TRANSFERS)]:
            del self._records[id]
        return transfer

    def _start(self, transfer: ArtifactTransfer, work: Awaitable[None]) -> None:
        transfer.task = self._context.background.start(self._run(transfer, work))

    async def _run(self, transfer: ArtifactTransfer, work: Awaitable[None]) -> None:
        try:
            await work
        except GatewayError as error:
            log.warning("transfer failed", action=transfer.action, reference=transfer.reference, reason=error.message)
            transfer.finish(error)
        except asyncio.CancelledError:
            is_complete = transfer.action == "pull" and transfer.snapshot_id
            transfer.finish(None if is_complete else Conflict(f"the {transfer.action} was cancelled: repeat it"))
            raise
        except Exception as error:
            log.error("transfer failed", exc_info=True, reference=transfer.reference)
            transfer.finish(BackendFailed(f"an internal error in the gateway stopped the {transfer.action}: {error}"))
        else:
            transfer.finish()


async def _read_artifact(client: RegistryClient, reference: ArtifactReference) -> Artifact:
    from sandbox_gateway.engine.transfer.artifact_format import compute_blob_digest, parse_config, parse_index

    text = await client.get_manifest()
    index = await asyncio.to_thread(parse_index, text)
    config = await client.get_blob(index.config.digest, index.config.size)
    signed = await asyncio.to_thread(parse_config, config)
    return Artifact(reference, compute_blob_digest(text), signed.contents, index, signed.public_key)


def _list_chunks(
    artifact: Artifact, parts: Container[SnapshotPart]
) -> tuple[list[tuple[Place, str]], dict[str, Descriptor]]:
    """Return the ``places`` and ``layers`` of a ``_Pull`` of ``parts``. Blocks."""
    from sandbox_gateway.engine.transfer.artifact_format import match_layers

    places = [(place, digest) for place, digest in artifact.contents.iterate_chunks() if place.part in parts]
    all_layers = match_layers(artifact.contents, artifact.index)
    return places, {digest: all_layers[digest] for _, digest in places}


async def _push_blob(client: RegistryClient, digest: str, data: bytes) -> bool:
    """Upload a blob, unless the registry has it. Return whether it was uploaded."""
    if await client.has_blob(digest):
        return False
    await client.put_blob(digest, data)
    return True


async def _find_chunks(pull: _Pull, bases: Sequence[SnapshotSource]) -> dict[str, tuple[SnapshotSource, Place]]:
    """Return the chunks that a local snapshot has at the same place, by the SHA-256 of their data."""

    def find_base(place: Place, digest: str) -> SnapshotSource | None:
        for base in bases:
            if base.sizes.get(place.part, 0) < place.offset + place.length:
                continue
            data = base.read(place.part, place.offset, place.length)
            if hashlib.sha256(data).hexdigest() == digest:
                return base
        return None

    found_places: dict[str, tuple[SnapshotSource, Place]] = {}
    # The bases can be large, so a cancellation takes effect after each chunk.
    for place, digest in pull.places if bases else ():
        if digest not in found_places:
            base = await finish_despite_cancellation(asyncio.to_thread(find_base, place, digest))
            if base is not None:
                found_places[digest] = base, place
    return found_places


async def _for_each(items: Iterable[_Item], work: Callable[[_Item], Awaitable[None]]) -> None:
    """Process items, a few at the same time. After an error, wait until no item is being processed, and raise it."""
    iterator = iter(items)

    async def process_items() -> None:
        for item in iterator:
            await work(item)

    workers = [asyncio.create_task(process_items()) for _ in range(_WORKERS)]
    try:
        await asyncio.gather(*workers)
    finally:
        for worker in workers:
            worker.cancel()
        await finish_despite_cancellation(asyncio.gather(*workers, return_exceptions=True))
