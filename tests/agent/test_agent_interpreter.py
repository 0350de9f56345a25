"""The code interpreter, as the clients ``e2b_code_interpreter`` and ``cubesandbox`` use it."""

from __future__ import annotations

import ast
import base64
import contextlib
import hashlib
import http.client
import json
import os
import signal
import socket
import subprocess
import sys
import textwrap
import threading
import time
from pathlib import Path

import pytest
from cubesandbox._models import Execution as CubeExecution
from cubesandbox._stream import _parse_line
from e2b_code_interpreter.models import Execution, parse_output
from hypothesis import given, settings
from hypothesis import strategies as st


class CodeClient:
    """A client that runs code in an agent. ``execute`` reuses its connection; other calls open a new one."""

    def __init__(self, agent):
        self.agent = agent
        self.persistent_connection = http.client.HTTPConnection("127.0.0.1", agent.code_port, timeout=30)

    def request(self, method, path, body=None, headers=None, connection=None):
        connection = connection or http.client.HTTPConnection("127.0.0.1", self.agent.code_port, timeout=30)
        data = None if body is None else json.dumps(body)
        connection.request(method, path, data, {"Content-Type": "application/json", **(headers or {})})
        return connection.getresponse()

    def execute(self, code, **fields):
        response = self.request("POST", "/execute", {"code": code, **fields}, connection=self.persistent_connection)
        data = response.read()
        assert response.status == 200, data
        return data.decode().splitlines()

    def run(self, code, **fields):
        """Run the code and parse the result as both clients do."""
        execution, cube_execution = Execution(), CubeExecution()
        for line in self.execute(textwrap.dedent(code), **fields):
            parse_output(execution, line)
            _parse_line(cube_execution, line)
        assert [result.text for result in cube_execution.results] == [result.text for result in execution.results]
        assert (cube_execution.logs.stdout, cube_execution.logs.stderr) == (
            execution.logs.stdout,
            execution.logs.stderr,
        )
        assert (cube_execution.error is None) == (execution.error is None)
        assert cube_execution.execution_count == execution.execution_count
        return execution

    def run_for_output(self, code, **fields):
        execution = self.run(code, **fields)
        assert execution.error is None, execution.error
        return "".join(execution.logs.stdout)

    def run_for_events(self, code, **fields):
        """Run the code. Returns its events, except for the execution count, as (type, text or name)."""
        events = [json.loads(line) for line in self.execute(textwrap.dedent(code), **fields)]
        return [(event["type"], event.get("text", event.get("name"))) for event in events[1:]]

    def create_context(self, **fields):
        response = self.request("POST", "/contexts", fields)
        context = json.loads(response.read())
        assert response.status == 200, context
        return context

    def list_contexts(self):
        return json.loads(self.request("GET", "/contexts").read())

    def fetch_error(self, method, path, body=None):
        response = self.request(method, path, body)
        return response.status, json.loads(response.read())["message"]


@pytest.fixture(scope="module")
def code_client(unmanaged_command, running):
    # The agent's "python3" is the Python that runs it.
    path = f"{Path(unmanaged_command[0]).parent}:{os.environ['PATH']}"
    with running(unmanaged_command, env={"PATH": path}) as agent:
        yield CodeClient(agent)


def list_kernel_pids(code_client):
    """Return the ids of the agent's child processes."""
    pids = []
    for stat_file in Path("/proc").glob("[0-9]*/stat"):
        with contextlib.suppress(OSError):
            if stat_file.read_text().rpartition(")")[2].split()[1] == str(code_client.agent.process.pid):
                pids.append(stat_file.parent.name)
    return pids


# -- results ---------------------------------------------------------------------------------------------------------


def test_cells_share_state_and_return_the_last_value(code_client):
    assert code_client.run("x = 1").text is None
    first_execution = code_client.run("x += 1\nx + 40")
    assert (first_execution.text, [result.is_main_result for result in first_execution.results]) == ("42", [True])
    assert code_client.run("x").execution_count == first_execution.execution_count + 1
    assert code_client.run("'a' 'b'").text == "'ab'"
    for source in ("x;", "None", "", "if x: x"):
        assert code_client.run(source).results == []
    assert code_client.run("s = '\\x0c\\u2028é'; s").text == repr("\x0c\u2028é")


