"""process.Process runs commands and streams their events."""

from __future__ import annotations

import base64
import json
import os
import signal
import socket
import struct
import time
from pathlib import Path

import pytest


def encode_base64(data: bytes) -> str:
    return base64.b64encode(data).decode()


def test_a_command_streams_its_output_and_end(agent):
    events = list(agent.start("sh", "-c", "printf out; printf err >&2"))
    assert events[0]["start"]["pid"] > 0
    output = {key: base64.b64decode(value) for event in events[1:-1] for key, value in event["data"].items()}
    assert output == {"stdout": b"out", "stderr": b"err"}
    assert events[-1] == {"end": {"exitCode": 0, "exited": True, "status": "exit status 0"}}


def test_a_nonzero_exit_code_is_reported(agent):
    end = agent.start("sh", "-c", "exit 3").read_to_end()[2]
    assert end == {"exitCode": 3, "exited": True, "status": "exit status 3", "error": "exit status 3"}


def test_no_output_is_lost(agent):
    out, _, end = agent.start(
        "sh", "-c", "head -c 20000000 /dev/urandom | tee /dev/stderr | cksum >/dev/null"
    ).read_to_end()
    assert end["exitCode"] == 0 and out == b""
    out, err, _ = agent.start("sh", "-c", "seq 1 300000; seq 1 1000 >&2").read_to_end()
    assert out == b"".join(b"%d\n" % n for n in range(1, 300001))
    assert err == b"".join(b"%d\n" % n for n in range(1, 1001))


def read_peak_memory_kib(pid: int) -> int:
    """Return the peak memory of a process, in KiB."""
    lines = Path(f"/proc/{pid}/status").read_text().splitlines()
    return next(int(line.split()[1]) for line in lines if line.startswith("VmHWM"))


def test_a_slow_client_blocks_the_process(agent):
    """The process writes 100 MB, and the client does not read at first. The agent buffers only a small part."""
    initial_memory_kib = read_peak_memory_kib(agent.process.pid)
    events = agent.start("sh", "-c", "head -c 100000000 /dev/zero; echo done >&2")
    time.sleep(0.5)
    received_byte_count, tail = 0, b""
    while piece := events._response.read1(1 << 20):
        received_byte_count += len(piece)
        tail = (tail + piece)[-1000:]
    # The output is in base64, with a frame around each piece.
    assert 133_000_000 < received_byte_count < 140_000_000
    assert b'"stderr":"ZG9uZQo="' in tail and b'"exitCode": 0' in tail
    assert read_peak_memory_kib(agent.process.pid) - initial_memory_kib < 20_000


def test_environment_directory_and_user_are_set(agent, tmp_path):
    out, _, _ = agent.start("sh", "-c", 'echo "$A:$B"; pwd', envs={"A": "1", "B": "ü"}, cwd=str(tmp_path)).read_to_end()
    assert out.decode() == f"1:ü\n{tmp_path}\n"
    if os.geteuid() == 0:
        out, _, _ = agent.start("sh", "-c", "id -un; id -Gn; echo $USER", user="nobody").read_to_end()
        assert out.split()[0] == out.split()[-1] == b"nobody" and b"root" not in out


def test_an_empty_directory_means_home(agent):
    assert agent.start("pwd", cwd="").read_to_end()[0].decode().strip() == str(Path.home())


@pytest.mark.parametrize(
    ("message", "code"),
    [
        ({}, "invalid_argument"),
        ({"process": {"cmd": ""}}, "invalid_argument"),
        ({"process": {"cmd": "no-such-command"}}, "invalid_argument"),
        ({"process": {"cmd": "true", "cwd": "/no/such"}}, "invalid_argument"),
        ({"process": {"cmd": "true", "args": "x"}}, "invalid_argument"),
        ({"process": {"cmd": "true"}, "pty": {"size": {"cols": "x"}}}, "invalid_argument"),
        ({"process": {"cmd": "true"}, "pty": {"size": {"cols": 99999}}}, "invalid_argument"),
    ],
)
def test_the_last_frame_reports_errors(agent, message, code):
    events = agent.stream("Start", message)
    assert list(events) == []
    assert events.error and events.error["code"] == code and events.error["message"]


def test_an_unknown_user_is_refused(agent):
    events = agent.start("true", user="no-such-user")
    assert list(events) == [] and events.error and events.error["code"] == "unauthenticated"


def test_the_codec_must_be_json(agent):
    status, data = agent.request("POST", "/process.Process/Start", b"x", {"Content-Type": "application/connect+proto"})
    assert (status, json.loads(data)["code"]) == (415, "unimplemented")


