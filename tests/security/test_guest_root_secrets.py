"""Root in a sandbox, or a user of the host, searches for the password for the host's proxy."""

from __future__ import annotations

import asyncio
import threading
from pathlib import Path

from sandbox_gateway.hosts.kvm_xfs.template import apt, debian

PASSWORD = "s3cret-of-the-proxy"
APT_OPTIONS = [f'Acquire::https::Proxy "http://user:{PASSWORD}@127.0.0.1:9"', 'Acquire::Retries "1"']
"""The mirror uses HTTP, so this proxy for HTTPS is not used."""


def test_the_proxy_password_is_not_in_templates_or_command_lines(need_root: None, tmp_path: Path) -> None:
    found_lines: set[str] = set()
    build_ended = threading.Event()

    def read_command_lines() -> None:
        """Collect the command lines of all processes, as `ps` does, until the build ends."""
        while not build_ended.wait(0.05):
            for entry in Path("/proc").glob("[0-9]*"):
                try:
                    line = (entry / "cmdline").read_text(errors="replace")
                except OSError:
                    continue
                found_lines.update({"mmdebstrap"} if "mmdebstrap" in line and str(tmp_path) in line else ())
                found_lines.update({line} if PASSWORD in line else ())

    watcher = threading.Thread(target=read_command_lines)
    watcher.start()
    try:
        asyncio.run(run_build(tmp_path))
    finally:
        build_ended.set()
        watcher.join()
    assert found_lines == {"mmdebstrap"}
    archive = (tmp_path / "rootfs.tar").read_bytes()
    assert b"Acquire::Retries" in archive, "the options without a password stay in the template"
    assert PASSWORD.encode() not in archive


async def run_build(work: Path) -> None:
    suite = "bookworm"
    options = [*await apt.apt_options(), *APT_OPTIONS]
    sources = work / "host.sources"
    sources.write_text(apt.host_sources(suite).replace("https://", "http://"))
    await debian.debootstrap(suite, ["ca-certificates"], options, [str(sources)], work, print)