def test_prints_and_results_stay_in_order(code_client):
    assert code_client.run_for_events("""
        import os, sys
        print("a")
        display(1)
        os.system("echo b")
        display(2, 3)
        sys.stdout.write("c")
        display(4)
        print("d", file=sys.stderr)
        5
    """) == [
        ("stdout", "a\n"), ("result", "1"), ("stdout", "b\n"), ("result", "2"), ("result", "3"), ("stdout", "c"),
        ("result", "4"), ("stderr", "d\n"), ("result", "5"),
    ]  # fmt: skip


def test_output_is_streamed(code_client):
    response = code_client.request("POST", "/execute", {"code": "import time\nprint(1)\ntime.sleep(30)", "timeout": 20})
    events = [json.loads(response.readline()) for _ in range(2)]
    assert [event["type"] for event in events] == ["number_of_executions", "stdout"]
    assert abs(events[1]["timestamp"] - time.time_ns()) < 10e9
    response.close()


def test_the_response_begins_before_any_output(code_client):
    start_time = time.monotonic()
    response = code_client.request("POST", "/execute", {"code": "import time\ntime.sleep(1)\n1"})
    assert time.monotonic() - start_time < 0.95
    assert b'"text":"1"' in response.read()


def test_rich_results_have_all_formats(code_client):
    execution = code_client.run("""
        class Rich:
            def __repr__(self): return "plain"
            def _repr_html_(self): return "<b>"
            def _repr_markdown_(self): return "*m*", {"meta": 1}
            def _repr_svg_(self): return "<svg/>"
            def _repr_png_(self): return b"\\x89PNG"
            def _repr_jpeg_(self): return "anBlZw=="
            def _repr_pdf_(self): return b"%PDF"
            def _repr_latex_(self): return "$x$"
            def _repr_json_(self): return {"a": [1]}
            def _repr_javascript_(self): return "f()"
        Rich()
    """)
    result = execution.results[0]
    assert (result.text, result.html, result.markdown, result.svg) == ("plain", "<b>", "*m*", "<svg/>")
    assert base64.b64decode(result.png) == b"\x89PNG" and base64.b64decode(result.pdf) == b"%PDF"
    assert (result.jpeg, result.latex, result.javascript) == ("anBlZw==", "$x$", "f()")
    assert result.json == {"a": [1]} and result.extra is None
    assert set(result.formats()) == {
        "text", "html", "markdown", "svg", "png", "jpeg", "pdf", "latex", "json", "javascript"
    }  # fmt: skip


def test_a_mime_bundle_takes_precedence(code_client):
    result = code_client.run("""
        class Both:
            def _repr_mimebundle_(self, include=None, exclude=None):
                return {"text/plain": "t", "text/html": "mine", "application/x-thing": {"a": 1}, "image/gif": b"GIF"}
            def _repr_html_(self): return "other"
        Both()
    """).results[0]
    assert (result.text, result.html) == ("t", "mine")
    assert result.extra == {"application/x-thing": {"a": 1}, "image/gif": base64.b64encode(b"GIF").decode()}


def test_a_failing_rich_representation_falls_back_to_text(code_client):
    execution = code_client.run("""
        class Broken:
            def __repr__(self): return "text"
            def _repr_html_(self): raise ValueError
            def _repr_json_(self): return object()
            def _repr_mimebundle_(self): return 5
        class Pretender:
            def __getattr__(self, name): return lambda: name
            def __repr__(self): return "pretender"
        display(Broken, Pretender())
        Broken()
    """)
    assert execution.error is None
    assert [(result.text, list(result.formats())) for result in execution.results][1:] == [
        ("pretender", ["text"]), ("text", ["text"])
    ]  # fmt: skip
    assert code_client.run("class R:\n  def __repr__(self): raise KeyError(1)\nR()").error.name == "KeyError"


