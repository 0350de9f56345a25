"""``/files``: contents of files, streamed both ways."""

from __future__ import annotations

import errno
import os
import stat

from sandbox_agent import multipart, users
from sandbox_agent.entries import checked_metadata, keep_metadata, metadata, shown
from sandbox_agent.failure import Failure, invalid, of_os_error
from sandbox_agent.server import Route
from sandbox_agent.wire import PIECE

TYPE_CHECKING = False
if TYPE_CHECKING:
    from collections.abc import Iterator
    from typing import IO, Any, Protocol

    from sandbox_agent.wire import Body, Reply, Request

    class Source(Protocol):
        def read(self) -> bytes:
            """Some bytes; b"" at the end."""


_METADATA = "x-metadata-"


def routes() -> dict[str, list[Route]]:
    return {"/files": [Route(download, method="GET"), Route(upload)]}


def download(request: Request, reply: Reply) -> None:
    """``?path&username`` → the file's bytes, packed where ``Accept-Encoding`` is gzip and nothing else.

    Most clients name gzip among others without being asked to: packing would cost more than it saves.
    """
    query = request.query()
    path = _user(request, query).path(query.get("path", ""))
    packed = request.headers.get("accept-encoding", "").strip().lower() == "gzip"
    with open(_open_regular(path), "rb", buffering=0) as file:
        found = os.fstat(file.fileno())
        kind = b"application/octet-stream"
        if packed:
            reply.begin(kind, extra=b"Content-Encoding: gzip\r\n")
            _send_packed(file, reply)
        elif found.st_size:
            reply.begin(kind, length=found.st_size)
            sent = reply.connection.sock.sendfile(file, count=found.st_size)
            # Of a file that shrank meanwhile the promised length cannot be sent: the connection ends instead.
            reply.complete = sent == found.st_size
        else:
            # Files of /proc and /sys have contents but no size.
            reply.begin(kind)
            piece = file.read(PIECE)
            while piece:
                reply.write(piece)
                piece = file.read(PIECE)
            reply.end()


def _send_packed(file: IO[bytes], reply: Reply) -> None:
    import zlib

    packer = zlib.compressobj(1, wbits=31)
    piece = file.read(PIECE)
    while piece:
        reply.write(packer.compress(piece))
        piece = file.read(PIECE)
    reply.end(packer.flush())


def _open_regular(path: str) -> int:
    fd = -1
    try:
        # Not to wait for a writer, where it is a pipe.
        fd = os.open(path, os.O_RDONLY | os.O_NONBLOCK)
        mode = os.fstat(fd).st_mode
        if not stat.S_ISREG(mode):
            raise invalid(f"{path} is {'a directory' if stat.S_ISDIR(mode) else 'not a regular file'}")
    except OSError as error:
        raise of_os_error(error, path) from None
    except Failure:
        os.close(fd)
        raise
    return fd


def upload(request: Request, reply: Reply) -> None:
    """``?path&username`` with the bytes as they are, or as multipart files → ``[{path, name, type, metadata?}]``.

    A multipart file without ``path`` goes to the path that its filename is. Headers ``X-Metadata-KEY`` are what is to
    be kept with each of the files.
    """
    query = request.query()
    user = _user(request, query)
    given = {name[len(_METADATA) :]: value for name, value in request.headers.items() if name.startswith(_METADATA)}
    kept = checked_metadata(given)
    content_type = request.headers.get("content-type", "")
    source: Source = request.body
    encoding = request.headers.get("content-encoding", "identity").lower()
    if encoding == "gzip":
        source = _Gunzip(request.body)
    elif encoding != "identity":
        raise Failure("unimplemented", f"Content-Encoding {encoding!r} is not taken: use gzip or none", 415)
    if content_type.lower().startswith("multipart/form-data"):
        parts = multipart.Parts(source, multipart.boundary(content_type))
        written = _store_parts(user, query.get("path", ""), parts, kept)
    else:
        if not query.get("path"):
            raise invalid("the path parameter is missing")
        written = [_store(user, user.path(query["path"]), iter(source.read, b""), kept)]
    # What may follow the last boundary.
    request.body.read_all(PIECE)
    reply.json(written)


def _store_parts(user: users.User, path: str, parts: multipart.Parts, kept: dict[str, str]) -> list[dict[str, Any]]:
    written: list[dict[str, Any]] = []
    for part in parts:
        if part.name != "file":
            for _ in part.pieces():
                pass
            continue
        if path and written:
            raise invalid("several files but one path parameter: name each by its filename instead")
        target = path or part.filename
        if not target:
            raise invalid("a file without a filename needs the path parameter")
        written.append(_store(user, user.path(target), part.pieces(), kept))
    if not written:
        raise invalid("the request has no part named 'file'")
    return written


def _store(user: users.User, path: str, pieces: Iterator[bytes], kept: dict[str, str]) -> dict[str, Any]:
    """Write the file, making what directories are missing; one that exists keeps its mode, not its metadata."""
    try:
        user.make_dirs(os.path.dirname(path))
        # Not to wait for a reader, where it is a pipe.
        fd = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_NONBLOCK, 0o666)
        with open(fd, "wb", buffering=0) as file:
            found = os.fstat(fd)
            if not stat.S_ISREG(found.st_mode):
                raise _not_regular(path)
            user.own(fd)
            keep_metadata(fd, path, kept)
            if found.st_size:
                os.ftruncate(fd, 0)
            for piece in pieces:
                view = memoryview(piece)
                while view:
                    view = view[file.write(view) :]
            kept = metadata(fd)
    except OSError as error:
        # ENXIO: a pipe without a reader, or a socket.
        if error.errno in (errno.EISDIR, errno.ENXIO):
            raise _not_regular(path) from None
        raise of_os_error(error, path) from None
    about: dict[str, Any] = {"path": shown(path), "name": shown(os.path.basename(path)), "type": "file"}
    if kept:
        about["metadata"] = kept
    return about


def _not_regular(path: str) -> Failure:
    return invalid(f"{path} exists and is not a regular file")


def _user(request: Request, query: dict[str, str]) -> users.User:
    name = query.get("username", "")
    return users.named(name) if name else users.of_request(request)


class _Gunzip:
    """A gzip-compressed body, unpacked as it is read."""

    def __init__(self, body: Body) -> None:
        import zlib

        self._error = zlib.error
        self._body = body
        self._unpacker = zlib.decompressobj(31)

    def read(self) -> bytes:
        while True:
            packed = self._unpacker.unconsumed_tail or self._body.read()
            try:
                data = self._unpacker.decompress(packed, 4 * PIECE) if packed else self._unpacker.flush()
            except self._error as error:
                raise invalid(f"the body is not gzip: {error}") from None
            if data or not packed:
                if not packed and not self._unpacker.eof:
                    raise invalid("the gzip body ends early")
                return data
