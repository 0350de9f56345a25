"""Watching directories: a stream of what happens, or a watcher that is asked from time to time.

On Linux the kernel tells. Elsewhere, and on network file systems, whose changes by others no kernel tells of, the agent
looks again and again, which finds less: see scan.py.
"""

from __future__ import annotations

import ctypes
import json
import os
import select
import threading
import time

from sandbox_agent import entries, inotify, scan, users
from sandbox_agent.connect import Stream, frame
from sandbox_agent.failure import Failure, invalid
from sandbox_agent.message import text

TYPE_CHECKING = False
if TYPE_CHECKING:
    from collections.abc import Iterator
    from typing import Any, Protocol

    from sandbox_agent.wire import Request

    class Source(Protocol):
        fd: int
        ended: bool

        def due(self) -> float | None: ...

        def read(self) -> Iterator[tuple[str, str]]: ...

        def close(self) -> None: ...


MAX_WATCHES = 32
"""Directories watched at once, streams and watchers together."""
MAX_WAITING = 2 << 20
"""Bytes of events that wait for whoever asks a watcher."""
FORGET_SECONDS = 1800.0
"""A watcher that is not asked for so long is gone."""
NETWORK = {0x6969, 0x517B, 0xFF534D42, 0xFE534D42}
"""The kernel's numbers of NFS, SMB, CIFS and SMB2. Not FUSE: of what is done in this machine it does tell."""
_PIECE = 64 << 10
_KEEPALIVE = frame(b'{"keepalive":{}}')


class Watch:
    """A directory that is watched, as a request asks for."""

    def __init__(self, request: Request, message: dict[str, Any]) -> None:
        """``{path, recursive?, includeEntry?, allowNetworkMounts?}``"""
        self._path = users.of_request(request).path(text(message, "path"))
        self._recursive = message.get("recursive") is True
        self._entries = message.get("includeEntry") is True
        os.stat(self._path)
        if not os.path.isdir(self._path):
            raise invalid(f"{self._path} is not a directory")
        self._told = inotify.AVAILABLE and not _on_network(self._path)
        if inotify.AVAILABLE and not self._told and message.get("allowNetworkMounts") is not True:
            raise invalid(
                f"{self._path} is on a network file system, where changes are found late or not at all: "
                "watch it with allowNetworkMounts if that will do"
            )
        self._source = self._open()

    def _open(self) -> Source:
        if self._told:
            try:
                return inotify.Tree(self._path, recursive=self._recursive)
            except Failure as failure:
                if failure.code != "unimplemented":
                    raise
        return scan.Tree(self._path, recursive=self._recursive)

    def reopen(self) -> None:
        """Watch anew what is there now."""
        self._source.close()
        self._source = self._open()

    def close(self) -> None:
        self._source.close()

    @property
    def ended(self) -> bool:
        return self._source.ended

    def wait(self, seconds: float, other: int, events: int) -> tuple[bool, bool]:
        """Whether there may be something to read, and whether ``other`` is ready for ``events``."""
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
        """What happened, as envd writes it; what happened twice in a row is said once."""
        last = b""
        for what, name in self._source.read():
            event: dict[str, Any] = {"name": entries.shown(name), "type": f"EVENT_TYPE_{what}"}
            if self._entries:
                try:
                    event["entry"] = entries.entry(os.path.normpath(os.path.join(self._path, name)))
                except OSError:
                    pass
            data = json.dumps(event, separators=(",", ":")).encode()
            if data != last:
                yield data
            last = data


def _on_network(path: str) -> bool:
    # Of struct statfs, the first member is the type; the whole of it is much smaller than this.
    found = ctypes.create_string_buffer(1024)
    if ctypes.CDLL(None, use_errno=True).statfs(os.fsencode(path), found) != 0:
        raise OSError(ctypes.get_errno(), os.strerror(ctypes.get_errno()), path)
    return ctypes.c_long.from_buffer(found).value & 0xFFFFFFFF in NETWORK


