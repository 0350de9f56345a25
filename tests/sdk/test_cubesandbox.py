"""Test that the unmodified, published ``cubesandbox`` client works with a live gateway."""

from __future__ import annotations

import hashlib
import threading
import uuid
from collections.abc import Callable, Iterator
from typing import Any

import cubesandbox
import pytest
from cubesandbox import NEVER_TIMEOUT, Config, Sandbox, Template, Volume
from cubesandbox._exceptions import AuthenticationError

from tests.sdk.conftest import HTTP
from tests.sdk.coverage import covers
from tests.sdk.servers import Server
from tests.sdk.test_e2b import HOST_SERVER_PROGRAM, fetch_host, wait_until
from tests.support import waiting
from tests.support.images import make_small_debian_layer, write_layout

CreateSandbox = Callable[..., Sandbox]
_LARGE_FILE_BYTES = 50 << 20


def build_environment(server: Server) -> dict[str, str]:
    """Return the environment variables that users of the client must set."""
    return {
        "CUBE_API_URL": server.url,
        "CUBE_API_KEY": server.key,
        "CUBE_TEMPLATE_ID": server.template,
        "CUBE_PROXY_NODE_IP": "127.0.0.1",
        "CUBE_PROXY_PORT_HTTP": str(server.port),
    }


@pytest.fixture(autouse=True)
def client_environment(server: Server, monkeypatch: pytest.MonkeyPatch) -> None:
    for name, value in build_environment(server).items():
        monkeypatch.setenv(name, value)


@pytest.fixture(scope="module")
def shared_sandbox(server) -> Iterator[Sandbox]:
    with pytest.MonkeyPatch.context() as monkeypatch:
        for name, value in build_environment(server).items():
            monkeypatch.setenv(name, value)
        with Sandbox.create() as sandbox:
            yield sandbox


@pytest.fixture
def create_sandbox() -> Iterator[CreateSandbox]:
    sandboxes: list[Sandbox] = []

    def create_one(template: str | None = None, **options: Any) -> Sandbox:
        sandboxes.append(Sandbox.create(template, **options))
        return sandboxes[-1]

    yield create_one
    for sandbox in sandboxes:
        sandbox.__exit__()


@pytest.mark.core
@covers("Sandbox.create", "Sandbox.get_info", "Sandbox.kill", "Sandbox.close", "Sandbox.get_host", "Sandbox.health")
def test_a_sandbox_can_be_created_and_killed(server):
    assert Sandbox.health()["status"] == "ok"
    sandbox = Sandbox.create(timeout=600, env_vars={"GREETING": "hello"}, metadata={"team": "red"})
    try:
        assert sandbox.get_host(80) == f"80-{sandbox.sandbox_id}.{server.domain}"
        assert sandbox.commands.run('echo "$GREETING"').stdout == "hello\n"
        info = sandbox.get_info()
        assert (info["sandboxID"], info["alias"], info["state"]) == (sandbox.sandbox_id, server.template, "running")
        assert (info["metadata"], info["cpuCount"], info["memoryMB"]) == ({"team": "red"}, 1, 256)
    finally:
        sandbox.kill()
        sandbox.close()
    with pytest.raises(cubesandbox.SandboxNotFoundError):
        sandbox.get_info()
    with pytest.raises(cubesandbox.SandboxNotFoundError):
        sandbox.kill()


@pytest.mark.core
@covers("Sandbox.connect", "Sandbox.list", "Sandbox.list_v2", "Sandbox.set_timeout", note="a timeout of -1 means none")
def test_sandboxes_can_be_connected_and_listed(create_sandbox):
    sandbox = create_sandbox()
    reconnected_sandbox = Sandbox.connect(sandbox.sandbox_id)
    assert reconnected_sandbox.commands.run("echo here").stdout == "here\n"
    for sandboxes in (Sandbox.list(), Sandbox.list_v2()):
        assert sandbox.sandbox_id in [each["sandboxID"] for each in sandboxes]
    sandbox.set_timeout(NEVER_TIMEOUT)
    assert sandbox.get_info()["endAt"].startswith("9999-")
    sandbox.set_timeout(0)
    wait_until(lambda: sandbox.sandbox_id not in [each["sandboxID"] for each in Sandbox.list()])
    with pytest.raises(cubesandbox.SandboxNotFoundError):
        Sandbox.connect("0" * 12)


