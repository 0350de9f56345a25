"""The program that runs the cells of a Python context in one namespace until the agent hangs up.

It runs on the sandbox's Python, with all packages installed there, and does not interfere with the user's code:
the agent's modules are not in its path, it does not import ``random``, whose state forks would share, and it does not
depend on the identity of the sandbox.

Standard input is the channel to the agent; at the start, it is moved to another descriptor. For each cell, the agent
sends a frame of a 32-bit length and JSON: ``{code, count, changes, env, plain, sent, interrupts}``. ``sent`` is a time
on the monotonic clock, and ``interrupts`` is the number of SIGINTs so far. An empty frame acknowledges the last event.
A frame from the kernel consists of a letter, a 32-bit length and the contents:

    E   an event of the response
    S   an event in the middle of a cell; the kernel waits for the empty frame, to keep prints and results in order
    D   the cell has finished; the contents are its count

Printed text goes to standard output and standard error, as with any program.

Rich results follow Jupyter's display protocol (``_repr_html_`` and so on). Open matplotlib figures are displayed at the
end of a cell. IPython magics, ``_ipython_display_``, and the ``chart`` and ``data`` of figures are not supported.
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

from sandbox_agent.interpreter.kernel_protocol import (
    AGENT_FRAME_HEAD,
    DONE,
    EVENT,
    FIELD_BY_MIME_TYPE,
    KERNEL_FRAME_HEAD,
    MAX_EVENT_BYTES,
    SYNC,
)

TYPE_CHECKING = False
if TYPE_CHECKING:
    from types import CodeType, FrameType, TracebackType
    from typing import Any

_MAX_TEXT_LENGTH = 1 << 20
"""Maximum number of characters in the text of an error, and in its traceback."""
_MAX_CACHED_CELLS = 1000
"""Maximum number of cells whose source is kept for tracebacks."""
_INTERRUPT_WAIT_MS = 100
"""Milliseconds to wait for an interrupt. If none arrives, a signal handler of the user must have received it."""
_PIECE_SIZE = 64 << 10
_COROUTINE_FLAG = 0x80
_FEATURE_FLAGS = 0
for _name in futures.all_feature_names:
    _FEATURE_FLAGS |= getattr(futures, _name).compiler_flag

_encode = json.JSONEncoder(separators=(",", ":")).encode
_REPR_METHODS = {mime: f"_repr_{field}_" for mime, field in FIELD_BY_MIME_TYPE.items() if field != "text"}


class Kernel:
    def __init__(self, channel: int, namespace: dict[str, Any]) -> None:
        self._fd = channel
        self._buffer = bytearray()
        self._namespace = namespace
        self._features = 0
        self._loop: Any = None
        self._lock = _thread.allocate_lock()
        self._main_thread = _thread.get_ident()
        self._is_running = False
        self._is_forked_child = False
        # While armed, an interrupt ends the user's code. It must never end the kernel's own code.
        self._is_armed = False
        self._signal_count = 0
        self._signalled_at = 0.0
        self._foreign_signal_count = 0
        self._is_sending = False
        self._was_interrupted = False

    def serve(self) -> None:
        """Run cells until the agent hangs up."""
        while True:
            frame = self._receive()
            if frame is None:
                return
            if frame:
                self._run_cell(json.loads(frame))

    # -- a cell ------------------------------------------------------------------------------------------------------

    def _run_cell(self, request: dict[str, Any]) -> None:
        lines: list[bytes] = []
        previous_env = {name: os.environ.get(name) for name in request["env"]}
        self._was_interrupted = False
        self._is_running = True
        try:
            try:
                for name, value in [*request["changes"].items(), *request["env"].items()]:
                    _set_variable(name, value)
                self._await_interrupts(request["interrupts"])
                self._is_armed = True
                if (
                    self._signal_count - self._foreign_signal_count > request["interrupts"]
                    and self._signalled_at >= request["sent"]
                ):
                    raise KeyboardInterrupt
                self._foreign_signal_count = self._signal_count - request["interrupts"]
                self._run(request, lines)
            finally:
                self._is_armed = False
        except BaseException as error:
            self._is_armed = False  # an interrupt may have arrived before the line above
            lines.append(_encode_event(_describe_error(error)))
        if self._is_forked_child:
            _exit_child(lines)
        for name, value in previous_env.items():
            _set_variable(name, value)
        with self._lock:
            self._is_running = False
            try:
                self._send(*[(EVENT, line) for line in lines], (DONE, b"%d" % request["count"]))
            except OSError:
                sys.exit(0)

    def _await_interrupts(self, count: int) -> None:
        """Wait for all ``count`` interrupts of earlier cells, so that none of them interrupts this cell."""
        for _ in range(_INTERRUPT_WAIT_MS):
            if self._signal_count - self._foreign_signal_count >= count:
                return
            time.sleep(0.001)

    def _run(self, request: dict[str, Any], lines: list[bytes]) -> None:
        try:
            value = self._evaluate(request["code"], request["count"])
            if value is not None:
                fields = {"text": repr(value)} if request["plain"] else describe_value(value)
                lines.append(_encode_event({"type": "result", **fields, "is_main_result": True}))
                if _is_figure(value) and "matplotlib.pyplot" in sys.modules:
                    sys.modules["matplotlib.pyplot"].close(value)  # otherwise it would be shown twice
        finally:
            try:
                _show_figures(lines)
            finally:
                _flush()

    def _evaluate(self, source: str, count: int) -> Any:
        """Run the statements of a cell.

        Returns the value of the last statement if that is an expression without a semicolon, otherwise None.
        """
        file_name = f"<cell {count}>"
        linecache.cache[file_name] = (len(source), None, source.splitlines(True), file_name)
        linecache.cache.pop(f"<cell {count - _MAX_CACHED_CELLS}>", None)
        flags = ast.PyCF_ALLOW_TOP_LEVEL_AWAIT
        tree: Any = compile(source, file_name, "exec", flags | self._features | ast.PyCF_ONLY_AST, dont_inherit=True)
        last_expression = None
        if tree.body and isinstance(tree.body[-1], ast.Expr) and not _ends_with_semicolon(source, tree.body[-1]):
            last_expression = ast.Expression(tree.body.pop().value)
        if tree.body:
            code = compile(tree, file_name, "exec", flags | self._features, dont_inherit=True)
            self._features |= code.co_flags & _FEATURE_FLAGS
            self._execute(code)
        if last_expression is None:
            return None
        return self._execute(compile(last_expression, file_name, "eval", flags | self._features, dont_inherit=True))

    def _execute(self, code: CodeType) -> Any:
        value = eval(code, self._namespace)
        return self._run_coroutine(value) if code.co_flags & _COROUTINE_FLAG else value

    def _run_coroutine(self, coroutine: Any) -> Any:
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

    # -- called by the user's code -----------------------------------------------------------------------------------

    def display(self, *values: Any, **options: Any) -> None:
        """Send each value as a result, at the current position in the output.

        Ignores the options of IPython's ``display``.
        """
        for value in values:
            self._send_result({"type": "result", **describe_value(value), "is_main_result": False})

    def _send_result(self, event: dict[str, Any]) -> None:
        if self._is_forked_child:
            print(event.get("text", ""))
            return
        _flush()
        line = _encode_event(event)
        is_main_thread = _thread.get_ident() == self._main_thread
        self._is_sending = self._is_sending or is_main_thread
        try:
            with self._lock:
                if self._is_running:
                    self._send((SYNC, line))
                    if self._receive() is None:
                        os._exit(0)
        finally:
            if is_main_thread:
                self._is_sending = False
        if is_main_thread and self._was_interrupted:
            self._was_interrupted = False
            raise KeyboardInterrupt

    def handle_interrupt(self, number: int, frame: FrameType | None) -> None:
        self._signal_count += 1
        self._signalled_at = time.monotonic()
        if self._is_armed and self._is_sending:
            self._was_interrupted = True
        elif self._is_armed:
            raise KeyboardInterrupt

    def handle_fork(self) -> None:
        """Close the channel in a forked child process, because it belongs to the parent."""
        self._is_forked_child = True
        try:
            os.close(self._fd)
        except OSError:
            pass

    # -- the channel -------------------------------------------------------------------------------------------------

    def _receive(self) -> bytes | None:
        """Return the contents of the next frame; None if the agent hung up."""
        head = self._receive_exactly(AGENT_FRAME_HEAD.size)
        return None if head is None else self._receive_exactly(AGENT_FRAME_HEAD.unpack(head)[0])

    def _receive_exactly(self, size: int) -> bytes | None:
        while len(self._buffer) < size:
            try:
                piece = os.read(self._fd, max(_PIECE_SIZE, size - len(self._buffer)))
            except OSError:
                return None
            if not piece:
                return None
            self._buffer += piece
        data = bytes(self._buffer[:size])
        del self._buffer[:size]
        return data

    def _send(self, *frames: tuple[bytes, bytes]) -> None:
        data = memoryview(b"".join([KERNEL_FRAME_HEAD.pack(kind, len(content)) + content for kind, content in frames]))
        while data:
            data = data[os.write(self._fd, data) :]


def describe_value(value: Any) -> dict[str, Any]:
    """Return the fields of a result for ``value``, according to Jupyter's display protocol."""
    contents: dict[str, Any] = {}
    value_class = type(value)
    if not isinstance(value, type):
        # Check the class, because an object can pretend to have any attribute.
        if hasattr(value_class, "_repr_mimebundle_"):
            contents.update(_call_repr(value, "_repr_mimebundle_") or {})
        for mime, method in _REPR_METHODS.items():
            if mime not in contents and hasattr(value_class, method):
                contents[mime] = _call_repr(value, method)
        if "image/png" not in contents and _is_figure(value):
            contents["image/png"] = _render_png(value)
    if not isinstance(contents.get("text/plain"), str):
        contents["text/plain"] = repr(value)
    fields: dict[str, Any] = {}
    extra: dict[str, Any] = {}
    for mime, content in contents.items():
        encoded_content = _encode_content(mime, content)
        if encoded_content is not None:
            (fields if mime in FIELD_BY_MIME_TYPE else extra)[FIELD_BY_MIME_TYPE.get(mime, str(mime))] = encoded_content
    if extra:
        fields["extra"] = extra
    return fields


