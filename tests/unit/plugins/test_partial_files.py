"""Exports by the module and by `sandboxctl` leave neither incomplete files nor secrets that other users can read."""

from __future__ import annotations

import contextlib
import errno
import hashlib
import os
import socket
import threading
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager
from pathlib import Path

import pytest
from ansible_collections.grove.sandbox.plugins.module_utils import _failure, _snapshot
from ansible_collections.grove.sandbox.plugins.module_utils._client import Client
from ansible_collections.grove.sandbox.plugins.module_utils._plan import Action
from ansible_collections.grove.sandbox.plugins.module_utils._snapshot_files import NewFile, new_file_opened

from sandbox_gateway.cli import client as cli_client
from sandbox_gateway.cli import failure as cli_failure
from sandbox_gateway.cli import snapshot_files
from tests.unit.engine.snapshot_file_samples import FILE

FAILURES = (_failure.Failure, cli_failure.Failure)
OpenFile = Callable[[str], AbstractContextManager[NewFile | snapshot_files._Output]]
Export = Callable[[str, str], object]
WHOLE_RESPONSE = b"HTTP/1.1 200 OK\r\nContent-Length: %d\r\n\r\n" % len(FILE) + FILE
CONFLICT = b'HTTP/1.1 409 Conflict\r\nContent-Length: 38\r\n\r\n{"kind": "conflict", "message": "no."}'


@pytest.fixture
def path(tmp_path: Path) -> Path:
    return tmp_path / "file"


@pytest.fixture
def partial_path(tmp_path: Path) -> Path:
    return tmp_path / ".file.partial"


@pytest.fixture(params=[new_file_opened, snapshot_files._output_opened], ids=["module", "sandboxctl"])
def open_file(request: pytest.FixtureRequest) -> OpenFile:
    opener: OpenFile = request.param
    return opener


def export_with_module(url: str, path: str) -> None:
    _snapshot.apply(Action("export", (), {"name": "golden", "file": path}), Client(url, timeout=10))


def export_with_cli(url: str, path: str) -> None:
    snapshot_files.export(cli_client.Client(url), "/snapshots/golden/export", "golden", path)


@pytest.fixture(params=[export_with_module, export_with_cli], ids=["module", "sandboxctl"])
def export(request: pytest.FixtureRequest) -> Export:
    exporter: Export = request.param
    return exporter


@contextlib.contextmanager
def served(*responses: bytes, request_lines: list[str]) -> Iterator[str]:
    """Answer one request after the other with ``responses``, and yield the URL. Adds to ``request_lines``."""
    with socket.create_server(("127.0.0.1", 0)) as listener:

        def serve() -> None:
            for response in responses:
                connection, _ = listener.accept()
                with connection:
                    request_lines.append(connection.recv(65536).partition(b"\r\n")[0].decode())
                    connection.sendall(response)

        thread = threading.Thread(target=serve)
        thread.start()
        yield f"http://127.0.0.1:{listener.getsockname()[1]}"
        thread.join(10)


def test_the_next_export_replaces_the_secrets_left_by_a_killed_export(
    path: Path, partial_path: Path, export: Export
) -> None:
    """The gateway refuses to continue a different file, and an older gateway sends the whole file."""
    for responses in ([CONFLICT, WHOLE_RESPONSE], [WHOLE_RESPONSE]):
        partial_path.write_bytes(FILE * 2)
        partial_path.chmod(0o644)
        requests: list[str] = []
        with served(*responses, request_lines=requests) as url:
            export(url, str(path))
        digest = hashlib.sha256(FILE * 2).hexdigest()
        assert f"offset={2 * len(FILE)}&digest={digest}" in requests[0] and "offset" not in "".join(requests[1:])
        assert path.read_bytes() == FILE and [*path.parent.iterdir()] == [path]
        assert path.stat().st_mode & 0o777 == 0o600
        path.unlink()


