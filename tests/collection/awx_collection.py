"""Get collections without Galaxy, by extracting them from the PyPI package ``ansible``."""

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

REQUIREMENTS_FILE = session.REPOSITORY / "requirements" / "awx.txt"
(_PIN,) = sbom.read_pins(REQUIREMENTS_FILE)
_COLLECTION_PATH = "ansible_collections/awx/awx/"
_DOWNLOAD_TIMEOUT_SECONDS = 300


@cache
def unpack_collection(name: str = "awx.awx") -> Path:
    """Return a collections path that contains only the collection ``name`` (awx.awx is 1 MB of the 54 MB package)."""
    directory = session.get_cache_dir() / f"{name}-{_PIN.version}"
    prefix = f"ansible_collections/{name.replace('.', '/')}/"
    if not directory.exists():
        with tempfile.TemporaryDirectory(dir=session.get_cache_dir()) as scratch:
            _download(Path(scratch))
            (wheel,) = Path(scratch).glob("*.whl")
            unpacked_directory = Path(scratch) / "unpacked"
            with zipfile.ZipFile(wheel) as archive:
                archive.extractall(unpacked_directory, [path for path in archive.namelist() if path.startswith(prefix)])
            # The rename is atomic, so the directory exists only if it is complete.
            unpacked_directory.rename(directory)
    return directory


def _download(directory: Path) -> None:
    options = ["--require-hashes", "--no-deps", "--only-binary=:all:", "--requirement", str(REQUIREMENTS_FILE)]
    result = subprocess.run(
        [sys.executable, "-m", "pip", "download", "-q", "-d", str(directory), *options],
        capture_output=True,
        text=True,
        timeout=_DOWNLOAD_TIMEOUT_SECONDS,
        check=False,
    )
    assert result.returncode == 0, (
        f"pip cannot download ansible {_PIN.version}, which contains awx.awx: {result.stderr}"
    )


@cache
def read_module_options(module: str) -> dict[str, dict[str, Any]]:
    """Return the options of a module of awx.awx, according to its documentation."""
    source_file = unpack_collection() / _COLLECTION_PATH / "plugins" / "modules" / f"{module}.py"
    _, _, remaining_source = source_file.read_text().partition("DOCUMENTATION = '''")
    documented_options: dict[str, dict[str, Any]] = yaml.safe_load(remaining_source.partition("'''")[0])["options"]
    return documented_options
