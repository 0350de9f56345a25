"""The shell of the code interpreter, its published client, and malicious kernels."""

from __future__ import annotations

import http.client
import json
import os
import shutil
import signal
import threading
import time
from pathlib import Path

import pytest
from e2b import NotFoundException, SandboxException
from e2b_code_interpreter import Sandbox
from e2b_code_interpreter.models import Execution, parse_output
from hypothesis import given
from hypothesis import strategies as st

from sandbox_agent.interpreter.answers import _parse_event
from sandbox_agent.interpreter.kernel_protocol import KERNEL_FRAME_HEAD
from sandbox_agent.interpreter.languages import Cell, Python, Shell

CHANNEL_CODE = """
import os, struct, time
def channel():
    for fd in map(int, os.listdir("/proc/self/fd")):
        try:
            if "socket" in os.readlink(f"/proc/self/fd/{fd}"): return fd
        except OSError: pass
def say(letter, content, size=None):
    os.write(channel(), struct.pack(">cI", letter, len(content) if size is None else size) + content)
"""


class CodeClient:
    def __init__(self, agent):
        self.agent = agent

    def run(self, code, language="python", **fields):
        connection = http.client.HTTPConnection("127.0.0.1", self.agent.code_port, timeout=30)
        body = json.dumps({"code": code, "language": language, **fields})
        connection.request("POST", "/execute", body)
        response = connection.getresponse()
        assert response.status == 200, response.read()
        execution = Execution()
        for line in response:
            parse_output(execution, line.decode())
        connection.close()
        return execution

    def run_shell(self, code, **fields):
        """Run the code in the shell. Returns its standard output and the error's value."""
        execution = self.run(code, "bash", **fields)
        return "".join(execution.logs.stdout), execution.error and execution.error.value


@pytest.fixture(scope="module")
def code_client(unmanaged_command, running):
    with running(unmanaged_command, env={"PATH": f"{Path(unmanaged_command[0]).parent}:{os.environ['PATH']}"}) as agent:
        yield CodeClient(agent)


@pytest.fixture(scope="module", params=["bash", "sh"])
def shell_client(request, unmanaged_command, running, tmp_path_factory):
    """A client of an agent whose PATH contains bash and sh, or only sh."""
    if request.param == "bash" and not shutil.which("bash"):
        pytest.fail("the tests need bash")
    path = tmp_path_factory.mktemp(request.param)
    for name in (request.param, "sh", "sleep", "cat", "env", "head", "printf"):
        (path / name).exists() or (path / name).symlink_to(shutil.which(name))
    with running(unmanaged_command, env={"PATH": str(path)}) as agent:
        yield CodeClient(agent)


# -- the shell -------------------------------------------------------------------------------------------------------


def test_the_shell_keeps_state_between_cells(shell_client):
    assert shell_client.run_shell("x='a  b'; f() { echo \"f:$1\"; }; cd /tmp") == ("", None)
    assert shell_client.run_shell('echo "$x"; f "$x"; pwd') == ("a  b\nf:a  b\n/tmp\n", None)
    assert shell_client.run_shell("cat <<E\nit's $x\nE\n") == ("it's a  b\n", None)
    assert shell_client.run_shell("cat; read y; echo end") == ("end\n", None)
    assert shell_client.run_shell("") == ("", None)
    assert shell_client.run_shell("echo é\ud800") == ("é?\n", None)


def test_a_nonzero_exit_status_is_an_error(shell_client):
    assert shell_client.run_shell("echo 1; false") == ("1\n", "exit code 1")
    assert shell_client.run_shell("(exit 77)") == ("", "exit code 77")
    assert shell_client.run_shell("echo $?")[1] is None
    failed_execution = shell_client.run("echo 'open", "bash")
    assert failed_execution.error.value == "exit code 2" and failed_execution.logs.stderr
    assert shell_client.run_shell("no-such-command-at-all")[1] == "exit code 127"
    assert shell_client.run_shell("echo fine") == ("fine\n", None)


def test_shell_variables_apply_to_a_single_execution(shell_client):
    assert shell_client.run_shell("B=kept; unset A") == ("", None)
    assert shell_client.run_shell("echo $A; env | head -c 0; sh -c 'echo $B'", env_vars={"A": "it's", "B": "é"}) == (
        "it's\né\n",
        None,
    )
    assert shell_client.run_shell("echo ${A-unset} $B") == ("unset kept\n", None)
    assert shell_client.run_shell("false", env_vars={"A": "1"})[1] == "exit code 1"
    assert (
        shell_client.run_shell("sleep 60", env_vars={"A": "1", "B": "2"}, timeout=0.2)[1]
        == "the code ran longer than 0.2 s"
    )
    assert shell_client.run_shell("echo ${A-unset} $B") == ("unset kept\n", None)