def test_figures_are_shown_at_the_end_of_the_cell(code_client, tmp_path):
    package_directory = tmp_path / "matplotlib"
    package_directory.mkdir()
    (package_directory / "__init__.py").touch()
    (package_directory / "figure.py").write_text(
        "class Figure:\n"
        "    def __init__(self, n): self.n = n\n"
        "    def __repr__(self): return f'<Figure {self.n}>'\n"
        "    def savefig(self, file, format, bbox_inches): file.write(b'%s %d' % (format.encode(), self.n))\n"
    )
    (package_directory / "pyplot.py").write_text(
        "import os\nfrom matplotlib.figure import Figure\nassert os.environ['MPLBACKEND']\nopened = {}\n"
        "def figure(n): return opened.setdefault(n, Figure(n))\n"
        "def get_fignums(): return list(opened)\n"
        "def close(figure): opened.pop(figure.n)\n"
        "def show():\n"
        "    import warnings\n"
        "    warnings.warn('FigureCanvasAgg is non-interactive, and thus cannot be shown')\n"
    )
    context_id = code_client.create_context()["id"]
    execution = code_client.run(
        f"""
        import sys
        sys.path.insert(0, {str(tmp_path)!r})
        import matplotlib.pyplot as plt
        plt.figure(1)
        plt.figure(2)
        plt.show()
        print("end")
        """,
        context_id=context_id,
    )
    assert execution.error is None and execution.logs.stderr == []
    assert [(result.text, base64.b64decode(result.png)) for result in execution.results] == [
        ("<Figure 1>", b"png 1"), ("<Figure 2>", b"png 2")
    ]  # fmt: skip
    later_execution = code_client.run("plt.figure(3)", context_id=context_id)
    assert [(result.text, result.is_main_result) for result in later_execution.results] == [("<Figure 3>", True)]
    assert code_client.run("plt.get_fignums()", context_id=context_id).text == "[]"
    failed_execution = code_client.run("plt.figure(4)\n1/0", context_id=context_id)
    assert failed_execution.error.name == "ZeroDivisionError" and len(failed_execution.results) == 1


def test_await_works_at_the_top_level(code_client):
    assert code_client.run("""
        import asyncio
        async def f(x):
            await asyncio.sleep(0.01)
            return x
        kept = asyncio.get_running_loop().create_task(f(1))
        async with asyncio.Lock():
            await f(2)
        await f(3)
    """).text == "3"  # fmt: skip
    assert code_client.run("await kept").text == "1"
    assert code_client.run("asyncio.run(f(4))").text == "4"
    assert code_client.run("await f(1) / 0").error.name == "ZeroDivisionError"


def test_future_imports_apply_to_user_code_only(code_client):
    context_id = code_client.create_context()["id"]
    source = "def f(x: undefined): ..."
    assert code_client.run(source, context_id=context_id).error.name == "NameError" or sys.version_info >= (3, 14)
    code_client.run("from __future__ import annotations", context_id=context_id)
    assert code_client.run(source + "\nf.__annotations__", context_id=context_id).text == "{'x': 'undefined'}"


@settings(max_examples=25, deadline=None)
@given(text=st.text(), error=st.text())
def test_any_text_arrives_unchanged(code_client, text, error):
    """The clients split lines in different ways, and the pipe may split the text at any byte."""
    execution = code_client.run(
        f"import sys\nsys.stdout.write({text!a})\nsys.stderr.write({error!a})\nraise OSError({text!a})"
    )
    assert "".join(execution.logs.stdout) == text and "".join(execution.logs.stderr) == error
    assert execution.error.value == text


def test_multibyte_characters_are_not_split(code_client):
    assert (
        code_client.run_for_output("""
        import os, time
        for byte in "€𝄞".encode():
            os.write(1, bytes([byte]))
            time.sleep(0.01)
        os.write(1, b"\\xff\\xe2")
    """)
        == "€𝄞\ufffd\ufffd"
    )


