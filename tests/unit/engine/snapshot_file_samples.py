"""Files with snapshots of virtual machines and jails, for the tests that damage them."""

from __future__ import annotations

import json
from typing import Any

from sandbox_gateway.engine.transfer.container import Encoder, compress_chunk
from sandbox_gateway.engine.transfer.manifest import Manifest, parse_manifest
from sandbox_gateway.engine.transfer.signing import Signer

MIB = 1 << 20


SIGNER = Signer(b"s" * 32)


def make_manifest_fields(**changes: Any) -> dict[str, Any]:
    sizes = {"kernel": 5000, "initrd": 5000, "disk": 64 * MIB, "memory": 64 * MIB, "device_state": 3000}
    fields = {
        "snapshot_id": "0123456789ab",
        "kind": "snapshot",
        "names": ["before-upgrade"],
        "description": "Before the upgrade",
        "release": "0.1.0",
        "host_kind": "kvm_xfs",
        "architecture": "x86_64",
        "sizes": {"cpus": 1, "memory_mb": 64, "disk_mb": 64},
        "platform": {
            "accelerator": "tcg",
            "cpu_model": "max",
            "machine": "pc-q35-7.2",
            "qemu_version": "7.2.22 (Debian 1:7.2+dfsg-7+deb12u18)",
        },
        "line": True,
        "parts": [{"name": name, "size": size, "data_bytes": min(size, 8 * MIB)} for name, size in sizes.items()],
    }
    return fields | changes


STREAM_PARTS = [{"name": "stream", "size": 5000, "data_bytes": 5000}]


JAIL_FIELDS: dict[str, Any] = {"host_kind": "jail_zfs", "platform": None, "line": False, "parts": STREAM_PARTS}


def make_manifest(**changes: Any) -> Manifest:
    return parse_manifest(json.dumps(make_manifest_fields(**changes)).encode())


CHUNKS = [
    (0, 0, b"kernel" * 833 + b"!!"),
    (1, 4096, b"initrd".ljust(904)),
    (2, 0, b"d" * 4096),
    (2, 64 * MIB - 4096, b"end of the disk".ljust(4096)),
    (3, 4096, bytes(range(256)) * 16),
    (4, 0, b"device state".ljust(3000)),
]


def make_file(chunks: list[tuple[int, int, bytes]] = CHUNKS, **changes: Any) -> tuple[bytes, list[int]]:
    """Return a file, and the offsets of the boundaries of its records."""
    encoder = Encoder(SIGNER)
    records = [
        encoder.encode_head(make_manifest(**changes)),
        *(encoder.encode_chunk(compress_chunk(*chunk)) for chunk in chunks),
        encoder.encode_end(),
    ]
    edges = [sum(map(len, records[:count])) for count in range(len(records) + 1)]
    return b"".join(records), edges


FILE, EDGES = make_file()
