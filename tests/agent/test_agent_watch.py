"""filesystem.Filesystem: watches on directories, by inotify and by repeated scans."""

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
# By inotify and by scans. Scans are more frequent here, which makes the tests faster.
KINDS = {"told": "", "looking": "inotify.AVAILABLE = False; scan.SCAN_SECONDS = 0.1; scan._REST_FACTOR = 1"}


def command_with_constants(code: str) -> list[str]:
    """The command of an agent with some constants changed."""
    return [
        os.environ.get("AGENT_PYTHON", sys.executable),
        "-c",
        "import sys; from sandbox_agent import agent; "
        f"from sandbox_agent.files import filesystem, inotify, scan, watch; {code}\n"
        "sys.argv = ['agent', '--unmanaged', '--bind', '127.0.0.1', '--port', '0']; sys.exit(agent.main())",
    ]


@pytest.fixture(scope="module", params=KINDS)
def kind(request):
    if request.param == "told" and not sys.platform.startswith("linux"):
        pytest.skip("inotify is Linux's")
    return request.param


@pytest.fixture(scope="module")
def agent(running, kind):
    with running(command_with_constants(KINDS[kind])) as found:
        yield found


class Watcher:
    """A watcher of the agent; each call returns the events since the previous one."""

    def __init__(self, agent, path, **options):
        self._agent = agent
        self.id = agent.post_ok(f"{SERVICE}/CreateWatcher", {"path": str(path), **options})["watcherId"]

    def take_events(self):
        return self._agent.post(f"{SERVICE}/GetWatcherEvents", {"watcherId": self.id})

    def wait_for(self, what, name):
        """Wait until ``name`` was created, written, …. Returns all events up to then (["create a", …]) and the last
        one."""
        said, deadline = [], time.monotonic() + 20
        while time.monotonic() < deadline:
            status, answer = self.take_events()
            assert status == 200, answer
            for event in answer["events"]:
                said.append(f"{event['type'].removeprefix('EVENT_TYPE_').lower()} {event['name']}")
                if said[-1] == f"{what} {name}":
                    self.last = event
                    return said
            time.sleep(0.02)
        raise AssertionError(f"{what} {name} did not come: {said}")


def test_events_of_a_file(agent, tmp_path):
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


def test_events_below_subdirectories(agent, tmp_path):
    (tmp_path / "old/deep").mkdir(parents=True)
    watcher = Watcher(agent, tmp_path, recursive=True)
    (tmp_path / "old/deep/a").write_text("")
    assert watcher.wait_for("create", "old/deep/a") == ["create old/deep/a"]
    # Created before the agent can watch it, and still complete.
    subprocess.run(["mkdir", "-p", tmp_path / "n/e/w"], check=True, timeout=30)
    (tmp_path / "n/e/w/b").write_text("")
    assert watcher.wait_for("create", "n/e/w/b") == ["create n", "create n/e", "create n/e/w", "create n/e/w/b"]
    subprocess.run(["sh", "-c", "mkdir v && echo 1 >v/c"], cwd=tmp_path, check=True, timeout=30)
    assert watcher.wait_for("write", "v/c") == ["create v", "create v/c", "write v/c"]
    (tmp_path / "n").rename(tmp_path / "m")
    said = watcher.wait_for("create", "m/e/w/b")
    assert said == ["rename n", "create m", "create m/e", "create m/e/w", "create m/e/w/b"]
    (tmp_path / "m/e/w/c").write_text("")
    assert watcher.wait_for("create", "m/e/w/c") == ["create m/e/w/c"]
    shutil.rmtree(tmp_path / "m")
    assert watcher.wait_for("remove", "m")[-3:] == ["remove m/e/w", "remove m/e", "remove m"]


def test_directories_moved_out_and_in(agent, kind, tmp_path):
    watched, outside = tmp_path / "in", tmp_path / "out"
    (watched / "a/b").mkdir(parents=True)
    outside.mkdir()
    watcher = Watcher(agent, watched, recursive=True)
    (watched / "a").rename(outside / "a")
    # A scan only sees that the directory is gone, not where it went.
    said = watcher.wait_for("rename" if kind == "told" else "remove", "a")
    assert set(said) <= {"rename a", "remove a/b", "remove a"}
    (outside / "a/b/unseen").write_text("")
    (outside / "a").rename(watched / "c")
    assert watcher.wait_for("create", "c/b/unseen") == ["create c", "create c/b", "create c/b/unseen"]
    (watched / "c/b/seen").write_text("")
    assert watcher.wait_for("create", "c/b/seen") == ["create c/b/seen"]