def _call_repr(value: Any, method: str) -> Any:
    """Call a method of Jupyter's display protocol.

    Returns None if the method fails, because the plain text is always available.
    """
    try:
        content = getattr(value, method)()
    except Exception:
        return None
    if isinstance(content, tuple) and len(content) == 2:
        content = content[0]  # the second item is metadata
    return content if method != "_repr_mimebundle_" or isinstance(content, dict) else None


def _encode_content(mime: Any, content: Any) -> Any:
    if isinstance(content, (bytes, bytearray)):
        return binascii.b2a_base64(content, newline=False).decode()
    if mime in FIELD_BY_MIME_TYPE and FIELD_BY_MIME_TYPE[mime] != "json" and content is not None:
        return str(content)
    try:
        json.dumps(content)
    except (TypeError, ValueError, RecursionError):
        return None
    return content


def _is_figure(value: Any) -> bool:
    return hasattr(type(value), "savefig") and type(value).__module__.startswith("matplotlib.")


def _render_png(figure: Any) -> Any:
    from io import BytesIO

    buffer = BytesIO()
    try:
        figure.savefig(buffer, format="png", bbox_inches="tight")
    except Exception:
        return None
    return buffer.getvalue()


def _show_figures(lines: list[bytes]) -> None:
    pyplot = sys.modules.get("matplotlib.pyplot")
    if pyplot is None:
        return
    for number in pyplot.get_fignums():
        figure = pyplot.figure(number)
        lines.append(_encode_event({"type": "result", **describe_value(figure), "is_main_result": False}))
        pyplot.close(figure)