@pytest.mark.parametrize("size", [1, len(FILE) // 2, len(FILE) - 1, len(FILE)])
def test_the_next_export_continues_where_a_lost_connection_has_ended_it(
    path: Path, partial_path: Path, export: Export, size: int
) -> None:
    begin = b"HTTP/1.1 200 OK\r\nTransfer-Encoding: chunked\r\n\r\n%x\r\n%s\r\n" % (size, FILE[:size])
    with served(begin, request_lines=[]) as url, pytest.raises(FAILURES, match="was lost"):
        export(url, str(path))
    assert partial_path.read_bytes() == FILE[:size] and partial_path.stat().st_mode & 0o777 == 0o600
    rest = b"HTTP/1.1 206 Partial Content\r\nContent-Length: %d\r\n\r\n" % (len(FILE) - size) + FILE[size:]
    requests: list[str] = []
    with served(rest, request_lines=requests) as url:
        export(url, str(path))
    assert f"offset={size}&digest={hashlib.sha256(FILE[:size]).hexdigest()}" in requests[0]
    assert path.read_bytes() == FILE and [*path.parent.iterdir()] == [path]


def test_two_exports_to_one_file_do_not_mix(path: Path, open_file: OpenFile) -> None:
    with open_file(str(path)) as file:
        with pytest.raises(FAILURES, match=r"another export is writing .*\.file\.partial"), open_file(str(path)):
            pass
        file.write(FILE)
    assert path.read_bytes() == FILE


@pytest.mark.parametrize("kind", ["symbolic link", "hard link", "file of another user", "pipe"])
def test_a_planted_partial_file_neither_receives_secrets_nor_damages_other_files(
    path: Path, partial_path: Path, open_file: OpenFile, kind: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    victim = path.with_name("victim")
    victim.write_text("mine")
    if kind == "symbolic link":
        partial_path.symlink_to(victim)
    elif kind == "hard link":
        partial_path.hardlink_to(victim)
    elif kind == "pipe":
        os.mkfifo(partial_path)
    else:
        partial_path.touch()
        monkeypatch.setattr(os, "geteuid", lambda: 12345)
    with pytest.raises(FAILURES, match=r"was not created by an export|Too many levels"), open_file(str(path)):
        pass
    assert victim.read_text() == "mine" and not path.exists()


def test_a_file_that_a_proxy_truncates_does_not_get_its_final_name(path: Path, export: Export) -> None:
    """With HTTP/1.0, a response ends when its connection is closed."""
    with (
        served(b"HTTP/1.0 200 OK\r\n\r\n" + FILE[:-1], request_lines=[]) as url,
        pytest.raises(FAILURES, match=r"was lost before all of .* had arrived"),
    ):
        export(url, str(path))
    assert not path.exists()
    with served(b"HTTP/1.0 200 OK\r\n\r\n" + FILE, request_lines=[]) as url:
        export(url, str(path))
    assert path.read_bytes() == FILE


def test_a_full_disk_is_not_reported_as_an_error_of_the_gateway(
    path: Path, export: Export, monkeypatch: pytest.MonkeyPatch
) -> None:
    def fail(descriptor: int, data: bytes) -> int:
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    with served(WHOLE_RESPONSE, request_lines=[]) as url:
        monkeypatch.setattr(os, "write", fail)
        with pytest.raises(FAILURES, match=r"(cannot be written|cannot write).*No space left on device") as error_info:
            export(url, str(path))
        monkeypatch.undo()
    assert getattr(error_info.value, "kind", "invalid") == "invalid"
    assert [*path.parent.iterdir()] == []


def test_a_connection_that_breaks_during_an_export_is_reported_as_lost(path: Path, export: Export) -> None:
    with (
        served(b"HTTP/1.1 200 OK\r\nTransfer-Encoding: chunked\r\n\r\n64\r\n", request_lines=[]) as url,
        pytest.raises(FAILURES, match=r"the connection to the gateway at .* was lost"),
    ):
        export(url, str(path))
    assert [*path.parent.iterdir()] == [], "there is nothing that the next export could continue"
