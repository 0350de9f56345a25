"""``/files``: stream downloads and uploads of files."""

from __future__ import annotations

import errno
import os
import stat

from sandbox_agent.failure import Failure, from_os_error, invalid_argument
from sandbox_agent.files.entries import normalize_metadata, read_metadata, write_metadata
from sandbox_agent.http import multipart
from sandbox_agent.http.message import make_displayable
from sandbox_agent.http.server import Route
from sandbox_agent.http.wire import PIECE_SIZE
from sandbox_agent.machine import users

TYPE_CHECKING = False
if TYPE_CHECKING:
    from collections.abc import Iterator
    from typing import IO, Any

    from sandbox_agent.http.wire import Body, Reply, Request


_METADATA_HEADER_PREFIX = "x-metadata-"


def build_routes() -> dict[str, list[Route]]:
    return {"/files": [Route(download, method="GET"), Route(upload)]}


def download(request: Request, reply: Reply) -> None:
    """Send the contents of a file.

    ``?path&username`` → the file's bytes, compressed if ``Accept-Encoding`` is exactly ``gzip``. Most clients accept
    gzip among other encodings by default. Compressing for them would cost more than it saves.
    """
    query = request.query()
    path = _find_request_user(request, query).resolve_path(query.get("path", ""))
    should_compress = request.headers.get("accept-encoding", "").strip().lower() == "gzip"
    with open(_open_regular_file(path), "rb", buffering=0) as file:
        file_stat = os.fstat(file.fileno())
        content_type = b"application/octet-stream"
        if should_compress:
            reply.begin(content_type, extra_headers=b"Content-Encoding: gzip\r\n")
            _send_compressed(file, reply)
        elif file_stat.st_size:
            reply.begin(content_type, length=file_stat.st_size)
            sent_byte_count = reply.connection.sock.sendfile(file, count=file_stat.st_size)
            # If the file has shrunk in the meantime, close the connection: fewer bytes were sent than announced.
            reply.is_complete = sent_byte_count == file_stat.st_size
        else:
            # Files in /proc and /sys have contents, but their size is 0.
            reply.begin(content_type)
            piece = file.read(PIECE_SIZE)
            while piece:
                reply.write(piece)
                piece = file.read(PIECE_SIZE)
            reply.end()


def _send_compressed(file: IO[bytes], reply: Reply) -> None:
    import zlib

    compressor = zlib.compressobj(1, wbits=31)
    piece = file.read(PIECE_SIZE)
    while piece:
        reply.write(compressor.compress(piece))
        piece = file.read(PIECE_SIZE)
    reply.end(compressor.flush())


def _open_regular_file(path: str) -> int:
    fd = -1
    try:
        # O_NONBLOCK: opening a pipe would wait for a writer.
        fd = os.open(path, os.O_RDONLY | os.O_NONBLOCK)
        mode = os.fstat(fd).st_mode
        if not stat.S_ISREG(mode):
            raise invalid_argument(f"{path} is {'a directory' if stat.S_ISDIR(mode) else 'not a regular file'}")
    except OSError as error:
        raise from_os_error(error, path) from None
    except Failure:
        os.close(fd)
        raise
    return fd


def upload(request: Request, reply: Reply) -> None:
    """Write the uploaded files.

    ``?path&username``, with raw bytes or multipart files as the body → ``[{path, name, type, metadata?}]``. Without
    ``path``, the path of each multipart file is its filename. ``X-Metadata-KEY`` headers set the metadata of all files.
    """
    query = request.query()
    user = _find_request_user(request, query)
    metadata_headers = {
        name[len(_METADATA_HEADER_PREFIX) :]: value
        for name, value in request.headers.items()
        if name.startswith(_METADATA_HEADER_PREFIX)
    }
    metadata = normalize_metadata(metadata_headers)
    content_type = request.headers.get("content-type", "")
    source: multipart.Source = request.body
    encoding = request.headers.get("content-encoding", "identity").lower()
    if encoding == "gzip":
        source = _GzipReader(request.body)
    elif encoding != "identity":
        raise Failure("unimplemented", f"Content-Encoding {encoding!r} is not supported: use gzip or identity", 415)
    if content_type.lower().startswith("multipart/form-data"):
        parts = multipart.Parts(source, multipart.parse_boundary(content_type))
        entries = _store_parts(user, query.get("path", ""), parts, metadata)
    else:
        if not query.get("path"):
            raise invalid_argument("the parameter 'path' is missing: set it to the path of the file")
        entries = [_store_file(user, user.resolve_path(query["path"]), iter(source.read, b""), metadata)]
    # Read the rest of the body after the last boundary.
    request.body.read_all(PIECE_SIZE)
    reply.json(entries)


