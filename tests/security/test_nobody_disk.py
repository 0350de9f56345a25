"""A client without a key tries to fill the host's disk with log messages about rejected requests."""

from __future__ import annotations

import logging
from pathlib import Path

from sandbox_gateway import log

LINES, LENGTH = 80_000, 1000


def test_the_log_file_is_bounded_and_readable_only_by_root(tmp_path: Path) -> None:
    path = tmp_path / "gateway.log"
    path.touch(mode=0o644)
    root = logging.getLogger()
    handlers_before, level = root.handlers[:], root.level
    logger = log.Logger("api")
    try:
        log.setup("info", "json", path)
        for number in range(LINES):
            logger.info("request", number=number, path="x" * LENGTH)
    finally:
        root.handlers[-1].close()
        root.handlers[:] = handlers_before
        root.setLevel(level)
    files = list(tmp_path.iterdir())
    assert sum(file.stat().st_size for file in files) <= 64 << 20 < LINES * LENGTH
    assert {file.stat().st_mode & 0o777 for file in files} == {0o600}
    assert f'"number": {LINES - 1},' in path.read_text().splitlines()[-1]