def test_an_interrupted_shell_survives(shell_client):
    shell_client.run_shell("kept=1; f() { while true; do sleep 0.05; echo x; done; }")
    for command in ("sleep 60", "f", "while :; do :; done", "sleep 60; echo after"):
        execution = shell_client.run(command, "bash", timeout=0.2)
        assert execution.error.name == "TimeoutError" and "after\n" not in execution.logs.stdout
    assert shell_client.run_shell("echo $kept") == ("1\n", None)


def test_exit_stops_the_shell_and_the_next_cell_starts_a_new_one(shell_client):
    execution = shell_client.run("gone=1; echo last; exit 4", "bash")
    assert execution.logs.stdout == ["last\n"]
    assert (execution.error.name, "with code 4" in execution.error.value) == ("KernelDied", True)
    assert shell_client.run_shell("echo ${gone-fresh}") == ("fresh\n", None)


def test_shell_tracing_hides_the_agents_commands(shell_client):
    execution = shell_client.run("set -x; echo 1", "bash", env_vars={"A": "1"})
    assert "".join(execution.logs.stderr).strip().lstrip("+") == " echo 1"
    shell_client.run("set +x", "bash")


def test_background_jobs_keep_running(shell_client):
    start_time = time.monotonic()
    assert shell_client.run_shell("(sleep 0.2; echo late) & echo now")[0] == "now\n"
    assert time.monotonic() - start_time < 0.2
    time.sleep(0.4)
    assert shell_client.run_shell("echo then")[0] == "then\n"


@pytest.mark.parametrize("language", ["python", "bash"])
def test_an_early_interrupt_is_not_lost(code_client, language):
    """The kernel has not read the code yet, for example because the sandbox is busy."""
    is_python = language == "python"
    execution = code_client.run("import os; kept = 1; print(os.getpid())" if is_python else "kept=1; echo $$", language)
    pid = int(execution.logs.stdout[0])
    os.kill(pid, signal.SIGSTOP)
    threading.Timer(0.5, os.kill, [pid, signal.SIGCONT]).start()
    error = code_client.run("while True: pass" if is_python else "while :; do :; done", language, timeout=0.2).error
    assert (error.name, error.value) == ("TimeoutError", "the code ran longer than 0.2 s")
    assert code_client.run("print(kept)" if is_python else "echo $kept", language).logs.stdout == ["1\n"]


def test_an_interrupt_between_cells_is_ignored(code_client):
    pid = int(code_client.run("import os, time; os.getpid()").text)
    os.kill(pid, signal.SIGINT)
    time.sleep(0.05)
    assert code_client.run("time.sleep(0.1); 1").text == "1"


# -- the client ------------------------------------------------------------------------------------------------------


def test_the_published_client_works(code_client, tmp_path):
    from e2b.connection_config import ConnectionConfig
    from packaging.version import Version

    url = f"http://127.0.0.1:{code_client.agent.code_port}"
    sandbox = Sandbox(
        sandbox_id="0123456789ab",
        sandbox_domain=None,
        envd_version=Version("0.5.7"),
        envd_access_token=None,
        connection_config=ConnectionConfig(debug=True, sandbox_url=url, api_key="key"),
    )
    messages = []
    execution = sandbox.run_code("print(1)\n2", on_stdout=messages.append, envs={"A": "1"})
    assert execution.text == "2" and [message.line for message in messages] == ["1\n"]
    context = sandbox.create_code_context(cwd=str(tmp_path), language="python")
    assert sandbox.run_code("import os; os.getcwd()", context=context).text == repr(str(tmp_path))
    assert context.id in [each.id for each in sandbox.list_code_contexts()]
    sandbox.restart_code_context(context)
    assert sandbox.run_code("os", context=context).error.name == "NameError"
    sandbox.remove_code_context(context.id)
    with pytest.raises(NotFoundException, match=f"context {context.id} not found"):
        sandbox.run_code("1", context=context)
    with pytest.raises(SandboxException, match="the language 'r' is not available: use python or bash"):
        sandbox.run_code("1", language="r")
    assert sandbox.run_code("echo $0", language="bash").error is None


