"""The agent's HTTP server."""

from __future__ import annotations

import contextlib
import json
import os
import shutil
import socket
import subprocess
import sys
import threading
import time
from pathlib import Path

SOURCE_DIRECTORY = Path(__file__).parents[2] / "gateway/src/sandbox_agent"


def send_bytes(agent, data: bytes) -> bytes:
    """Send the bytes unchanged. Returns all bytes that arrive until the agent closes the connection."""
    with socket.create_connection(("127.0.0.1", agent.port), timeout=30) as sock:
        sock.sendall(data)
        received_data = b""
        while piece := sock.recv(65536):
            received_data += piece
    return received_data


def test_health_responds_without_a_body(agent):
    assert agent.request("GET", "/health") == (204, b"")


def test_a_connection_serves_many_requests(agent):
    connection = agent.connect()
    for _ in range(3):
        connection.request("POST", "/filesystem.Filesystem/Stat", json.dumps({"path": "/"}))
        response = connection.getresponse()
        assert (response.status, json.loads(response.read())["entry"]["type"]) == (200, "FILE_TYPE_DIRECTORY")
    sock = connection.sock
    connection.request("POST", "/nowhere", b"x" * 100)
    assert connection.getresponse().read()
    connection.request("GET", "/health")
    assert connection.getresponse().status == 204
    assert connection.sock is sock


def test_pipelined_requests_are_served(agent):
    request_head = b"GET /health HTTP/1.1\r\nHost: x\r\n"
    responses = send_bytes(agent, request_head + b"\r\n" + request_head + b"Connection: close\r\n\r\n")
    assert responses.count(b"HTTP/1.1 204") == 2


def test_errors_are_json(agent):
    status, response = agent.post("/nowhere")
    assert (status, response["code"]) == (404, 404)
    # The gateway compares this text; see AgentClient.eval.
    assert response["message"] == "/nowhere not found"
    status, response = agent.post("/health")
    assert status == 405
    status, response = agent.post("/process.Process/Nothing")
    assert (status, response["code"]) == (404, "unimplemented")


def test_a_body_that_is_not_json_is_refused(agent):
    for body in (b"{", b"[]", b"\xff", b"[" * 100_000):
        status, data = agent.request("POST", "/exec", body)
        assert status == 400, data


def test_a_chunked_body_is_read(agent):
    response = send_bytes(
        agent,
        b"POST /exec HTTP/1.1\r\nTransfer-Encoding: chunked\r\nConnection: close\r\n\r\n"
        b'8\r\n{"args":\r\n9;ext=1\r\n["true"]}\r\n0\r\nTrailer: x\r\n\r\n',
    )
    assert b" 200 OK" in response and b'"exitCode":0' in response


def test_expect_continue_is_confirmed(agent):
    with socket.create_connection(("127.0.0.1", agent.port), timeout=30) as sock:
        sock.sendall(b"POST /exec HTTP/1.1\r\nContent-Length: 17\r\nExpect: 100-continue\r\n\r\n")
        assert sock.recv(1000) == b"HTTP/1.1 100 Continue\r\n\r\n"
        sock.sendall(b'{"args":["true"]}')
        assert b'"exitCode":0' in sock.recv(1000)


def test_http_1_0_connections_close_after_the_response(agent):
    assert send_bytes(agent, b"GET /health HTTP/1.0\r\n\r\n").startswith(b"HTTP/1.1 204")
    assert send_bytes(agent, b"GET /files?path=/proc/version HTTP/1.0\r\n\r\n").endswith(b"\n")


def test_an_invalid_request_closes_only_its_connection(agent):
    for data in (
        b"\x16\x03\x01\r\n\r\n",
        b"GET\r\n\r\n",
        b"POST /exec HTTP/1.1\r\nContent-Length: -1\r\n\r\n",
        "POST /exec HTTP/1.1\r\nContent-Length: \u00b2\r\n\r\n".encode("latin-1"),
        b"POST /exec HTTP/1.1\r\nContent-Length: " + b"9" * 5000 + b"\r\n\r\n",
        b"POST /exec HTTP/1.1\r\nTransfer-Encoding: chunked\r\n\r\nzz\r\n",
        b"GET /" + b"x" * 200_000,
    ):
        with contextlib.suppress(ConnectionResetError):
            assert send_bytes(agent, data) == b""
    assert agent.request("GET", "/health")[0] == 204


def test_the_size_of_a_json_body_is_limited(agent):
    head = b"POST /exec HTTP/1.1\r\nContent-Length: 99999999999\r\n\r\n"
    with socket.create_connection(("127.0.0.1", agent.port), timeout=30) as sock:
        sock.sendall(head + b"{" * 1000)
        assert sock.recv(1000).startswith(b"HTTP/1.1 413")


def test_many_connections_are_served_concurrently(agent):
    failures = []

    def send_requests() -> None:
        try:
            for _ in range(5):
                assert agent.request("GET", "/health")[0] == 204
        except Exception as error:
            failures.append(error)

    threads = [threading.Thread(target=send_requests) for _ in range(20)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert not failures


def test_threads_end_with_their_connections(agent, wait_until):
    def count_threads() -> int:
        return len(list(Path(f"/proc/{agent.process.pid}/task").iterdir()))

    def count_threads_after(seconds: float) -> int:
        time.sleep(seconds)
        return count_threads()

    initial_count = count_threads()
    while (count := count_threads_after(0.5)) < initial_count:  # connections of earlier tests may still be closing
        initial_count = count
    sockets = [socket.create_connection(("127.0.0.1", agent.port)) for _ in range(10)]
    wait_until(lambda: count_threads() >= initial_count + 10)
    for sock in sockets:
        sock.close()
    wait_until(lambda: count_threads() <= initial_count)


def test_the_agent_runs_from_a_folder_without_site_packages(tmp_path, running):
    folder = tmp_path / "opt/sandbox_agent"
    shutil.copytree(SOURCE_DIRECTORY, folder, ignore=shutil.ignore_patterns("__pycache__"))
    argv = [sys.executable, "-I", "-S", "-B", str(folder), "--unmanaged", "--bind", "127.0.0.1", "--port", "0"]
    with running(argv, env={"PYTHONPATH": ""}) as agent:
        assert agent.post_ok("/exec", {"args": ["true"]})["exitCode"] == 0
    assert not list(folder.rglob("*.pyc")), "byte code was written"


def test_a_port_in_use_is_reported(agent, unmanaged_command):
    argv = [*unmanaged_command[:-1], str(agent.port)]
    result = subprocess.run(
        argv, env={**os.environ, "PYTHONPATH": str(SOURCE_DIRECTORY.parent)}, capture_output=True, text=True
    )
    assert result.returncode == 1
    assert f"cannot listen on 127.0.0.1:{agent.port}" in result.stderr
