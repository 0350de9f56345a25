"""``/files``: contents of files, streamed both ways."""

from __future__ import annotations

import os
import stat

from sandbox_agent import multipart, users
from sandbox_agent.failure import Failure, invalid, of_os_error
from sandbox_agent.server import Route
from sandbox_agent.wire import PIECE

TYPE_CHECKING = False
if TYPE_CHECKING:
    from collections.abc import Iterator
    from typing import Any, Protocol

    from sandbox_agent.wire import Body, Reply, Request

    class Source(Protocol):
        def read(self) -> bytes:
            """Some bytes; b"" at the end."""


def routes() -> dict[str, list[Route]]:
    return {"/files": [Route(download, method="GET"), Route(upload)]}


def download(request: Request, reply: Reply) -> None:
    """``?path&username`` → the file's bytes."""
    query = request.query()
    path = _user(request, query).path(query.get("path", ""))
    with open(_open_regular(path), "rb", buffering=0) as file:
        found = os.fstat(file.fileno())
        kind = b"application/octet-stream"
        if found.st_size:
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
    """``?path&username`` with the bytes as they are, or as multipart files → ``[{path, name, type}]``.

    A multipart file without ``path`` goes to the path that its filename is.
    """
    query = request.query()
    user = _user(request, query)
    content_type = request.headers.get("content-type", "")
    source: Source = request.body
    encoding = request.headers.get("content-encoding", "identity").lower()
    if encoding == "gzip":
        source = _Gunzip(request.body)
    elif encoding != "identity":
        raise Failure("unimplemented", f"Content-Encoding {encoding!r} is not taken: use gzip or none", 415)
    if content_type.lower().startswith("multipart/form-data"):
        written = _store_parts(user, query.get("path", ""), multipart.Parts(source, multipart.boundary(content_type)))
    else:
        if not query.get("path"):
            raise invalid("the path parameter is missing")
        written = [_store(user, user.path(query["path"]), iter(source.read, b""))]
    # What may follow the last boundary.
    request.body.read_all(PIECE)
    reply.json(written)


def _store_parts(user: users.User, path: str, parts: multipart.Parts) -> list[dict[str, Any]]:
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
        written.append(_store(user, user.path(target), part.pieces()))
    if not written:
        raise invalid("the request has no part named 'file'")
    return written


def _store(user: users.User, path: str, pieces: Iterator[bytes]) -> dict[str, Any]:
    """Write the file, making what directories are missing; one that exists keeps its mode."""
    try:
        user.make_dirs(os.path.dirname(path))
        if os.path.exists(path) and not stat.S_ISREG(os.stat(path).st_mode):
            raise invalid(f"{path} exists and is not a regular file")
        fd = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_TRUNC, 0o666)
        with open(fd, "wb", buffering=0) as file:
            user.own(fd)
            for piece in pieces:
                view = memoryview(piece)
                while view:
                    view = view[file.write(view) :]
    except OSError as error:
        raise of_os_error(error, path) from None
    return {"path": path, "name": os.path.basename(path), "type": "file"}


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
