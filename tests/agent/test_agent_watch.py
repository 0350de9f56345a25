"""filesystem.Filesystem watches directories, with inotify or with periodic scans."""

from __future__ import annotations

import contextlib
import os
import shutil
import socket
import struct
import subprocess
import sys
import tempfile
import threading
import time
from pathlib import Path

import pytest

SERVICE = "/filesystem.Filesystem"
# Scans are more frequent here, to make the tests faster.
EVENT_SOURCES = {
    "inotify": "",
    "scan": "inotify.IS_AVAILABLE = False; scan.SCAN_INTERVAL_SECONDS = 0.1; scan._PAUSE_FACTOR = 1",
}


def make_command_with_constants(code: str) -> list[str]:
    """Return the command of an agent that runs ``code`` first, for example to change constants."""
    return [
        os.environ.get("AGENT_PYTHON", sys.executable),
        "-c",
        "import sys; from sandbox_agent import agent; "
        f"from sandbox_agent.files import filesystem, inotify, scan, watch; {code}\n"
        "sys.argv = ['agent', '--unmanaged', '--bind', '127.0.0.1', '--port', '0']; sys.exit(agent.main())",
    ]


@pytest.fixture(scope="module", params=EVENT_SOURCES)
def event_source(request):
    if request.param == "inotify" and not sys.platform.startswith("linux"):
        pytest.skip("inotify is Linux's")
    return request.param


@pytest.fixture(scope="module")
def agent(running, event_source):
    with running(make_command_with_constants(EVENT_SOURCES[event_source])) as running_agent:
        yield running_agent


class Watcher:
    """A watcher of the agent. ``last_event`` is the event for which ``wait_for`` waited."""

    def __init__(self, agent, path, **options):
        self._agent = agent
        self.id = agent.post_ok(f"{SERVICE}/CreateWatcher", {"path": str(path), **options})["watcherId"]

    def take_events(self):
        return self._agent.post(f"{SERVICE}/GetWatcherEvents", {"watcherId": self.id})

    def wait_for(self, event_type, name):
        """Wait for an event. Returns it and all earlier events, such as ["create a", "write a"]."""
        seen_events, deadline = [], time.monotonic() + 20
        while time.monotonic() < deadline:
            status, response = self.take_events()
            assert status == 200, response
            for event in response["events"]:
                seen_events.append(f"{event['type'].removeprefix('EVENT_TYPE_').lower()} {event['name']}")
                if seen_events[-1] == f"{event_type} {name}":
                    self.last_event = event
                    return seen_events
            time.sleep(0.02)
        raise AssertionError(f"{event_type} {name} did not arrive: {seen_events}")


def test_changes_to_a_file_are_reported(agent, tmp_path):
    watcher = Watcher(agent, tmp_path)
    path = tmp_path / "file"
    path.write_text("a")
    assert watcher.wait_for("write", "file")[:2] == ["create file", "write file"]
    with path.open("a") as file:
        file.write("b")
    assert watcher.wait_for("write", "file") == ["write file"]
    path.chmod(0o700)
    assert watcher.wait_for("chmod", "file") == ["chmod file"]
    path.rename(tmp_path / "other")
    assert watcher.wait_for("create", "other") == ["rename file", "create other"]
    (tmp_path / "other").unlink()
    assert watcher.wait_for("remove", "other") == ["remove other"]
    (tmp_path / "dir").mkdir()
    (tmp_path / "dir/inside").write_text("")
    (tmp_path / "end").write_text("")
    assert watcher.wait_for("create", "end") == ["create dir", "create end"]