@covers("Sandbox.connect", "Sandbox.get_info")
def test_times_are_dates(create_sandbox):
    sandbox = create_sandbox(timeout=600)
    info = sandbox.get_info()
    assert (info.end_at - info.started_at).total_seconds() == pytest.approx(600, abs=60)
    with pytest.raises(cubesandbox.ApiError):
        Sandbox.connect(sandbox.sandbox_id, timeout=0)


@pytest.mark.core
@covers("Sandbox.pause", "Sandbox.resume")
def test_a_paused_sandbox_can_be_resumed(create_sandbox):
    sandbox = create_sandbox()
    sandbox.files.write("/root/note", "kept")
    sandbox.pause()
    assert sandbox.get_info()["state"] == "paused"
    with pytest.raises(cubesandbox.ApiError) as error_info:
        sandbox.pause()
    assert error_info.value.status_code == 409
    sandbox.resume(timeout=600)
    assert sandbox.files.read("/root/note") == "kept"


@covers("Sandbox.create", note="lifecycle: pauses at the timeout, and resumes at the next request")
def test_traffic_resumes_a_sandbox_that_paused_at_its_timeout(create_sandbox):
    sandbox = create_sandbox(lifecycle={"on_timeout": "pause", "auto_resume": True})
    sandbox.set_timeout(0)
    wait_until(lambda: sandbox.get_info().state == "paused")
    assert sandbox.commands.run("echo up").stdout == "up\n"


@pytest.mark.core
@covers("Sandbox.run_code")
def test_code_keeps_state_and_returns_results(shared_sandbox):
    output: list[str] = []
    result = shared_sandbox.run_code("print('a'); 6 * 7", on_stdout=lambda message: output.append(message.text))
    assert (result.text, result.logs.stdout, output) == ("42", ["a\n"], ["a\n"])
    shared_sandbox.run_code("kept = 1")
    assert shared_sandbox.run_code("kept + 1").text == "2"
    failure = shared_sandbox.run_code("raise ValueError('no')")
    assert failure.error is not None and (failure.error.name, failure.error.value) == ("ValueError", "no")
    assert shared_sandbox.run_code("import os; os.environ['ONCE']", envs={"ONCE": "x"}).text == "'x'"
    assert shared_sandbox.run_code("echo $((1+1))", language="bash").logs.stdout == ["2\n"]


@pytest.mark.core
@covers("Commands.run")
def test_commands_return_output_and_exit_code(shared_sandbox):
    result = shared_sandbox.commands.run("echo out; echo err >&2; pwd; echo $A; exit 3", cwd="/etc", envs={"A": "b"})
    assert (result.stdout, result.stderr, result.exit_code) == ("out\n/etc\nb\n", "err\n", 3)
    assert shared_sandbox.commands.run("seq 100000", timeout=60).stdout.endswith("\n100000\n")
    # Older releases do not hide the exception of the e2b client, if that is installed.
    with pytest.raises(Exception, match=r"deadline|time"):
        shared_sandbox.commands.run("sleep 600.3", timeout=1)