def test_stdin_can_be_sent_and_streamed(agent):
    events = agent.start("cat", stdin=True)
    pid = events.next()["start"]["pid"]
    agent.post_ok("/process.Process/SendInput", {"process": {"pid": pid}, "input": {"stdin": encode_base64(b"one ")}})
    # The input stream consists of frames. Its response has one message.
    messages = [{"start": {"process": {"pid": pid}}}, {"keepalive": {}}]
    messages += [{"data": {"input": {"stdin": encode_base64(part)}}} for part in (b"two ", b"x" * 300_000)]
    response_stream = agent.stream("StreamInput", *messages)
    assert (list(response_stream), response_stream.error) == ([{}], None)
    agent.post_ok("/process.Process/CloseStdin", {"process": {"pid": pid}})
    assert events.read_to_end()[0] == b"one two " + b"x" * 300_000


def test_input_streams_may_pause(running, unmanaged_command):
    """The pause is longer than the idle timeout of other connections."""
    setup_code = (
        "import sys; from sandbox_agent import agent; from sandbox_agent.http import server; "
        "server.IDLE_TIMEOUT_SECONDS = 0.3; sys.argv = sys.argv[1:]"
    )
    with running(
        [unmanaged_command[0], "-c", f"{setup_code}; sys.exit(agent.main())", *unmanaged_command[2:]]
    ) as agent:
        agent.start("cat", stdin=True, tag="cat").next()

        def generate_frames():
            input_message = {"data": {"input": {"stdin": encode_base64(b"late")}}}
            for message in ({"start": {"process": {"tag": "cat"}}}, input_message):
                data = json.dumps(message).encode()
                yield struct.pack(">BI", 0, len(data)) + data
                time.sleep(0.6)

        headers = {"Content-Type": "application/connect+json", "Transfer-Encoding": "chunked"}
        status, response = agent.request("POST", "/process.Process/StreamInput", generate_frames(), headers)
        assert status == 200 and b"error" not in response
        agent.post_ok("/process.Process/CloseStdin", {"process": {"tag": "cat"}})
        assert agent.stream("Connect", {"process": {"tag": "cat"}}).read_to_end()[0] == b"late"


def test_the_start_request_can_contain_the_input(agent):
    data = b"x" * 3_000_000
    events = agent.start("sh", "-c", "sleep 0.3; cat; echo end", input=encode_base64(data))
    assert events.next()["start"]["input"] is True
    assert events.read_to_end()[0] == data + b"end\n"
    assert agent.start("cat", input="").read_to_end()[0] == b""


def test_unread_input_does_not_block_the_agent(agent):
    out, _, end = agent.start("sh", "-c", "sleep 30.2 & echo done", input=encode_base64(b"x" * 3_000_000)).read_to_end()
    assert (out, end["exitCode"]) == (b"done\n", 0)
    events = agent.start("sh", "-c", "exec 0<&-; echo closed; sleep 0.3", input=encode_base64(b"x" * 3_000_000))
    assert events.read_to_end()[0] == b"closed\n"
    events = agent.start("true", pty={"size": {"cols": 80, "rows": 24}}, input="")
    assert (list(events), events.error["code"]) == ([], "invalid_argument")


def test_input_without_stdin_is_refused(agent):
    events = agent.start("sleep", "30.1")
    pid = events.next()["start"]["pid"]
    status, response = agent.post(
        "/process.Process/SendInput", {"process": {"pid": pid}, "input": {"stdin": encode_base64(b"x")}}
    )
    assert (status, response["code"]) == (400, "failed_precondition")
    agent.post_ok("/process.Process/SendSignal", {"process": {"pid": pid}, "signal": "SIGNAL_SIGKILL"})
    end = events.read_to_end()[2]
    assert end == {"exitCode": -1, "exited": False, "status": "signal: killed", "error": "signal: killed"}


def test_a_signal_reaches_the_process_group(agent):
    events = agent.start(
        "sh",
        "-c",
        "trap 'echo parent' TERM; sh -c 'trap \"echo child; exit\" TERM; echo up; "
        "while :; do sleep 0.05; done'; exit 5",
    )
    pid = events.next()["start"]["pid"]
    assert base64.b64decode(events.next()["data"]["stdout"]) == b"up\n"
    agent.post_ok("/process.Process/SendSignal", {"process": {"pid": pid}, "signal": "SIGNAL_SIGTERM"})
    out, _, end = events.read_to_end()
    assert (sorted(out.split()), end["exitCode"]) == ([b"child", b"parent"], 5)