def test_changes_in_subdirectories_are_reported(agent, tmp_path):
    (tmp_path / "old/deep").mkdir(parents=True)
    watcher = Watcher(agent, tmp_path, recursive=True)
    (tmp_path / "old/deep/a").write_text("")
    assert watcher.wait_for("create", "old/deep/a") == ["create old/deep/a"]
    # These directories are created before the agent can watch them, but are still reported completely.
    subprocess.run(["mkdir", "-p", tmp_path / "n/e/w"], check=True, timeout=30)
    (tmp_path / "n/e/w/b").write_text("")
    assert watcher.wait_for("create", "n/e/w/b") == ["create n", "create n/e", "create n/e/w", "create n/e/w/b"]
    subprocess.run(["sh", "-c", "mkdir v && echo 1 >v/c"], cwd=tmp_path, check=True, timeout=30)
    assert watcher.wait_for("write", "v/c") == ["create v", "create v/c", "write v/c"]
    (tmp_path / "n").rename(tmp_path / "m")
    changes = watcher.wait_for("create", "m/e/w/b")
    assert changes == ["rename n", "create m", "create m/e", "create m/e/w", "create m/e/w/b"]
    (tmp_path / "m/e/w/c").write_text("")
    assert watcher.wait_for("create", "m/e/w/c") == ["create m/e/w/c"]
    shutil.rmtree(tmp_path / "m")
    assert watcher.wait_for("remove", "m")[-3:] == ["remove m/e/w", "remove m/e", "remove m"]


def test_directories_moved_out_of_the_tree_are_not_watched(agent, event_source, tmp_path):
    watched_directory, outside_directory = tmp_path / "in", tmp_path / "out"
    (watched_directory / "a/b").mkdir(parents=True)
    outside_directory.mkdir()
    watcher = Watcher(agent, watched_directory, recursive=True)
    (watched_directory / "a").rename(outside_directory / "a")
    # A scan detects only that the directory is missing, not that it was moved.
    changes = watcher.wait_for("rename" if event_source == "inotify" else "remove", "a")
    assert set(changes) <= {"rename a", "remove a/b", "remove a"}
    (outside_directory / "a/b/unseen").write_text("")
    (outside_directory / "a").rename(watched_directory / "c")
    assert watcher.wait_for("create", "c/b/unseen") == ["create c", "create c/b", "create c/b/unseen"]
    (watched_directory / "c/b/seen").write_text("")
    assert watcher.wait_for("create", "c/b/seen") == ["create c/b/seen"]


def test_changes_to_the_watched_directory_itself_are_reported(agent, tmp_path):
    path = tmp_path / "gone"
    path.mkdir()
    watcher, events = Watcher(agent, path), agent.stream("WatchDir", {"path": str(path)}, service=SERVICE)
    assert events.next() == {"start": {}}
    path.chmod(0o711)
    assert watcher.wait_for("chmod", ".") == ["chmod ."]
    path.rmdir()
    assert watcher.wait_for("remove", ".") == ["remove ."]
    assert watcher.take_events() == (200, {"events": []})
    event_types = [event["filesystem"]["type"] for event in events]
    assert (event_types[-1], events.error) == ("EVENT_TYPE_REMOVE", None)


def test_events_include_the_entry(agent, tmp_path):
    watcher = Watcher(agent, tmp_path, includeEntry=True, recursive=True)
    (tmp_path / "d").mkdir()
    watcher.wait_for("create", "d")
    assert watcher.last_event["entry"]["type"] == "FILE_TYPE_DIRECTORY"
    (tmp_path / "d/file").write_text("123")
    watcher.wait_for("write", "d/file")
    entry = watcher.last_event["entry"]
    assert (entry["path"], entry["name"], entry["size"]) == (f"{tmp_path}/d/file", "file", "3")
    (tmp_path / "d/file").unlink()
    watcher.wait_for("remove", "d/file")
    assert "entry" not in watcher.last_event
    (tmp_path / os.fsdecode(b"not \xff utf-8")).write_text("")
    watcher.wait_for("create", "not � utf-8")


def test_events_are_streamed(agent, tmp_path):
    events = agent.stream("WatchDir", {"path": str(tmp_path)}, service=SERVICE, **{"Keepalive-Ping-Interval": "1"})
    assert [events.next(), events.next()] == [{"start": {}}, {"keepalive": {}}]
    (tmp_path / "file").write_text("")
    assert events.next() == {"filesystem": {"name": "file", "type": "EVENT_TYPE_CREATE"}}
    limited_stream = agent.stream("WatchDir", {"path": str(tmp_path)}, service=SERVICE, **{"Connect-Timeout-Ms": "200"})
    assert list(limited_stream) == [{"start": {}}]
    assert limited_stream.error["code"] == "deadline_exceeded"


