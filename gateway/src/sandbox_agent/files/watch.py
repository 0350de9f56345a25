"""Watch directories. Clients either receive a stream of events or poll a watcher.

On Linux, the agent uses inotify. On other systems, and on network file systems, where inotify misses changes made by
other machines, the agent scans periodically, which detects fewer changes (see scan.py).
"""

from __future__ import annotations

import ctypes
import json
import os
import select
import threading
import time

from sandbox_agent.failure import Failure, invalid_argument
from sandbox_agent.files import entries, inotify, scan
from sandbox_agent.http.connect import Stream, encode_frame
from sandbox_agent.http.message import get_text, make_displayable
from sandbox_agent.machine import users

TYPE_CHECKING = False
if TYPE_CHECKING:
    from collections.abc import Iterator
    from typing import Any, Protocol

    from sandbox_agent.http.wire import Request

    class Source(Protocol):
        fd: int
        has_ended: bool

        def seconds_until_due(self) -> float | None: ...

        def read(self) -> Iterator[tuple[str, str]]: ...

        def close(self) -> None: ...


MAX_WATCHES = 32
"""Maximum total number of streams and watchers."""
MAX_PENDING_BYTES = 2 << 20
"""Maximum size of the events that a watcher keeps until its client fetches them."""
EXPIRY_SECONDS = 1800.0
"""How long a watcher is kept if no client polls it."""
NETWORK_FILE_SYSTEM_MAGIC_NUMBERS = {0x6969, 0x517B, 0xFF534D42, 0xFE534D42}
"""The magic numbers of NFS, SMB, CIFS and SMB2. FUSE is omitted, because inotify reports its local changes."""
_PIECE_SIZE = 64 << 10
_KEEPALIVE_FRAME = encode_frame(b'{"keepalive":{}}')


class Watch:
    """A watch on a directory, with the options from a request."""

    def __init__(self, request: Request, message: dict[str, Any]) -> None:
        """Start watching: ``{path, recursive?, includeEntry?, allowNetworkMounts?}``."""
        self._path = users.find_request_user(request).resolve_path(get_text(message, "path"))
        self._recursive = message.get("recursive") is True
        self._include_entry = message.get("includeEntry") is True
        os.stat(self._path)
        if not os.path.isdir(self._path):
            raise invalid_argument(f"{self._path} is not a directory")
        self._uses_inotify = inotify.IS_AVAILABLE and not _is_on_network(self._path)
        if inotify.IS_AVAILABLE and not self._uses_inotify and message.get("allowNetworkMounts") is not True:
            raise invalid_argument(
                f"{self._path} is on a network file system, where changes are detected late or never: "
                "set allowNetworkMounts to watch it anyway"
            )
        self._source = self._open()

    def _open(self) -> Source:
        if self._uses_inotify:
            try:
                return inotify.TreeWatch(self._path, recursive=self._recursive)
            except Failure as failure:
                if failure.code != "unimplemented":
                    raise
        return scan.TreeWatch(self._path, recursive=self._recursive)

    def reopen(self) -> None:
        """Restart the watch from the current state."""
        self._source.close()
        self._source = self._open()

    def close(self) -> None:
        self._source.close()

    @property
    def has_ended(self) -> bool:
        return self._source.has_ended

    def wait(self, seconds: float, other_fd: int, events: int) -> tuple[bool, bool]:
        """Wait for changes, for at most ``seconds`` or until the descriptor ``other_fd`` is ready for ``events``.

        Returns whether there may be changes to read, and whether ``other_fd`` is ready.
        """
        poll = select.poll()
        poll.register(other_fd, events)
        delay = self._source.seconds_until_due()
        if delay is None:
            poll.register(self._source.fd, select.POLLIN)
        else:
            seconds = min(seconds, delay)
        ready_fds = {fd for fd, _ in poll.poll(max(0.0, seconds) * 1000 + 1)}
        return self._source.fd in ready_fds or self._source.seconds_until_due() == 0, other_fd in ready_fds

    def read(self) -> Iterator[bytes]:
        """Yield events as JSON in the format of envd, without consecutive duplicates."""
        previous_data = b""
        for kind, name in self._source.read():
            event: dict[str, Any] = {"name": make_displayable(name), "type": f"EVENT_TYPE_{kind}"}
            if self._include_entry:
                try:
                    event["entry"] = entries.describe_entry(os.path.normpath(os.path.join(self._path, name)))
                except OSError:
                    pass
            data = json.dumps(event, separators=(",", ":")).encode()
            if data != previous_data:
                yield data
            previous_data = data


