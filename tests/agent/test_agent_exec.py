"""POST /exec."""

from __future__ import annotations

import base64
import os
import time
from pathlib import Path

import pytest


def run(agent, *args: str, **fields):
    answer = agent.post_ok("/exec", {"args": list(args), **fields})
    return answer, base64.b64decode(answer["stdout"]), base64.b64decode(answer["stderr"])


def test_output_and_exit_code(agent):
    answer, out, err = run(agent, "sh", "-c", "echo out; echo err >&2; exit 7")
    assert (answer["exitCode"], out, err) == (7, b"out\n", b"err\n")
    assert (answer["timedOut"], answer["truncated"]) == (False, False)


def test_arguments_pass_unchanged(agent):
    odd = ["", "a b", "$HOME", "'\"", "\n", "ü", "*"]
    _, out, _ = run(agent, "printf", "%s|", *odd)
    assert out.decode() == "".join(f"{item}|" for item in odd)


def test_stdin_larger_than_a_pipe(agent):
    data = os.urandom(1_000_000)
    _, out, _ = run(agent, "cat", stdin=base64.b64encode(data).decode())
    assert out == data


def test_stdin_that_is_not_read(agent):
    answer, _, _ = run(agent, "true", stdin=base64.b64encode(b"x" * 1_000_000).decode())
    assert answer["exitCode"] == 0


def test_stdin_is_empty_by_default(agent):
    assert run(agent, "cat")[1] == b""


def test_environment_and_directory(agent, tmp_path):
    _, out, _ = run(agent, "sh", "-c", 'echo "$A $HOME"; pwd', env={"A": "1"}, cwd=str(tmp_path))
    home = Path.home()
    assert out.decode() == f"1 {home}\n{tmp_path}\n"


def test_commands_do_not_inherit_the_agents_environment(agent):
    assert b"PYTHONPATH" not in run(agent, "env")[1]


def test_a_relative_directory_starts_at_home(agent):
    status, answer = agent.post("/exec", {"args": ["pwd"], "cwd": "no/such/directory"})
    assert status == 400
    assert str(Path.home() / "no/such/directory") in answer["message"]


def test_timeout_kills_the_whole_group(agent):
    started = time.monotonic()
    answer, out, _ = run(agent, "sh", "-c", "sleep 31.7 & echo $!; wait", timeout=0.3)
    assert time.monotonic() - started < 10
    assert (answer["timedOut"], answer["exitCode"]) == (True, 137)
    assert not is_alive(int(out))


def test_a_signal_is_reported_as_128_plus_its_number(agent):
    assert run(agent, "sh", "-c", "kill -TERM $$")[0]["exitCode"] == 143


def test_missing_and_forbidden_commands(agent, tmp_path):
    answer, _, err = run(agent, "no-such-command")
    assert (answer["exitCode"], b"no-such-command" in err) == (127, True)
    answer, _, err = run(agent, str(tmp_path))
    assert (answer["exitCode"], b"Permission denied" in err) == (126, True)


def test_a_background_child_does_not_delay_the_result(agent):
    """The child writes to an output that is no longer read. This must not kill it."""
    started = time.monotonic()
    _, out, _ = run(agent, "sh", "-c", "(sleep 0.3; echo late; sleep 30.3) & echo $!")
    assert time.monotonic() - started < 5
    pid = int(out.split()[0])
    try:
        time.sleep(0.6)
        assert is_alive(pid)
    finally:
        os.killpg(os.getpgid(pid), 9)


def test_output_is_capped(agent):
    answer, out, _ = run(agent, "sh", "-c", "head -c 17000000 /dev/zero; echo end >&2")
    assert (len(out), answer["truncated"], answer["exitCode"]) == (16 << 20, True, 0)


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
    status, answer = agent.post("/exec", body)
    assert (status, answer["code"]) == (400, 400), answer


def test_users(agent):
    status, answer = agent.post("/exec", {"args": ["id", "-un"], "user": "no-such-user"})
    assert status == 401 and "no-such-user" in answer["message"]
    if os.geteuid() == 0:
        _, out, _ = run(agent, "sh", "-c", "id -un; id -gn; echo $HOME", user="nobody")
        assert out.decode().split()[0] == "nobody" and "root" not in out.decode().split()[1]
    else:
        assert agent.post("/exec", {"args": ["id"], "user": "root"})[0] == 403


def is_alive(pid: int) -> bool:
    """Whether the process runs; a zombie does not."""
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] != "Z"
    except FileNotFoundError:
        return False
