"""Root in a sandbox, or a user of the host, searches for the password of the host's proxy."""

from __future__ import annotations

import asyncio
import threading
from pathlib import Path

import pytest

from sandbox_gateway.hosts.kvm_xfs.template import apt, debian

PASSWORD = "s3cret-of-the-proxy"
APT_OPTIONS = [f'Acquire::https::Proxy "http://user:{PASSWORD}@127.0.0.1:9"', 'Acquire::Retries "1"']
"""The mirror uses HTTP, so this proxy for HTTPS is not used."""


@pytest.mark.slow
def test_the_proxy_password_is_not_in_templates_or_command_lines(requires_root: None, tmp_path: Path) -> None:
    found_lines: set[str] = set()
    build_end_event = threading.Event()

    def search_command_lines() -> None:
        """Search the command lines of all processes for the password and for mmdebstrap, until the build ends."""
        while not build_end_event.wait(0.05):
            for entry in Path("/proc").glob("[0-9]*"):
                try:
                    command_line = (entry / "cmdline").read_text(errors="replace")
                except OSError:
                    continue
                found_lines.update(
                    {"mmdebstrap"} if "mmdebstrap" in command_line and str(tmp_path) in command_line else ()
                )
                found_lines.update({command_line} if PASSWORD in command_line else ())

    watcher = threading.Thread(target=search_command_lines)
    watcher.start()
    try:
        asyncio.run(run_build(tmp_path))
    finally:
        build_end_event.set()
        watcher.join()
    assert found_lines == {"mmdebstrap"}
    archive = (tmp_path / "rootfs.tar").read_bytes()
    assert b"Acquire::Retries" in archive, "the options without a password stay in the template"
    assert PASSWORD.encode() not in archive


async def run_build(work_directory: Path) -> None:
    suite = "bookworm"
    options = [*await apt.read_apt_options(), *APT_OPTIONS]
    sources_file = work_directory / "host.sources"
    sources_file.write_text(apt.read_host_sources(suite).replace("https://", "http://"))
    await debian.build_tarball(suite, ["ca-certificates"], options, [str(sources_file)], work_directory, print)