# -- errors ----------------------------------------------------------------------------------------------------------


def test_tracebacks_show_only_user_code(code_client):
    code_client.run("def broken(x):\n    return 1 / x  # here")
    error = code_client.run("print('before')\nbroken(0)").error
    assert (error.name, error.value) == ("ZeroDivisionError", "division by zero")
    assert "broken(0)" in error.traceback and "return 1 / x  # here" in error.traceback
    assert "kernel.py" not in error.traceback
    assert error.traceback.startswith("Traceback") and error.traceback.endswith("ZeroDivisionError: division by zero")
    error = code_client.run("x = (1\ny = 2").error
    assert error.name == "SyntaxError" and " = " in error.traceback and "kernel.py" not in error.traceback
    assert code_client.run("class E(Exception):\n  def __str__(self): raise ValueError\nraise E").error.name == "E"
    assert code_client.run("def f(): f()\nf()").error.name == "RecursionError"


def test_input_is_refused_with_a_reason(code_client):
    error = code_client.run("input('name? ')").error
    assert error.name == "RuntimeError" and "input() is not available" in error.value
    assert code_client.run("import sys; sys.stdin.read()").text == "''"


def test_sys_exit_is_an_error_and_the_kernel_survives(code_client):
    code_client.run("kept = 5")
    assert code_client.run("import sys\nsys.exit(3)").error.name == "SystemExit"
    assert code_client.run("kept").text == "5"


@pytest.mark.parametrize(
    ("ending", "description"),
    [
        ("os._exit(7)", "with code 7"),
        ("os.kill(os.getpid(), 11)", "SIGSEGV"),
        ("os.closerange(3, 100); time.sleep(60)", "SIGKILL"),
    ],
)
def test_a_dead_kernel_is_reported_and_replaced(code_client, ending, description):
    code_client.run("gone = 1")
    execution = code_client.run(f"import os, time\nprint('last words')\n{ending}")
    assert execution.logs.stdout == ["last words\n"]
    assert execution.error.name == "KernelDied" and description in execution.error.value
    fresh_execution = code_client.run("'gone' in globals()")
    assert (fresh_execution.text, fresh_execution.execution_count) == ("False", 1)


def test_a_kernel_that_died_between_cells_is_reported(code_client, wait_until):
    pid = int(code_client.run("import os; os.getpid()").text)
    os.kill(pid, signal.SIGKILL)
    assert code_client.run("1").error.name == "KernelDied"
    assert code_client.run("1").text == "1"


def test_a_deleted_working_directory_is_reported(code_client, tmp_path):
    (tmp_path / "d").mkdir()
    context = code_client.create_context(cwd=str(tmp_path / "d"))
    (tmp_path / "d").rmdir()
    status, message = code_client.fetch_error("POST", "/execute", {"code": "1", "context_id": context["id"]})
    assert status == 400 and str(tmp_path / "d") in message


# -- options of a request --------------------------------------------------------------------------------------------


def test_variables_apply_to_a_single_execution(code_client):
    source = "import os; [os.environ.get(n) for n in ('ONE', 'HOME')], os.popen('echo $ONE').read()"
    home = code_client.run("import os; os.environ['HOME']").text
    assert code_client.run(source, env_vars={"ONE": "ü", "HOME": "/h"}).text == "(['ü', '/h'], 'ü\\n')"
    assert code_client.run(source).text == f"([None, {home}], '\\n')"
    assert code_client.run("1/0", env_vars={"ONE": "1"}).error
    assert code_client.run(source).text == f"([None, {home}], '\\n')"
    assert code_client.fetch_error("POST", "/execute", {"code": "1", "env_vars": {"a": 1}})[0] == 400


