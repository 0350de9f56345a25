"""Parse multipart/form-data as it arrives.

The standard library offers no alternative: ``email`` holds the whole body in memory, and newer Python versions lack
``cgi``.
"""

from __future__ import annotations

from sandbox_agent.failure import invalid_argument

TYPE_CHECKING = False
if TYPE_CHECKING:
    from collections.abc import Iterator
    from typing import Protocol

    class Source(Protocol):
        def read(self) -> bytes:
            """Return the next bytes; b"" at the end."""


_MAX_HEAD_BYTES = 16 << 10


def parse_boundary(content_type: str) -> bytes:
    value = parse_parameters(content_type).get("boundary", "")
    if not 1 <= len(value) <= 200:
        raise invalid_argument(
            "the Content-Type multipart/form-data requires a boundary parameter of 1 to 200 characters"
        )
    return value.encode("latin-1")


class Parts:
    """The parts of a body. Read all ``pieces`` of a part before you request the next part."""

    def __init__(self, source: Source, boundary: bytes) -> None:
        self._source = source
        self._delimiter = b"\r\n--" + boundary
        # Pretend that a line ended before the first boundary, so that all boundaries look the same.
        self._buffer = b"\r\n"

    def __iter__(self) -> Iterator[Part]:
        for _ in self.pieces():
            pass  # skip the preamble
        while True:
            suffix = self._take(2)
            if suffix == b"--":
                return
            if suffix != b"\r\n":
                raise invalid_argument("the multipart body is malformed: a boundary must be followed by CRLF or --")
            yield Part(self, self._read_head())

    def _read_more(self) -> None:
        data = self._source.read()
        if not data:
            raise invalid_argument("the multipart body ends before its last boundary: send the complete body")
        self._buffer += data

    def _take(self, size: int) -> bytes:
        while len(self._buffer) < size:
            self._read_more()
        data, self._buffer = self._buffer[:size], self._buffer[size:]
        return data

    def _read_head(self) -> bytes:
        """Return the header lines of a part, without the blank line at their end."""
        data = b"\r\n" + self._buffer
        while b"\r\n\r\n" not in data:
            if len(data) > _MAX_HEAD_BYTES:
                raise invalid_argument(f"the headers of a part are longer than {_MAX_HEAD_BYTES} bytes: shorten them")
            self._read_more()
            data = b"\r\n" + self._buffer
        head, _, self._buffer = data.partition(b"\r\n\r\n")
        return head

    def pieces(self) -> Iterator[bytes]:
        """Yield the bytes up to the next boundary."""
        while True:
            end = self._buffer.find(self._delimiter)
            if end >= 0:
                data, self._buffer = self._buffer[:end], self._buffer[end + len(self._delimiter) :]
                if data:
                    yield data
                return
            safe_size = len(self._buffer) - len(self._delimiter) + 1
            if safe_size > 0:
                data, self._buffer = self._buffer[:safe_size], self._buffer[safe_size:]
                yield data
            self._read_more()


class Part:
    """A part, with the ``name`` and the ``filename`` from its Content-Disposition header; "" if absent."""

    def __init__(self, parts: Parts, head: bytes) -> None:
        self._parts = parts
        self.name = self.filename = ""
        for line in head.decode("utf-8", "surrogateescape").split("\r\n"):
            key, _, value = line.partition(":")
            if key.strip().lower() == "content-disposition":
                params = parse_parameters(value)
                self.name = params.get("name", "")
                self.filename = params.get("filename", "")

    def pieces(self) -> Iterator[bytes]:
        return self._parts.pieces()


def parse_parameters(value: str) -> dict[str, str]:
    """Parse the parameters of a header value such as ``x; name="a"; filename=b``."""
    params = {}
    rest = value.partition(";")[2]
    while rest:
        key, separator, rest = rest.partition("=")
        if not separator:
            break
        rest = rest.lstrip()
        if rest.startswith('"'):
            text, rest = _unquote(rest[1:])
            rest = rest.partition(";")[2]
        else:
            text, _, rest = rest.partition(";")
            text = text.strip()
        params[key.strip().lower()] = text
    return params


def _unquote(text: str) -> tuple[str, str]:
    """Return the contents of a quoted string, and the rest of the text. Clients encode quotes as ``%22``."""
    characters = []
    index = 0
    while index < len(text) and text[index] != '"':
        if text[index] == "\\" and text[index + 1 : index + 2] in ("\\", '"'):
            index += 1
        characters.append(text[index])
        index += 1
    return "".join(characters).replace("%22", '"').replace("%0D", "\r").replace("%0A", "\n"), text[index + 1 :]