def _is_on_network(path: str) -> bool:
    # The first member of struct statfs is the type; the buffer is larger than the struct.
    buffer = ctypes.create_string_buffer(1024)
    if ctypes.CDLL(None, use_errno=True).statfs(os.fsencode(path), buffer) != 0:
        raise OSError(ctypes.get_errno(), os.strerror(ctypes.get_errno()), path)
    return ctypes.c_long.from_buffer(buffer).value & 0xFFFFFFFF in NETWORK_FILE_SYSTEM_MAGIC_NUMBERS


class Watcher:
    """A watch that keeps its events until a client fetches them."""

    def __init__(self, watch: Watch) -> None:
        self._watch = watch
        self._lock = threading.Lock()
        self._events: list[bytes] = []
        self._size = 0
        self._has_lost_events = False
        self._failure: Failure | None = None
        self._polled_at = time.monotonic()
        try:
            self._stop_reader, self._stop_writer = os.pipe()
        except OSError:
            watch.close()
            raise

    def run(self) -> None:
        """Collect events until the watcher is stopped or no client has polled it for ``EXPIRY_SECONDS``."""
        try:
            while True:
                remaining_seconds = EXPIRY_SECONDS - (time.monotonic() - self._polled_at)
                if remaining_seconds <= 0:
                    return
                if self._failure or self._watch.has_ended:
                    self._watch.close()
                    has_changes, is_stopped = False, _is_readable(self._stop_reader, remaining_seconds)
                else:
                    has_changes, is_stopped = self._watch.wait(remaining_seconds, self._stop_reader, select.POLLIN)
                if is_stopped:
                    return
                if has_changes:
                    self._collect_events()
        finally:
            self._watch.close()
            os.close(self._stop_reader)

    def _collect_events(self) -> None:
        try:
            for event in self._watch.read():
                self._append_event(event)
        except Failure as failure:
            self._handle_failure(failure)
        except Exception as error:
            self._handle_failure(Failure("internal", f"watching failed: {error}"))

    def _handle_failure(self, failure: Failure) -> None:
        """Restart the watch if events were lost. Keep any other failure for the client."""
        try:
            if failure.code == "data_loss":
                self._watch.reopen()
                with self._lock:
                    self._drop_events()
                return
        except (Failure, OSError) as error:
            failure = error if isinstance(error, Failure) else Failure("not_found", f"watching failed: {error}")
        with self._lock:
            self._failure = failure

    def _append_event(self, event: bytes) -> None:
        with self._lock:
            if self._size + len(event) > MAX_PENDING_BYTES:
                self._drop_events()
            if not self._has_lost_events:
                self._events.append(event)
                self._size += len(event)

    def _drop_events(self) -> None:
        self._has_lost_events = True
        self._events = []
        self._size = 0

    def take(self) -> list[bytes]:
        """Return the events since the previous call. Raises Failure once if events were lost."""
        with self._lock:
            self._polled_at = time.monotonic()
            if self._has_lost_events:
                self._has_lost_events = False
                raise Failure(
                    "data_loss",
                    "too many changes happened since the last call, and their events were lost: list the directory "
                    "again; later changes will be reported",
                )
            events, self._events, self._size = self._events, [], 0
            if not events and self._failure:
                raise self._failure
            return events

    def stop(self) -> None:
        """Make ``run`` return. Call this method only once."""
        os.close(self._stop_writer)


