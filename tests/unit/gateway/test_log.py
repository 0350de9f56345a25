"""Tests that untrusted text cannot add lines to the log."""

from __future__ import annotations

import logging

from sandbox_gateway.log import _TextFormatter


def test_untrusted_text_cannot_forge_a_log_line() -> None:
    record = logging.LogRecord("sandbox_gateway.api", logging.INFO, "", 0, "request", None, None)
    record.fields = {"path": "/x\n12:00:00 info    request caller=admin \x1b[2J", "status": 404, "name": "ü"}
    line = _TextFormatter().format(record)
    assert "\n" not in line and "\x1b" not in line
    assert line.endswith("status=404 name=ü")
