"""Build a reproducible archive of the gateway's package.

`pack.py SOURCE` prints the SHA-256 of the contents. `pack.py SOURCE OUT.tar.gz` writes the archive and prints its
SHA-256.
"""

import gzip
import hashlib
import io
import sys
import tarfile
from pathlib import Path

TOP_LEVEL_FILES = (
    "README.md",
    "pyproject.toml",
    "requirements-build.txt",
    "requirements-fleet.txt",
    "requirements-maturin.txt",
    "requirements-transfer-build.txt",
    "requirements-transfer.txt",
    "requirements.txt",
    "sbom.cdx.json",
)


def list_members(source):
    """Return (name in the package, path) of each packaged file, sorted by name."""
    paths = [source / name for name in TOP_LEVEL_FILES] + [
        path for path in (source / "src").rglob("*") if path.is_file()
    ]
    names = {path.relative_to(source).as_posix(): path for path in paths}
    return sorted((name, path) for name, path in names.items() if is_packaged(name))


def is_packaged(name):
    return not name.endswith(".pyc") and not any(part.endswith(".egg-info") for part in name.split("/"))


def compute_digest(source):
    digest = hashlib.sha256()
    for name, path in list_members(source):
        digest.update(f"{name}\0{hashlib.sha256(path.read_bytes()).hexdigest()}\0".encode())
    return digest.hexdigest()


def write_archive(source, out):
    buffer = io.BytesIO()
    with tarfile.open(fileobj=buffer, mode="w", format=tarfile.USTAR_FORMAT) as archive:
        for name, path in list_members(source):
            contents = path.read_bytes()
            entry = tarfile.TarInfo(f"sandbox-gateway/{name}")
            entry.size = len(contents)
            entry.mode = 0o644
            archive.addfile(entry, io.BytesIO(contents))
    compressed = gzip.compress(buffer.getvalue(), mtime=0)
    out.write_bytes(compressed)
    return hashlib.sha256(compressed).hexdigest()


if __name__ == "__main__":
    if len(sys.argv) == 2:
        print(compute_digest(Path(sys.argv[1])))
    else:
        print(write_archive(Path(sys.argv[1]), Path(sys.argv[2])))