def test_sandbox_variables_are_read_at_each_execution(code_client):
    set_env = lambda env: code_client.agent.post_ok("/identity", {"env": env})  # noqa: E731
    source = "import os; [os.environ.get(n) for n in 'AB']"
    context_id = code_client.create_context(language="bash")["id"]
    try:
        set_env({"A": "1", "B": "2"})
        assert code_client.run(source).text == "['1', '2']"
        assert code_client.run_for_output("echo $A$B", context_id=context_id) == "12\n"
        set_env({"A": "it's"})
        assert code_client.run(source).text == '["it\'s", None]'
        assert code_client.run_for_output("echo $A$B; sh -c 'echo $A'", context_id=context_id) == "it's\nit's\n"
    finally:
        set_env({})
    assert code_client.run(source).text == "[None, None]"


def test_contexts_are_created_restarted_and_removed(code_client, tmp_path):
    context = code_client.create_context(cwd=str(tmp_path))
    assert context == {"id": context["id"], "language": "python", "cwd": str(tmp_path)}
    assert code_client.run("import os; os.getcwd()", context_id=context["id"]).text == repr(str(tmp_path))
    assert code_client.run("os.chdir('/'); its_own = 1", context_id=context["id"]).error is None
    assert code_client.run("'its_own' in globals()").text == "False"
    assert context in code_client.list_contexts()
    assert code_client.request("POST", f"/contexts/{context['id']}/restart").status == 200
    restarted_execution = code_client.run("import os; os.getcwd(), 'its_own' in globals()", context_id=context["id"])
    assert restarted_execution.text == f"({str(tmp_path)!r}, False)"
    initial_pids = set(list_kernel_pids(code_client))
    assert code_client.request("DELETE", f"/contexts/{context['id']}").status == 204
    assert context not in code_client.list_contexts() and len(initial_pids - set(list_kernel_pids(code_client))) == 1
    for method, path in (("DELETE", ""), ("POST", "/restart"), ("POST", "/start")):
        status, message = code_client.fetch_error(method, f"/contexts/{context['id']}{path}")
        assert status == 404 and f"context {context['id']} not found" in message
    assert code_client.fetch_error("POST", "/execute", {"code": "1", "context_id": context["id"]})[0] == 404


def test_the_default_context_is_created_on_demand(code_client):
    code_client.run("1")
    default_context = next(context for context in code_client.list_contexts() if context["id"] == "default")
    home = "/home/user" if Path("/home/user").is_dir() else str(Path.home())
    assert default_context == {"id": "default", "language": "python", "cwd": home}
    assert code_client.run("1", context_id="default", language="Python").text == "1"
    assert code_client.request("DELETE", "/contexts/default").status == 204
    assert code_client.run("1").execution_count == 1


def test_invalid_requests_are_refused(code_client):
    for body, sentence in (
        ({"code": "1", "language": "r"}, "the language 'r' is not available: use python or bash"),
        ({"code": "1", "context_id": "default", "language": "bash"}, "the context default runs python, not bash"),
        ({}, "the field 'code' must be a string"),
        ({"code": "\0"}, "NUL"),
        ({"code": "1", "timeout": -1}, "'timeout' must be a number"),
        ({"code": "1", "language": "bash", "env_vars": {"a-b": "1"}}, "'a-b' is not a valid shell variable name"),
    ):
        status, message = code_client.fetch_error("POST", "/execute", body)
        assert status == 400 and sentence in message
    assert code_client.fetch_error("POST", "/contexts", {"cwd": "/no/such"}) == (
        400, "the working directory /no/such does not exist: create it first"
    )  # fmt: skip
    assert code_client.fetch_error("POST", "/contexts", {"language": "r"})[0] == 400
    assert code_client.fetch_error("GET", "/execute")[0] == 405
    for path in ("/contexts/", "/contexts/a/b/c"):
        assert code_client.fetch_error("POST", path)[0] == 404


def test_the_number_of_contexts_is_limited(fresh_agent):
    code_client = CodeClient(fresh_agent)
    for _ in range(64):
        code_client.create_context()
    status, message = code_client.fetch_error("POST", "/contexts", {})
    assert status == 429 and "remove one first" in message


