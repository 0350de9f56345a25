"""All methods for files, commands, pty and git of the published ``e2b`` client work with the agent."""

from __future__ import annotations

import asyncio
import io
import os
import pwd
import shutil
import sys
import tempfile
import time
from pathlib import Path

import pytest

e2b = pytest.importorskip("e2b", reason="needs the e2b client: pip install e2b==2.63.0")

ENVD_VERSION = "0.6.4"
"""The version of envd whose features the agent has, such as metadata of files and watches on network mounts."""


def connect_client(client_class, agent, token=None):
    from e2b.connection_config import ConnectionConfig
    from packaging.version import Version

    return client_class(
        sandbox_id="0123456789ab",
        sandbox_domain=None,
        envd_version=Version(ENVD_VERSION),
        envd_access_token=token,
        connection_config=ConnectionConfig(
            debug=True,
            sandbox_url=f"http://127.0.0.1:{agent.port}",
            api_key="key",
            extra_sandbox_headers={"X-Access-Token": token} if token else {},
        ),
    )


@pytest.fixture(scope="module")
def sandbox(agent):
    return connect_client(e2b.Sandbox, agent)


@pytest.fixture
def shared_directory():
    """A directory that all users may enter, unlike ``tmp_path``."""
    path = Path(tempfile.mkdtemp(prefix="agent-test-"))
    path.chmod(0o755)
    yield path
    shutil.rmtree(path)


def test_commands_run(sandbox):
    assert sandbox.is_running()
    result = sandbox.commands.run("echo out; echo err >&2", envs={"A": "1"}, cwd="/")
    assert (result.stdout, result.stderr, result.exit_code, result.error) == ("out\n", "err\n", 0, None)
    with pytest.raises(e2b.CommandExitException) as error:
        sandbox.commands.run("exit 3")
    assert error.value.exit_code == 3
    with pytest.raises(e2b.TimeoutException):
        sandbox.commands.run("sleep 30.5", timeout=1)


def test_background_commands_can_be_reconnected_and_killed(sandbox):
    handle = sandbox.commands.run("read x; echo got $x; exec sleep 30.6", background=True, stdin=True)
    assert handle.pid in [item.pid for item in sandbox.commands.list()]
    sandbox.commands.send_stdin(handle.pid, "abc\n")
    assert next(iter(sandbox.commands.connect(handle.pid)))[0] == "got abc\n"
    assert sandbox.commands.kill(handle.pid)
    with pytest.raises(e2b.CommandExitException):
        handle.wait()
    assert not sandbox.commands.kill(handle.pid)


def test_input_can_be_streamed(sandbox):
    handle = sandbox.commands.run("cat", background=True, stdin=True)
    sandbox.commands.stream_input(handle.pid, ["a", "b" * 100_000])
    sandbox.commands.close_stdin(handle.pid)
    assert handle.wait().stdout == "a" + "b" * 100_000


def test_a_terminal_can_be_resized(sandbox):
    from e2b.sandbox.commands.command_handle import PtySize

    handle = sandbox.pty.create(PtySize(rows=30, cols=100), timeout=30)
    sandbox.pty.resize(handle.pid, PtySize(rows=20, cols=90))
    sandbox.pty.send_stdin(handle.pid, b"stty size; exit\n")
    output = bytearray()
    handle.wait(on_pty=output.extend)
    assert b"20 90" in output


def test_files_are_written_and_read(sandbox, tmp_path):
    files, path = sandbox.files, f"{tmp_path}/a b/ü.txt"
    assert files.write(path, "héllo").path == path
    assert files.read(path) == "héllo"
    paths = [f"{tmp_path}/one", f'{tmp_path}/t"w\\o']
    uploaded_files = files.write_files([{"path": each, "data": each} for each in paths])
    assert [item.path for item in uploaded_files] == paths
    assert [files.read(each) for each in paths] == paths
    files.write(f"{tmp_path}/big", io.BytesIO(b"z" * 3_000_000))
    assert sum(map(len, files.read(f"{tmp_path}/big", format="stream"))) == 3_000_000
    files.write(f"{tmp_path}/packed", "g" * 100_000, gzip=True)
    assert files.read(f"{tmp_path}/packed") == files.read(f"{tmp_path}/packed", gzip=True) == "g" * 100_000
    with pytest.raises(e2b.FileNotFoundException):
        files.read(f"{tmp_path}/none")