@pytest.mark.core
@covers(
    "Filesystem.write",
    "Filesystem.read",
    "Filesystem.write_files",
    "Filesystem.list",
    "Filesystem.stat",
    "Filesystem.exists",
    "Filesystem.remove",
    "Filesystem.rename",
    "Filesystem.make_dir",
)
def test_files_can_be_written_read_and_removed(shared_sandbox):
    files = shared_sandbox.files
    files.write("/tmp/c/a b", "héllo")
    assert files.read("/tmp/c/a b") == "héllo"
    assert files.write_files([(f"/tmp/c/{number}", str(number)) for number in range(3)]) == 3
    assert [entry["name"] for entry in files.list("/tmp/c")] == ["0", "1", "2", "a b"]
    assert files.stat("/tmp/c/0")["type"] == "FILE_TYPE_FILE"
    assert files.rename("/tmp/c/0", "/tmp/c/zero")["path"] == "/tmp/c/zero"
    assert files.make_dir("/tmp/c/d")["type"] == "FILE_TYPE_DIRECTORY"
    files.remove("/tmp/c")
    assert not files.exists("/tmp/c")
    with pytest.raises(cubesandbox.FilesystemNotFoundError):
        files.list("/tmp/c")
    with pytest.raises(OSError, match="none"):
        files.read("/tmp/none")
    contents = bytes(range(256)) * (_LARGE_FILE_BYTES // 256)
    files.write("/tmp/big", contents)
    assert shared_sandbox.commands.run("sha256sum </tmp/big").stdout.split()[0] == hashlib.sha256(contents).hexdigest()
    files.remove("/tmp/big")


@covers("Filesystem.watch_dir", "Watcher.close")
def test_watched_directories_report_events(shared_sandbox):
    shared_sandbox.files.make_dir("/tmp/watched")
    events: list[tuple[str, str]] = []
    with shared_sandbox.files.watch_dir("/tmp/watched") as watcher:
        shared_sandbox.files.write("/tmp/watched/new", "1")
        for event in watcher:
            events.append((event.name, event.type))
            if ("new", "EVENT_TYPE_WRITE") in events:
                break
    assert events[0] == ("new", "EVENT_TYPE_CREATE")


@covers(
    "Pty.create",
    "Pty.connect",
    "Pty.kill",
    "Pty.resize",
    "Pty.send_stdin",
    "PtyHandle.wait",
    "PtyHandle.send_stdin",
    "PtyHandle.resize",
    "PtyHandle.disconnect",
    "PtyHandle.kill",
)
def test_terminals_can_be_used_resized_and_killed(shared_sandbox):
    output = bytearray()
    handle = shared_sandbox.pty.create(cubesandbox.PtySize(rows=24, cols=80))
    shared_sandbox.pty.resize(handle.pid, cubesandbox.PtySize(rows=30, cols=99))
    handle.resize(cubesandbox.PtySize(rows=30, cols=98))
    handle.send_stdin("stty size\n")
    shared_sandbox.pty.send_stdin(handle.pid, "exit\n")
    assert handle.wait(on_data=output.extend) == 0
    assert b"30 98" in output
    second_handle = shared_sandbox.pty.create(cubesandbox.PtySize(rows=24, cols=80))
    second_handle.disconnect()
    shared_sandbox.pty.connect(second_handle.pid).disconnect()
    assert shared_sandbox.pty.kill(second_handle.pid)
    wait_until(lambda: not shared_sandbox.pty.kill(second_handle.pid))
    third_handle = shared_sandbox.pty.create(cubesandbox.PtySize(rows=24, cols=80))
    assert third_handle.kill()


@pytest.mark.core
@covers("Sandbox.create_snapshot", "Sandbox.list_snapshots", "Sandbox.delete_snapshot")
def test_snapshots_can_be_listed_and_deleted(create_sandbox):
    sandbox, name = create_sandbox(), f"name-{uuid.uuid4().hex[:8]}"
    snapshots = [sandbox.create_snapshot(), sandbox.create_snapshot(name), sandbox.create_snapshot()]
    first_page, token = Sandbox.list_snapshots(sandbox_id=sandbox.sandbox_id, limit=2)
    assert len(first_page) == 2 and token
    second_page, last_token = Sandbox.list_snapshots(sandbox_id=sandbox.sandbox_id, limit=2, next_token=token)
    assert last_token is None
    assert {each.snapshot_id for each in first_page + second_page} == {each.snapshot_id for each in snapshots}
    assert snapshots[1].names == [name]
    sandbox.kill()
    for snapshot in snapshots:
        Sandbox.delete_snapshot(snapshot.snapshot_id)
    with pytest.raises(cubesandbox.TemplateNotFoundError):
        Sandbox.delete_snapshot(snapshots[0].snapshot_id)


@covers("Sandbox.delete_snapshot", note="a snapshot in use is hidden until its last user is removed")
def test_a_snapshot_in_use_is_hidden(create_sandbox):
    sandbox = create_sandbox()
    sandbox.files.write("/root/note", "kept")
    snapshot = sandbox.create_snapshot()
    fork = create_sandbox(snapshot.snapshot_id)
    Sandbox.delete_snapshot(snapshot.snapshot_id)
    assert Sandbox.list_snapshots(sandbox_id=sandbox.sandbox_id)[0] == []
    assert fork.files.read("/root/note") == "kept"
    with pytest.raises(cubesandbox.TemplateNotFoundError):
        create_sandbox(snapshot.snapshot_id)


@pytest.mark.core
@covers("Sandbox.rollback")
def test_a_sandbox_object_works_after_a_rollback(server, create_sandbox):
    """The object also works after a rollback to a missing snapshot, which fails."""
    sandbox = create_sandbox()
    sandbox.files.write("/root/note", "before")
    sandbox.run_code("counter = 1")
    snapshot = sandbox.create_snapshot()
    for _ in range(2):
        sandbox.files.write("/root/note", "after")
        sandbox.run_code("counter = 100")
        sandbox.rollback(snapshot.snapshot_id)
        assert sandbox.files.read("/root/note") == "before"
        if server.abilities.memory:
            assert sandbox.run_code("counter += 1; counter").text == "2"
    second_snapshot = sandbox.create_snapshot()
    assert create_sandbox(second_snapshot.snapshot_id).files.read("/root/note") == "before"
    with pytest.raises(cubesandbox.CubeSandboxError, match="not found") as error_info:
        sandbox.rollback("0" * 12)
    assert error_info.value.status_code == 404
    assert sandbox.files.read("/root/note") == "before"


@pytest.mark.core
@pytest.mark.parametrize("concurrency", [1, 4])
@covers("Sandbox.clone", note="sequential and concurrent; the snapshot is removed when the last clone is removed")
def test_clones_are_independent_copies(server, create_sandbox, concurrency):
    sandbox = create_sandbox()
    sandbox.run_code("counter = 7")
    sandbox.files.write("/root/note", "shared")
    clones = sandbox.clone(4, concurrency=concurrency)
    try:
        for number, clone in enumerate(clones):
            assert clone.files.read("/root/note") == "shared"
            clone.files.write("/root/note", str(number))
            if server.abilities.memory:
                assert clone.run_code("counter += 1; counter").text == "8"
        assert [clone.files.read("/root/note") for clone in clones] == ["0", "1", "2", "3"]
        assert sandbox.files.read("/root/note") == "shared"
    finally:
        for clone in clones:
            clone.kill()
    assert Sandbox.list_snapshots(sandbox_id=sandbox.sandbox_id)[0] == []


@covers("Sandbox.update_network", note="no `rules`; domain names on `kvm_xfs`")
def test_update_network_replaces_the_rules(create_sandbox):
    sandbox = create_sandbox(allow_internet_access=False)
    connect_command = "python3 -c 'import socket; socket.create_connection((\"198.51.100.1\", 80), 5)' 2>&1 | tail -n 1"
    assert "Error" in sandbox.commands.run(connect_command).stdout
    sandbox.update_network({"allow_out": ["198.51.100.0/24"], "allow_internet_access": False})
    assert sandbox.get_info()["network"]["allowOut"] == ["198.51.100.0/24"]
    with pytest.raises(cubesandbox.ApiError):
        sandbox.update_network({"rules": {"api.example.com": [{"transform": {"headers": {"A": "b"}}}]}})


@covers(
    "Sandbox.create",
    "Sandbox.update_network",
    note="`network`: public ports, and the `Host` header that services receive",
)
def test_ports_are_public_on_request(server, create_sandbox):
    sandbox = create_sandbox(network={"allow_public_traffic": True, "mask_request_host": "shop.example.com:${PORT}"})
    sandbox.files.write("/root/server.py", HOST_SERVER_PROGRAM)
    sandbox.commands.run("nohup python3 /root/server.py >/dev/null 2>&1 &")
    wait_until(lambda: fetch_host(server, sandbox.get_host(8000)) == "shop.example.com:8000")
    headers = {"Host": sandbox.get_host(8000)}
    assert HTTP.get(server.url, headers=headers).text == "shop.example.com:8000"
    sandbox.update_network({"mask_request_host": "", "allow_public_traffic": False})
    assert fetch_host(server, sandbox.get_host(8000)) == sandbox.get_host(8000)
    assert HTTP.get(server.url, headers=headers).status_code == 403


@pytest.mark.usefixtures("requires_one_host")
@covers("Volume.create", "Volume.list", "Volume.get_info", "Volume.connect", "Volume.destroy", "VolumeMount")
def test_volumes_are_shared_between_sandboxes(create_sandbox):
    volume = Volume.create(f"data-{uuid.uuid4().hex[:8]}")
    try:
        assert volume.volume_id in [each.volume_id for each in Volume.list()]
        assert Volume.get_info(volume.volume_id).name == Volume.connect(volume.name).name
        writer = create_sandbox(volume_mounts={"/data": volume})
        reader = create_sandbox(volume_mounts={"/data": cubesandbox.VolumeMount(volume, read_only=True)})
        writer.files.write("/data/note", "shared")
        wait_until(lambda: reader.files.exists("/data/note"))
        assert reader.files.read("/data/note") == "shared"
        assert reader.commands.run("touch /data/x").exit_code != 0
        writer.kill()
        reader.kill()
    finally:
        wait_until(lambda: _try_to_destroy(volume))
    with pytest.raises(cubesandbox.VolumeNotFoundError):
        Volume.get_info(volume.volume_id)


def _try_to_destroy(volume: Volume) -> bool:
    try:
        return bool(Volume.destroy(volume.volume_id))
    except cubesandbox.ApiError:
        return False


@covers("Template.list", "Template.get", "Template.delete", "Template.get_build_status", "Template.get_build_logs")
@covers("Template.set_alias", note="adds a name; the other names are kept")
def test_templates_can_be_listed_and_renamed(server, create_sandbox):
    assert server.template in [each.name for each in Template.list()]
    template = Template.get(server.template)
    assert template.status == "READY"
    assert {each.status for each in Template.list() if each.name == server.template} == {"READY"}
    alias = f"alias-{uuid.uuid4().hex[:8]}"
    assert Template.set_alias(template.template_id, alias).template_id == template.template_id
    assert Template.get(alias).template_id == template.template_id
    with pytest.raises(cubesandbox.TemplateNotFoundError):
        Template.get("no-such")
    for invalid_alias, error_text in (("no spaces", "is not allowed"), (None, "give the name to a different template")):
        with pytest.raises(cubesandbox.ApiError, match=error_text) as alias_error_info:
            Template.set_alias(template.template_id, invalid_alias)
        assert alias_error_info.value.status_code == 400
    build_id = server.gateway.call("GET", f"/templates/{server.template}")["buildID"]
    assert Template.get_build_status(server.template, build_id).status == "ready"
    assert Template.get_build_logs(server.template, build_id) is not None
    create_sandbox()
    with pytest.raises(cubesandbox.ApiError) as error_info:
        Template.delete(server.template)
    assert error_info.value.status_code == 409


@pytest.mark.usefixtures("requires_memory")
@covers("Template.build", note="`image`, `cpu_count` and `memory_mb`; the image's entry point is started")
@covers("Template.rebuild", note="builds only if the image has changed")
def test_a_template_is_built_from_an_image(server, create_sandbox, tmp_path):
    layout = write_layout(tmp_path / "layout", [make_small_debian_layer(tmp_path)], {"Cmd": ["sleep", "100000"]})
    build = Template.build(name="image", image=f"oci:{layout}:test", cpu_count=1000, memory_mb=256)
    waiting.wait_until(lambda: Template.get_build_status(build.template_id, build.build_id).status != "building", 300)
    assert Template.get_build_status("image", build.build_id).status == "ready", Template.get_build_logs(
        "image", build.build_id
    )
    assert Template.rebuild("image").template_id == build.template_id
    sandbox = create_sandbox("image")
    assert "sleep" in sandbox.commands.run("cat /proc/[0-9]*/comm").stdout
    assert sandbox.run_code("import sys; sys.executable").text == "'/opt/sandbox/bin/python3'"
    sandbox.kill()
    Template.delete("image")


def test_errors_have_their_own_classes(server):
    with pytest.raises(cubesandbox.TemplateNotFoundError):
        Sandbox.create("no-such-template")
    with pytest.raises(AuthenticationError):
        Sandbox.create(config=Config(api_key="wrong"))
    with pytest.raises(cubesandbox.ApiError) as error_info:
        Sandbox.create(metadata={"a": "b"}, timeout=-7)
    assert error_info.value.status_code == 400


def test_threads_can_share_one_sandbox_object(shared_sandbox):
    results: dict[int, str] = {}

    def run_command(number: int) -> None:
        results[number] = shared_sandbox.commands.run(f"echo {number}").stdout

    threads = [threading.Thread(target=run_command, args=(number,)) for number in range(8)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(60)
    assert results == {number: f"{number}\n" for number in range(8)}


def test_unsupported_options_are_refused(server, create_sandbox):
    """An unsupported option must not silently create something other than what the client requested."""
    original_id = Template.get(server.template).template_id
    with pytest.raises(cubesandbox.ApiError, match=r"nodes: not supported, because .*; command: .*set 'startCommand'"):
        Template.build(name=server.template, image="nginx:latest", command=["nginx"], nodes=["10.0.0.7"])
    with pytest.raises(cubesandbox.ApiError, match=r"use whole CPUs"):
        Template.build(name=server.template, image="nginx:latest", cpu_count=1500)
    assert Template.get(server.template).template_id == original_id
    with pytest.raises(cubesandbox.ApiError, match="host-mount"):
        create_sandbox(metadata={"host-mount": '[{"hostPath": "/srv", "mountPath": "/srv"}]'})
    with pytest.raises(cubesandbox.ApiError, match="distributionScope: not supported"):
        create_sandbox(distribution_scope=["10.0.0.7"])
    with pytest.raises(cubesandbox.ApiError, match="driver: not supported"):
        Volume.create("unsupported-driver", driver="nfs")
    assert "unsupported-driver" not in [each.name for each in Volume.list()]
