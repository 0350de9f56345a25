"""All methods for files, commands and pty of the published ``cubesandbox`` client work with the agent."""

from __future__ import annotations

import os
import pwd
import shutil
import tempfile
import threading
from pathlib import Path

import pytest

cubesandbox = pytest.importorskip("cubesandbox", reason="needs the cubesandbox client: pip install cubesandbox==0.7.3")


@pytest.fixture(scope="module")
def sandbox(agent):
    # The client uses a fixed address and a Host header, which the agent ignores.
    config = cubesandbox.Config(api_key="key", proxy_node_ip="127.0.0.1", proxy_port=agent.port)
    return cubesandbox.Sandbox({"sandboxID": "0123456789ab", "templateID": "t", "domain": "test"}, config)


def test_commands_run(sandbox, tmp_path):
    result = sandbox.commands.run("echo out $A; echo err >&2; pwd; exit 3", envs={"A": "1"}, cwd=str(tmp_path))
    assert (result.stdout, result.stderr, result.exit_code) == (f"out 1\n{tmp_path}\n", "err\n", 3)
    assert sandbox.commands.run("echo $B", env={"B": "2"}, timeout=0).stdout == "2\n"
    assert sandbox.commands.run("kill -9 $$").exit_code == -1
    assert len(sandbox.commands.run("seq 300000", timeout=60).stdout) == 1_988_895
    with pytest.raises(RuntimeError, match="does not exist"):
        sandbox.commands.run("true", cwd=f"{tmp_path}/none")
    with pytest.raises(RuntimeError, match=r"unauthenticated.*no-such-user"):
        sandbox.commands.run("true", user="no-such-user")
    with pytest.raises(Exception, match=r"timed out|deadline"):
        sandbox.commands.run("sleep 30.9", timeout=0.5)


def test_files_are_read_and_changed(sandbox, tmp_path):
    files, path = sandbox.files, f"{tmp_path}/d/ü f"
    files.write(path, "héllo")
    assert files.read(path) == "héllo"
    assert files.write_files([(f"{tmp_path}/d/{name}", name.encode()) for name in "ab"]) == 2
    assert [item["name"] for item in files.list(f"{tmp_path}/d")] == ["a", "b", "ü f"]
    assert files.stat(path)["size"] == "6" and files.exists(path)
    assert files.rename(path, f"{tmp_path}/e")["path"] == f"{tmp_path}/e"
    assert files.make_dir(f"{tmp_path}/x/y")["type"] == "FILE_TYPE_DIRECTORY"
    files.remove(f"{tmp_path}/d")
    assert not files.exists(path)
    with pytest.raises(cubesandbox.FilesystemNotFoundError):
        files.list(f"{tmp_path}/d")
    with pytest.raises(OSError, match="No such file"):
        files.read(path)
    with pytest.raises(OSError, match="not a regular file"):
        files.write(str(tmp_path), "x")
    with pytest.raises(OSError, match="already exists"):
        files.make_dir(f"{tmp_path}/x/y")
    from cubesandbox._exceptions import PartialWriteError

    with pytest.raises(PartialWriteError) as error:
        files.write_files([(f"{tmp_path}/1", "1"), (f"{tmp_path}/1/2", "2")])
    assert error.value.written == 1


def test_requests_can_name_another_user(sandbox):
    if os.geteuid() != 0:
        pytest.skip("needs root")
    shared_directory = Path(tempfile.mkdtemp(prefix="agent-test-"))
    try:
        shared_directory.chmod(0o755)
        output = sandbox.commands.run('id -un; echo "$HOME"', user="daemon").stdout
        assert output.split() == ["daemon", pwd.getpwnam("daemon").pw_dir]
        sandbox.files.write(f"{shared_directory}/d/f", "x", user="daemon")
        assert sandbox.files.stat(f"{shared_directory}/d/f", user="daemon")["owner"] == "daemon"
        assert sandbox.files.read(f"{shared_directory}/d/f", user="daemon") == "x"
    finally:
        shutil.rmtree(shared_directory)


def test_a_watch_yields_events(sandbox, tmp_path):
    with sandbox.files.watch_dir(str(tmp_path)) as watcher:
        timer = threading.Timer(0.2, (tmp_path / "new").write_text, ("x",))
        timer.start()
        events = [next(watcher), next(watcher)]
        timer.join()
    assert [(event.name, event.type) for event in events] == [("new", "EVENT_TYPE_CREATE"), ("new", "EVENT_TYPE_WRITE")]
    with pytest.raises(OSError, match="No such file"):
        next(sandbox.files.watch_dir(f"{tmp_path}/none"))


def test_a_terminal_can_be_reconnected_and_killed(sandbox):
    terminal_size = cubesandbox.PtySize(rows=30, cols=100)
    terminal = sandbox.pty.create(terminal_size, cwd="/", envs={"MARK": "m1"}, timeout=30)
    terminal.resize(cubesandbox.PtySize(rows=20, cols=90))
    terminal.send_stdin("stty size; echo $MARK-$(pwd)-$((40+2))\n")
    output = b""
    for data in terminal:
        output += data
        if b"m1-/-42" in output:
            break
    assert b"20 90" in output
    terminal.disconnect()
    reconnected_terminal = sandbox.pty.connect(terminal.pid, timeout=30)
    reconnected_terminal.send_stdin("exit\n")
    assert reconnected_terminal.wait(lambda data: None) == 0
    other_terminal = sandbox.pty.create(terminal_size, timeout=30)
    assert other_terminal.kill()
    with pytest.raises(cubesandbox.CubeSandboxError, match="killed"):
        other_terminal.wait()
    assert not sandbox.pty.kill(other_terminal.pid)