def test_file_urls_work(sandbox, tmp_path):
    """The URLs have no signature, because the sandbox has no token."""
    import httpx

    url = sandbox.upload_url(f"{tmp_path}/up", user="root")
    assert httpx.post(url, files={"file": b"sent"}).json()[0]["path"] == f"{tmp_path}/up"
    assert httpx.get(sandbox.download_url(f"{tmp_path}/up")).text == "sent"


def test_a_wrong_token_is_refused(fresh_agent, tmp_path):
    fresh_agent.post_ok("/identity", {"accessToken": "right"})
    sandbox = connect_client(e2b.Sandbox, fresh_agent, "right")
    assert sandbox.files.write(f"{tmp_path}/f", "x").name == "f" and sandbox.files.exists(f"{tmp_path}/f")
    unauthorized_sandbox = connect_client(e2b.Sandbox, fresh_agent, "wrong")
    for request in (
        lambda: unauthorized_sandbox.files.read(f"{tmp_path}/f"),
        lambda: unauthorized_sandbox.files.write(f"{tmp_path}/f", ""),
        lambda: unauthorized_sandbox.files.list(str(tmp_path)),
        lambda: unauthorized_sandbox.files.watch_dir(str(tmp_path)),
        lambda: unauthorized_sandbox.commands.run("true"),
    ):
        with pytest.raises(e2b.AuthenticationException):
            request()
    assert unauthorized_sandbox.is_running()


def test_directories_are_listed_and_changed(sandbox, tmp_path):
    files, path = sandbox.files, f"{tmp_path}/d"
    assert files.make_dir(f"{path}/e") and not files.make_dir(f"{path}/e")
    files.write(f"{path}/e/f", "123")
    (tmp_path / "d/link").symlink_to("e/f")
    entries = {item.name: item for item in files.list(path, depth=2)}
    assert {name: item.type.value for name, item in entries.items()} == {"e": "dir", "f": "file", "link": "symlink"}
    assert entries["f"].size == 3 and abs(entries["f"].modified_time.timestamp() - time.time()) < 60
    assert files.rename(f"{path}/e/f", f"{tmp_path}/moved/f").path == f"{tmp_path}/moved/f"
    files.remove(path)
    assert not files.exists(path) and files.exists(f"{tmp_path}/moved/f")
    with pytest.raises(e2b.FileNotFoundException):
        files.list(path)


def test_output_is_streamed(sandbox):
    stdout, stderr = [], []
    result = sandbox.commands.run(
        "echo ü; echo no >&2", on_stdout=stdout.append, on_stderr=stderr.append, retain_output=False
    )
    assert (stdout, stderr, result.stdout, result.exit_code) == (["ü\n"], ["no\n"], None, 0)


def test_a_command_outlives_its_stream(sandbox):
    handle = sandbox.commands.run("echo one; read x; echo two; exit 4", background=True, stdin=True, timeout=0)
    assert next(iter(handle))[0] == "one\n"
    handle.disconnect()
    reconnected_handle = sandbox.commands.connect(handle.pid)
    reconnected_handle.send_stdin("go\n")
    with pytest.raises(e2b.CommandExitException) as error:
        reconnected_handle.wait()
    assert (error.value.stdout, error.value.exit_code) == ("one\ntwo\n", 4)
    # The result remains available later.
    with pytest.raises(e2b.CommandExitException) as error:
        sandbox.commands.connect(handle.pid).wait()
    assert error.value.exit_code == 4
    with pytest.raises(e2b.NotFoundException):
        sandbox.commands.send_stdin(handle.pid, "more")
    cat_handle = sandbox.commands.run("cat", background=True, stdin=True)
    cat_handle.send_stdin(b"bytes")
    cat_handle.close_stdin()
    assert cat_handle.wait().stdout == "bytes"