def test_the_token_is_required(fresh_agent):
    code_client = CodeClient(fresh_agent)
    assert code_client.request("GET", "/health").status == 200
    fresh_agent.post_ok("/identity", {"accessToken": "secret"})
    for method, path in (("POST", "/execute"), ("GET", "/contexts"), ("POST", "/contexts/default/restart")):
        assert code_client.request(method, path, {"code": "1"}).status == 401
    assert code_client.request("GET", "/health").status == 200
    code_token = hashlib.sha256(b"code secret").hexdigest()
    for token in ("secret", code_token):
        assert code_client.request("POST", "/execute", {"code": "1"}, {"X-Access-Token": token}).status == 200
    assert fresh_agent.request("POST", "/eval", '{"code": "1"}', {"X-Access-Token": code_token})[0] == 401
    assert fresh_agent.request("POST", "/eval", '{"code": "1"}')[0] == 401


def test_eval_returns_the_value_or_the_error(code_client):
    def evaluate(text, **fields):
        return code_client.agent.post_ok("/eval", {"code": text, **fields})

    assert evaluate("[1] * 2") == {"result": "[1, 1]", "error": "", "exit_code": 0}
    assert evaluate("y = 7; print(y)") == {"result": "None", "error": "", "exit_code": 0}
    assert code_client.run("y").text == "7"
    assert evaluate("1/0") == {"result": "", "error": "ZeroDivisionError: division by zero", "exit_code": 1}
    timeout_result = evaluate("import time; time.sleep(30)", timeout=0.1)
    assert timeout_result == {"result": "", "error": "TimeoutError: the code ran longer than 0.1 s", "exit_code": 1}
    assert code_client.agent.post("/eval", {})[0] == 400


# -- queued cells --------------------------------------------------------------------------------------------------


def test_contexts_run_in_parallel_and_their_cells_in_order(code_client, tmp_path):
    other_context_id = code_client.create_context()["id"]
    code_client.run("import os, time")
    first_response = code_client.request("POST", "/execute", {
        "code": f"print('on', flush=True)\nwhile not os.path.exists({str(tmp_path / 'go')!r}): time.sleep(0.01)\nn = 1"
    })  # fmt: skip
    while b"on" not in first_response.readline():
        pass
    answers = {}

    def run_cell(number):
        response = code_client.request("POST", "/execute", {"code": f"n = n * 10 + {number}\nn"})
        answers[number] = json.loads(response.read().splitlines()[-1])["text"]

    threads = []
    for number in (2, 3, 4):
        threads.append(threading.Thread(target=run_cell, args=(number,)))
        threads[-1].start()
        time.sleep(0.1)
    assert code_client.run("'other'", context_id=other_context_id).text == "'other'"
    assert answers == {}
    (tmp_path / "go").touch()
    for thread in threads:
        thread.join()
    first_response.read()
    assert answers == {2: "12", 3: "123", 4: "1234"}


def test_a_queued_execution_is_dropped_when_its_client_hangs_up(code_client, tmp_path):
    code_client.run("import os, time; ran = []")
    first_response = code_client.request("POST", "/execute", {
        "code": f"print('on', flush=True)\nwhile not os.path.exists({str(tmp_path / 'go')!r}): time.sleep(0.01)"
    })  # fmt: skip
    while b"on" not in first_response.readline():
        pass
    body = json.dumps({"code": "ran.append(1)"}).encode()
    with socket.create_connection(("127.0.0.1", code_client.agent.code_port)) as sock:
        sock.sendall(b"POST /execute HTTP/1.1\r\nContent-Length: %d\r\n\r\n%s" % (len(body), body))
        time.sleep(0.1)
    time.sleep(0.1)
    (tmp_path / "go").touch()
    first_response.read()
    assert code_client.run("ran").text == "[]"


def test_a_restart_stops_the_running_code(code_client):
    response = code_client.request("POST", "/execute", {"code": "print(1, flush=True)\nwhile True: pass"})
    while b"stdout" not in response.readline():
        pass
    assert code_client.request("POST", "/contexts/default/restart").status == 200
    assert b"the context was restarted" in response.read()
    assert code_client.run("1").execution_count == 1