def _encode_event(event: dict[str, Any]) -> bytes:
    line = _encode(event).encode()
    if len(line) > MAX_EVENT_BYTES:
        text = f"(a result of {len(line)} bytes was omitted: the limit is {MAX_EVENT_BYTES} bytes)"
        event = {"type": event["type"], "text": text, "is_main_result": event["is_main_result"]}
        line = _encode(event).encode()
    return line


def _describe_error(error: BaseException) -> dict[str, Any]:
    """Return the event for an error. The traceback begins and ends in the user's code."""
    try:
        value = str(error)
    except BaseException:
        value = "(no text)"
    try:
        lines = traceback.format_exception(type(error), error, _trim_traceback(error.__traceback__))
    except BaseException:
        lines = [f"{type(error).__name__}: {value}\n"]
    text = "".join(lines)
    return {
        "type": "error",
        "name": type(error).__name__,
        "value": value[:_MAX_TEXT_LENGTH],
        "traceback": text[-_MAX_TEXT_LENGTH:].rstrip("\n"),
    }


def _trim_traceback(trace: TracebackType | None) -> TracebackType | None:
    """Remove the kernel's own frames from the beginning and the end of a traceback."""
    own_file_name = _trim_traceback.__code__.co_filename
    entries = []
    while trace is not None:
        entries.append(trace)
        trace = trace.tb_next
    file_names = [entry.tb_frame.f_code.co_filename for entry in entries]
    first_index = next((index for index, file_name in enumerate(file_names) if file_name.startswith("<cell ")), None)
    if first_index is None:
        first_index = next(
            (index for index, file_name in enumerate(file_names) if file_name != own_file_name), len(file_names)
        )
    last_index = max((index for index, file_name in enumerate(file_names) if file_name != own_file_name), default=-1)
    if last_index < first_index:
        return None
    entries[last_index].tb_next = None
    return entries[first_index]