def test_a_terminal_can_be_reconnected_and_killed(sandbox):
    from e2b.sandbox.commands.command_handle import PtySize

    handle = sandbox.pty.create(PtySize(rows=30, cols=100), envs={"MARK": "m1"}, cwd="/", timeout=0)
    handle.disconnect()
    sandbox.pty.stream_input(handle.pid, ["echo $MARK-$TERM-", "$(pwd)-$((40+2))\n"])
    reconnected_handle, output = sandbox.pty.connect(handle.pid), b""
    for _, _, data in reconnected_handle:
        output += data or b""
        if b"m1-xterm-256color-/-42" in output:
            break
    assert sandbox.pty.kill(handle.pid)
    with pytest.raises(e2b.CommandExitException):
        reconnected_handle.wait()
    assert not sandbox.pty.kill(handle.pid)


def test_requests_can_name_another_user(sandbox, shared_directory):
    if os.geteuid() != 0:
        pytest.skip("needs root")
    user = pwd.getpwnam("daemon")
    result = sandbox.commands.run('id -un; echo "$HOME"; pwd; touch /etc/of-daemon || true', user="daemon")
    assert result.stdout.split()[:2] == ["daemon", user.pw_dir] and "denied" in result.stderr
    files = sandbox.files
    files.write(f"{shared_directory}/a/b", "x", user="daemon")
    files.make_dir(f"{shared_directory}/c/d", user="daemon")
    files.rename(f"{shared_directory}/a/b", f"{shared_directory}/e/b", user="daemon")
    owners = {
        item.path.removeprefix(str(shared_directory)): item.owner for item in files.list(str(shared_directory), depth=2)
    }
    assert owners == dict.fromkeys(("/a", "/c", "/c/d", "/e", "/e/b"), "daemon")
    assert files.get_info("", user="daemon").path == files.get_info("~", user="daemon").path == user.pw_dir
    for request in (
        lambda: files.write(f"{shared_directory}/no", "", user="no-such-user"),
        lambda: files.list("/", user="no-such-user"),
        lambda: sandbox.commands.run("true", user="no-such-user"),
    ):
        with pytest.raises(e2b.AuthenticationException, match="no-such-user"):
            request()


def test_errors_have_the_expected_types(sandbox, tmp_path):
    files = sandbox.files
    (tmp_path / "file").write_text("")
    (tmp_path / "loop").symlink_to("loop")
    os.mkfifo(tmp_path / "pipe")
    for request in (
        lambda: files.read(f"{tmp_path}/none"),
        lambda: files.get_info(f"{tmp_path}/none"),
        lambda: files.rename(f"{tmp_path}/none", f"{tmp_path}/other"),
        lambda: files.watch_dir(f"{tmp_path}/none"),
    ):
        with pytest.raises(e2b.FileNotFoundException):
            request()
    for request in (
        lambda: files.list(f"{tmp_path}/file"),
        lambda: files.read(str(tmp_path)),
        lambda: files.read(f"{tmp_path}/pipe"),
        lambda: files.write(f"{tmp_path}/pipe", "x"),
        lambda: files.write(str(tmp_path), "x"),
        lambda: files.write(f"{tmp_path}/file/below", "x"),
        lambda: files.make_dir(f"{tmp_path}/file"),
        lambda: files.read(f"{tmp_path}/loop"),
        lambda: files.list(f"{tmp_path}/loop"),
        lambda: sandbox.commands.run("true", cwd=f"{tmp_path}/none"),
    ):
        with pytest.raises(e2b.InvalidArgumentException):
            request()
    with pytest.raises(e2b.NotFoundException):
        sandbox.commands.connect(999_999_999)
    assert not sandbox.commands.kill(999_999_999)
    files.remove(f"{tmp_path}/none")


def test_a_full_disk_and_unsupported_metadata_are_reported(requires_root, running, unmanaged_command, tmp_path):
    script = 'mount -t tmpfs -o size=64k none "$0" && exec "$@"'
    command = ["unshare", "--mount", "--propagation", "private", "sh", "-c", script, str(tmp_path), *unmanaged_command]
    with running(command) as agent:
        files = connect_client(e2b.Sandbox, agent).files
        for form in ({"use_octet_stream": True}, {"use_octet_stream": False}):
            with pytest.raises(e2b.NotEnoughSpaceException, match="No space left"):
                files.write(f"{tmp_path}/big", b"x" * 3_000_000, **form)
        files.write("/proc/self/oom_score_adj", "0")
        with pytest.raises(e2b.SandboxException, match="cannot store metadata"):
            files.write("/proc/self/oom_score_adj", "0", metadata={"a": "b"})


