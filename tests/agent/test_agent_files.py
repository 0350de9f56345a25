"""/files uploads and downloads files."""

from __future__ import annotations

import gzip
import json
import os
import socket
from pathlib import Path
from urllib.parse import urlencode

import pytest


def download_file(agent, path, **query):
    return agent.request("GET", "/files?" + urlencode({"path": str(path), **query}))


def upload_file(agent, body, content_type="application/octet-stream", headers=None, **query):
    status, data = agent.request(
        "POST", "/files?" + urlencode(query), body, {"Content-Type": content_type, **(headers or {})}
    )
    return status, json.loads(data)


def encode_multipart(*parts: tuple[str, str, bytes]) -> bytes:
    body = b""
    for name, filename, data in parts:
        disposition = f'form-data; name="{name}"' + (f'; filename="{filename}"' if filename else "")
        body += b"--XX\r\nContent-Disposition: " + disposition.encode() + b"\r\nContent-Type: text/plain\r\n\r\n"
        body += data + b"\r\n"
    return body + b"--XX--\r\n"


MULTIPART_TYPE = "multipart/form-data; boundary=XX"


def test_uploaded_content_is_downloaded_unchanged(agent, tmp_path):
    path = tmp_path / "deep/er/a b+ü"
    data = os.urandom(1_000_000)
    assert upload_file(agent, data, path=str(path)) == (200, [{"path": str(path), "name": "a b+ü", "type": "file"}])
    assert path.read_bytes() == data
    assert download_file(agent, path) == (200, data)


def test_overwriting_truncates_a_file_and_keeps_its_mode(agent, tmp_path):
    path = tmp_path / "file"
    path.write_text("long content")
    path.chmod(0o640)
    assert upload_file(agent, b"new", path=str(path))[0] == 200
    assert (path.read_text(), path.stat().st_mode & 0o777) == ("new", 0o640)
    assert upload_file(agent, b"", path=str(path))[0] == 200
    assert download_file(agent, path) == (200, b"")


def test_a_chunked_upload_is_stored(agent, tmp_path):
    pieces = [os.urandom(70_000) for _ in range(10)]
    status, _ = agent.request("POST", f"/files?path={tmp_path}/c", iter(pieces), {"Transfer-Encoding": "chunked"})
    assert status == 200
    assert (tmp_path / "c").read_bytes() == b"".join(pieces)


def test_gzip_uploads_are_decompressed(agent, tmp_path):
    data = b"abc" * 300_000
    compressed_data = gzip.compress(data)
    assert upload_file(agent, compressed_data, headers={"Content-Encoding": "gzip"}, path=f"{tmp_path}/g")[0] == 200
    assert (tmp_path / "g").read_bytes() == data
    for invalid_data in (compressed_data[:-20], b"not gzip at all"):
        status, response = upload_file(agent, invalid_data, headers={"Content-Encoding": "gzip"}, path=f"{tmp_path}/g")
        assert status == 400 and "gzip" in response["message"]


def test_downloads_are_compressed_if_only_gzip_is_accepted(agent, tmp_path):
    data = b"abc" * 300_000
    (tmp_path / "plain").write_bytes(data)
    target = f"/files?path={tmp_path}/plain"
    status, compressed_data = agent.request("GET", target, headers={"Accept-Encoding": "gzip"})
    assert (status, gzip.decompress(compressed_data)) == (200, data) and len(compressed_data) < 10_000
    assert agent.request("GET", target, headers={"Accept-Encoding": "gzip, deflate"}) == (200, data)


def test_the_path_parameter_overrides_the_filename(agent, tmp_path):
    data = b"\r\n--X\r\n--XY" + os.urandom(300_000) + b"\r\n"
    body = encode_multipart(("other", "", b"ignored"), ("file", "elsewhere", data))
    assert upload_file(agent, body, MULTIPART_TYPE, path=f"{tmp_path}/here")[1][0]["path"] == f"{tmp_path}/here"
    assert (tmp_path / "here").read_bytes() == data
    assert not (tmp_path / "elsewhere").exists()


def test_filenames_set_the_paths_of_several_files(agent, tmp_path):
    body = encode_multipart(("file", f"{tmp_path}/d/one", b"1"), ("file", f"{tmp_path}/t%22wo ü", b""))
    status, response = upload_file(agent, body, MULTIPART_TYPE)
    assert (status, [item["name"] for item in response]) == (200, ["one", 't"wo ü'])
    assert ((tmp_path / "d/one").read_bytes(), (tmp_path / 't"wo ü').read_bytes()) == (b"1", b"")


def test_a_boundary_split_between_reads_is_found(agent, tmp_path):
    """The body arrives in small pieces, so its boundaries are split between them."""
    body = encode_multipart(("file", f"{tmp_path}/cut", b"a\r\n--X\r\nb"))
    for size in (1, 2, 3, 7):
        pieces = [body[start : start + size] for start in range(0, len(body), size)]
        headers = {"Content-Type": MULTIPART_TYPE, "Transfer-Encoding": "chunked"}
        assert agent.request("POST", "/files", iter(pieces), headers)[0] == 200
        assert (tmp_path / "cut").read_bytes() == b"a\r\n--X\r\nb"