def _ends_with_semicolon(source: str, node: ast.stmt) -> bool:
    """Return whether a semicolon follows ``node``. If so, its value is not shown, as in Jupyter."""
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
            pass  # closed, or replaced by the user


def _exit_child(lines: list[bytes]) -> None:
    """Print the error of a forked child process, if any, to standard error, and exit the child process."""
    has_failed = False
    for line in lines:
        event = json.loads(line)
        if event["type"] == "error":
            has_failed = event["name"] != "SystemExit"
            print(event["traceback"], file=sys.stderr, flush=True)
    os._exit(1 if has_failed else 0)


def _reject_input(prompt: object = "") -> str:
    raise RuntimeError("input() is not available, because nobody can enter a value: put the value into the code")


def main() -> None:
    channel = os.dup(0)  # child processes do not inherit it
    null_fd = os.open(os.devnull, os.O_RDONLY)
    os.dup2(null_fd, 0)
    os.close(null_fd)
    for stream in (sys.stdout, sys.stderr):
        stream.reconfigure(encoding="utf-8", errors="backslashreplace", line_buffering=True)  # type: ignore[union-attr]
    if sys.path[:1] == [""]:
        # Another user may own the directory: its files must not shadow installed modules.
        sys.path.append(sys.path.pop(0))
    sys.argv = [""]
    namespace = sys.modules["__main__"].__dict__
    for name in [name for name in namespace if not name.startswith("__")]:
        del namespace[name]
    kernel = Kernel(channel, namespace)
    signal.signal(signal.SIGINT, kernel.handle_interrupt)
    os.register_at_fork(after_in_child=kernel.handle_fork)
    builtins.display = kernel.display  # type: ignore[attr-defined]
    builtins.input = _reject_input
    # There is no display: figures are shown at the end of the cell.
    os.environ.setdefault("MPLBACKEND", "agg")
    warnings.filterwarnings("ignore", message=".* is non-interactive, and thus cannot be shown")
    kernel.serve()
