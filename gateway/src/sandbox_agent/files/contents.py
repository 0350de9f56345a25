"""``/files``: downloads and uploads of files, streamed."""

from __future__ import annotations

import errno
import os
import stat

from sandbox_agent.failure import Failure, from_os_error, invalid
from sandbox_agent.files.entries import check_metadata, read_metadata, write_metadata
from sandbox_agent.http import multipart
from sandbox_agent.http.message import displayable
from sandbox_agent.http.server import Route
from sandbox_agent.http.wire import PIECE
from sandbox_agent.machine import users

TYPE_CHECKING = False
if TYPE_CHECKING:
    from collections.abc import Iterator
    from typing import IO, Any

    from sandbox_agent.http.wire import Body, Reply, Request


_METADATA = "x-metadata-"


def routes() -> dict[str, list[Route]]:
    return {"/files": [Route(download, method="GET"), Route(upload)]}


def download(request: Request, reply: Reply) -> None:
    """``?path&username`` → the file's bytes, compressed if ``Accept-Encoding`` is exactly ``gzip``.

    Most clients accept gzip among other encodings by default; compressing for them would cost more than it saves.
    """
    query = request.query()
    path = _user_for(request, query).path(query.get("path", ""))
    compress = request.headers.get("accept-encoding", "").strip().lower() == "gzip"
    with open(_open_regular(path), "rb", buffering=0) as file:
        found = os.fstat(file.fileno())
        kind = b"application/octet-stream"
        if compress:
            reply.begin(kind, extra=b"Content-Encoding: gzip\r\n")
            _send_compressed(file, reply)
        elif found.st_size:
            reply.begin(kind, length=found.st_size)
            sent = reply.connection.sock.sendfile(file, count=found.st_size)
            # If the file has shrunk, close the connection: fewer bytes were sent than announced.
            reply.complete = sent == found.st_size
        else:
            # Files in /proc and /sys have content but no size.
            reply.begin(kind)
            piece = file.read(PIECE)
            while piece:
                reply.write(piece)
                piece = file.read(PIECE)
            reply.end()


def _send_compressed(file: IO[bytes], reply: Reply) -> None:
    import zlib

    compressor = zlib.compressobj(1, wbits=31)
    piece = file.read(PIECE)
    while piece:
        reply.write(compressor.compress(piece))
        piece = file.read(PIECE)
    reply.end(compressor.flush())


def _open_regular(path: str) -> int:
    fd = -1
    try:
        # O_NONBLOCK: opening a pipe would wait for a writer.
        fd = os.open(path, os.O_RDONLY | os.O_NONBLOCK)
        mode = os.fstat(fd).st_mode
        if not stat.S_ISREG(mode):
            raise invalid(f"{path} is {'a directory' if stat.S_ISDIR(mode) else 'not a regular file'}")
    except OSError as error:
        raise from_os_error(error, path) from None
    except Failure:
        os.close(fd)
        raise
    return fd


def upload(request: Request, reply: Reply) -> None:
    """``?path&username``, with raw bytes or multipart files → ``[{path, name, type, metadata?}]``.

    Without ``path``, the filename of each multipart file is its path. ``X-Metadata-KEY`` headers set the metadata of
    every file.
    """
    query = request.query()
    user = _user_for(request, query)
    given = {name[len(_METADATA) :]: value for name, value in request.headers.items() if name.startswith(_METADATA)}
    kept = check_metadata(given)
    content_type = request.headers.get("content-type", "")
    source: multipart.Source = request.body
    encoding = request.headers.get("content-encoding", "identity").lower()
    if encoding == "gzip":
        source = _Gunzip(request.body)
    elif encoding != "identity":
        raise Failure("unimplemented", f"Content-Encoding {encoding!r} is not supported: use gzip or none", 415)
    if content_type.lower().startswith("multipart/form-data"):
        parts = multipart.Parts(source, multipart.boundary(content_type))
        written = _store_parts(user, query.get("path", ""), parts, kept)
    else:
        if not query.get("path"):
            raise invalid("the path parameter is missing")
        written = [_store(user, user.path(query["path"]), iter(source.read, b""), kept)]
    # Read the rest of the body after the last boundary.
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
            raise invalid("several files but one path parameter: leave path out, and set each filename")
        target = path or part.filename
        if not target:
            raise invalid("a file without a filename needs the path parameter")
        written.append(_store(user, user.path(target), part.pieces(), kept))
    if not written:
        raise invalid("the request has no part named 'file'")
    return written


def _store(user: users.User, path: str, pieces: Iterator[bytes], kept: dict[str, str]) -> dict[str, Any]:
    """Write a file and create missing directories. An existing file keeps its mode, but not its metadata."""
    try:
        user.make_dirs(os.path.dirname(path))
        # O_NONBLOCK: opening a pipe would wait for a reader.
        fd = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_NONBLOCK, 0o666)
        with open(fd, "wb", buffering=0) as file:
            found = os.fstat(fd)
            if not stat.S_ISREG(found.st_mode):
                raise _not_regular_error(path)
            user.own(fd)
            write_metadata(fd, path, kept)
            if found.st_size:
                os.ftruncate(fd, 0)
            for piece in pieces:
                view = memoryview(piece)
                while view:
                    view = view[file.write(view) :]
            kept = read_metadata(fd)
    except OSError as error:
        # ENXIO: a socket, or a pipe without a reader.
        if error.errno in (errno.EISDIR, errno.ENXIO):
            raise _not_regular_error(path) from None
        raise from_os_error(error, path) from None
    about: dict[str, Any] = {"path": displayable(path), "name": displayable(os.path.basename(path)), "type": "file"}
    if kept:
        about["metadata"] = kept
    return about


def _not_regular_error(path: str) -> Failure:
    return invalid(f"{path} exists and is not a regular file")


def _user_for(request: Request, query: dict[str, str]) -> users.User:
    name = query.get("username", "")
    return users.find_user(name) if name else users.user_of(request)


class _Gunzip:
    """Decompresses a gzip body while reading it."""

    def __init__(self, body: Body) -> None:
        import zlib

        self._error = zlib.error
        self._body = body
        self._inflate = zlib.decompressobj(31)

    def read(self) -> bytes:
        while True:
            compressed = self._inflate.unconsumed_tail or self._body.read()
            try:
                data = self._inflate.decompress(compressed, 4 * PIECE) if compressed else self._inflate.flush()
            except self._error as error:
                raise invalid(f"the body is not gzip: {error}") from None
            if data or not compressed:
                if not compressed and not self._inflate.eof:
                    raise invalid("the gzip body ends early")
                return data