def test_special_entries_do_not_break_listings(sandbox, tmp_path):
    """A listing contains names that are not UTF-8, and omits special files."""
    (tmp_path / os.fsdecode(b"not-\xff-utf-8")).write_text("")
    (tmp_path / "loop").symlink_to("loop")
    (tmp_path / "self").symlink_to(".")
    os.mkfifo(tmp_path / "pipe")
    entries = {item.name: item for item in sandbox.files.list(str(tmp_path), depth=5)}
    assert {name: item.type.value for name, item in entries.items()} == {
        "not-�-utf-8": "file",
        "loop": "symlink",
        "self": "symlink",
    }
    assert entries["self"].symlink_target == str(tmp_path)
    assert sandbox.files.get_info(f"{tmp_path}/pipe").type is None
    # The arguments of this process are not UTF-8, but the list of processes is still valid.
    handle = sandbox.commands.run("exec -a $'\\xff' sleep 30.7", background=True)
    assert handle.pid in [item.pid for item in sandbox.commands.list()]
    handle.kill()


def test_metadata_is_stored_and_replaced(sandbox, tmp_path):
    files, path = sandbox.files, f"{tmp_path}/file"
    try:
        os.setxattr(tmp_path, "user.test", b"")
    except (OSError, AttributeError):
        pytest.skip("needs a file system with extended attributes")
    assert files.write(path, "1", metadata={"Author": "me", "n": "1"}).metadata == {"author": "me", "n": "1"}
    assert files.get_info(path).metadata == {"author": "me", "n": "1"}
    # Replacing a file also replaces its metadata.
    uploaded_files = files.write_files([{"path": path, "data": io.BytesIO(b"2")}], metadata={"n": "2"})
    assert [item.metadata for item in uploaded_files] == [{"n": "2"}]
    os.setxattr(path, "user.other", b"")
    os.setxattr(path, "user.e2b.raw", b"\xff")
    assert files.list(str(tmp_path))[0].metadata == {"n": "2", "raw": "�"}
    assert files.rename(path, f"{path}2").metadata["n"] == "2"
    assert files.write(f"{path}2", "3").metadata is None and files.get_info(f"{path}2").metadata is None
    for metadata in ({"k" * 300: ""}, {"k": "v" * 5000}):
        with pytest.raises(e2b.InvalidArgumentException):
            files.write(path, "", metadata=metadata)
    assert not files.exists(path)


def read_peak_memory_kib(pid: int) -> int:
    """Return the peak memory of a process, in KiB."""
    lines = Path(f"/proc/{pid}/status").read_text().splitlines()
    return next(int(line.split()[1]) for line in lines if line.startswith("VmHWM"))


