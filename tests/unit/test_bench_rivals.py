"""Tests for the parts of the `rivals` bench that need no machine, and for the selection of its packages."""

from __future__ import annotations

import json
import socket
import struct
import subprocess
import sys
import threading
import time
from pathlib import Path
from typing import Any

import pytest

from benchmarks.measure import Result
from benchmarks.rivals import probe, table
from benchmarks.rivals.machines import RIVAL_KINDS, edit_saved_xml
from benchmarks.rivals.ours import OurMachine
from tests.support import session

COLUMNS = {"ours": "this software", "savevm": "QEMU `savevm`"}


def create_bench_result() -> dict[str, Any]:
    """Return the JSON of a bench result with a measure for each kind of table cell."""
    result = Result("rivals", "a title", {"not_offered": {"savevm_fork_1": "a reason"}})
    result.add_measure("ours_snapshot", "a title", samples=[5, 6, 7])
    result.add_measure("savevm_snapshot", "a title", samples=[1200, 1400], floor="ours_snapshot")
    result.add_measure("ours_written", "a title", "bytes", samples=[3 << 20])
    result.add_measure("savevm_written", "a title", "bytes")
    result.add_measure("ours_fork_1", "a title", samples=[95.25])
    result.add_measure("savevm_fork_1", "a title")
    return result.as_json()


def test_each_operation_is_a_row_with_medians_and_sample_counts() -> None:
    assert table.render_table(create_bench_result(), "median", COLUMNS).splitlines() == [
        "| median | this software | QEMU `savevm` |",
        "| --- | --- | --- |",
        "| snapshot, until its source answers | 6.00 ms (3) | 1.30 s (2) |",
        "| bytes written for a snapshot | 3.0 MiB (1) | not measured |",
        "| one fork, until it answers | 95.2 ms (1) | not offered |",
    ]


def test_a_table_without_measures_has_only_its_header() -> None:
    lines = table.render_table(create_bench_result(), "median", table.PLAYBOOKS).splitlines()
    assert lines == [
        "| median | modules of this collection | `community.general.zfs` and commands |",
        "| --- | --- | --- |",
    ]


def test_the_columns_are_the_keys_of_the_rivals() -> None:
    assert set(table.MACHINES) == {OurMachine.key, *(kind.key for kind in RIVAL_KINDS)}


@pytest.mark.parametrize(
    ("benches", "exit_code", "expected_output"),
    [
        ({"rivals": create_bench_result()}, 0, "| jail, median of a playbook run |"),
        ({"fork": {}}, 2, "no results of the bench"),
    ],
)
def test_the_program_reads_the_file_of_a_run(
    benches: dict[str, Any], exit_code: int, expected_output: str, tmp_path: Path
) -> None:
    result_file = tmp_path / "result.json"
    result_file.write_text(json.dumps({"benches": benches}))
    result = subprocess.run(
        [sys.executable, "-m", "benchmarks.rivals.table", str(result_file)],
        cwd=session.REPOSITORY, capture_output=True, text=True, timeout=60, check=False,
    )  # fmt: skip
    assert result.returncode == exit_code, result.stderr
    assert expected_output in result.stdout + result.stderr


@pytest.mark.parametrize(
    ("arguments", "is_selected"),
    [
        ("", True),
        ("--quick", True),
        ("--json rivals", True),
        ("fork rivals", True),
        ("--plot docs/rivals.svg rivals --quick", True),
        ("fork", False),
        ("--quick fork", False),
        ("--json rivals fork", False),
        ("--json=rivals fork", False),
    ],
)
def test_packages_of_rivals_are_installed_only_if_the_bench_is_selected(arguments: str, is_selected: bool) -> None:
    extraction_command = "sed -n '/^is_selected()/,/^}/p' dev"
    script = f'set -u; eval "$({extraction_command})"; is_selected rivals {arguments}'
    result = subprocess.run(
        ["bash", "-c", script], cwd=session.REPOSITORY, capture_output=True, text=True, timeout=30, check=False
    )
    assert (result.returncode, result.stderr) == (0 if is_selected else 1, "")


SAVED_XML = b"<domain><name>source</name><target dev='rival00'/></domain>"


@pytest.fixture
def saved_file(tmp_path: Path) -> Path:
    """A file such as `virsh save` creates: a 92-byte header, the XML, and the state of the machine."""
    path = tmp_path / "source.save"
    header = struct.pack("=16sII", b"LibvirtQemudSave", 2, len(SAVED_XML)).ljust(92, b"\0")
    path.write_bytes(header + SAVED_XML + b"rival00 state")
    return path


def test_only_the_xml_of_a_saved_file_is_edited(saved_file: Path) -> None:
    bytes_before = saved_file.read_bytes()
    edit_saved_xml(saved_file, {"<name>source<": "<name>fork01<", "'rival00'": "'rival01'"})
    expected_xml = b"<domain><name>fork01</name><target dev='rival01'/></domain>"
    assert saved_file.read_bytes() == bytes_before[:92] + expected_xml + b"rival00 state"


@pytest.mark.parametrize("replacement", [{"source": "fork"}, {"absent": "fork01"}])
def test_a_replacement_that_would_damage_a_saved_file_is_refused(saved_file: Path, replacement: dict[str, str]) -> None:
    bytes_before = saved_file.read_bytes()
    with pytest.raises(RuntimeError, match="cannot replace"):
        edit_saved_xml(saved_file, replacement)
    assert saved_file.read_bytes() == bytes_before


def test_a_file_without_the_header_is_refused(tmp_path: Path) -> None:
    path = tmp_path / "other"
    path.write_bytes(b"qcow2".ljust(200, b"\0"))
    with pytest.raises(RuntimeError, match="not created by virsh save"):
        edit_saved_xml(path, {})


def test_the_probe_waits_until_the_guest_accepts_and_answers(monkeypatch: pytest.MonkeyPatch) -> None:
    """The first connections are refused, the next one is closed without an answer, and then the guest answers."""
    with socket.socket() as listener:
        listener.bind(("127.0.0.1", 0))
        monkeypatch.setattr(probe, "AGENT_PORT", listener.getsockname()[1])
        received_requests: list[bytes] = []

        def serve_requests() -> None:
            time.sleep(0.1)
            listener.listen()
            listener.accept()[0].close()
            while not received_requests:
                connection, _ = listener.accept()
                with connection:
                    request = connection.recv(1024)
                    if request:
                        received_requests.append(request)
                        connection.sendall(b"HTTP/1.1 204 No Content\r\n\r\n")

        thread = threading.Thread(target=serve_requests, daemon=True)
        thread.start()
        start_time = time.monotonic()
        probe.wait_for_answer("127.0.0.1")
        assert time.monotonic() - start_time >= 0.1
        thread.join(10)
    assert received_requests[0].startswith(b"GET /health ")


def test_the_probe_gives_up_after_its_timeout(monkeypatch: pytest.MonkeyPatch) -> None:
    with socket.socket() as silent_listener:
        silent_listener.bind(("127.0.0.1", 0))
        silent_listener.listen()
        monkeypatch.setattr(probe, "AGENT_PORT", silent_listener.getsockname()[1])
        monkeypatch.setattr(probe, "_TIMEOUT_SECONDS", 0.2)
        with pytest.raises(RuntimeError, match="did not answer"):
            probe.wait_for_answer("127.0.0.1")