def test_an_unknown_process_is_not_found(agent):
    for method, extra_fields in (
        ("SendSignal", {"signal": "SIGNAL_SIGKILL"}),
        ("SendInput", {"input": {"stdin": ""}}),
        ("CloseStdin", {}),
        ("Update", {}),
    ):
        status, response = agent.post(f"/process.Process/{method}", {"process": {"pid": 999_999_999}, **extra_fields})
        assert (status, response["code"]) == (404, "not_found"), method
    events = agent.stream("Connect", {"process": {"tag": "none"}})
    assert list(events) == [] and events.error and events.error["code"] == "not_found"


def test_a_disconnect_does_not_stop_the_process(agent, wait_until):
    body = json.dumps({"process": {"cmd": "sh", "args": ["-c", "echo a; read x; echo b"]}, "tag": "orphan"}).encode()
    with socket.create_connection(("127.0.0.1", agent.port)) as sock:
        sock.sendall(
            b"POST /process.Process/Start HTTP/1.1\r\nContent-Type: application/connect+json\r\n"
            b"Content-Length: %d\r\n\r\n" % (len(body) + 5) + struct.pack(">BI", 0, len(body)) + body
        )
        assert b"start" in sock.recv(1000)
    processes = [item for item in agent.post_ok("/process.Process/List")["processes"] if item.get("tag") == "orphan"]
    assert processes[0]["config"] == {"cmd": "sh", "args": ["-c", "echo a; read x; echo b"], "envs": {}}
    events = agent.stream("Connect", {"process": {"tag": "orphan"}})
    assert events.next()["start"]["pid"] == processes[0]["pid"]
    assert base64.b64decode(events.next()["data"]["stdout"]) == b"a\n"
    message = {"process": {"tag": "orphan"}, "input": {"stdin": encode_base64(b"\n")}}
    agent.post_ok("/process.Process/SendInput", message)
    assert events.read_to_end()[0] == b"b\n"
    # After the process has exited, it is no longer listed, but its result remains available.
    assert not [item for item in agent.post_ok("/process.Process/List")["processes"] if item.get("tag") == "orphan"]
    out, _, end = agent.stream("Connect", {"process": {"tag": "orphan"}}).read_to_end()
    assert (out, end["exitCode"]) == (b"a\nb\n", 0)


def test_only_the_last_output_is_kept(agent):
    events = agent.start("sh", "-c", "head -c 3000000 /dev/zero; printf end", tag="long")
    assert len(events.read_to_end()[0]) == 3_000_003
    out = agent.stream("Connect", {"process": {"tag": "long"}}).read_to_end()[0]
    assert out.endswith(b"end") and 100_000 < len(out) < 400_000


def test_a_process_without_a_client_keeps_running(agent, tmp_path, wait_until):
    marker_file = tmp_path / "done"
    events = agent.start("sh", "-c", f"sleep 0.2; head -c 9000000 /dev/zero; touch {marker_file}")
    events.next()
    events._response.close()
    wait_until(marker_file.exists)


def test_a_process_is_killed_at_its_deadline(agent, wait_until):
    start_time = time.monotonic()
    events = agent.start("sh", "-c", "echo $$; sleep 31.1", Connect_Timeout_Ms="400")
    pid = events.next()["start"]["pid"]
    out, _, end = events.read_to_end()
    assert (int(out), end, events.error["code"]) == (pid, {}, "deadline_exceeded")
    assert time.monotonic() - start_time < 10
    # Another stream, without a deadline, reports how the process ended.
    assert agent.stream("Connect", {"process": {"pid": pid}}).read_to_end()[2]["status"] == "signal: killed"
    wait_until(lambda: all(item["pid"] != pid for item in agent.post_ok("/process.Process/List")["processes"]))


def test_the_deadline_of_a_stream_ends_only_the_stream(agent):
    start_stream = agent.start("sleep", "30.2", tag="sleeper")
    pid = start_stream.next()["start"]["pid"]
    events = agent.stream("Connect", {"process": {"pid": pid}}, **{"Connect-Timeout-Ms": "100"})
    assert [list(event) for event in events] == [["start"]]
    assert events.error and events.error["code"] == "deadline_exceeded"
    assert pid in [item["pid"] for item in agent.post_ok("/process.Process/List")["processes"]]
    os.kill(pid, signal.SIGKILL)
    assert start_stream.read_to_end()[2]["status"] == "signal: killed"


