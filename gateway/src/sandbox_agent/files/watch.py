"""Watch directories: a stream of events, or a watcher that clients poll.

On Linux the agent uses inotify. Elsewhere, and on network file systems, where inotify misses changes by other
machines, it scans periodically, which detects fewer changes: see scan.py.
"""

from __future__ import annotations

import ctypes
import json
import os
import select
import threading
import time

from sandbox_agent.failure import Failure, invalid
from sandbox_agent.files import entries, inotify, scan
from sandbox_agent.http.connect import Stream, frame
from sandbox_agent.http.message import displayable, get_text
from sandbox_agent.machine import users

TYPE_CHECKING = False
if TYPE_CHECKING:
    from collections.abc import Iterator
    from typing import Any, Protocol

    from sandbox_agent.http.wire import Request

    class Source(Protocol):
        fd: int
        ended: bool

        def due(self) -> float | None: ...

        def read(self) -> Iterator[tuple[str, str]]: ...

        def close(self) -> None: ...


MAX_WATCHES = 32
"""Maximum number of directories watched at once, streams and watchers together."""
MAX_WAITING = 2 << 20
"""Bytes of events that a watcher keeps until its client fetches them."""
FORGET_SECONDS = 1800.0
"""A watcher is removed if no client polls it for this long."""
NETWORK = {0x6969, 0x517B, 0xFF534D42, 0xFE534D42}
"""File system numbers of NFS, SMB, CIFS and SMB2. Not FUSE: inotify reports its local changes."""
_PIECE = 64 << 10
_KEEPALIVE = frame(b'{"keepalive":{}}')


class Watch:
    """A watched directory, with the options of a request."""

    def __init__(self, request: Request, message: dict[str, Any]) -> None:
        """``{path, recursive?, includeEntry?, allowNetworkMounts?}``"""
        self._path = users.user_of(request).path(get_text(message, "path"))
        self._recursive = message.get("recursive") is True
        self._entries = message.get("includeEntry") is True
        os.stat(self._path)
        if not os.path.isdir(self._path):
            raise invalid(f"{self._path} is not a directory")
        self._uses_inotify = inotify.AVAILABLE and not _is_on_network(self._path)
        if inotify.AVAILABLE and not self._uses_inotify and message.get("allowNetworkMounts") is not True:
            raise invalid(
                f"{self._path} is on a network file system, where changes are found late or not at all: "
                "set allowNetworkMounts to watch it anyway"
            )
        self._source = self._open()

    def _open(self) -> Source:
        if self._uses_inotify:
            try:
                return inotify.Tree(self._path, recursive=self._recursive)
            except Failure as failure:
                if failure.code != "unimplemented":
                    raise
        return scan.Tree(self._path, recursive=self._recursive)

    def reopen(self) -> None:
        """Start watching again from the current state."""
        self._source.close()
        self._source = self._open()

    def close(self) -> None:
        self._source.close()

    @property
    def ended(self) -> bool:
        return self._source.ended

    def wait(self, seconds: float, other: int, events: int) -> tuple[bool, bool]:
        """Wait; return whether there may be something to read, and whether ``other`` is ready for ``events``."""
        poll = select.poll()
        poll.register(other, events)
        due = self._source.due()
        if due is None:
            poll.register(self._source.fd, select.POLLIN)
        else:
            seconds = min(seconds, due)
        ready = {fd for fd, _ in poll.poll(max(0.0, seconds) * 1000 + 1)}
        return self._source.fd in ready or self._source.due() == 0, other in ready

    def read(self) -> Iterator[bytes]:
        """Yield events in envd's JSON, without immediate repetitions."""
        last = b""
        for kind, name in self._source.read():
            event: dict[str, Any] = {"name": displayable(name), "type": f"EVENT_TYPE_{kind}"}
            if self._entries:
                try:
                    event["entry"] = entries.describe_entry(os.path.normpath(os.path.join(self._path, name)))
                except OSError:
                    pass
            data = json.dumps(event, separators=(",", ":")).encode()
            if data != last:
                yield data
            last = data


def _is_on_network(path: str) -> bool:
    # The first member of struct statfs is the type; the buffer is larger than the struct.
    found = ctypes.create_string_buffer(1024)
    if ctypes.CDLL(None, use_errno=True).statfs(os.fsencode(path), found) != 0:
        raise OSError(ctypes.get_errno(), os.strerror(ctypes.get_errno()), path)
    return ctypes.c_long.from_buffer(found).value & 0xFFFFFFFF in NETWORK


