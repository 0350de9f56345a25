"""POST /exec runs commands and returns their output."""

from __future__ import annotations

import base64
import os
import time
from pathlib import Path

import pytest


def run_command(agent, *args: str, **fields):
    response = agent.post_ok("/exec", {"args": list(args), **fields})
    return response, base64.b64decode(response["stdout"]), base64.b64decode(response["stderr"])


def test_output_and_exit_code_are_returned(agent):
    response, out, err = run_command(agent, "sh", "-c", "echo out; echo err >&2; exit 7")
    assert (response["exitCode"], out, err) == (7, b"out\n", b"err\n")
    assert (response["timedOut"], response["truncated"]) == (False, False)


def test_arguments_are_passed_unchanged(agent):
    arguments = ["", "a b", "$HOME", "'\"", "\n", "ü", "*"]
    _, out, _ = run_command(agent, "printf", "%s|", *arguments)
    assert out.decode() == "".join(f"{item}|" for item in arguments)


def test_stdin_can_be_larger_than_a_pipe(agent):
    data = os.urandom(1_000_000)
    _, out, _ = run_command(agent, "cat", stdin=base64.b64encode(data).decode())
    assert out == data


def test_unread_stdin_does_not_block(agent):
    response, _, _ = run_command(agent, "true", stdin=base64.b64encode(b"x" * 1_000_000).decode())
    assert response["exitCode"] == 0


def test_stdin_is_empty_by_default(agent):
    assert run_command(agent, "cat")[1] == b""


def test_environment_and_directory_are_set(agent, tmp_path):
    _, out, _ = run_command(agent, "sh", "-c", 'echo "$A $HOME"; pwd', env={"A": "1"}, cwd=str(tmp_path))
    home = Path.home()
    assert out.decode() == f"1 {home}\n{tmp_path}\n"


def test_commands_do_not_inherit_the_agents_environment(agent):
    assert b"PYTHONPATH" not in run_command(agent, "env")[1]


def test_a_relative_directory_is_resolved_from_home(agent):
    status, response = agent.post("/exec", {"args": ["pwd"], "cwd": "no/such/directory"})
    assert status == 400
    assert str(Path.home() / "no/such/directory") in response["message"]


def test_a_timeout_kills_the_whole_process_group(agent, wait_until):
    start_time = time.monotonic()
    response, out, _ = run_command(agent, "sh", "-c", "sleep 31.7 & echo $!; wait", timeout=2)
    assert time.monotonic() - start_time < 10
    assert (response["timedOut"], response["exitCode"]) == (True, 137)
    wait_until(lambda: not is_alive(int(out)))


def test_a_signal_is_reported_as_128_plus_its_number(agent):
    assert run_command(agent, "sh", "-c", "kill -TERM $$")[0]["exitCode"] == 143


def test_missing_and_forbidden_commands_have_shell_exit_codes(agent, tmp_path):
    response, _, err = run_command(agent, "no-such-command")
    assert (response["exitCode"], b"no-such-command" in err) == (127, True)
    response, _, err = run_command(agent, str(tmp_path))
    assert (response["exitCode"], b"Permission denied" in err) == (126, True)


def test_a_background_child_does_not_delay_the_result(agent):
    """The child still writes to the output after the command has exited. This must not kill the child."""
    start_time = time.monotonic()
    _, out, _ = run_command(agent, "sh", "-c", "(sleep 0.3; echo late; sleep 30.3) & echo $!")
    assert time.monotonic() - start_time < 5
    pid = int(out.split()[0])
    try:
        time.sleep(0.6)
        assert is_alive(pid)
    finally:
        os.killpg(os.getpgid(pid), 9)


def test_long_output_is_truncated(agent):
    response, out, _ = run_command(agent, "sh", "-c", "head -c 17000000 /dev/zero; echo end >&2")
    assert (len(out), response["truncated"], response["exitCode"]) == (16 << 20, True, 0)


@pytest.mark.parametrize(
    "body",
    [
        {},
        {"args": []},
        {"args": "true"},
        {"args": [1]},
        {"args": ["a\0b"]},
        {"args": ["true"], "env": {"A=B": "x"}},
        {"args": ["true"], "env": {"A": 1}},
        {"args": ["true"], "timeout": 0},
        {"args": ["true"], "timeout": "1"},
        {"args": ["true"], "stdin": "a"},
        {"args": ["true"], "cwd": 5},
    ],
)
def test_invalid_requests_are_refused(agent, body):
    status, response = agent.post("/exec", body)
    assert (status, response["code"]) == (400, 400), response


def test_commands_run_as_the_requested_user(agent):
    status, response = agent.post("/exec", {"args": ["id", "-un"], "user": "no-such-user"})
    assert status == 401 and "no-such-user" in response["message"]
    if os.geteuid() == 0:
        _, out, _ = run_command(agent, "sh", "-c", "id -un; id -gn; echo $HOME", user="nobody")
        assert out.decode().split()[0] == "nobody" and "root" not in out.decode().split()[1]
    else:
        assert agent.post("/exec", {"args": ["id"], "user": "root"})[0] == 403


def is_alive(pid: int) -> bool:
    """Return whether the process is alive. A zombie is not."""
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] != "Z"
    except FileNotFoundError:
        return False
