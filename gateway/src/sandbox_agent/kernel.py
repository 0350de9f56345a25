"""The program of a Python context: runs cells in one namespace until its agent hangs up.

It runs on the sandbox's Python with all that is installed there, and keeps out of the user's way: no module of the
agent's is in its path, ``random`` is not loaded (siblings of one snapshot would share its state), and nothing of it
depends on who the sandbox is.

Standard input is the channel to the agent, moved elsewhere at once. The agent sends frames of 32 bits of length and
JSON, one for each cell: ``{code, count, changes, env, plain, sent, interrupts}``, where ``sent`` is on the monotonic
clock and ``interrupts`` the number of SIGINTs until then. An empty frame says that the last event has been passed on.
The kernel sends frames of a letter, 32 bits of length and content:

    E   a line of the answer
    S   the same, from the middle of a cell: waits for the empty frame, by which prints and results keep their order
    D   the cell is done; the content is its count

What the cell prints goes through standard output and error as with any program.

Rich results follow Jupyter's display protocol (``_repr_html_`` and so on); open matplotlib figures are shown at the end
of a cell. There are no IPython magics, no ``_ipython_display_``, and no ``chart`` or ``data`` taken from figures.
"""

from __future__ import annotations
import __future__ as futures

import _thread
import ast
import binascii
import builtins
import json
import linecache
import os
import signal
import sys
import time
import traceback
import warnings

from sandbox_agent.kernel_protocol import DONE, EVENT, FIELDS, HEAD, MOST, SIZE, SYNC

TYPE_CHECKING = False
if TYPE_CHECKING:
    from types import CodeType, FrameType, TracebackType
    from typing import Any

_MOST_TEXT = 1 << 20
"""Characters of an error's text, and of its traceback."""
_CELLS = 1000
"""Cells whose source is kept for tracebacks."""
_LATE = 100
"""Milliseconds that an interrupt may take; where it takes longer, the user has taken the signal for himself."""
_PIECE = 64 << 10
_COROUTINE = 0x80
_FEATURES = 0
for _name in futures.all_feature_names:
    _FEATURES |= getattr(futures, _name).compiler_flag

_encode = json.JSONEncoder(separators=(",", ":")).encode
_METHODS = {mime: f"_repr_{field}_" for mime, field in FIELDS.items() if field != "text"}