# -- malicious code --------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "attack",
    [
        "os.write(channel(), b'garbage')",
        "say(b'E', b'', 1 << 31)",
        "say(b'E', b'no json')",
        'say(b\'E\', b\'{"type":"stdout","text":"x"}\')',
        'say(b\'E\', b\'{"type":"result","text":1,"is_main_result":true}\')',
        'say(b\'E\', b\'{"type":"result","is_main_result":true}\\n\')',
        "say(b'E', b'[' * 100000)",
        "say(b'S', b'\\xff')",
        "say(b'E', b'cut', 9)",
        "say(b'D', b'x' * 5000)",
        'while True: say(b\'S\', b\'{"type":"result","text":"x","is_main_result":true}\')',
    ],
)
def test_a_kernel_is_killed_if_its_code_writes_to_the_channel(code_client, attack):
    error = code_client.run(f"{CHANNEL_CODE}\n{attack}\ntime.sleep(0.3)", timeout=20).error
    assert error.name == "KernelDied" and "wrote to the kernel's channel" in error.value
    assert code_client.run("1").execution_count == 1
    assert code_client.agent.process.poll() is None


def test_a_forged_end_frame_affects_only_its_own_kernel(code_client):
    code_client.agent.post("/contexts/default/start")
    execution_count = code_client.run("1").execution_count
    code = f"{CHANNEL_CODE}\nsay(b'D', b'%d' % {execution_count + 1})\ntime.sleep(0.3)\n'late'"
    attack_execution = code_client.run(code)
    assert attack_execution.results == []
    assert [result.text for result in code_client.run("2").results] == ["'late'", "2"]
    assert code_client.run("3").text == "3"
    assert code_client.agent.post("/contexts/default/start")[0] == 200


def test_a_kernel_that_ignores_the_interrupt_is_killed(code_client):
    """A stopped kernel does not react to the interrupt, so it is killed."""
    error = code_client.run("import os, signal\nos.kill(os.getpid(), signal.SIGSTOP)", timeout=0.1).error
    assert error.name == "TimeoutError" and "its kernel was killed" in error.value
    assert code_client.run("1").execution_count == 1


def test_a_python_that_does_not_start_is_reported(unmanaged_command, running, tmp_path):
    (tmp_path / "python3").write_text("#!/bin/sh\necho no such luck >&2\nexit 9\n")
    (tmp_path / "python3").chmod(0o755)
    with running(unmanaged_command, env={"PATH": str(tmp_path)}) as agent:
        execution = CodeClient(agent).run("1")
        assert execution.logs.stderr == ["no such luck\n"] and "with code 9" in execution.error.value
        status, response = agent.post("/contexts/default/start")
        assert status == 503 and "with code 9" in response["message"]
        (tmp_path / "python3").unlink()
        assert CodeClient(agent).run("__import__('sys').executable").error is None


def test_the_agent_starts_if_the_code_port_is_in_use(unmanaged_command, running, agent):
    with running([*unmanaged_command, "--code-port", str(agent.code_port)]) as other_agent:
        assert other_agent.code_port == 0
        assert other_agent.request("GET", "/health")[0] == 204


@given(frames=st.lists(st.tuples(st.sampled_from("ES"), st.binary(max_size=20))), cuts=st.lists(st.integers(0, 200)))
def test_split_frames_are_joined(frames, cuts):
    data = b"".join(KERNEL_FRAME_HEAD.pack(letter.encode(), len(content)) + content for letter, content in frames)
    data += KERNEL_FRAME_HEAD.pack(b"D", 1) + b"6" + KERNEL_FRAME_HEAD.pack(b"D", 1) + b"7"
    python, parsed_frames, start = Python(), [], 0
    python.encode_cell(Cell("", {}), 7)
    for end in [*sorted(cuts), len(data)]:
        parsed_frames += python.parse(data[start:end])
        start = max(start, end)
    kinds_by_letter = {"E": "event", "S": "sync"}
    assert parsed_frames == [*[(kinds_by_letter[letter], content) for letter, content in frames], ("done", b"0")]


@given(pieces=st.lists(st.binary(max_size=30)))
def test_arbitrary_bytes_do_not_break_the_channel(pieces):
    for language in (Python(), Shell()):
        language.encode_cell(Cell("", {}), 1)
        for piece in pieces:
            for kind, content in language.parse(piece):
                assert kind in ("event", "sync", "done", "begun", "broken")
                if kind == "done":
                    assert 0 <= int(content) <= 999


EVENT_VALUES = st.none() | st.booleans() | st.text(max_size=5) | st.just({}) | st.sampled_from(["result", "error"])
EVENTS = st.fixed_dictionaries({"type": st.sampled_from(["result", "error", "stdout"])} , optional=dict.fromkeys(
    ["text", "json", "extra", "is_main_result", "name", "value", "traceback", "self"], EVENT_VALUES
))  # fmt: skip


@given(line=st.binary() | EVENTS.map(lambda event: json.dumps(event).encode()))
def test_invalid_events_are_dropped(line):
    if _parse_event(line) is not None:
        assert line.splitlines() == [line]
        execution = Execution()
        parse_output(execution, line.decode())
        assert execution.results or execution.error