class Watcher:
    """A watch that keeps its events until a client asks for them."""

    def __init__(self, watch: Watch) -> None:
        self._watch = watch
        self._lock = threading.Lock()
        self._events: list[bytes] = []
        self._size = 0
        self._lost = False
        self._failure: Failure | None = None
        self._asked_at = time.monotonic()
        try:
            self._stopped, self._stop = os.pipe()
        except OSError:
            watch.close()
            raise

    def run(self) -> None:
        """Collect events until the watcher is stopped, or no client has polled it for ``FORGET_SECONDS``."""
        try:
            while True:
                left = FORGET_SECONDS - (time.monotonic() - self._asked_at)
                if left <= 0:
                    return
                if self._failure or self._watch.ended:
                    self._watch.close()
                    ready, stopped = False, _is_readable(self._stopped, left)
                else:
                    ready, stopped = self._watch.wait(left, self._stopped, select.POLLIN)
                if stopped:
                    return
                if ready:
                    self._collect()
        finally:
            self._watch.close()
            os.close(self._stopped)

    def _collect(self) -> None:
        try:
            for event in self._watch.read():
                self._put(event)
        except Failure as failure:
            self._fail(failure)
        except Exception as error:
            self._fail(Failure("internal", f"watching failed: {error}"))

    def _fail(self, failure: Failure) -> None:
        """Restart the watch if events were lost; keep any other failure for the client."""
        try:
            if failure.code == "data_loss":
                self._watch.reopen()
                with self._lock:
                    self._drop_events()
                return
        except (Failure, OSError) as other:
            failure = other if isinstance(other, Failure) else Failure("not_found", f"watching failed: {other}")
        with self._lock:
            self._failure = failure

    def _put(self, event: bytes) -> None:
        with self._lock:
            if self._size + len(event) > MAX_WAITING:
                self._drop_events()
            if not self._lost:
                self._events.append(event)
                self._size += len(event)

    def _drop_events(self) -> None:
        self._lost = True
        self._events = []
        self._size = 0

    def take(self) -> list[bytes]:
        """Return the events since the last call. If events were lost, raises Failure once and then continues."""
        with self._lock:
            self._asked_at = time.monotonic()
            if self._lost:
                self._lost = False
                raise Failure(
                    "data_loss",
                    "too many changes happened since the last call and were lost: list the directory again; "
                    "later changes are reported",
                )
            events, self._events, self._size = self._events, [], 0
            if not events and self._failure:
                raise self._failure
            return events

    def stop(self) -> None:
        """Make ``run`` return. Call it once."""
        os.close(self._stop)


class Watchers:
    """All streams and watchers."""

    def __init__(self) -> None:
        self._slots = threading.BoundedSemaphore(MAX_WATCHES)
        self._lock = threading.Lock()
        self._watchers: dict[str, Watcher] = {}

    def _reserve(self) -> None:
        if not self._slots.acquire(blocking=False):
            raise Failure(
                "resource_exhausted",
                f"the limit of {MAX_WATCHES} watches is reached: stop one first",
            )

    def watch_dir(self, request: Request, stream: Stream) -> None:
        """``{path, recursive?, includeEntry?, allowNetworkMounts?}`` → start, events, keepalives.

        The stream ends normally when the directory is removed, and with an error at the deadline or if events are lost.
        """
        message = stream.receive_only()
        self._reserve()
        try:
            watch = Watch(request, message)
            try:
                stream.send(frame(b'{"start":{}}'))
                self._report(watch, stream)
            finally:
                watch.close()
        finally:
            self._slots.release()

    def _report(self, watch: Watch, stream: Stream) -> None:
        silent_until = time.monotonic() + stream.keepalive
        while not watch.ended:
            now = time.monotonic()
            if stream.deadline is not None and now >= stream.deadline:
                raise Failure("deadline_exceeded", "the request's deadline passed")
            if now >= silent_until:
                stream.send(_KEEPALIVE)
                silent_until = now + stream.keepalive
            until = silent_until if stream.deadline is None else min(silent_until, stream.deadline)
            ready, gone = watch.wait(until - now, stream.fileno(), Stream.GONE)
            if gone:
                stream.abandon()
            if ready and _send(watch, stream):
                silent_until = time.monotonic() + stream.keepalive
        stream.end()

    def create_watcher(self, request: Request, message: dict[str, Any]) -> dict[str, Any]:
        """``{path, recursive?, includeEntry?, allowNetworkMounts?}`` → ``{watcherId}``"""
        self._reserve()
        try:
            watcher = Watcher(Watch(request, message))
        except BaseException:
            self._slots.release()
            raise
        identity = "w" + os.urandom(8).hex()
        with self._lock:
            self._watchers[identity] = watcher
        try:
            threading.Thread(target=self._run, args=(identity, watcher), daemon=True).start()
        except RuntimeError:
            # Clean up as if the watcher had been removed immediately.
            self.remove_watcher(request, {"watcherId": identity})
            self._run(identity, watcher)
            raise Failure("resource_exhausted", "the agent cannot start another thread: try again later") from None
        return {"watcherId": identity}

    def _run(self, identity: str, watcher: Watcher) -> None:
        try:
            watcher.run()
        finally:
            with self._lock:
                # Otherwise the request that removed the watcher stops it.
                if self._watchers.pop(identity, None):
                    watcher.stop()
            self._slots.release()

    def get_watcher_events(self, request: Request, message: dict[str, Any]) -> bytes:
        """``{watcherId}`` → ``{events}`` since the last call."""
        identity = get_text(message, "watcherId")
        with self._lock:
            watcher = self._watchers.get(identity)
        if watcher is None:
            raise _not_found_error(identity)
        return b'{"events":[%s]}' % b",".join(watcher.take())

    def remove_watcher(self, request: Request, message: dict[str, Any]) -> dict[str, Any]:
        """``{watcherId}`` → ``{}``"""
        identity = get_text(message, "watcherId")
        with self._lock:
            watcher = self._watchers.pop(identity, None)
        if watcher is None:
            raise _not_found_error(identity)
        watcher.stop()
        return {}


WATCHERS = Watchers()


def _send(watch: Watch, stream: Stream) -> bool:
    """Send the events; False if there were none. Events found before a failure are also sent."""
    frames: list[bytes] = []
    size = sent = 0
    try:
        for event in watch.read():
            frames.append(frame(b'{"filesystem":%s}' % event))
            size += len(event)
            if size > _PIECE:
                stream.send(b"".join(frames))
                frames, size, sent = [], 0, 1
    finally:
        if frames:
            stream.send(b"".join(frames))
    return bool(sent or size)


def _is_readable(fd: int, seconds: float) -> bool:
    poll = select.poll()
    poll.register(fd, select.POLLIN)
    return bool(poll.poll(seconds * 1000 + 1))


def _not_found_error(identity: str) -> Failure:
    minutes = FORGET_SECONDS / 60
    return Failure(
        "not_found", f"watcher {identity!r} not found: it was removed, or no client asked for {minutes:.0f} minutes"
    )