class Watcher:
    """A watch whose events wait until they are asked for."""

    def __init__(self, watch: Watch) -> None:
        self._watch = watch
        self._lock = threading.Lock()
        self._events: list[bytes] = []
        self._size = 0
        self._lost = False
        self._failure: Failure | None = None
        self._asked = time.monotonic()
        try:
            self._stopped, self._stop = os.pipe()
        except OSError:
            watch.close()
            raise

    def run(self) -> None:
        """Collect what happens until it is stopped, or forgotten."""
        try:
            while True:
                left = FORGET_SECONDS - (time.monotonic() - self._asked)
                if left <= 0:
                    return
                if self._failure or self._watch.ended:
                    self._watch.close()
                    ready, stopped = False, _readable(self._stopped, left)
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
        """Go on where only events were lost."""
        try:
            if failure.code == "data_loss":
                self._watch.reopen()
                with self._lock:
                    self._lose()
                return
        except (Failure, OSError) as other:
            failure = other if isinstance(other, Failure) else Failure("not_found", f"watching failed: {other}")
        with self._lock:
            self._failure = failure

    def _put(self, event: bytes) -> None:
        with self._lock:
            if self._size + len(event) > MAX_WAITING:
                self._lose()
            if not self._lost:
                self._events.append(event)
                self._size += len(event)

    def _lose(self) -> None:
        self._lost = True
        self._events = []
        self._size = 0

    def take(self) -> list[bytes]:
        """What happened since the last time. Raises Failure once where that is not known, and then goes on."""
        with self._lock:
            self._asked = time.monotonic()
            if self._lost:
                self._lost = False
                raise Failure(
                    "data_loss",
                    "so much changed since the last time that it is not known any more: look for yourself; "
                    "what changes from now on is known again",
                )
            events, self._events, self._size = self._events, [], 0
            if not events and self._failure:
                raise self._failure
            return events

    def stop(self) -> None:
        """Once: its descriptors go, and ``run`` returns."""
        os.close(self._stop)


class Watchers:
    """All that is watched."""

    def __init__(self) -> None:
        self._room = threading.BoundedSemaphore(MAX_WATCHES)
        self._lock = threading.Lock()
        self._watchers: dict[str, Watcher] = {}

    def _reserve(self) -> None:
        if not self._room.acquire(blocking=False):
            raise Failure("resource_exhausted", f"{MAX_WATCHES} directories are watched, which is the most: stop one")

    def watch_dir(self, request: Request, stream: Stream) -> None:
        """``{path, recursive?, includeEntry?, allowNetworkMounts?}`` → start, events, keepalives.

        The stream ends well where the directory goes; else with the deadline, or where not all is known.
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
            self._room.release()

    def _report(self, watch: Watch, stream: Stream) -> None:
        silent_until = time.monotonic() + stream.keepalive
        while not watch.ended:
            now = time.monotonic()
            if stream.deadline is not None and now >= stream.deadline:
                raise Failure("deadline_exceeded", "the request's deadline passed while it watched")
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
            self._room.release()
            raise
        identity = "w" + os.urandom(8).hex()
        with self._lock:
            self._watchers[identity] = watcher
        try:
            threading.Thread(target=self._run, args=(identity, watcher), daemon=True).start()
        except RuntimeError:
            # As if it had been removed at once.
            self.remove_watcher(request, {"watcherId": identity})
            self._run(identity, watcher)
            raise Failure("resource_exhausted", "the agent cannot start another thread: try again later") from None
        return {"watcherId": identity}

    def _run(self, identity: str, watcher: Watcher) -> None:
        try:
            watcher.run()
        finally:
            with self._lock:
                # Else whoever removed it stops it.
                if self._watchers.pop(identity, None):
                    watcher.stop()
            self._room.release()

    def get_watcher_events(self, request: Request, message: dict[str, Any]) -> bytes:
        """``{watcherId}`` → ``{events}``: those since the last time."""
        identity = text(message, "watcherId")
        with self._lock:
            watcher = self._watchers.get(identity)
        if watcher is None:
            raise _unknown(identity)
        return b'{"events":[%s]}' % b",".join(watcher.take())

    def remove_watcher(self, request: Request, message: dict[str, Any]) -> dict[str, Any]:
        """``{watcherId}`` → ``{}``"""
        identity = text(message, "watcherId")
        with self._lock:
            watcher = self._watchers.pop(identity, None)
        if watcher is None:
            raise _unknown(identity)
        watcher.stop()
        return {}


WATCHERS = Watchers()


def _send(watch: Watch, stream: Stream) -> bool:
    """Send what happened; False where nothing did. What is known when it fails is sent, too."""
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


def _readable(fd: int, seconds: float) -> bool:
    poll = select.poll()
    poll.register(fd, select.POLLIN)
    return bool(poll.poll(seconds * 1000 + 1))


def _unknown(identity: str) -> Failure:
    minutes = FORGET_SECONDS / 60
    return Failure(
        "not_found", f"watcher {identity!r} not found: it was removed, or not asked for {minutes:.0f} minutes"
    )
