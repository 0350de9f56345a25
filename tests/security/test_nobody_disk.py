"""A client without a key tries to fill the host's disk with log messages about rejected requests."""

from __future__ import annotations

import logging
from pathlib import Path

from sandbox_gateway import log

LINE_COUNT, PATH_LENGTH = 80_000, 1000


def test_the_log_file_is_bounded_and_readable_only_by_root(tmp_path: Path) -> None:
    log_path = tmp_path / "gateway.log"
    log_path.touch(mode=0o644)
    root_logger = logging.getLogger()
    handlers_before, level_before = root_logger.handlers[:], root_logger.level
    logger = log.Logger("api")
    try:
        log.setup("info", "json", log_path)
        for number in range(LINE_COUNT):
            logger.info("request", number=number, path="x" * PATH_LENGTH)
    finally:
        root_logger.handlers[-1].close()
        root_logger.handlers[:] = handlers_before
        root_logger.setLevel(level_before)
    log_files = list(tmp_path.iterdir())
    assert sum(file.stat().st_size for file in log_files) <= 64 << 20 < LINE_COUNT * PATH_LENGTH
    assert {file.stat().st_mode & 0o777 for file in log_files} == {0o600}
    assert f'"number": {LINE_COUNT - 1},' in log_path.read_text().splitlines()[-1]