@pytest.mark.skipif(not sys.platform.startswith("linux"), reason="reads /proc")
def test_large_files_are_not_held_in_memory(running, unmanaged_command, tmp_path):
    size, piece = 50_000_000, os.urandom(1_000_000)
    with running(unmanaged_command) as agent:
        files, path = connect_client(e2b.Sandbox, agent).files, f"{tmp_path}/large"
        files.write(path, "x")
        memory_kib_before = read_peak_memory_kib(agent.process.pid)
        files.write(path, (piece for _ in range(size // len(piece))))
        (tmp_path / "source").write_bytes(piece * (size // len(piece)))
        with (tmp_path / "source").open("rb") as source:
            files.write(f"{path}2", source, use_octet_stream=False)
        assert (tmp_path / "large2").stat().st_size == size
        with files.read(path, format="stream") as stream:
            assert sum(map(len, stream)) == size
        assert read_peak_memory_kib(agent.process.pid) - memory_kib_before < 10_000


def test_a_watch_returns_new_events(sandbox, tmp_path):
    kinds, watch = e2b.FilesystemEventType, sandbox.files.watch_dir(str(tmp_path), recursive=True, include_entry=True)
    sandbox.files.write(f"{tmp_path}/d/f", "12")
    events, new_events, deadline = [], [], time.monotonic() + 20
    while ("d/f", kinds.WRITE) not in events and time.monotonic() < deadline:
        new_events = watch.get_new_events()
        events += [(event.name, event.type) for event in new_events]
        time.sleep(0.02)
    assert [event for event in events if event[1] == kinds.CREATE] == [("d", kinds.CREATE), ("d/f", kinds.CREATE)]
    assert (new_events[-1].entry.path, new_events[-1].entry.size) == (f"{tmp_path}/d/f", 2)
    watch.stop()
    with pytest.raises(e2b.SandboxException):
        watch.get_new_events()
    sandbox.files.watch_dir(str(tmp_path), allow_network_mounts=True).stop()


def test_git_methods_work(sandbox, tmp_path):
    """The remote repository is on this machine."""
    if not shutil.which("git"):
        pytest.skip("needs git")
    git, work, remote = sandbox.git, f"{tmp_path}/work", f"{tmp_path}/remote.git"
    env = {"HOME": str(tmp_path)}
    git.init(remote, bare=True, envs=env)
    git.init(work, initial_branch="main", envs=env)
    git.configure_user("A", "a@example.org", scope="local", path=work, envs=env)
    git.set_config("grove.test", "yes", scope="local", path=work, envs=env)
    assert git.get_config("grove.test", scope="local", path=work, envs=env) == "yes"
    sandbox.files.write(f"{work}/f", "1")
    assert git.status(work, envs=env).file_status[0].name == "f"
    git.add(work, envs=env)
    git.commit(work, "first", envs=env)
    git.remote_add(work, "origin", remote, envs=env)
    assert git.remote_get(work, "origin", envs=env) == remote
    git.push(work, remote="origin", branch="main", set_upstream=True, envs=env)
    git.create_branch(work, "side", envs=env)
    git.checkout_branch(work, "main", envs=env)
    assert sorted(git.branches(work, envs=env).branches) == ["main", "side"]
    git.delete_branch(work, "side", envs=env)
    sandbox.files.write(f"{work}/f", "2")
    git.restore(work, paths=["f"], envs=env)
    assert sandbox.files.read(f"{work}/f") == "1"
    git.reset(work, mode="hard", target="HEAD", envs=env)
    git.pull(work, remote="origin", branch="main", envs=env)
    git.clone(remote, f"{tmp_path}/clone", branch="main", envs=env)
    assert sandbox.files.read(f"{tmp_path}/clone/f") == "1"
    git.dangerously_authenticate("u", "p", envs=env)
    assert sandbox.files.exists(f"{tmp_path}/.git-credentials")


async def test_the_async_client_works(agent, tmp_path):
    from e2b.sandbox.commands.command_handle import PtySize

    sandbox = connect_client(e2b.AsyncSandbox, agent)
    files, commands = sandbox.files, sandbox.commands
    assert await sandbox.is_running()
    events, exit_errors = asyncio.Queue(), asyncio.Queue()
    watch = await files.watch_dir(
        str(tmp_path), events.put_nowait, exit_errors.put_nowait, recursive=True, include_entry=True, timeout=0
    )
    await files.make_dir(f"{tmp_path}/d")
    assert (await asyncio.wait_for(events.get(), 20)).name == "d"

    async def generate_pieces():
        for _ in range(30):
            yield b"y" * 100_000

    await files.write(f"{tmp_path}/d/f", generate_pieces(), metadata={"k": "v"} if hasattr(os, "setxattr") else None)
    event = await asyncio.wait_for(events.get(), 20)
    assert (event.name, event.type, event.entry.name) == ("d/f", e2b.FilesystemEventType.CREATE, "f")
    async with await files.read(f"{tmp_path}/d/f", format="stream") as stream:
        assert sum([len(piece) async for piece in stream]) == 3_000_000
    await watch.stop()
    assert await asyncio.wait_for(exit_errors.get(), 20) is None
    second_watch = await files.watch_dir(f"{tmp_path}/d", events.put_nowait, exit_errors.put_nowait)
    await files.remove(f"{tmp_path}/d")
    # The watch ends without an error when its directory is removed.
    assert await asyncio.wait_for(exit_errors.get(), 20) is None
    await second_watch.stop()
    await files.write_files([{"path": f"{tmp_path}/{name}", "data": name} for name in ("a", "b")])
    assert (await files.rename(f"{tmp_path}/a", f"{tmp_path}/c")).name == "c"
    assert [item.name for item in await files.list(str(tmp_path))] == ["b", "c"]
    assert await files.exists(f"{tmp_path}/b") and (await files.get_info(f"{tmp_path}/b")).size == 1
    assert (await commands.run("echo $A", envs={"A": "1"})).stdout == "1\n"
    handle = await commands.run("cat; echo end", background=True, stdin=True)
    assert handle.pid in [item.pid for item in await commands.list()]
    await commands.send_stdin(handle.pid, "one ")
    await handle.disconnect()
    reconnected_handle = await commands.connect(handle.pid)
    await commands.close_stdin(handle.pid)
    assert (await reconnected_handle.wait()).stdout == "one end\n"
    with pytest.raises(e2b.TimeoutException):
        await commands.run("sleep 30.8", timeout=0.5)
    handle = await commands.run("cat; exec sleep 30.9", background=True, stdin=True)
    async with commands.stream_input(handle.pid) as stdin:
        await stdin.send("a")
    assert await handle.kill()
    with pytest.raises(e2b.CommandExitException):
        await handle.wait()
    assert not await commands.kill(handle.pid)
    output = bytearray()
    terminal = await sandbox.pty.create(PtySize(rows=30, cols=100), on_data=output.extend)
    await terminal.disconnect()
    terminal = await sandbox.pty.connect(terminal.pid, on_data=output.extend)
    await sandbox.pty.resize(terminal.pid, PtySize(rows=20, cols=90))
    async with sandbox.pty.stream_input(terminal.pid) as keys:
        await keys.send(b"stty size\n")
    await sandbox.pty.send_stdin(terminal.pid, b"exit 3\n")
    with pytest.raises(e2b.CommandExitException) as error:
        await terminal.wait()
    assert error.value.exit_code == 3 and b"20 90" in output
    assert not await sandbox.pty.kill(terminal.pid)
    if shutil.which("git"):
        await sandbox.git.init(f"{tmp_path}/repository", initial_branch="main")
        assert (await sandbox.git.status(f"{tmp_path}/repository")).current_branch == "main"


HIDE_BASH_SCRIPT = """
set -e
mount --bind /dev/null "$(readlink -f /bin/bash)"
exec "$@"
"""


def test_without_bash_another_shell_is_used(requires_root, running, unmanaged_command, tmp_path):
    """The client always requests /bin/bash. If it is missing, the agent uses another bash or /bin/sh."""
    (tmp_path / "bin").mkdir()
    shutil.copy("/bin/bash", tmp_path / "bin/bash")
    command = ["unshare", "--mount", "--propagation", "private", "sh", "-c", HIDE_BASH_SCRIPT, "sh", *unmanaged_command]
    if "bash" in Path("/bin/sh").resolve().name:
        pytest.skip("needs another sh")
    with running(command) as agent:
        sandbox = connect_client(e2b.Sandbox, agent)
        assert sandbox.commands.run('echo "$0 $HOME"; shopt 2>&1 || true').stdout.startswith(f"-sh {Path.home()}\n")
        with pytest.raises(e2b.CommandExitException) as error:
            sandbox.commands.run("shopt -s extglob")
        assert (error.value.exit_code, "sh:" in error.value.stderr) == (127, True)
        from e2b.sandbox.commands.command_handle import PtySize

        output = bytearray()
        terminal = sandbox.pty.create(PtySize(rows=30, cols=100))
        sandbox.pty.send_stdin(terminal.pid, b"echo $((40+2)); exit\n")
        terminal.wait(on_pty=output.extend)
        assert b"42" in output
        env_with_bash = {"PATH": f"{tmp_path}/bin:/usr/bin:/bin"}
        assert sandbox.commands.run("echo ${BASH_VERSION:+bash}", envs=env_with_bash).stdout == "bash\n"