def test_invalid_paths_are_refused(agent, tmp_path):
    (tmp_path / "file").write_text("")
    for path, code, status in (("none", "not_found", 404), ("file", "invalid_argument", 400)):
        events = agent.stream("WatchDir", {"path": str(tmp_path / path)}, service=SERVICE)
        assert (list(events), events.error["code"]) == ([], code)
        actual_status, response = agent.post(f"{SERVICE}/CreateWatcher", {"path": str(tmp_path / path)})
        assert (actual_status, response["code"]) == (status, code)
    assert agent.post(f"{SERVICE}/CreateWatcher", {"path": str(tmp_path)}, "no-such-user")[0] == 401


def test_removing_a_watcher_twice_fails(agent, tmp_path):
    watcher = Watcher(agent, tmp_path)
    assert agent.post(f"{SERVICE}/RemoveWatcher", {"watcherId": watcher.id}) == (200, {})
    for method in ("RemoveWatcher", "GetWatcherEvents"):
        status, response = agent.post(f"{SERVICE}/{method}", {"watcherId": watcher.id})
        assert (status, response["code"]) == (404, "not_found") and watcher.id in response["message"]


def count_resources(agent) -> tuple[int, int]:
    process_directory = Path(f"/proc/{agent.process.pid}")
    return len(list((process_directory / "fd").iterdir())), len(list((process_directory / "task").iterdir()))


def test_removing_a_watch_releases_its_resources(agent, tmp_path, wait_until):
    resource_counts_before = count_resources(agent)
    watcher = Watcher(agent, tmp_path, recursive=True)
    sockets = []
    for _ in range(3):
        sock = socket.create_connection(("127.0.0.1", agent.port))
        body = b'{"path":"%s"}' % os.fsencode(tmp_path)
        sock.sendall(
            b"POST /filesystem.Filesystem/WatchDir HTTP/1.1\r\nContent-Type: application/connect+json\r\n"
            b"Content-Length: %d\r\n\r\n" % (len(body) + 5) + struct.pack(">BI", 0, len(body)) + body
        )
        assert b"start" in sock.recv(1000)
        sockets.append(sock)
    assert count_resources(agent)[0] > resource_counts_before[0] + 3
    agent.post_ok(f"{SERVICE}/RemoveWatcher", {"watcherId": watcher.id})
    start_time = time.monotonic()
    for sock in sockets:
        sock.close()
    wait_until(lambda: count_resources(agent) <= resource_counts_before)
    # Resources are released immediately, not after the next keepalive.
    assert time.monotonic() - start_time < 5


def test_the_number_of_watches_is_limited(running, tmp_path, wait_until):
    code = "watch.EXPIRY_SECONDS = 1.5; watch.MAX_WATCHES = 2; watch.WATCHERS = watch.Watchers()"
    with running(make_command_with_constants(code)) as agent:
        resource_counts_before = count_resources(agent)
        watchers = [Watcher(agent, tmp_path) for _ in range(2)]
        status, response = agent.post(f"{SERVICE}/CreateWatcher", {"path": str(tmp_path)})
        assert (status, response["code"]) == (429, "resource_exhausted") and "stop one" in response["message"]
        # Unused watchers are removed after a while.
        wait_until(lambda: count_resources(agent) <= resource_counts_before)
        assert watchers[0].take_events()[0] == 404
        Watcher(agent, tmp_path)