class Watchers:
    """All streams and watchers of the agent."""

    def __init__(self) -> None:
        self._slots = threading.BoundedSemaphore(MAX_WATCHES)
        self._lock = threading.Lock()
        self._watchers: dict[str, Watcher] = {}

    def _reserve_slot(self) -> None:
        if not self._slots.acquire(blocking=False):
            raise Failure(
                "resource_exhausted",
                f"there are already {MAX_WATCHES} watches: stop one first",
            )

    def watch_dir(self, request: Request, stream: Stream) -> None:
        """Stream the changes in a directory until it is removed.

        ``{path, recursive?, includeEntry?, allowNetworkMounts?}`` → start, events, keepalives. The stream ends without
        an error when the directory is removed, and with an error at the deadline or if events are lost.
        """
        message = stream.receive_single()
        self._reserve_slot()
        try:
            watch = Watch(request, message)
            try:
                stream.send(encode_frame(b'{"start":{}}'))
                self._forward_events(watch, stream)
            finally:
                watch.close()
        finally:
            self._slots.release()

    def _forward_events(self, watch: Watch, stream: Stream) -> None:
        next_keepalive_at = time.monotonic() + stream.keepalive
        while not watch.has_ended:
            now = time.monotonic()
            if stream.deadline is not None and now >= stream.deadline:
                raise Failure("deadline_exceeded", "the request's deadline has passed")
            if now >= next_keepalive_at:
                stream.send(_KEEPALIVE_FRAME)
                next_keepalive_at = now + stream.keepalive
            wake_at = next_keepalive_at if stream.deadline is None else min(next_keepalive_at, stream.deadline)
            has_changes, is_client_gone = watch.wait(wake_at - now, stream.fileno(), Stream.HANGUP_EVENT)
            if is_client_gone:
                stream.abandon()
            if has_changes and _send_events(watch, stream):
                next_keepalive_at = time.monotonic() + stream.keepalive
        stream.end()

    def create_watcher(self, request: Request, message: dict[str, Any]) -> dict[str, Any]:
        """Create a watcher: ``{path, recursive?, includeEntry?, allowNetworkMounts?}`` → ``{watcherId}``."""
        self._reserve_slot()
        try:
            watcher = Watcher(Watch(request, message))
        except BaseException:
            self._slots.release()
            raise
        watcher_id = "w" + os.urandom(8).hex()
        with self._lock:
            self._watchers[watcher_id] = watcher
        try:
            threading.Thread(target=self._run, args=(watcher_id, watcher), daemon=True).start()
        except RuntimeError:
            # Clean up as if a client had removed the watcher.
            self.remove_watcher(request, {"watcherId": watcher_id})
            self._run(watcher_id, watcher)
            raise Failure("resource_exhausted", "the agent cannot start another thread: try again later") from None
        return {"watcherId": watcher_id}

    def _run(self, watcher_id: str, watcher: Watcher) -> None:
        try:
            watcher.run()
        finally:
            with self._lock:
                # Otherwise the request that removed the watcher stops it.
                if self._watchers.pop(watcher_id, None):
                    watcher.stop()
            self._slots.release()

    def get_watcher_events(self, request: Request, message: dict[str, Any]) -> bytes:
        """Return the events since the previous call: ``{watcherId}`` → ``{events}``."""
        watcher_id = get_text(message, "watcherId")
        with self._lock:
            watcher = self._watchers.get(watcher_id)
        if watcher is None:
            raise _make_not_found_error(watcher_id)
        return b'{"events":[%s]}' % b",".join(watcher.take())

    def remove_watcher(self, request: Request, message: dict[str, Any]) -> dict[str, Any]:
        """Remove a watcher: ``{watcherId}`` → ``{}``."""
        watcher_id = get_text(message, "watcherId")
        with self._lock:
            watcher = self._watchers.pop(watcher_id, None)
        if watcher is None:
            raise _make_not_found_error(watcher_id)
        watcher.stop()
        return {}


WATCHERS = Watchers()


def _send_events(watch: Watch, stream: Stream) -> bool:
    """Send the pending events, including those that precede a failure. Returns whether there were any."""
    frames: list[bytes] = []
    size = 0
    has_sent = False
    try:
        for event in watch.read():
            frames.append(encode_frame(b'{"filesystem":%s}' % event))
            size += len(event)
            if size > _PIECE_SIZE:
                stream.send(b"".join(frames))
                frames, size, has_sent = [], 0, True
    finally:
        if frames:
            stream.send(b"".join(frames))
    return has_sent or size > 0


def _is_readable(fd: int, seconds: float) -> bool:
    poll = select.poll()
    poll.register(fd, select.POLLIN)
    return bool(poll.poll(seconds * 1000 + 1))


def _make_not_found_error(watcher_id: str) -> Failure:
    minutes = EXPIRY_SECONDS / 60
    return Failure(
        "not_found",
        f"watcher {watcher_id!r} not found: it was removed, or no client polled it for {minutes:.0f} minutes",
    )