def test_silent_streams_send_keepalives(agent):
    events = agent.start("sleep", "1.3", Connect_Timeout_Ms="0")
    assert list(events.next()) == ["start"]
    failed_stream = agent.stream("Connect", {"process": {"pid": 0, "tag": ""}})
    assert list(failed_stream) == []
    slow_stream = agent.stream(
        "Start", {"process": {"cmd": "sleep", "args": ["1.2"]}, "stdin": False}, **{"Keepalive-Ping-Interval": "1"}
    )
    assert [next(iter(event)) for event in slow_stream] == ["start", "keepalive", "end"]
    events.read_to_end()


def test_a_terminal_can_be_resized(agent):
    events = agent.start(
        "sh", "-c", "tty; stty size; read x; stty size; echo got $x", pty={"size": {"cols": 100, "rows": 30}}
    )
    pid = events.next()["start"]["pid"]
    out = b""
    while b"30 100" not in out:
        out += base64.b64decode(events.next()["data"]["pty"])
    assert out.startswith(b"/dev/")
    agent.post_ok("/process.Process/Update", {"process": {"pid": pid}, "pty": {"size": {"cols": 90, "rows": 20}}})
    agent.post_ok("/process.Process/SendInput", {"process": {"pid": pid}, "input": {"pty": encode_base64(b"in\n")}})
    out, _, end = events.read_to_end()
    assert b"20 90" in out and b"got in" in out and end["exitCode"] == 0


def test_a_terminal_controls_its_session(agent):
    # Do not use a shell, which may lose an interrupt between two commands.
    events = agent.start("sleep", "31.2", pty={"size": {}})
    pid = events.next()["start"]["pid"]
    status, response = agent.post("/process.Process/CloseStdin", {"process": {"pid": pid}})
    assert (status, response["code"]) == (400, "failed_precondition")
    agent.post_ok("/process.Process/SendInput", {"process": {"pid": pid}, "input": {"pty": encode_base64(b"\x03")}})
    assert events.read_to_end()[2]["status"] == "signal: interrupt"


def test_a_background_child_does_not_delay_the_end(agent):
    start_time = time.monotonic()
    out, _, _ = agent.start("sh", "-c", "sleep 30.4 & echo $!").read_to_end()
    assert time.monotonic() - start_time < 5
    os.kill(int(out), signal.SIGKILL)


def test_descriptors_and_threads_are_released(fresh_agent, wait_until):
    def count_entries(directory: str) -> int:
        return len(list(Path(f"/proc/{fresh_agent.process.pid}/{directory}").iterdir()))

    thread_count = count_entries("task")
    fresh_agent.start("true").read_to_end()
    wait_until(lambda: count_entries("task") == thread_count)
    descriptor_count = count_entries("fd")
    for _ in range(5):
        fresh_agent.start("true", stdin=True).read_to_end()
        fresh_agent.start("true", pty={"size": {}}).read_to_end()
        fresh_agent.post_ok("/exec", {"args": ["true"]})
        fresh_agent.stream("Start", {"process": {"cmd": "no-such"}, "pty": {"size": {}}}).read_to_end()
        fresh_agent.stream("Start", {"process": {"cmd": "no-such"}}).read_to_end()
    wait_until(lambda: (count_entries("task"), count_entries("fd")) == (thread_count, descriptor_count))
    assert Path(f"/proc/{fresh_agent.process.pid}/task/{fresh_agent.process.pid}/children").read_text() == ""


def test_arguments_that_are_not_utf_8_are_passed(agent):
    """As in Python, certain unpaired surrogates represent bytes that are not UTF-8. All others are refused."""
    argv = ["sh", "-c", 'printf %s "$1" | od -An -tx1; sleep 0.5', "sh", "a\udcff"]
    events = agent.start(*argv, envs={"A": "\udcfe"}, tag="bytes")
    events.next()
    processes = [item for item in agent.post_ok("/process.Process/List")["processes"] if item.get("tag") == "bytes"]
    assert (processes[0]["config"]["args"][-1], processes[0]["config"]["envs"]) == ("a\ufffd", {"A": "\ufffd"})
    assert events.read_to_end()[0].split() == [b"61", b"ff"]
    for fields in ({"envs": {"A": "\ud800"}}, {"args": ["\ud800"]}, {"cwd": "/\ud800"}):
        rejected_events = agent.stream("Start", {"process": {"cmd": "true", **fields}})
        assert (list(rejected_events), rejected_events.error["code"]) == ([], "invalid_argument"), fields
