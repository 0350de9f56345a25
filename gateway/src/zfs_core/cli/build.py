"""Build `lzc` as one executable file that needs only Python: ``python3 build.py OUTPUT [PYTHON]``.

The same sources produce the same bytes on every machine, so that copying the file to a host is idempotent. The file is
a zipapp; the module ``zipapp`` is not used because it writes the times and modes of the sources into it.
"""

from __future__ import annotations

import io
import sys
import zipfile
from pathlib import Path

PACKAGE = Path(__file__).resolve().parent.parent
_EARLIEST_TIME = (1980, 1, 1, 0, 0, 0)
# Old versions of Python must be able to read this part.
_MAIN = """\
import sys

if sys.version_info < (3, 11):
    sys.exit("lzc: Python %d.%d is too old: install Python 3.11 or newer" % sys.version_info[:2])

from zfs_core.cli.main import main

sys.exit(main())
"""


def build(interpreter: str) -> bytes:
    """Return the contents of the executable file, whose first line names ``interpreter``."""
    buffer = io.BytesIO()
    with zipfile.ZipFile(buffer, "w") as archive:
        for name, content in sorted({"__main__.py": _MAIN.encode(), **_read_sources()}.items()):
            entry = zipfile.ZipInfo(name, _EARLIEST_TIME)
            # Otherwise, the entry records the operating system of the builder.
            entry.create_system = 3
            entry.external_attr = 0o644 << 16
            archive.writestr(entry, content)
    return f"#!{interpreter}\n".encode() + buffer.getvalue()


def _read_sources() -> dict[str, bytes]:
    return {
        str(path.relative_to(PACKAGE.parent)): path.read_bytes()
        for path in PACKAGE.rglob("*.py")
        if path != Path(__file__).resolve()
    }


def main() -> None:
    if len(sys.argv) not in (2, 3):
        sys.exit("usage: build.py OUTPUT [PYTHON]")
    output = Path(sys.argv[1])
    output.write_bytes(build(sys.argv[2] if len(sys.argv) == 3 else "/usr/bin/env python3"))
    output.chmod(0o755)


if __name__ == "__main__":
    main()