# -- interrupts ------------------------------------------------------------------------------------------------------


def test_a_time_limit_interrupts_the_code(code_client):
    code_client.run("import asyncio, os, time; kept = 1; await asyncio.sleep(0)")
    error = code_client.run("print('a')\ntime.sleep(60)", timeout=0.2).error
    assert (error.name, error.value) == ("TimeoutError", "the code ran longer than 0.2 s")
    assert "time.sleep(60)" in error.traceback and "kernel.py" not in error.traceback
    for statement in (
        "try: time.sleep(60)\nexcept KeyboardInterrupt: print('caught')",
        "os.system('sleep 60')",
        "await asyncio.sleep(60)",
    ):
        assert code_client.run(statement, timeout=0.2).error.name == "TimeoutError"
    assert code_client.run("await asyncio.sleep(0, kept)").text == "1"


@pytest.mark.parametrize(
    "statement", ["time.sleep(60)", "while True: print('x' * 1000)", "while True: display('x' * 1000)"]
)
def test_a_disconnect_interrupts_the_code(code_client, statement):
    code_client.run("import time; ended = ''")
    source = f"try:\n    print('on')\n    {statement}\nexcept BaseException as error:\n    ended = type(error).__name__"
    response = code_client.request("POST", "/execute", {"code": source})
    while b"on" not in response.readline():
        pass
    response.close()
    assert code_client.run("ended").text == "'KeyboardInterrupt'"


def test_an_interrupt_affects_only_user_code(code_client):
    """The kernel and the agent stay in sync, no matter when the interrupt arrives."""
    code_client.run("import time; kept = 0")
    for step in range(30):
        code_client.run("kept += 1; time.sleep(0.002); display(kept)", timeout=0.0005 + step * 0.0002)
        assert code_client.run(f"'{step}'").text == f"'{step}'"
    assert int(code_client.run("kept").text) > 0


# -- large output, and output between cells --------------------------------------------------------------------------


def read_memory_mb(code_client):
    process_status = Path(f"/proc/{code_client.agent.process.pid}/status").read_text()
    return int(next(line for line in process_status.splitlines() if line.startswith("VmRSS")).split()[1]) // 1024


def test_a_slow_client_blocks_the_code(code_client):
    initial_memory_mb = read_memory_mb(code_client)
    response = code_client.request("POST", "/execute", {
        "code": "import os\nfor n in range(100): os.write(1, b'x' * 100_000)\n1"
    })  # fmt: skip
    first_event = json.loads(response.readline())
    time.sleep(0.5)
    assert read_memory_mb(code_client) < initial_memory_mb + 5
    events = [json.loads(line) for line in response.read().splitlines()]
    assert first_event["type"] == "number_of_executions" and events[-1]["type"] == "result"
    assert sum(len(event["text"]) for event in events[:-1]) == 10_000_000


def test_the_size_of_a_result_is_limited(code_client):
    assert len(code_client.run("'x' * (2 << 20)").text) == (2 << 20) + 2
    execution = code_client.run("'x' * (33 << 20)")
    assert execution.error is None and "was omitted: the limit is 33554432" in execution.text
    assert len(code_client.run("raise ValueError('x' * (2 << 20))").error.value) == 1 << 20


def test_output_between_cells_is_discarded(code_client):
    """A thread and a process write more than a pipe can hold, and neither of them blocks."""
    code_client.run("""
        import subprocess, threading, time
        def chatter():
            for n in range(40): print("t" * 10_000, flush=True)
            done.set()
        done = threading.Event()
        timer = threading.Timer(0.2, chatter)
        timer.start()
        process = subprocess.Popen("sleep 0.2; head -c 400000 /dev/zero; head -c 400000 /dev/zero >&2", shell=True)
    """)
    time.sleep(0.8)
    assert code_client.run_for_events("1") == [("result", "1")]
    assert code_client.run("done.is_set(), process.poll()").text == "(True, 0)"
    assert code_client.run_for_events("print('mine')") == [("stdout", "mine\n")]