def test_the_watched_directory_itself(agent, tmp_path):
    path = tmp_path / "gone"
    path.mkdir()
    watcher, events = Watcher(agent, path), agent.stream("WatchDir", {"path": str(path)}, service=SERVICE)
    assert events.next() == {"start": {}}
    path.chmod(0o711)
    assert watcher.wait_for("chmod", ".") == ["chmod ."]
    path.rmdir()
    assert watcher.wait_for("remove", ".") == ["remove ."]
    assert watcher.take_events() == (200, {"events": []})
    said = [event["filesystem"]["type"] for event in events]
    assert (said[-1], events.error) == ("EVENT_TYPE_REMOVE", None)


def test_events_carry_their_entry(agent, tmp_path):
    watcher = Watcher(agent, tmp_path, includeEntry=True, recursive=True)
    (tmp_path / "d").mkdir()
    watcher.wait_for("create", "d")
    assert watcher.last["entry"]["type"] == "FILE_TYPE_DIRECTORY"
    (tmp_path / "d/file").write_text("123")
    watcher.wait_for("write", "d/file")
    entry = watcher.last["entry"]
    assert (entry["path"], entry["name"], entry["size"]) == (f"{tmp_path}/d/file", "file", "3")
    (tmp_path / "d/file").unlink()
    watcher.wait_for("remove", "d/file")
    assert "entry" not in watcher.last
    (tmp_path / os.fsdecode(b"not \xff utf-8")).write_text("")
    watcher.wait_for("create", "not � utf-8")


def test_events_are_streamed(agent, tmp_path):
    events = agent.stream("WatchDir", {"path": str(tmp_path)}, service=SERVICE, **{"Keepalive-Ping-Interval": "1"})
    assert [events.next(), events.next()] == [{"start": {}}, {"keepalive": {}}]
    (tmp_path / "file").write_text("")
    assert events.next() == {"filesystem": {"name": "file", "type": "EVENT_TYPE_CREATE"}}
    limited = agent.stream("WatchDir", {"path": str(tmp_path)}, service=SERVICE, **{"Connect-Timeout-Ms": "200"})
    assert list(limited) == [{"start": {}}]
    assert limited.error["code"] == "deadline_exceeded"


def test_paths_that_cannot_be_watched(agent, tmp_path):
    (tmp_path / "file").write_text("")
    for path, code, status in (("none", "not_found", 404), ("file", "invalid_argument", 400)):
        events = agent.stream("WatchDir", {"path": str(tmp_path / path)}, service=SERVICE)
        assert (list(events), events.error["code"]) == ([], code)
        found, answer = agent.post(f"{SERVICE}/CreateWatcher", {"path": str(tmp_path / path)})
        assert (found, answer["code"]) == (status, code)
    assert agent.post(f"{SERVICE}/CreateWatcher", {"path": str(tmp_path)}, "no-such-user")[0] == 401


def test_a_watcher_is_removed_once(agent, tmp_path):
    watcher = Watcher(agent, tmp_path)
    assert agent.post(f"{SERVICE}/RemoveWatcher", {"watcherId": watcher.id}) == (200, {})
    for method in ("RemoveWatcher", "GetWatcherEvents"):
        status, answer = agent.post(f"{SERVICE}/{method}", {"watcherId": watcher.id})
        assert (status, answer["code"]) == (404, "not_found") and watcher.id in answer["message"]


def open_watches(agent) -> tuple[int, int]:
    process = Path(f"/proc/{agent.process.pid}")
    return len(list((process / "fd").iterdir())), len(list((process / "task").iterdir()))