@pytest.mark.skipif(not sys.platform.startswith("linux"), reason="inotify is Linux's")
def test_too_many_pending_events_are_dropped(running, tmp_path):
    with running(make_command_with_constants("watch.MAX_PENDING_BYTES = 2000")) as agent:
        watcher = Watcher(agent, tmp_path, recursive=True)
        (tmp_path / "new").mkdir()
        for number in range(200):
            (tmp_path / f"new/{number}").write_text("")
        time.sleep(0.3)
        status, response = watcher.take_events()
        assert (status, response["code"]) == (500, "data_loss") and "list the directory again" in response["message"]
        (tmp_path / "new/end").write_text("")
        assert watcher.wait_for("create", "new/end") == ["create new/end"]


@pytest.mark.skipif(not sys.platform.startswith("linux"), reason="inotify is Linux's")
def test_dropped_events_are_reported(running, tmp_path):
    """The agent does not read, so the kernel drops events. Streams and watchers both report this."""
    queue_limit = int(Path("/proc/sys/fs/inotify/max_queued_events").read_text())
    hold_file, tmp_path = tmp_path / "hold", tmp_path / "watched"
    tmp_path.mkdir()
    hold_file.touch()
    code = f"""
import os, time
wait = watch.Watch.wait
def slow_wait(*args):
    while os.path.exists({str(hold_file)!r}):
        time.sleep(0.02)
    return wait(*args)
watch.Watch.wait = slow_wait
"""
    with running(make_command_with_constants(code)) as agent:
        watcher = Watcher(agent, tmp_path)
        events = agent.stream("WatchDir", {"path": str(tmp_path)}, service=SERVICE)
        assert events.next() == {"start": {}}
        for number in range(queue_limit):
            (tmp_path / str(number % 2)).touch()
            (tmp_path / str(number % 2)).unlink()
        hold_file.unlink()
        assert sum(1 for _ in events) <= queue_limit and events.error["code"] == "data_loss"
        deadline = time.monotonic() + 30
        status = 200
        while status == 200 and time.monotonic() < deadline:
            status, response = watcher.take_events()
        assert response["code"] == "data_loss"
        (tmp_path / "end").write_text("")
        watcher.wait_for("create", "end")


@pytest.mark.skipif(not sys.platform.startswith("linux"), reason="inotify is Linux's")
def test_watching_too_many_directories_is_refused(running, tmp_path):
    (tmp_path / "a/b").mkdir(parents=True)
    with running(make_command_with_constants("inotify.MAX_DIRECTORIES = 5")) as agent:
        watcher = Watcher(agent, tmp_path, recursive=True)
        (tmp_path / "c/d/e").mkdir(parents=True)
        deadline = time.monotonic() + 30
        status = 200
        while status == 200 and time.monotonic() < deadline:
            status, response = watcher.take_events()
        assert (status, response["code"]) == (429, "resource_exhausted") and "only some of them" in response["message"]
        status, response = agent.post(f"{SERVICE}/CreateWatcher", {"path": str(tmp_path), "recursive": True})
        assert (status, response["code"]) == (429, "resource_exhausted")
        Watcher(agent, tmp_path)


def test_scanning_too_many_entries_is_refused(running, tmp_path):
    for number in range(12):
        (tmp_path / str(number)).write_text("")
    with running(make_command_with_constants(f"{EVENT_SOURCES['scan']}; scan.MAX_ENTRIES = 10")) as agent:
        status, response = agent.post(f"{SERVICE}/CreateWatcher", {"path": str(tmp_path)})
        assert (status, response["code"]) == (429, "resource_exhausted") and "only some of them" in response["message"]


# Change the user after all imports: Python, or the tree, may be readable only by root.
DROP_PRIVILEGES_CODE = """
import os
build_servers = agent.build_servers
agent.build_servers = lambda *args, **options: (build_servers(*args, **options), os.setgroups([]), os.setuid(65534))[0]
"""