def test_a_late_display_from_a_thread_is_ignored(code_client):
    code_client.run("import threading\nt = threading.Timer(0.1, display, ['late'])\nt.start()")
    time.sleep(0.2)
    assert code_client.run("t.join(); 1").text == "1"
    execution = code_client.run("t = threading.Thread(target=display, args=['thread'])\nt.start()\nt.join()\n2")
    assert [result.text for result in execution.results] == ["'thread'", "2"]


def test_children_of_the_kernel_cannot_write_to_its_channel(code_client):
    assert code_client.run_for_events("""
        import os, sys
        pid = os.fork()
        if pid == 0:
            display("child")
            os.write(1, b"")
        else:
            os.waitpid(pid, 0)
        1
    """) == [("stdout", "'child'\n"), ("result", "1")]
    code = "pid = os.fork()\nif pid == 0: raise OSError('in the child')\nos.waitpid(pid, 0)[1] >> 8"
    assert code_client.run(code).text == "1"
    assert code_client.run("""
        import multiprocessing
        def f(x): return x * x
        with multiprocessing.get_context("fork").Pool(2) as pool: squares = pool.map(f, range(5))
        squares
    """).text == "[0, 1, 4, 9, 16]"  # fmt: skip
    assert code_client.run("1").text == "1"


# -- lazy loading and memory use -------------------------------------------------------------------------------------


def test_modules_are_loaded_on_demand(unmanaged_command, running):
    with running(unmanaged_command) as agent:
        agent.request("GET", "/health")
        threads = Path(f"/proc/{agent.process.pid}/task").iterdir()
        assert len(list(threads)) <= 3  # the threads of the two listeners and of the request
        code_client = CodeClient(agent)
        assert list_kernel_pids(code_client) == [] and code_client.list_contexts() == []
        assert agent.post("/contexts/default/start")[1]["id"] == "default"
        assert len(list_kernel_pids(code_client)) == 1
        assert code_client.run("1").execution_count == 1


def test_files_in_the_working_directory_do_not_shadow_installed_modules(code_client, tmp_path):
    (tmp_path / "random.py").write_text("planted = True")
    (tmp_path / "own.py").write_text("value = 7")
    context_id = code_client.create_context(cwd=str(tmp_path))["id"]
    assert code_client.run("import random; hasattr(random, 'planted')", context_id=context_id).text == "False"
    assert code_client.run("import own; own.value", context_id=context_id).text == "7"


def test_the_kernel_imports_few_modules(code_client, unmanaged_command):
    context_id = code_client.create_context()["id"]
    names_text = code_client.run(
        "sorted(name for name in globals() if not name.startswith('__'))", context_id=context_id
    ).text
    assert names_text == "[]"
    execution = code_client.run("import sys\nsys.path[0], sys.path[-1], sys.argv, __name__", context_id=context_id)
    first_path, last_path, *other_values = ast.literal_eval(execution.text)
    assert first_path and not last_path and other_values == [[""], "__main__"]
    # Python's own site packages may import any module.
    expected_text = subprocess.check_output(
        [unmanaged_command[0], "-c", "import sys; print('random' in sys.modules)"], text=True
    ).strip()
    code_client.run("await __import__('asyncio').sleep(0)", context_id=context_id)
    assert code_client.run("'random' in sys.modules", context_id=context_id).text == expected_text


def test_user_files_do_not_break_the_kernel(code_client, tmp_path):
    for name in ("json", "ast", "traceback", "sandbox_agent"):
        (tmp_path / f"{name}.py").write_text("raise SystemExit('mine')")
    (tmp_path / "helper.py").write_text("x = 'imported'")
    context_id = code_client.create_context(cwd=str(tmp_path))["id"]
    assert code_client.run("import helper\nhelper.x", context_id=context_id).text == "'imported'"