def test_a_removed_watch_releases_its_resources(agent, tmp_path, eventually):
    before = open_watches(agent)
    watcher = Watcher(agent, tmp_path, recursive=True)
    socks = []
    for _ in range(3):
        sock = socket.create_connection(("127.0.0.1", agent.port))
        body = b'{"path":"%s"}' % os.fsencode(tmp_path)
        sock.sendall(
            b"POST /filesystem.Filesystem/WatchDir HTTP/1.1\r\nContent-Type: application/connect+json\r\n"
            b"Content-Length: %d\r\n\r\n" % (len(body) + 5) + struct.pack(">BI", 0, len(body)) + body
        )
        assert b"start" in sock.recv(1000)
        socks.append(sock)
    assert open_watches(agent)[0] > before[0] + 3
    agent.post_ok(f"{SERVICE}/RemoveWatcher", {"watcherId": watcher.id})
    started = time.monotonic()
    for sock in socks:
        sock.close()
    eventually(lambda: open_watches(agent) <= before)
    # At once, not with the next keepalive.
    assert time.monotonic() - started < 5


def test_the_number_of_watches_is_limited(running, tmp_path, eventually):
    code = "watch.FORGET_SECONDS = 1.5; watch.MAX_WATCHES = 2; watch.WATCHERS = watch.Watchers()"
    with running(command_with_constants(code)) as agent:
        before = open_watches(agent)
        watchers = [Watcher(agent, tmp_path) for _ in range(2)]
        status, answer = agent.post(f"{SERVICE}/CreateWatcher", {"path": str(tmp_path)})
        assert (status, answer["code"]) == (429, "resource_exhausted") and "stop one" in answer["message"]
        # Unused watchers are removed after a while.
        eventually(lambda: open_watches(agent) <= before)
        assert watchers[0].take_events()[0] == 404
        Watcher(agent, tmp_path)


@pytest.mark.skipif(not sys.platform.startswith("linux"), reason="inotify is Linux's")
def test_too_many_pending_events(running, tmp_path):
    with running(command_with_constants("watch.MAX_WAITING = 2000")) as agent:
        watcher = Watcher(agent, tmp_path, recursive=True)
        (tmp_path / "new").mkdir()
        for number in range(200):
            (tmp_path / f"new/{number}").write_text("")
        time.sleep(0.3)
        status, answer = watcher.take_events()
        assert (status, answer["code"]) == (500, "data_loss") and "list the directory again" in answer["message"]
        (tmp_path / "new/end").write_text("")
        assert watcher.wait_for("create", "new/end") == ["create new/end"]


@pytest.mark.skipif(not sys.platform.startswith("linux"), reason="inotify is Linux's")
def test_dropped_events_are_reported(running, tmp_path):
    """The client does not read, so the kernel drops events. Both kinds of watchers report this."""
    queue_limit = int(Path("/proc/sys/fs/inotify/max_queued_events").read_text())
    hold, tmp_path = tmp_path / "hold", tmp_path / "watched"
    tmp_path.mkdir()
    hold.touch()
    code = f"""
import os, time
wait = watch.Watch.wait
def slow(*given):
    while os.path.exists({str(hold)!r}):
        time.sleep(0.02)
    return wait(*given)
watch.Watch.wait = slow
"""
    with running(command_with_constants(code)) as agent:
        watcher = Watcher(agent, tmp_path)
        events = agent.stream("WatchDir", {"path": str(tmp_path)}, service=SERVICE)
        assert events.next() == {"start": {}}
        for number in range(queue_limit):
            (tmp_path / str(number % 2)).touch()
            (tmp_path / str(number % 2)).unlink()
        hold.unlink()
        assert sum(1 for _ in events) <= queue_limit and events.error["code"] == "data_loss"
        deadline = time.monotonic() + 30
        status = 200
        while status == 200 and time.monotonic() < deadline:
            status, answer = watcher.take_events()
        assert answer["code"] == "data_loss"
        (tmp_path / "end").write_text("")
        watcher.wait_for("create", "end")


@pytest.mark.skipif(not sys.platform.startswith("linux"), reason="inotify is Linux's")
def test_too_many_directories(running, tmp_path):
    (tmp_path / "a/b").mkdir(parents=True)
    with running(command_with_constants("inotify.MAX_DIRECTORIES = 5")) as agent:
        watcher = Watcher(agent, tmp_path, recursive=True)
        (tmp_path / "c/d/e").mkdir(parents=True)
        deadline = time.monotonic() + 30
        status = 200
        while status == 200 and time.monotonic() < deadline:
            status, answer = watcher.take_events()
        assert (status, answer["code"]) == (429, "resource_exhausted") and "a part" in answer["message"]
        status, answer = agent.post(f"{SERVICE}/CreateWatcher", {"path": str(tmp_path), "recursive": True})
        assert (status, answer["code"]) == (429, "resource_exhausted")
        Watcher(agent, tmp_path)