class Kernel:
    def __init__(self, channel: int, namespace: dict[str, Any]) -> None:
        self._fd = channel
        self._ahead = bytearray()
        self._namespace = namespace
        self._features = 0
        self._loop: Any = None
        self._lock = _thread.allocate_lock()
        self._main = _thread.get_ident()
        self._running = False
        self._forked = False
        # An interrupt ends the user's code where that runs, or is about to, and nothing of ours.
        self._armed = False
        self._heard = 0
        self._heard_at = 0.0
        self._strange = 0
        self._talking = False
        self._interrupted = False

    def serve(self) -> None:
        """Run cells until the agent hangs up."""
        while True:
            frame = self._receive()
            if frame is None:
                return
            if frame:
                self._cell(json.loads(frame))

    # -- a cell ------------------------------------------------------------------------------------------------------

    def _cell(self, request: dict[str, Any]) -> None:
        lines: list[bytes] = []
        before = {name: os.environ.get(name) for name in request["env"]}
        self._interrupted = False
        self._running = True
        try:
            try:
                for name, value in [*request["changes"].items(), *request["env"].items()]:
                    _set_variable(name, value)
                self._await_interrupts(request["interrupts"])
                self._armed = True
                if self._heard - self._strange > request["interrupts"] and self._heard_at >= request["sent"]:
                    raise KeyboardInterrupt
                self._strange = self._heard - request["interrupts"]
                self._run(request, lines)
            finally:
                self._armed = False
        except BaseException as error:
            self._armed = False  # an interrupt may have come just before it was said above
            lines.append(_line(_description(error)))
        if self._forked:
            _leave(lines)
        for name, value in before.items():
            _set_variable(name, value)
        with self._lock:
            self._running = False
            try:
                self._send(*[(EVENT, line) for line in lines], (DONE, b"%d" % request["count"]))
            except OSError:
                sys.exit(0)

    def _await_interrupts(self, sent: int) -> None:
        """The agent has interrupted cells before this one so often: what has not arrived yet is not for this one."""
        for _ in range(_LATE):
            if self._heard - self._strange >= sent:
                return
            time.sleep(0.001)

    def _run(self, request: dict[str, Any], lines: list[bytes]) -> None:
        try:
            value = self._evaluate(request["code"], request["count"])
            if value is not None:
                fields = {"text": repr(value)} if request["plain"] else bundle(value)
                lines.append(_line({"type": "result", **fields, "is_main_result": True}))
                if _is_figure(value) and "matplotlib.pyplot" in sys.modules:
                    sys.modules["matplotlib.pyplot"].close(value)  # it need not be shown twice
        finally:
            try:
                _show_figures(lines)
            finally:
                _flush()

    def _evaluate(self, source: str, count: int) -> Any:
        """Run the statements; the value of the last, where it is an expression that no semicolon follows."""
        name = f"<cell {count}>"
        linecache.cache[name] = (len(source), None, source.splitlines(True), name)
        linecache.cache.pop(f"<cell {count - _CELLS}>", None)
        flags = ast.PyCF_ALLOW_TOP_LEVEL_AWAIT
        tree: Any = compile(source, name, "exec", flags | self._features | ast.PyCF_ONLY_AST, dont_inherit=True)
        last = None
        if tree.body and isinstance(tree.body[-1], ast.Expr) and not _silenced(source, tree.body[-1]):
            last = ast.Expression(tree.body.pop().value)
        if tree.body:
            code = compile(tree, name, "exec", flags | self._features, dont_inherit=True)
            self._features |= code.co_flags & _FEATURES
            self._execute(code)
        if last is None:
            return None
        return self._execute(compile(last, name, "eval", flags | self._features, dont_inherit=True))

    def _execute(self, code: CodeType) -> Any:
        value = eval(code, self._namespace)
        return self._await(value) if code.co_flags & _COROUTINE else value

    def _await(self, coroutine: Any) -> Any:
        import asyncio

        if self._loop is None or self._loop.is_closed():
            self._loop = asyncio.new_event_loop()
            asyncio.set_event_loop(self._loop)
        task = self._loop.create_task(coroutine)
        try:
            return self._loop.run_until_complete(task)
        except KeyboardInterrupt:
            task.cancel()
            self._loop.run_until_complete(asyncio.gather(task, return_exceptions=True))
            raise

    # -- what the user's code calls ----------------------------------------------------------------------------------

    def display(self, *values: Any, **options: Any) -> None:
        """Show each value in the answer, at this point of the cell. The options of IPython's are ignored."""
        for value in values:
            self._show({"type": "result", **bundle(value), "is_main_result": False})

    def _show(self, event: dict[str, Any]) -> None:
        if self._forked:
            print(event.get("text", ""))
            return
        _flush()
        line = _line(event)
        ours = _thread.get_ident() == self._main
        self._talking = self._talking or ours
        try:
            with self._lock:
                if self._running:
                    self._send((SYNC, line))
                    if self._receive() is None:
                        os._exit(0)
        finally:
            if ours:
                self._talking = False
        if ours and self._interrupted:
            self._interrupted = False
            raise KeyboardInterrupt

    def interrupt(self, number: int, frame: FrameType | None) -> None:
        self._heard += 1
        self._heard_at = time.monotonic()
        if self._armed and self._talking:
            self._interrupted = True
        elif self._armed:
            raise KeyboardInterrupt

    def forked(self) -> None:
        """In a child process: the channel is not its own."""
        self._forked = True
        try:
            os.close(self._fd)
        except OSError:
            pass

    # -- the channel -------------------------------------------------------------------------------------------------

    def _receive(self) -> bytes | None:
        """The next frame; None when the agent hung up."""
        head = self._exactly(SIZE.size)
        return None if head is None else self._exactly(SIZE.unpack(head)[0])

    def _exactly(self, size: int) -> bytes | None:
        while len(self._ahead) < size:
            try:
                piece = os.read(self._fd, max(_PIECE, size - len(self._ahead)))
            except OSError:
                return None
            if not piece:
                return None
            self._ahead += piece
        data = bytes(self._ahead[:size])
        del self._ahead[:size]
        return data

    def _send(self, *frames: tuple[bytes, bytes]) -> None:
        data = memoryview(b"".join([HEAD.pack(kind, len(content)) + content for kind, content in frames]))
        while data:
            data = data[os.write(self._fd, data) :]


def bundle(value: Any) -> dict[str, Any]:
    """What an object looks like, by the display protocol: the fields of a result."""
    found: dict[str, Any] = {}
    kind = type(value)
    if not isinstance(value, type):
        # Of the class: an object may pretend to have any attribute.
        if hasattr(kind, "_repr_mimebundle_"):
            found.update(_asked(value, "_repr_mimebundle_") or {})
        for mime, method in _METHODS.items():
            if mime not in found and hasattr(kind, method):
                found[mime] = _asked(value, method)
        if "image/png" not in found and _is_figure(value):
            found["image/png"] = _png(value)
    if not isinstance(found.get("text/plain"), str):
        found["text/plain"] = repr(value)
    fields: dict[str, Any] = {}
    extra: dict[str, Any] = {}
    for mime, content in found.items():
        shown = _encoded(mime, content)
        if shown is not None:
            (fields if mime in FIELDS else extra)[FIELDS.get(mime, str(mime))] = shown
    if extra:
        fields["extra"] = extra
    return fields


def _asked(value: Any, method: str) -> Any:
    """What a method of the protocol gives; None where it fails: there is always the text."""
    try:
        content = getattr(value, method)()
    except Exception:
        return None
    if isinstance(content, tuple) and len(content) == 2:
        content = content[0]  # the other is metadata
    return content if method != "_repr_mimebundle_" or isinstance(content, dict) else None