def _store_parts(user: users.User, path: str, parts: multipart.Parts, metadata: dict[str, str]) -> list[dict[str, Any]]:
    entries: list[dict[str, Any]] = []
    for part in parts:
        if part.name != "file":
            for _ in part.pieces():
                pass
            continue
        if path and entries:
            raise invalid_argument(
                "the request has several files but only one path: remove the parameter 'path', and set "
                "the filename of each file"
            )
        target = path or part.filename
        if not target:
            raise invalid_argument("the file has no filename: set its filename or the parameter 'path'")
        entries.append(_store_file(user, user.resolve_path(target), part.pieces(), metadata))
    if not entries:
        raise invalid_argument("the request has no part named 'file': send each file in a part with that name")
    return entries


def _store_file(user: users.User, path: str, pieces: Iterator[bytes], metadata: dict[str, str]) -> dict[str, Any]:
    """Write a file, and create missing directories. An existing file keeps its mode but not its metadata."""
    try:
        user.make_dirs(os.path.dirname(path))
        # O_NONBLOCK: opening a pipe would wait for a reader.
        fd = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_NONBLOCK, 0o666)
        with open(fd, "wb", buffering=0) as file:
            file_stat = os.fstat(fd)
            if not stat.S_ISREG(file_stat.st_mode):
                raise _make_not_regular_file_error(path)
            user.take_ownership(fd)
            write_metadata(fd, path, metadata)
            if file_stat.st_size:
                os.ftruncate(fd, 0)
            for piece in pieces:
                view = memoryview(piece)
                while view:
                    view = view[file.write(view) :]
            metadata = read_metadata(fd)
    except OSError as error:
        # ENXIO: a socket, or a pipe without a reader.
        if error.errno in (errno.EISDIR, errno.ENXIO):
            raise _make_not_regular_file_error(path) from None
        raise from_os_error(error, path) from None
    entry: dict[str, Any] = {
        "path": make_displayable(path),
        "name": make_displayable(os.path.basename(path)),
        "type": "file",
    }
    if metadata:
        entry["metadata"] = metadata
    return entry


def _make_not_regular_file_error(path: str) -> Failure:
    return invalid_argument(f"{path} exists and is not a regular file")


def _find_request_user(request: Request, query: dict[str, str]) -> users.User:
    name = query.get("username", "")
    return users.find_user(name) if name else users.find_request_user(request)


class _GzipReader:
    """A reader that decompresses a gzip body as it arrives."""

    def __init__(self, body: Body) -> None:
        import zlib

        self._zlib_error = zlib.error
        self._body = body
        self._decompressor = zlib.decompressobj(31)

    def read(self) -> bytes:
        while True:
            compressed_data = self._decompressor.unconsumed_tail or self._body.read()
            try:
                data = (
                    self._decompressor.decompress(compressed_data, 4 * PIECE_SIZE)
                    if compressed_data
                    else self._decompressor.flush()
                )
            except self._zlib_error as error:
                raise invalid_argument(
                    f"the body is not valid gzip data ({error}): send gzip data, or omit Content-Encoding"
                ) from None
            if data or not compressed_data:
                if not compressed_data and not self._decompressor.eof:
                    raise invalid_argument("the gzip data in the body is truncated: send the complete data")
                return data
