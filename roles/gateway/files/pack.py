#!/usr/bin/env python3
"""The gateway's package as one file, always the same bytes for the same source.

`pack.py SOURCE` prints the SHA-256 of what the package is made of; `pack.py SOURCE OUT.tar.gz` writes it.
"""

import gzip
import hashlib
import io
import os
import sys
import tarfile


def members(source):
    """(name in the package, path) of each file that belongs into it, in a fixed order."""
    found = [(name, os.path.join(source, name)) for name in ("README.md", "pyproject.toml", "requirements.txt")]
    for directory, folders, names in os.walk(os.path.join(source, "src")):
        folders[:] = sorted(name for name in folders if name != "__pycache__" and not name.endswith(".egg-info"))
        for name in sorted(names):
            if not name.endswith(".pyc"):
                path = os.path.join(directory, name)
                found.append((os.path.relpath(path, source), path))
    return found


def read(path):
    with open(path, "rb") as file:
        return file.read()


def digest(source):
    total = hashlib.sha256()
    for name, path in members(source):
        total.update(("%s\0%s\0" % (name, hashlib.sha256(read(path)).hexdigest())).encode())
    return total.hexdigest()


def pack(source, out):
    buffer = io.BytesIO()
    with tarfile.open(fileobj=buffer, mode="w", format=tarfile.USTAR_FORMAT) as archive:
        for name, path in members(source):
            content = read(path)
            entry = tarfile.TarInfo("sandbox-gateway/" + name)
            entry.size = len(content)
            entry.mode = 0o644
            archive.addfile(entry, io.BytesIO(content))
    with open(out, "wb") as file:
        file.write(gzip.compress(buffer.getvalue(), mtime=0))


if __name__ == "__main__":
    if len(sys.argv) == 2:
        print(digest(sys.argv[1]))
    else:
        pack(sys.argv[1], sys.argv[2])