@pytest.mark.parametrize(
    "body",
    [
        b"",
        b"--XX\r\n",
        b"--XX--\r\n",
        b"nothing",
        encode_multipart(("file", "/tmp/never", b"x"))[:-8] + b"\r\n--XXoops",
    ],
)
def test_a_malformed_multipart_body_is_refused(agent, tmp_path, body):
    status, response = upload_file(agent, body, MULTIPART_TYPE, path=f"{tmp_path}/never")
    assert status == 400, response


def test_errors_have_a_status_and_a_code(agent, tmp_path):
    (tmp_path / "file").write_text("x")
    os.mkfifo(tmp_path / "pipe")
    for path, status in (
        (tmp_path / "none", 404),
        (tmp_path, 400),
        (tmp_path / "pipe", 400),
        ("/dev/zero", 400),
        (tmp_path / "file/below", 400),
        ("a\0b", 400),
    ):
        actual_status, data = download_file(agent, path)
        assert (actual_status, json.loads(data)["code"]) == (status, status), path
    for path, status in ((tmp_path, 400), (tmp_path / "pipe", 400), (tmp_path / "file/below", 400), ("", 400)):
        actual_status, response = upload_file(agent, b"x", path=str(path))
        assert (actual_status, response["code"]) == (status, status), path
    assert download_file(agent, tmp_path / "file", username="no-such-user")[0] == 401


def test_a_full_disk_returns_507(requires_root, running, unmanaged_command, tmp_path):
    """The file system has a size of 1 MiB, and only this agent sees it."""
    script = 'mount -t tmpfs -o size=1m tmpfs "$1"; shift; exec "$@"'
    argv = ["unshare", "--mount", "--propagation", "private", "sh", "-c", script, "sh", str(tmp_path)]
    with running([*argv, *unmanaged_command]) as agent:
        status, response = upload_file(agent, bytes(2 << 20), path=f"{tmp_path}/file")
    assert (status, response["code"]) == (507, 507) and "No space" in response["message"]


def test_files_without_a_size_are_downloaded(agent):
    status, data = download_file(agent, "/proc/self/status")
    assert status == 200 and b"Name:" in data


def test_a_relative_path_is_resolved_from_home(agent):
    for path in ("no-such-file", "~/no-such-file"):
        status, data = download_file(agent, path)
        assert status == 404 and str(Path.home() / "no-such-file") in json.loads(data)["message"]


def test_large_uploads_use_little_memory(agent, tmp_path):
    size = 200_000_000
    with (tmp_path / "sparse").open("wb") as file:
        file.truncate(size)
    memory_kib_before = read_peak_memory_kib(agent.process.pid)
    with socket.create_connection(("127.0.0.1", agent.port)) as sock:
        sock.sendall(f"GET /files?path={tmp_path}/sparse HTTP/1.1\r\n\r\n".encode())
        received_byte_count = 0
        while received_byte_count < size:
            received_byte_count += len(sock.recv(1 << 20))
    assert (
        upload_file(
            agent, iter([bytes(1 << 20)] * 60), headers={"Transfer-Encoding": "chunked"}, path=f"{tmp_path}/up"
        )[0]
        == 200
    )
    assert read_peak_memory_kib(agent.process.pid) - memory_kib_before < 20_000


def read_peak_memory_kib(pid: int) -> int:
    """Return the peak memory of a process, in KiB."""
    lines = Path(f"/proc/{pid}/status").read_text().splitlines()
    return next(int(line.split()[1]) for line in lines if line.startswith("VmHWM"))


def test_the_user_owns_uploaded_files(agent, tmp_path):
    if os.geteuid() != 0:
        pytest.skip("needs root")
    assert upload_file(agent, b"x", path=f"{tmp_path}/new/deep/file", username="nobody")[0] == 200
    owner_uids = {(tmp_path / part).stat().st_uid for part in ("new", "new/deep", "new/deep/file")}
    assert owner_uids == {65534} and tmp_path.stat().st_uid == 0


def test_an_aborted_upload_closes_the_connection(agent, tmp_path):
    with socket.create_connection(("127.0.0.1", agent.port)) as sock:
        sock.sendall(f"POST /files?path={tmp_path}/cut HTTP/1.1\r\nContent-Length: 100\r\n\r\nabc".encode())
        sock.shutdown(socket.SHUT_WR)
        assert sock.recv(1000) == b""


def test_a_refused_upload_receives_a_response(agent, tmp_path):
    """The client keeps sending, although the agent does not read the body."""
    status, response = upload_file(
        agent, iter([bytes(1 << 20)] * 8), headers={"Transfer-Encoding": "chunked"}, path=str(tmp_path)
    )
    assert status == 400 and "regular file" in response["message"]
