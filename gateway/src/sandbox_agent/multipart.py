"""multipart/form-data, read piece by piece."""

from __future__ import annotations

from sandbox_agent.failure import invalid

TYPE_CHECKING = False
if TYPE_CHECKING:
    from collections.abc import Iterator

    from sandbox_agent.files import Source

_MAX_HEAD = 16 << 10


def boundary(content_type: str) -> bytes:
    value = parameters(content_type).get("boundary", "")
    if not 1 <= len(value) <= 200:
        raise invalid("multipart/form-data without a boundary")
    return value.encode("latin-1")


class Parts:
    """The parts of a body, each to be read to its end (``pieces``) before the next."""

    def __init__(self, source: Source, mark: bytes) -> None:
        self._source = source
        self._mark = b"\r\n--" + mark
        # As if a line had ended before the first boundary: then all of them look alike.
        self._ahead = b"\r\n"

    def __iter__(self) -> Iterator[Part]:
        for _ in self.pieces():
            pass  # a preamble
        while True:
            end = self._take(2)
            if end == b"--":
                return
            if end != b"\r\n":
                raise invalid("the multipart body is malformed after a boundary")
            yield Part(self, self._head())

    def _more(self) -> None:
        data = self._source.read()
        if not data:
            raise invalid("the multipart body ends before its last boundary")
        self._ahead += data

    def _take(self, size: int) -> bytes:
        while len(self._ahead) < size:
            self._more()
        data, self._ahead = self._ahead[:size], self._ahead[size:]
        return data

    def _head(self) -> bytes:
        """The lines of a part's head, without the blank one that ends it."""
        data = b"\r\n" + self._ahead
        while b"\r\n\r\n" not in data:
            if len(data) > _MAX_HEAD:
                raise invalid("the head of a part is too long")
            self._more()
            data = b"\r\n" + self._ahead
        head, _, self._ahead = data.partition(b"\r\n\r\n")
        return head

    def pieces(self) -> Iterator[bytes]:
        """All up to the next boundary."""
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
            self._more()


class Part:
    """``name`` and ``filename`` ("" where it has none) of a part's Content-Disposition."""

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
    """The parameters of a header's value, ``x; name="a"; filename=b``, as browsers and HTTP clients write them."""
    found = {}
    rest = value.partition(";")[2]
    while rest:
        key, equals, rest = rest.partition("=")
        if not equals:
            break
        rest = rest.lstrip()
        if rest.startswith('"'):
            text, rest = _quoted(rest[1:])
            rest = rest.partition(";")[2]
        else:
            text, _, rest = rest.partition(";")
            text = text.strip()
        found[key.strip().lower()] = text
    return found


def _quoted(text: str) -> tuple[str, str]:
    """A quoted string's content and what follows it; ``%22`` is how clients write a quote in a file's name."""
    content = []
    index = 0
    while index < len(text) and text[index] != '"':
        if text[index] == "\\" and text[index + 1 : index + 2] in ("\\", '"'):
            index += 1
        content.append(text[index])
        index += 1
    return "".join(content).replace("%22", '"').replace("%0D", "\r").replace("%0A", "\n"), text[index + 1 :]