def _encoded(mime: Any, content: Any) -> Any:
    if isinstance(content, (bytes, bytearray)):
        return binascii.b2a_base64(content, newline=False).decode()
    if mime in FIELDS and FIELDS[mime] != "json" and content is not None:
        return str(content)
    try:
        json.dumps(content)
    except (TypeError, ValueError, RecursionError):
        return None
    return content


def _is_figure(value: Any) -> bool:
    return hasattr(type(value), "savefig") and type(value).__module__.startswith("matplotlib.")


def _png(figure: Any) -> Any:
    from io import BytesIO

    file = BytesIO()
    try:
        figure.savefig(file, format="png", bbox_inches="tight")
    except Exception:
        return None
    return file.getvalue()


def _show_figures(lines: list[bytes]) -> None:
    pyplot = sys.modules.get("matplotlib.pyplot")
    if pyplot is None:
        return
    for number in pyplot.get_fignums():
        figure = pyplot.figure(number)
        lines.append(_line({"type": "result", **bundle(figure), "is_main_result": False}))
        pyplot.close(figure)


def _line(event: dict[str, Any]) -> bytes:
    line = _encode(event).encode()
    if len(line) > MOST:
        text = f"(a result of {len(line)} bytes was left out: the most is {MOST})"
        event = {"type": event["type"], "text": text, "is_main_result": event["is_main_result"]}
        line = _encode(event).encode()
    return line


def _description(error: BaseException) -> dict[str, Any]:
    """The event of an error; its traceback begins and ends in the user's code."""
    try:
        value = str(error)
    except BaseException:
        value = "(it has no text)"
    try:
        lines = traceback.format_exception(type(error), error, _of_user(error.__traceback__))
    except BaseException:
        lines = [f"{type(error).__name__}: {value}\n"]
    text = "".join(lines)
    return {
        "type": "error",
        "name": type(error).__name__,
        "value": value[:_MOST_TEXT],
        "traceback": text[-_MOST_TEXT:].rstrip("\n"),
    }


def _of_user(trace: TracebackType | None) -> TracebackType | None:
    """The traceback without what is ours at its beginning and its end."""
    ours = _of_user.__code__.co_filename
    frames = []
    while trace is not None:
        frames.append(trace)
        trace = trace.tb_next
    names = [frame.tb_frame.f_code.co_filename for frame in frames]
    first = next((index for index, name in enumerate(names) if name.startswith("<cell ")), None)
    if first is None:
        first = next((index for index, name in enumerate(names) if name != ours), len(names))
    last = max((index for index, name in enumerate(names) if name != ours), default=-1)
    if last < first:
        return None
    frames[last].tb_next = None
    return frames[first]


def _silenced(source: str, node: ast.stmt) -> bool:
    """Whether a semicolon follows: by Jupyter's custom the value is not shown then."""
    line = source.splitlines()[node.end_lineno - 1] if node.end_lineno else ""
    return line.encode(errors="replace")[node.end_col_offset or 0 :].lstrip().startswith(b";")


def _set_variable(name: str, value: str | None) -> None:
    if value is None:
        os.environ.pop(name, None)
    else:
        os.environ[name] = value


def _flush() -> None:
    for stream in (sys.stdout, sys.stderr, sys.__stdout__):
        try:
            stream.flush()  # type: ignore[union-attr]
        except Exception:
            pass  # closed, or the user's own


def _leave(lines: list[bytes]) -> None:
    """End a child process that came to the end of its parent's cell; its error goes where errors of programs go."""
    failed = False
    for line in lines:
        event = json.loads(line)
        if event["type"] == "error":
            failed = event["name"] != "SystemExit"
            print(event["traceback"], file=sys.stderr, flush=True)
    os._exit(1 if failed else 0)


def _input(prompt: object = "") -> str:
    raise RuntimeError("input() is not available: nobody is there to answer; put the value into the code")


def main() -> None:
    channel = os.dup(0)  # not inherited by what the user starts
    nothing = os.open(os.devnull, os.O_RDONLY)
    os.dup2(nothing, 0)
    os.close(nothing)
    for stream in (sys.stdout, sys.stderr):
        stream.reconfigure(encoding="utf-8", errors="backslashreplace", line_buffering=True)  # type: ignore[union-attr]
    if sys.path[:1] == [""]:
        # The directory may be somebody else's: what is there must not stand in for what is installed.
        sys.path.append(sys.path.pop(0))
    sys.argv = [""]
    namespace = sys.modules["__main__"].__dict__
    for name in [name for name in namespace if not name.startswith("__")]:
        del namespace[name]
    kernel = Kernel(channel, namespace)
    signal.signal(signal.SIGINT, kernel.interrupt)
    os.register_at_fork(after_in_child=kernel.forked)
    builtins.display = kernel.display  # type: ignore[attr-defined]
    builtins.input = _input
    # There is no display; what is shown is shown at the end of the cell.
    os.environ.setdefault("MPLBACKEND", "agg")
    warnings.filterwarnings("ignore", message=".* is non-interactive, and thus cannot be shown")
    kernel.serve()