def test_too_many_entries_to_scan(running, tmp_path):
    for number in range(12):
        (tmp_path / str(number)).write_text("")
    with running(command_with_constants(f"{KINDS['looking']}; scan.MAX_ENTRIES = 10")) as agent:
        status, answer = agent.post(f"{SERVICE}/CreateWatcher", {"path": str(tmp_path)})
        assert (status, answer["code"]) == (429, "resource_exhausted") and "a part" in answer["message"]


# Change the user after all imports: Python, or the tree, may be readable only by root.
NOBODY = """
import os
build = agent.build
agent.build = lambda *given, **named: (build(*given, **named), os.setgroups([]), os.setuid(65534))[0]
"""


@pytest.mark.parametrize("kind", KINDS)
def test_unreadable_directories_are_skipped(root, running, kind):
    """The agent runs as an unprivileged user and watches everything it may read."""
    place = Path(tempfile.mkdtemp(prefix="agent-test-"))
    try:
        for name in ("open", "closed"):
            (place / name / "below").mkdir(parents=True)
        place.chmod(0o755)
        (place / "closed").chmod(0o700)
        with running(command_with_constants(f"{KINDS[kind]}\n{NOBODY}")) as agent:
            watcher = Watcher(agent, place, recursive=True)
            for name in ("closed", "open"):
                (place / name / "below/new").write_text("")
            assert watcher.wait_for("create", "open/below/new") == ["create open/below/new"]
            status, answer = agent.post(f"{SERVICE}/CreateWatcher", {"path": f"{place}/closed"})
            assert (status, answer["code"]) == (403, "permission_denied")
    finally:
        shutil.rmtree(place)


@pytest.mark.skipif(not sys.platform.startswith("linux"), reason="elsewhere all are looked at")
def test_a_kernel_without_inotify_events(running, tmp_path):
    with running(
        command_with_constants("""
import errno
def none(*given):
    inotify.ctypes.set_errno(errno.ENOSYS)
    return -1
inotify._libc.inotify_init1 = none
scan.SCAN_SECONDS = 0.1
""")
    ) as agent:
        watcher = Watcher(agent, tmp_path)
        (tmp_path / "file").write_text("")
        assert watcher.wait_for("create", "file") == ["create file"]


def open_files(pid):
    """The open files of a process; some of them are closed while they are listed."""
    found = set()
    for fd in Path(f"/proc/{pid}/fd").iterdir():
        with contextlib.suppress(FileNotFoundError):
            found.add(str(fd.readlink()))
    return found


@pytest.mark.skipif(not sys.platform.startswith("linux"), reason="elsewhere all are looked at")
def test_network_file_systems_are_scanned(running, tmp_path):
    """The agent takes this file system for a network one: it is watched only on explicit request, and by scans."""
    code = "watch.NETWORK = type('All', (), {'__contains__': lambda *given: True})(); scan.SCAN_SECONDS = 0.1"
    with running(command_with_constants(code)) as agent:
        status, answer = agent.post(f"{SERVICE}/CreateWatcher", {"path": str(tmp_path)})
        assert (status, answer["code"]) == (400, "invalid_argument") and "allowNetworkMounts" in answer["message"]
        watcher = Watcher(agent, tmp_path, allowNetworkMounts=True)
        assert "anon_inode:inotify" not in open_files(agent.process.pid)
        (tmp_path / "file").write_text("")
        assert watcher.wait_for("create", "file") == ["create file"]


@pytest.mark.skipif(not sys.platform.startswith("linux"), reason="inotify is Linux's")
def test_a_rapidly_changing_tree_is_reported_correctly(fresh_agent, tmp_path):
    """Directories are made, moved and removed as fast as possible. None of them is watched under a wrong name."""
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
    places = [path.relative_to(tmp_path) for path in tmp_path.glob("**/") if path != tmp_path]
    assert len(places) > 400
    for place in places:
        (tmp_path / place / "proof").write_text("")
    (tmp_path / "end").write_text("")
    said = watcher.wait_for("create", "end")
    assert sorted(said[:-1]) == sorted(f"create {place}/proof" for place in places)
