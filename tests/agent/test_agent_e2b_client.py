"""The published ``e2b`` client, unmodified, talking to the agent."""

from __future__ import annotations

import io
import time

import pytest

e2b = pytest.importorskip("e2b", reason="needs the e2b client: pip install e2b==2.63.0")

ENVD_VERSION = "0.5.7"
"""What the agent amounts to: stdin that can be closed, octet-stream and gzip uploads; no metadata of files."""


@pytest.fixture(scope="module")
def sandbox(agent):
    from e2b.connection_config import ConnectionConfig
    from packaging.version import Version

    return e2b.Sandbox(
        sandbox_id="0123456789ab",
        sandbox_domain=None,
        envd_version=Version(ENVD_VERSION),
        envd_access_token=None,
        connection_config=ConnectionConfig(debug=True, sandbox_url=f"http://127.0.0.1:{agent.port}", api_key="key"),
    )


def test_commands(sandbox):
    assert sandbox.is_running()
    result = sandbox.commands.run("echo out; echo err >&2", envs={"A": "1"}, cwd="/")
    assert (result.stdout, result.stderr, result.exit_code, result.error) == ("out\n", "err\n", 0, None)
    with pytest.raises(e2b.CommandExitException) as failed:
        sandbox.commands.run("exit 3")
    assert failed.value.exit_code == 3
    with pytest.raises(e2b.TimeoutException):
        sandbox.commands.run("sleep 30.5", timeout=1)


def test_background_commands(sandbox):
    handle = sandbox.commands.run("read x; echo got $x; exec sleep 30.6", background=True, stdin=True)
    assert handle.pid in [item.pid for item in sandbox.commands.list()]
    sandbox.commands.send_stdin(handle.pid, "abc\n")
    assert next(iter(sandbox.commands.connect(handle.pid)))[0] == "got abc\n"
    assert sandbox.commands.kill(handle.pid)
    with pytest.raises(e2b.CommandExitException):
        handle.wait()
    assert not sandbox.commands.kill(handle.pid)


def test_streamed_input(sandbox):
    handle = sandbox.commands.run("cat", background=True, stdin=True)
    sandbox.commands.stream_input(handle.pid, ["a", "b" * 100_000])
    sandbox.commands.close_stdin(handle.pid)
    assert handle.wait().stdout == "a" + "b" * 100_000


def test_terminal(sandbox):
    from e2b.sandbox.commands.command_handle import PtySize

    handle = sandbox.pty.create(PtySize(rows=30, cols=100), timeout=30)
    sandbox.pty.resize(handle.pid, PtySize(rows=20, cols=90))
    sandbox.pty.send_stdin(handle.pid, b"stty size; exit\n")
    output = bytearray()
    handle.wait(on_pty=output.extend)
    assert b"20 90" in output


def test_files(sandbox, tmp_path):
    files, path = sandbox.files, f"{tmp_path}/a b/ü.txt"
    assert files.write(path, "héllo").path == path
    assert files.read(path) == "héllo"
    names = [f"{tmp_path}/one", f'{tmp_path}/t"w\\o']
    written = files.write_files([{"path": name, "data": name} for name in names])
    assert [item.path for item in written] == names
    assert [files.read(name) for name in names] == names
    files.write(f"{tmp_path}/big", io.BytesIO(b"z" * 3_000_000))
    assert sum(map(len, files.read(f"{tmp_path}/big", format="stream"))) == 3_000_000
    files.write(f"{tmp_path}/packed", "g" * 100_000, gzip=True)
    assert files.read(f"{tmp_path}/packed") == "g" * 100_000
    with pytest.raises(e2b.FileNotFoundException):
        files.read(f"{tmp_path}/none")


def test_directories(sandbox, tmp_path):
    files, path = sandbox.files, f"{tmp_path}/d"
    assert files.make_dir(f"{path}/e") and not files.make_dir(f"{path}/e")
    files.write(f"{path}/e/f", "123")
    (tmp_path / "d/link").symlink_to("e/f")
    found = {item.name: item for item in files.list(path, depth=2)}
    assert {name: item.type.value for name, item in found.items()} == {"e": "dir", "f": "file", "link": "symlink"}
    assert found["f"].size == 3 and abs(found["f"].modified_time.timestamp() - time.time()) < 60
    assert files.rename(f"{path}/e/f", f"{tmp_path}/moved/f").path == f"{tmp_path}/moved/f"
    files.remove(path)
    assert not files.exists(path) and files.exists(f"{tmp_path}/moved/f")
    with pytest.raises(e2b.FileNotFoundException):
        files.list(path)
