"""Parse multipart/form-data piece by piece.

The standard library does not help: ``email`` holds the whole body in memory, and newer versions of Python lack ``cgi``.
"""

from __future__ import annotations

from sandbox_agent.failure import invalid

TYPE_CHECKING = False
if TYPE_CHECKING:
    from collections.abc import Iterator
    from typing import Protocol

    class Source(Protocol):
        def read(self) -> bytes:
            """Read some bytes; b"" at the end."""


_MAX_HEAD = 16 << 10


def boundary(content_type: str) -> bytes:
    value = parameters(content_type).get("boundary", "")
    if not 1 <= len(value) <= 200:
        raise invalid("the Content-Type multipart/form-data has no boundary parameter")
    return value.encode("latin-1")


class Parts:
    """The parts of a body. Read each part to its end (``pieces``) before the next."""

    def __init__(self, source: Source, mark: bytes) -> None:
        self._source = source
        self._mark = b"\r\n--" + mark
        # Pretend that a line ended before the first boundary, so that all boundaries look the same.
        self._ahead = b"\r\n"

    def __iter__(self) -> Iterator[Part]:
        for _ in self.pieces():
            pass  # skip the preamble
        while True:
            end = self._take(2)
            if end == b"--":
                return
            if end != b"\r\n":
                raise invalid("the multipart body is malformed after a boundary")
            yield Part(self, self._head())

    def _read_more(self) -> None:
        data = self._source.read()
        if not data:
            raise invalid("the multipart body ends before its last boundary")
        self._ahead += data

    def _take(self, size: int) -> bytes:
        while len(self._ahead) < size:
            self._read_more()
        data, self._ahead = self._ahead[:size], self._ahead[size:]
        return data

    def _head(self) -> bytes:
        """Read the header lines of a part, without the blank line that ends them."""
        data = b"\r\n" + self._ahead
        while b"\r\n\r\n" not in data:
            if len(data) > _MAX_HEAD:
                raise invalid("the headers of a multipart part are too long")
            self._read_more()
            data = b"\r\n" + self._ahead
        head, _, self._ahead = data.partition(b"\r\n\r\n")
        return head

    def pieces(self) -> Iterator[bytes]:
        """Yield the bytes up to the next boundary."""
        while True:
            end = self._ahead.find(self._mark)
            if end >= 0:
                data, self._ahead = self._ahead[:end], self._ahead[end + len(self._mark) :]
                if data:
                    yield data
                return
            safe = len(self._ahead) - len(self._mark) + 1
            if safe > 0:
                data, self._ahead = self._ahead[:safe], self._ahead[safe:]
                yield data
            self._read_more()


class Part:
    """A part, with the ``name`` and ``filename`` from its Content-Disposition; "" if absent."""

    def __init__(self, parts: Parts, head: bytes) -> None:
        self._parts = parts
        self.name = self.filename = ""
        for line in head.decode("utf-8", "surrogateescape").split("\r\n"):
            key, _, value = line.partition(":")
            if key.strip().lower() == "content-disposition":
                found = parameters(value)
                self.name = found.get("name", "")
                self.filename = found.get("filename", "")

    def pieces(self) -> Iterator[bytes]:
        return self._parts.pieces()


def parameters(value: str) -> dict[str, str]:
    """Parse the parameters of a header value such as ``x; name="a"; filename=b``."""
    found = {}
    rest = value.partition(";")[2]
    while rest:
        key, equals, rest = rest.partition("=")
        if not equals:
            break
        rest = rest.lstrip()
        if rest.startswith('"'):
            text, rest = _unquote(rest[1:])
            rest = rest.partition(";")[2]
        else:
            text, _, rest = rest.partition(";")
            text = text.strip()
        found[key.strip().lower()] = text
    return found


def _unquote(text: str) -> tuple[str, str]:
    """Return the content of a quoted string, and the rest of the text. Clients encode quotes in it as ``%22``."""
    content = []
    index = 0
    while index < len(text) and text[index] != '"':
        if text[index] == "\\" and text[index + 1 : index + 2] in ("\\", '"'):
            index += 1
        content.append(text[index])
        index += 1
    return "".join(content).replace("%22", '"').replace("%0D", "\r").replace("%0A", "\n"), text[index + 1 :]
