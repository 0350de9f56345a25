"""Test that the unmodified, published ``e2b_code_interpreter`` client works with a live gateway."""

from __future__ import annotations

import asyncio
import json
from collections.abc import Iterator
from typing import Any

import e2b
import pytest
from e2b_code_interpreter import AsyncSandbox, Sandbox

from tests.sdk.coverage import covers
from tests.sdk.test_e2b import client_environment, wait_until

__all__ = ["client_environment"]

_RICH_OUTPUT_PROGRAM = """
class Rich:
    def _repr_html_(self): return "<b>rich</b>"
    def _repr_markdown_(self): return "**rich**"
    def _repr_png_(self): return b"\\x89PNG"
    def _repr_mimebundle_(self, include=None, exclude=None): return {"application/vnd.custom": {"a": 1}}
    def __repr__(self): return "rich"
display(Rich())
Rich()
"""


@pytest.fixture(scope="module")
def sandbox(server) -> Iterator[Sandbox]:
    sandbox = Sandbox.create(server.template, api_key=server.key, api_url=server.url, sandbox_url=server.url)
    yield sandbox
    sandbox.kill()


@pytest.mark.core
@covers("Sandbox.run_code")
def test_code_keeps_state_and_returns_results(sandbox):
    assert sandbox.run_code("x = 20").text is None
    result = sandbox.run_code("print('hello'); x += 1; x * 2")
    assert (result.text, result.logs.stdout, result.error) == ("42", ["hello\n"], None)
    assert sandbox.run_code("await __import__('asyncio').sleep(0, x)").text == "21"
    output: dict[str, list[Any]] = {"stdout": [], "stderr": [], "result": [], "error": []}
    handlers = {f"on_{kind}": values.append for kind, values in output.items()}
    sandbox.run_code("import sys; print(1); print(2, file=sys.stderr); display(3); 1 / 0", **handlers)
    assert ["".join(str(each) for each in output[kind]) for kind in ("stdout", "stderr")] == ["1\n", "2\n"]
    assert [result.text for result in output["result"]] == ["3"]
    (error,) = output["error"]
    assert (error.name, error.value) == ("ZeroDivisionError", "division by zero")
    assert "1 / 0" in error.traceback


def test_rich_results_have_all_formats(sandbox):
    displayed_result, main_result = sandbox.run_code(_RICH_OUTPUT_PROGRAM).results
    assert not displayed_result.is_main_result and main_result.is_main_result
    for each in (displayed_result, main_result):
        assert (each.text, each.html, each.markdown) == ("rich", "<b>rich</b>", "**rich**")
        assert each.png == "iVBORw=="
        assert each.extra == {"application/vnd.custom": {"a": 1}}
        assert set(each.formats()) == {"text", "html", "markdown", "png", "application/vnd.custom"}


def test_the_kernel_receives_environment_variables(sandbox, server):
    code = "import os; os.environ.get('ONCE')"
    assert sandbox.run_code(code, envs={"ONCE": "now"}).text == "'now'"
    assert sandbox.run_code(code).text is None
    other_sandbox = Sandbox.create(server.template, envs={"ALWAYS": "here"})
    try:
        assert other_sandbox.run_code("import os; os.environ['ALWAYS']").text == "'here'"
    finally:
        other_sandbox.kill()


def test_a_timeout_interrupts_the_code(sandbox):
    sandbox.run_code("survives = 'yes'")
    with pytest.raises(e2b.TimeoutException):
        sandbox.run_code("import time\ntry:\n    time.sleep(600)\nfinally:\n    interrupted = True", timeout=1)
    wait_until(lambda: sandbox.run_code("survives, globals().get('interrupted')").text == "('yes', True)")


def test_a_dead_kernel_is_reported_and_restarted(sandbox):
    result = sandbox.run_code("import os; os._exit(3)")
    assert result.error is not None
    assert sandbox.run_code("1 + 1").text == "2"


@pytest.mark.core
@covers("Sandbox.run_code", note="`language` is python or bash")
def test_bash_keeps_state_between_runs(sandbox):
    sandbox.run_code("here=kept; cd /etc", language="bash")
    result = sandbox.run_code('echo "$here $PWD"; echo no >&2', language="bash")
    assert (result.logs.stdout, result.logs.stderr) == (["kept /etc\n"], ["no\n"])
    assert sandbox.run_code("false", language="bash").error is not None
    with pytest.raises(e2b.SandboxException, match="python"):
        sandbox.run_code("1", language="cobol")


@pytest.mark.core
@covers(
    "Sandbox.create_code_context",
    "Sandbox.list_code_contexts",
    "Sandbox.restart_code_context",
    "Sandbox.remove_code_context",
)
def test_contexts_have_separate_state(sandbox):
    context = sandbox.create_code_context(cwd="/tmp", language="python")
    assert (context.language, context.cwd) == ("python", "/tmp")
    assert context.id in [each.id for each in sandbox.list_code_contexts()]
    sandbox.run_code("mine = 1", context=context)
    assert sandbox.run_code("import os; (os.getcwd(), mine)", context=context).text == "('/tmp', 1)"
    assert sandbox.run_code("'mine' in globals()").text == "False"
    sandbox.restart_code_context(context)
    assert sandbox.run_code("'mine' in globals()", context=context).text == "False"
    sandbox.remove_code_context(context.id)
    assert context.id not in [each.id for each in sandbox.list_code_contexts()]
    with pytest.raises(e2b.NotFoundException):
        sandbox.run_code("1", context=context)


def test_large_output_is_complete(sandbox):
    result = sandbox.run_code("for number in range(100_000): print(number)", timeout=120)
    text = "".join(result.logs.stdout)
    assert text.endswith("\n99999\n") and text.count("\n") == 100_000


@pytest.mark.core
@pytest.mark.usefixtures("requires_memory")
def test_memory_survives_snapshot_fork_and_pause(server):
    sandbox = Sandbox.create(server.template)
    sandboxes = [sandbox]
    try:
        sandbox.run_code("counter = 41; import threading; lock = threading.Lock()")
        snapshot = sandbox.create_snapshot()
        sandbox.run_code("counter = 0")
        sandboxes += [Sandbox.create(snapshot.snapshot_id), *sandbox.fork(count=2)]
        assert [each.run_code("counter += 1; counter").text for each in sandboxes] == ["1", "42", "1", "1"]
        assert sandbox.pause()
        sandbox.connect()
        assert sandbox.run_code("counter").text == "1"
        random_values = {each.run_code("import random; random.random()").text for each in sandboxes[2:]}
        assert len(random_values) == 2
        for each in sandboxes:
            each.kill()
        Sandbox.delete_snapshot(snapshot.snapshot_id)
    finally:
        for each in sandboxes:
            each.kill()


async def _use_async_client(template: str) -> list[str | None]:
    sandbox = await AsyncSandbox.create(template)
    try:
        context = await sandbox.create_code_context()
        first_run = sandbox.run_code(
            "import time, pathlib\nwhile not pathlib.Path('/tmp/go').exists(): time.sleep(0.05)\n'a'"
        )
        second_run = sandbox.run_code(
            "pathlib = __import__('pathlib'); pathlib.Path('/tmp/go').touch(); 'b'", context=context
        )
        return [result.text for result in await asyncio.gather(first_run, second_run)]
    finally:
        await sandbox.kill()


def test_async_contexts_run_in_parallel(server):
    assert asyncio.run(_use_async_client(server.template)) == ["'a'", "'b'"]


def test_results_are_serializable_as_json(sandbox):
    assert json.loads(sandbox.run_code("1").to_json())["results"][0]["text"] == "1"
