"""Collections without Galaxy: extracted from PyPI's package ``ansible``, once for each test state."""

from __future__ import annotations

import subprocess
import sys
import tempfile
import zipfile
from functools import cache
from pathlib import Path
from typing import Any

import yaml

from requirements import sbom
from tests.support import session

LIST = session.REPOSITORY / "requirements" / "awx.txt"
(_PIN,) = sbom.read_pins(LIST)
_PREFIX = "ansible_collections/awx/awx/"
_DOWNLOAD_SECONDS = 300


@cache
def collections_path(name: str = "awx.awx") -> Path:
    """A collections path that holds only this collection (awx.awx: 1 MB of a package of 54 MB)."""
    place = session.cache_dir() / f"{name.partition('.')[0]}-{_PIN.version}"
    prefix = f"ansible_collections/{name.replace('.', '/')}/"
    if not place.exists():
        with tempfile.TemporaryDirectory(dir=session.cache_dir()) as scratch:
            _download(Path(scratch))
            (wheel,) = Path(scratch).glob("*.whl")
            unpacked = Path(scratch) / "unpacked"
            with zipfile.ZipFile(wheel) as archive:
                archive.extractall(unpacked, [path for path in archive.namelist() if path.startswith(prefix)])
            # Atomic: the directory exists only if it is complete.
            unpacked.rename(place)
    return place


def _download(into: Path) -> None:
    hashed = ["--require-hashes", "--no-deps", "--only-binary=:all:", "--requirement", str(LIST)]
    done = subprocess.run(
        [sys.executable, "-m", "pip", "download", "-q", "-d", str(into), *hashed],
        capture_output=True,
        text=True,
        timeout=_DOWNLOAD_SECONDS,
        check=False,
    )
    assert done.returncode == 0, f"pip cannot download ansible {_PIN.version}, which has awx.awx: {done.stderr}"


@cache
def module_options(module: str) -> dict[str, dict[str, Any]]:
    """The options of a module of awx.awx, from its documentation."""
    source = collections_path() / _PREFIX / "plugins" / "modules" / f"{module}.py"
    _, _, rest = source.read_text().partition("DOCUMENTATION = '''")
    found: dict[str, dict[str, Any]] = yaml.safe_load(rest.partition("'''")[0])["options"]
    return found