@pytest.mark.parametrize("event_source", EVENT_SOURCES)
def test_unreadable_directories_are_skipped(requires_root, running, event_source):
    """The agent runs as an unprivileged user, and watches the directories that it can read."""
    directory = Path(tempfile.mkdtemp(prefix="agent-test-"))
    try:
        for name in ("open", "closed"):
            (directory / name / "below").mkdir(parents=True)
        directory.chmod(0o755)
        (directory / "closed").chmod(0o700)
        with running(make_command_with_constants(f"{EVENT_SOURCES[event_source]}\n{DROP_PRIVILEGES_CODE}")) as agent:
            watcher = Watcher(agent, directory, recursive=True)
            for name in ("closed", "open"):
                (directory / name / "below/new").write_text("")
            assert watcher.wait_for("create", "open/below/new") == ["create open/below/new"]
            status, response = agent.post(f"{SERVICE}/CreateWatcher", {"path": f"{directory}/closed"})
            assert (status, response["code"]) == (403, "permission_denied")
    finally:
        shutil.rmtree(directory)


@pytest.mark.skipif(not sys.platform.startswith("linux"), reason="other systems always scan")
def test_without_inotify_the_agent_scans(running, tmp_path):
    with running(
        make_command_with_constants("""
import errno
def fail(*args):
    inotify.ctypes.set_errno(errno.ENOSYS)
    return -1
inotify._libc.inotify_init1 = fail
scan.SCAN_INTERVAL_SECONDS = 0.1
""")
    ) as agent:
        watcher = Watcher(agent, tmp_path)
        (tmp_path / "file").write_text("")
        assert watcher.wait_for("create", "file") == ["create file"]


def list_open_files(pid):
    """Return the open files of a process. Ignores files that are closed during the call."""
    paths = set()
    for fd in Path(f"/proc/{pid}/fd").iterdir():
        with contextlib.suppress(FileNotFoundError):
            paths.add(str(fd.readlink()))
    return paths


@pytest.mark.skipif(not sys.platform.startswith("linux"), reason="other systems always scan")
def test_network_file_systems_are_scanned(running, tmp_path):
    """The agent takes this file system for a network file system, and scans it only on explicit request."""
    code = (
        "watch.NETWORK_FILE_SYSTEM_MAGIC_NUMBERS = type('All', (), {'__contains__': lambda *args: True})(); "
        "scan.SCAN_INTERVAL_SECONDS = 0.1"
    )
    with running(make_command_with_constants(code)) as agent:
        status, response = agent.post(f"{SERVICE}/CreateWatcher", {"path": str(tmp_path)})
        assert (status, response["code"]) == (400, "invalid_argument") and "allowNetworkMounts" in response["message"]
        watcher = Watcher(agent, tmp_path, allowNetworkMounts=True)
        assert "anon_inode:inotify" not in list_open_files(agent.process.pid)
        (tmp_path / "file").write_text("")
        assert watcher.wait_for("create", "file") == ["create file"]


@pytest.mark.skipif(not sys.platform.startswith("linux"), reason="inotify is Linux's")
def test_a_rapidly_changing_tree_is_reported_correctly(fresh_agent, tmp_path):
    """Directories are created, moved and removed as fast as possible. All are reported under the right names."""
    watcher = Watcher(fresh_agent, tmp_path, recursive=True)
    script = (
        "for i in $(seq 60); do mkdir -p a/b/c x/y; mv a x/y/a$i; mv x/y z$i; mv z$i/a$i n$i; mkdir n$i/b/c/d;"
        " rm -r z$i x; done"
    )
    threads = [
        threading.Thread(target=subprocess.run, args=(["sh", "-c", script],), kwargs={"cwd": cwd, "timeout": 60})
        for cwd in (tmp_path / "one", tmp_path / "two")
    ]
    for name in ("one", "two"):
        (tmp_path / name).mkdir()
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    (tmp_path / "settled").write_text("")
    watcher.wait_for("create", "settled")
    directories = [path.relative_to(tmp_path) for path in tmp_path.glob("**/") if path != tmp_path]
    assert len(directories) > 400
    for directory in directories:
        (tmp_path / directory / "proof").write_text("")
    (tmp_path / "end").write_text("")
    changes = watcher.wait_for("create", "end")
    assert sorted(changes[:-1]) == sorted(f"create {directory}/proof" for directory in directories)
