"""Test sandboxes, life cycles and snapshots with the unmodified, published ``e2b`` client and a live gateway."""

from __future__ import annotations

import asyncio
import functools
import random
import uuid
from collections.abc import Callable, Iterator
from datetime import UTC, datetime, timedelta
from typing import Any

import e2b
import httpx
import pytest
from e2b import AsyncSandbox, Sandbox, SandboxQuery, SandboxState

from tests.sdk import client_sets
from tests.sdk.conftest import HTTP
from tests.sdk.coverage import covers
from tests.sdk.servers import Server, build_e2b_environment
from tests.support import waiting
from tests.support.images import (
    PASSWORD,
    USER,
    make_small_debian_layer,
    push_image,
    running_registry,
    write_auth_file,
    write_layout,
)

CreateSandbox = Callable[..., Sandbox]
_NOT_RUNNING_ERROR = getattr(e2b, "SandboxNotRunningException", e2b.TimeoutException)
"""The exception for a sandbox that does not run. Older releases report it like a timeout."""


@pytest.fixture(autouse=True)
def client_environment(server: Server, monkeypatch: pytest.MonkeyPatch) -> None:
    """Set the environment variables that users of the client must set."""
    for name, value in build_e2b_environment(server.url, server.key).items():
        monkeypatch.setenv(name, value)
    monkeypatch.setenv("E2B_DOMAIN", server.domain)


@pytest.fixture
def create_sandbox(server: Server) -> Iterator[CreateSandbox]:
    sandboxes: list[Sandbox] = []

    def create_one(template: str = server.template, **options: Any) -> Sandbox:
        sandboxes.append(Sandbox.create(template, **options))
        return sandboxes[-1]

    yield create_one
    for sandbox in sandboxes:
        sandbox.kill()


wait_until = functools.partial(waiting.wait_until, seconds=60)


def fetch_all_items(paginator: Any) -> list[Any]:
    items = []
    while paginator.has_next:
        items += paginator.next_items()
    return items


@pytest.mark.core
@covers("Sandbox.create", "Sandbox.get_info", "Sandbox.is_running", "Sandbox.kill")
def test_a_sandbox_can_be_created_and_killed(server, create_sandbox):
    sandbox = create_sandbox(timeout=600, metadata={"team": "red"}, envs={"GREETING": "hello"})
    assert sandbox.is_running()
    assert sandbox.commands.run('echo "$GREETING"').stdout == "hello\n"
    info = sandbox.get_info()
    assert (info.sandbox_id, info.name, info.state) == (sandbox.sandbox_id, server.template, SandboxState.RUNNING)
    assert info.metadata == {"team": "red"}
    assert (info.cpu_count, info.memory_mb) == (1, 256)
    assert timedelta(seconds=500) < info.end_at - datetime.now(UTC) <= timedelta(seconds=600)
    assert sandbox.kill()
    assert not sandbox.kill()
    assert not sandbox.is_running()
    with pytest.raises(e2b.SandboxNotFoundException):
        sandbox.get_info()
    with pytest.raises(_NOT_RUNNING_ERROR):
        sandbox.commands.run("true")


@pytest.mark.core
@covers("Sandbox.connect")
def test_connect_finds_the_sandbox_and_extends_its_timeout(create_sandbox):
    sandbox = create_sandbox()
    sandbox.files.write("/root/note", "kept")
    connected_sandbox = Sandbox.connect(sandbox.sandbox_id, timeout=900)
    assert connected_sandbox.files.read("/root/note") == "kept"
    assert connected_sandbox.get_info().end_at - datetime.now(UTC) > timedelta(seconds=800)
    with pytest.raises(e2b.SandboxNotFoundException):
        Sandbox.connect("0" * 12)


@pytest.mark.core
@covers("Sandbox.list", "SandboxPaginator.next_items")
def test_list_filters_and_paginates(create_sandbox):
    mark = uuid.uuid4().hex
    sandboxes = [
        create_sandbox(metadata={"mark": mark, "number": str(number), "odd": "a=b&c d"}) for number in range(3)
    ]
    ids = [sandbox.sandbox_id for sandbox in sandboxes]
    infos = fetch_all_items(Sandbox.list(query=SandboxQuery(metadata={"mark": mark, "odd": "a=b&c d"}), limit=2))
    assert [info.sandbox_id for info in infos] == ids or {info.sandbox_id for info in infos} == set(ids)
    assert [
        info.metadata["number"] for info in fetch_all_items(Sandbox.list(query=SandboxQuery(metadata={"number": "1"})))
    ]
    sandboxes[0].pause()
    query = {"metadata": {"mark": mark}}
    both_states = [SandboxState.RUNNING, SandboxState.PAUSED]
    for states, count in (([SandboxState.RUNNING], 2), ([SandboxState.PAUSED], 1), (both_states, 3)):
        assert len(fetch_all_items(Sandbox.list(query=SandboxQuery(**query, state=states)))) == count


@covers("Sandbox.list")
def test_list_sorts_and_filters_by_template_and_time(server, create_sandbox):
    query = {"metadata": {"mark": uuid.uuid4().hex}}
    for _ in range(3):
        create_sandbox(**query)
    newest_infos = fetch_all_items(Sandbox.list(query=SandboxQuery(**query), order="desc", limit=1))
    assert [info.started_at for info in newest_infos] == sorted(
        (info.started_at for info in newest_infos), reverse=True
    )
    assert len(fetch_all_items(Sandbox.list(query=SandboxQuery(**query, template=server.template)))) == 3
    future_time = datetime.now(UTC) + timedelta(hours=1)
    assert not fetch_all_items(Sandbox.list(query=SandboxQuery(**query, started_after=future_time)))


@covers("Sandbox.set_timeout")
def test_a_sandbox_ends_at_its_timeout(create_sandbox):
    sandbox = create_sandbox(timeout=600)
    sandbox.set_timeout(1)
    wait_until(lambda: not sandbox.is_running())
    with pytest.raises(e2b.SandboxNotFoundException):
        sandbox.set_timeout(60)


@covers("Sandbox.create", "Sandbox.set_timeout", note="a timeout of -1 means none")
def test_a_sandbox_without_a_timeout_never_ends(create_sandbox):
    sandbox = create_sandbox(timeout=-1, metadata={"mark": (mark := uuid.uuid4().hex)})
    (listed_info,) = fetch_all_items(Sandbox.list(query=SandboxQuery(metadata={"mark": mark})))
    for info in (sandbox.get_info(), listed_info):
        assert info.end_at.astimezone().year in (9998, 9999)
    sandbox.set_timeout(600)
    assert sandbox.get_info().end_at - datetime.now(UTC) <= timedelta(seconds=600)
    sandbox.set_timeout(-1)
    assert sandbox.get_info().end_at.year == 9999


def test_refreshes_extend_the_lifetime(server, create_sandbox):
    """Only the generated API client of the package supports this request."""
    from e2b.api.client.api.sandboxes import post_sandboxes_sandbox_id_refreshes
    from e2b.api.client.models import SandboxRefreshRequest
    from e2b.api.client_sync import get_api_client

    sandbox = create_sandbox(timeout=600)
    api_client = get_api_client(e2b.ConnectionConfig())
    for duration, seconds in ((60, 600), (1800, 1800)):
        body = SandboxRefreshRequest(duration=duration)
        response = post_sandboxes_sandbox_id_refreshes.sync_detailed(sandbox.sandbox_id, client=api_client, body=body)
        assert response.status_code == 204
        remaining_seconds = (sandbox.get_info().end_at - datetime.now(UTC)).total_seconds()
        assert seconds - 100 < remaining_seconds <= seconds


@pytest.mark.core
@covers("Sandbox.pause")
def test_a_paused_sandbox_resumes_with_its_disk_and_memory(server, create_sandbox):
    sandbox = create_sandbox()
    sandbox.commands.run("echo disk >/root/note; (sleep 1000; true) >/dev/null 2>&1 &")
    sandbox.pause()
    assert sandbox.get_info().state is SandboxState.PAUSED
    with pytest.raises(_NOT_RUNNING_ERROR):
        sandbox.commands.run("true")
    sandbox.connect()
    assert sandbox.commands.run("cat /root/note").stdout == "disk\n"
    process_count = sandbox.commands.run("pgrep -c sleep || true").stdout.strip()
    assert process_count == ("1" if server.abilities.memory else "0")


@covers("Sandbox.pause", "Sandbox.beta_pause")
def test_pause_returns_whether_it_paused_the_sandbox(create_sandbox):
    sandbox = create_sandbox()
    assert sandbox.pause()
    assert not sandbox.pause() and not sandbox.beta_pause()


@covers("Sandbox.create", note="lifecycle: pauses at the timeout, and resumes at the next request")
def test_a_sandbox_pauses_at_its_timeout_and_traffic_resumes_it(create_sandbox):
    sandbox = create_sandbox(timeout=600, lifecycle={"on_timeout": "pause", "auto_resume": True})
    sandbox.files.write("/root/note", "still here")
    sandbox.set_timeout(0)
    wait_until(lambda: sandbox.get_info().state is SandboxState.PAUSED)
    assert sandbox.files.read("/root/note") == "still here"
    assert sandbox.get_info().state is SandboxState.RUNNING


@pytest.mark.core
@covers("Sandbox.create_snapshot", "Sandbox.list_snapshots", "Sandbox.delete_snapshot", "SnapshotPaginator.next_items")
def test_snapshots_can_be_listed_forked_and_deleted(create_sandbox):
    sandbox, name = create_sandbox(), f"name-{uuid.uuid4().hex[:8]}"
    sandbox.files.write("/root/note", "one")
    first_snapshot = sandbox.create_snapshot()
    sandbox.files.write("/root/note", "two")
    second_snapshot = sandbox.create_snapshot(name=name)
    assert second_snapshot.names == [name]
    snapshots = fetch_all_items(sandbox.list_snapshots(limit=1))
    assert {each.snapshot_id for each in snapshots} == {first_snapshot.snapshot_id, second_snapshot.snapshot_id}
    assert not fetch_all_items(Sandbox.list_snapshots(sandbox_id="0" * 12))
    for snapshot, text in ((first_snapshot.snapshot_id, "one"), (second_snapshot.snapshot_id, "two"), (name, "two")):
        fork = create_sandbox(snapshot)
        assert fork.files.read("/root/note") == text
        fork.kill()
    sandbox.kill()
    assert [
        Sandbox.delete_snapshot(each.snapshot_id) for each in (first_snapshot, second_snapshot, second_snapshot)
    ] == [True, True, False]
    with pytest.raises(e2b.SandboxException, match="not found"):
        create_sandbox(first_snapshot.snapshot_id)


@covers("Sandbox.delete_snapshot", note="a snapshot in use is hidden until its last user is removed")
def test_a_snapshot_in_use_is_hidden(create_sandbox):
    sandbox = create_sandbox()
    sandbox.files.write("/root/note", "kept")
    snapshot = sandbox.create_snapshot()
    fork = create_sandbox(snapshot.snapshot_id)
    assert Sandbox.delete_snapshot(snapshot.snapshot_id)
    assert not Sandbox.delete_snapshot(snapshot.snapshot_id)
    assert not fetch_all_items(sandbox.list_snapshots())
    assert fork.files.read("/root/note") == "kept"
    with pytest.raises(e2b.SandboxException, match="not found"):
        create_sandbox(snapshot.snapshot_id)


@pytest.mark.core
@client_sets.requires_release("e2b", "2.34.0", "has no `Sandbox.fork`")
@covers("Sandbox.fork")
def test_forks_are_independent_copies(server, create_sandbox):
    sandbox = create_sandbox()
    sandbox.commands.run("echo before >/root/note; (sleep 1001; true) >/dev/null 2>&1 &")
    forks = sandbox.fork(count=3)
    try:
        for number, fork in enumerate(forks):
            assert isinstance(fork, Sandbox)
            assert fork.files.read("/root/note") == "before\n"
            fork.files.write("/root/note", str(number))
            process_count = fork.commands.run("pgrep -fc 'sleep 100[1]' || true").stdout.strip()
            assert (process_count != "0") == server.abilities.memory
        assert [fork.files.read("/root/note") for fork in forks] == ["0", "1", "2"]
        assert sandbox.files.read("/root/note") == "before\n"
    finally:
        for fork in forks:
            fork.kill()


@covers("Sandbox.update_network")
def test_update_network_replaces_the_rules(create_sandbox):
    """Other tests check how the rules affect packets: tests/kvm_xfs/test_netns.py and tests/jail_zfs/test_pf.py."""
    sandbox = create_sandbox(allow_internet_access=False)
    assert sandbox.get_info().allow_internet_access is False
    connect_command = "python3 -c 'import socket; socket.create_connection((\"198.51.100.1\", 80), 5)' 2>&1 | tail -n 1"
    assert "Error" in sandbox.commands.run(connect_command).stdout
    sandbox.update_network({"allow_out": ["198.51.100.0/24"], "deny_out": ["0.0.0.0/0"]})
    network = sandbox.get_info().network
    assert (network["allow_out"], network["deny_out"]) == (["198.51.100.0/24"], ["0.0.0.0/0"])
    with pytest.raises(e2b.SandboxException, match="rules"):
        sandbox.update_network({"rules": {"api.example.com": [{"transform": {"headers": {"A": "b"}}}]}})


@covers("Sandbox.get_host")
def test_a_port_is_reachable_by_its_host_name(server, create_sandbox):
    sandbox = create_sandbox()
    sandbox.commands.run("cd /etc && python3 -m http.server 8000", background=True)
    key_headers = {"Host": sandbox.get_host(8000), "X-API-Key": server.key}
    wait_until(lambda: HTTP.get(f"{server.url}/hostname", headers=key_headers).status_code == 200)
    token_headers = {"Host": sandbox.get_host(8000), "E2B-Traffic-Access-Token": sandbox.traffic_access_token}
    assert HTTP.get(f"{server.url}/hostname", headers=token_headers).status_code == 200
    assert HTTP.get(f"{server.url}/hostname", headers={"Host": sandbox.get_host(8000)}).status_code == 403
    sandbox.kill()


HOST_SERVER_PROGRAM = """
import http.server
class Handler(http.server.BaseHTTPRequestHandler):
    def do_GET(self):
        self.send_response(200)
        self.end_headers()
        self.wfile.write(self.headers["Host"].encode())
http.server.HTTPServer(("", 8000), Handler).serve_forever()
"""


def fetch_host(server: Server, host: str) -> str:
    """Return the Host header that the server at ``host`` receives, or "" if the server is not running."""
    response = HTTP.get(server.url, headers={"Host": host, "X-API-Key": server.key})
    return response.text if response.status_code == 200 else ""


@covers("Sandbox.create", note="`network`: the `Host` header that services receive")
def test_services_see_the_masked_host(server, create_sandbox):
    sandbox = create_sandbox(network={"mask_request_host": "${PORT}-shop.example.com"})
    assert sandbox.get_info().network["mask_request_host"] == "${PORT}-shop.example.com"
    sandbox.files.write("/root/server.py", HOST_SERVER_PROGRAM)
    sandbox.commands.run("python3 /root/server.py", background=True)
    wait_until(lambda: fetch_host(server, sandbox.get_host(8000)) == "8000-shop.example.com")
    sandbox.update_network({"deny_out": ["198.51.100.0/24"]})
    assert fetch_host(server, sandbox.get_host(8000)) == "8000-shop.example.com"
    with pytest.raises(e2b.SandboxException, match="is not a host name"):
        create_sandbox(network={"mask_request_host": "a b"})


@covers("Sandbox.create", note="`network`: public ports")
def test_public_ports_need_no_key(server, create_sandbox):
    sandbox = create_sandbox(network={"allow_public_traffic": True})
    assert sandbox.get_info().network["allow_public_traffic"] is True
    sandbox.commands.run("cd /etc && python3 -m http.server 8000", background=True)
    headers = {"Host": sandbox.get_host(8000)}
    wait_until(lambda: HTTP.get(f"{server.url}/hostname", headers=headers).status_code == 200)
    agent_headers = {"Host": sandbox.get_host(49983)}
    assert HTTP.get(f"{server.url}/files?path=/etc/hostname", headers=agent_headers).status_code == 401


@covers("Sandbox.download_url", "Sandbox.upload_url")
def test_signed_urls_need_no_headers(server, create_sandbox):
    """The URLs work exactly as the client returns them, without extra headers or name resolution."""
    sandbox, _other_sandbox = create_sandbox(), create_sandbox()
    for upload_url in (sandbox.upload_url("/root/up", use_signature_expiration=60), sandbox.upload_url("/root/up")):
        response = HTTP.post(upload_url, files={"file": ("up", upload_url.encode())})
        assert response.status_code == 200, response.text
        assert sandbox.files.read("/root/up") == upload_url
        for url in (sandbox.download_url("/root/up", use_signature_expiration=60), sandbox.download_url("/root/up")):
            response = HTTP.get(url)
            assert response.status_code == 200 and response.text == upload_url
            assert HTTP.get(url.replace("up", "down")).status_code == 401
            assert HTTP.post(url, files={"file": ("up", b"changed")}).status_code == 401
    sandbox.kill()
    assert HTTP.get(url).status_code == 401


@covers("Sandbox.download_url", "Sandbox.upload_url")
def test_signed_urls_identify_the_sandbox_by_host_name(server, create_sandbox, monkeypatch):
    """Without `E2B_SANDBOX_URL`, a URL identifies the sandbox by its host name, which must resolve to the gateway."""
    sandbox = create_sandbox()
    sandbox.files.write("/root/up", "signed")
    monkeypatch.delenv("E2B_SANDBOX_URL")
    url = httpx.URL(Sandbox.connect(sandbox.sandbox_id).download_url("/root/up"))
    assert url.host == sandbox.get_host(49983)
    local_url = url.copy_with(scheme="http", host="127.0.0.1", port=server.port)
    assert HTTP.get(local_url, headers={"Host": url.host}).text == "signed"


@covers("Sandbox.get_metrics", note="measured by the host; `mem_cache` is `None`")
def test_metrics_report_the_usage(server, create_sandbox):
    start_time = datetime.now(UTC)
    sandbox = create_sandbox()
    info = sandbox.get_info()
    (first_sample, *_) = sandbox.get_metrics()
    assert first_sample.cpu_count == info.cpu_count and first_sample.mem_total == info.memory_mb << 20
    assert first_sample.disk_used > 0 and first_sample.mem_used > 1 << 20 and first_sample.mem_cache is None
    assert start_time - timedelta(seconds=2) <= first_sample.timestamp <= datetime.now(UTC)
    # A busy loop uses all of one CPU, however many the sandbox has.
    sandbox.commands.run("timeout 60 sh -c 'while :; do :; done'", background=True)
    busy_percent = 30 / info.cpu_count
    wait_until(lambda: len(sandbox.get_metrics()) >= 2 and sandbox.get_metrics()[-1].cpu_used_pct > busy_percent)
    samples = sandbox.get_metrics()
    assert samples == sorted(samples, key=lambda sample: sample.timestamp) and first_sample.cpu_used_pct >= 0
    later_samples = sandbox.get_metrics(start=samples[1].timestamp)
    assert later_samples[0] == samples[1] and samples[0] not in later_samples
    assert sandbox.get_metrics(end=start_time - timedelta(seconds=5)) == []
    network = HTTP.get(f"{server.url}/sandboxes/{sandbox.sandbox_id}/metrics", headers={"X-API-Key": server.key}).json()
    rates = [each[f"{direction}BytesPerSecond"] for each in network for direction in ("received", "sent")]
    assert rates[:2] == [None, None]
    # The requests to the agent go over the sandbox's network. Jails are not measured.
    assert all(rate > 0 for rate in rates[2:4]) if server.kind == "kvm_xfs" else set(rates) == {None}
    sandbox.kill()
    with pytest.raises(e2b.SandboxNotFoundException):
        sandbox.get_metrics()


@pytest.mark.usefixtures("requires_one_host")
@covers("Volume.create", "Volume.connect", "Volume.destroy")
@covers("Volume.list", "Volume.get_info", note="of the class; those of a volume are refused: they read its files")
def test_volumes_are_shared_between_sandboxes(server, create_sandbox):
    name = f"data-{uuid.uuid4().hex[:8]}"
    volume = e2b.Volume.create(name)
    try:
        assert name in [each.name for each in e2b.Volume.list()]
        assert e2b.Volume.get_info(volume.volume_id).name == name
        assert e2b.Volume.connect(volume.volume_id).name == name
        writer, reader = (create_sandbox(volume_mounts={"/data": volume}) for _ in range(2))
        writer.files.write("/data/shared", "by all")
        wait_until(lambda: reader.files.exists("/data/shared"))
        assert reader.files.read("/data/shared") == "by all"
        writer.kill()
        reader.kill()
    finally:
        wait_until(lambda: e2b.Volume.destroy(volume.volume_id))
    assert not e2b.Volume.destroy(volume.volume_id)
    with pytest.raises(e2b.NotFoundException):
        e2b.Volume.get_info(volume.volume_id)


def test_file_calls_on_volumes_are_refused_with_a_reason(server):
    volume = e2b.Volume.create(f"data-{uuid.uuid4().hex[:8]}")
    try:
        calls: dict[str, Callable[[], Any]] = {
            "list": lambda: volume.list("/"),
            "exists": lambda: volume.exists("/a"),
            "read_file": lambda: volume.read_file("/a"),
            "write_file": lambda: volume.write_file("/a", "text"),
            "make_dir": lambda: volume.make_dir("/d"),
            "update_metadata": lambda: volume.update_metadata("/a", mode=0o600),
            "remove": lambda: volume.remove("/a"),
        }
        for call in calls.values():
            with pytest.raises(e2b.VolumeException, match="mount the volume in a sandbox"):
                call()
    finally:
        wait_until(lambda: e2b.Volume.destroy(volume.volume_id))


@covers("Template.exists", "Template.alias_exists")
def test_templates_are_found_by_name(server):
    assert e2b.Template.exists(server.template)
    assert not e2b.Template.alias_exists("no-such-template")
    with pytest.raises(e2b.SandboxException, match="is not allowed") as error_info:
        e2b.Template.alias_exists("no spaces")
    assert error_info.value.status_code == 400


@covers("Template.assign_tags", "Template.get_tags")
@covers("Template.remove_tags", note="a build without a tag is removed when its last sandbox is removed")
def test_tags_stand_for_builds_of_a_template(server, create_sandbox):
    template = server.gateway.call("GET", f"/templates/{server.template}")
    tag_info = e2b.Template.assign_tags(server.template, ["v1", "stable"])
    assert tag_info.build_id == template["buildID"] and tag_info.tags == ["v1", "stable"]
    assert e2b.Template.assign_tags(f"{server.template}:v1", "live").tags == ["live"]
    tags = {tag.tag: tag for tag in e2b.Template.get_tags(server.template)}
    assert tags.keys() == {"default", "v1", "stable", "live"}
    assert {tag.build_id for tag in tags.values()} == {template["buildID"]}
    assert tags["default"].created_at < tags["v1"].created_at <= tags["live"].created_at
    for tag in ("live", "default", template["buildID"]):
        assert create_sandbox(f"{server.template}:{tag}").get_info().template_id == template["templateID"]
    assert e2b.Template.exists(f"{server.template}:live") and not e2b.Template.exists(f"{server.template}:v2")
    e2b.Template.remove_tags(server.template, ["v1", "stable"])
    e2b.Template.remove_tags(server.template, "live")
    assert [tag.tag for tag in e2b.Template.get_tags(server.template)] == ["default"]
    with pytest.raises(e2b.SandboxException, match=":v1' not found"):
        create_sandbox(f"{server.template}:v1")
    with pytest.raises(e2b.TemplateException, match="the tag 'default' cannot be removed"):
        e2b.Template.remove_tags(server.template, "default")
    with pytest.raises(e2b.TemplateException, match="the tag 'no spaces' is not allowed"):
        e2b.Template.assign_tags(server.template, "no spaces")


@pytest.mark.usefixtures("requires_memory")
@covers("Template.build", "Template.build_in_background")
def test_a_tag_keeps_its_build_when_the_template_is_built_again(server, create_sandbox, tmp_path):
    layout = write_layout(tmp_path / "layout", [make_small_debian_layer(tmp_path)], {"Env": ["PATH=/usr/bin:/bin"]})

    def make_template(version: int) -> Any:
        return e2b.Template().from_image(f"oci:{layout}:test").run_cmd(f"echo {version} > /version")

    first_build = e2b.Template.build(make_template(1), "web", tags=["v1", "live"], cpu_count=1, memory_mb=256)
    assert first_build.tags == ["v1", "live"]
    second_build = e2b.Template.build_in_background(make_template(2), "web:v2", cpu_count=1, memory_mb=256)
    assert {tag.build_id for tag in e2b.Template.get_tags("web")} == {first_build.build_id}, "it is not built yet"
    wait_until(lambda: e2b.Template.get_build_status(second_build).status is e2b.TemplateBuildStatus.READY)
    assert e2b.Template.assign_tags("web:v2", ["live", "default"]).build_id == second_build.build_id
    assert {tag.tag: tag.build_id for tag in e2b.Template.get_tags("web")} == {
        "v1": first_build.build_id,
        "v2": second_build.build_id,
        "live": second_build.build_id,
        "default": second_build.build_id,
    }
    for ref, version in (("web:v1", 1), ("web:v2", 2), ("web:live", 2), ("web", 2), (f"web:{first_build.build_id}", 1)):
        assert create_sandbox(ref).files.read("/version") == f"{version}\n"
    e2b.Template.remove_tags("web", "v1")
    assert not e2b.Template.exists("web:v1")
    server.gateway.call("DELETE", f"/templates/{second_build.template_id}?when=unused")


@covers("Template.get_build_status")
def test_the_status_of_a_build_contains_its_log(server):
    template = server.gateway.call("GET", f"/templates/{server.template}")
    build = e2b.BuildInfo(template["templateID"], template["buildID"], server.template, server.template)
    status = e2b.Template.get_build_status(build)
    assert status.status is e2b.TemplateBuildStatus.READY and status.reason is None
    assert [entry.message for entry in status.log_entries] == status.logs


@pytest.mark.usefixtures("requires_memory")
@covers("Template.build", note="each call runs a full build")
@covers("Template.from_image", note="also from `oci:` and archives on the gateway's host")
@covers("Template.get_build_status", "TemplateBuilder.run_cmd", "TemplateBuilder.set_envs")
@covers("TemplateBuilder.set_workdir", "TemplateBuilder.set_user", "TemplateBuilder.set_start_cmd")
def test_a_template_is_built_from_an_image_with_steps(server, create_sandbox, tmp_path):
    settings = {"Env": ["COLOUR=green", "PATH=/usr/bin"], "Cmd": ["sleep", "77777"]}
    layout = write_layout(tmp_path / "layout", [make_small_debian_layer(tmp_path)], settings)
    template = (
        e2b.Template()
        .from_image(f"oci:{layout}:test")
        .run_cmd('echo "$COLOUR $(id -u) $PWD" > /root.txt')
        .set_envs({"SHAPE": "it's round"})
        .set_workdir("/srv/work")
        .set_user("games")
        .run_cmd('echo "$COLOUR $SHAPE $(id -un) $PWD" > /tmp/games.txt')
        .run_cmd("cat /root.txt /tmp/games.txt > all.txt", user="root")
        .set_start_cmd('echo "$SHAPE $(id -un)" > /tmp/started; sleep 88888', "test -e /tmp/started")
    )
    messages = []
    build = e2b.Template.build(
        template, "steps", cpu_count=1, memory_mb=256, on_build_logs=lambda entry: messages.append(entry.message)
    )
    assert any("booting the base file system" in message for message in messages)
    assert e2b.Template.get_build_status(build).status is e2b.TemplateBuildStatus.READY
    sandbox = create_sandbox(build.template_id)
    assert sandbox.files.read("/srv/work/all.txt") == "green 0 /\ngreen it's round games /srv/work\n"
    assert sandbox.files.read("/tmp/started") == "it's round games\n"
    command_lines = sandbox.commands.run("cat /proc/[0-9]*/cmdline; true").stdout
    assert "88888" in command_lines and "77777" not in command_lines, "the image's own command was started"
    sandbox.kill()
    server.gateway.call("DELETE", "/templates/steps")


@pytest.mark.usefixtures("requires_memory")
@covers("Template.build", "TemplateBuilder.copy", "TemplateBuilder.copy_items", "TemplateBuilder.set_ready_cmd")
def test_copy_adds_files_to_a_template(server, create_sandbox, tmp_path):
    layout = write_layout(tmp_path / "layout", [make_small_debian_layer(tmp_path)], {"Env": ["PATH=/usr/bin:/bin"]})
    context = tmp_path / "context"
    (context / "tree/deep").mkdir(parents=True)
    (context / "tree/deep/data").write_bytes(random.Random(1).randbytes(3_000_000))
    (context / "tree/link").symlink_to("/etc/hostname")
    (context / "run.sh").write_text("#!/bin/sh\necho copied\n")
    template = (
        e2b.Template(file_context_path=context)
        .from_image(f"oci:{layout}:test")
        .set_workdir("/srv/work")
        .set_user("games")
        .copy("run.sh", "bin/", user="games:daemon", mode=0o750)
        .copy("tree", "/app/")
        .copy_items([{"src": "run.sh", "dest": "/etc/renamed"}, {"src": "*", "dest": "all"}])
        .run_cmd("bin/run.sh > /tmp/output")
        .set_ready_cmd("test -e /tmp/output")
    )
    messages = []
    build = e2b.Template.build(
        template, "copied", cpu_count=1, memory_mb=256, on_build_logs=lambda entry: messages.append(entry.message)
    )
    assert "Uploaded 'tree'" in messages
    sandbox = create_sandbox(build.template_id)
    listing = sandbox.commands.run(
        "stat -c '%n %a %U %G %F' /srv/work/bin /srv/work/bin/run.sh /app /app/deep/data /app/link /etc/renamed; "
        "cat /tmp/output; cd /srv/work/all; echo * deep/* /opt/sandbox/*.tar"
    )
    assert listing.stdout.splitlines() == [
        "/srv/work/bin 755 games daemon directory",
        "/srv/work/bin/run.sh 750 games daemon regular file",
        "/app 755 root root directory",
        "/app/deep/data 644 root root regular file",
        "/app/link 777 root root symbolic link",
        "/etc/renamed 644 root root regular file",
        "copied",
        "deep link run.sh deep/data /opt/sandbox/*.tar",
    ]
    assert sandbox.files.read("/app/deep/data", format="bytes") == (context / "tree/deep/data").read_bytes()
    sandbox.kill()
    server.gateway.call("DELETE", "/templates/copied")


@pytest.mark.usefixtures("requires_memory")
@covers("Template.build")
def test_a_private_image_is_fetched_with_the_credentials_of_the_request(server, create_sandbox, tmp_path):
    layout = write_layout(tmp_path / "layout", [make_small_debian_layer(tmp_path)], {"Env": ["PATH=/usr/bin:/bin"]})
    with running_registry(tmp_path / "registry", with_password=True, port=server.registry_port) as registry:
        image = f"{registry}/private:1"
        push_image(layout, image, write_auth_file(tmp_path / "auth.json", registry))
        for options in ({}, {"username": USER, "password": "wrong"}):
            with pytest.raises(e2b.BuildException, match=r"refuses access to .*/private:1: check the name, and pass a"):
                e2b.Template.build(e2b.Template().from_image(image, **options), "private")
        messages = []
        build = e2b.Template.build(
            e2b.Template().from_image(image, username=USER, password=PASSWORD),
            "private",
            cpu_count=1,
            memory_mb=256,
            on_build_logs=lambda entry: messages.append(entry.message),
        )
        with pytest.raises(AssertionError, match="refuses access"):
            server.gateway.call("POST", "/templates/private")
    assert create_sandbox("private").commands.run("echo works").stdout == "works\n"
    template = server.gateway.call("GET", f"/templates/{build.template_id}")
    assert template["recipe"]["image"] == image
    records = [path.read_text() for path in server.gateway.state_root.rglob("*.json")]
    assert any(build.template_id in text for text in records)
    assert not any(PASSWORD in text for text in (str(template), *messages, *records))
    server.gateway.call("DELETE", "/templates/private?when=unused")


@pytest.mark.slow
@pytest.mark.usefixtures("requires_memory")
@covers("Template.build", "Template.from_dockerfile")
def test_a_template_is_built_from_a_dockerfile(server, create_sandbox, tmp_path):
    layout = write_layout(tmp_path / "layout", [make_small_debian_layer(tmp_path)], {"Env": ["PATH=/usr/bin:/bin"]})
    context = tmp_path / "context"
    context.mkdir()
    (context / "run.sh").write_text("#!/bin/sh\necho copied\n")
    dockerfile = f"FROM oci:{layout}:test\nARG TARGET=/opt/app\nWORKDIR /opt\nCOPY --chmod=0700 run.sh $TARGET/\n"
    dockerfile += "RUN app/run.sh > app/output\n"
    build = e2b.Template.build(
        e2b.Template(file_context_path=context).from_dockerfile(dockerfile), "copied", cpu_count=1, memory_mb=256
    )
    sandbox = create_sandbox(build.template_id)
    assert sandbox.files.read("/opt/app/output") == "copied\n"
    sandbox.kill()
    server.gateway.call("DELETE", "/templates/copied")


@pytest.mark.usefixtures("requires_memory")
@covers("Template.build")
@covers("Template.from_template", note="not from a jail's template")
@covers("TemplateBuilder.make_dir", "TemplateBuilder.make_symlink", "TemplateBuilder.rename", "TemplateBuilder.remove")
def test_a_template_is_built_from_another_template(server, create_sandbox, tmp_path):
    (tmp_path / "run.sh").write_text("#!/bin/sh\necho $0 copied\n")
    lower_template = (
        e2b.Template(file_context_path=tmp_path)
        .from_template(server.template)
        .set_envs({"SHAPE": "round"})
        .set_workdir("/srv/work")
        .copy("run.sh", "bin/", mode=0o755)
        .make_dir("made/deep", mode=0o700)
        .make_symlink("/etc/hostname", "made/link")
        .rename("made/link", "made/renamed")
        .remove("made/deep", recursive=True)
        .run_cmd('echo "$SHAPE $(id -un)" > /var/tmp/lower; bin/run.sh >> /var/tmp/lower', user="games")
        .set_start_cmd('echo "$SHAPE" > /var/tmp/started; sleep 88888', "test -e /var/tmp/started")
    )
    lower_build = e2b.Template.build(lower_template, "lower", cpu_count=1, memory_mb=512)
    upper_template = (
        e2b.Template().from_template("lower").run_cmd("rm /var/tmp/started").run_cmd("cp /var/tmp/lower /upper")
    )
    upper_build = e2b.Template.build(upper_template, "upper:v1")
    lower_details, upper_details = (
        server.gateway.call("GET", f"/templates/{build.template_id}") for build in (lower_build, upper_build)
    )
    assert upper_details["memoryMB"] == lower_details["memoryMB"] == 512
    assert upper_details["diskSizeMB"] == server.gateway.call("GET", f"/templates/{server.template}")["diskSizeMB"]
    server.gateway.call("DELETE", "/templates/lower")
    sandbox = create_sandbox("upper:v1")
    assert sandbox.files.read("/upper") == "round games\nbin/run.sh copied\n"
    assert sandbox.commands.run("cd /srv/work/made; echo *; readlink *").stdout == "renamed\n/etc/hostname\n"
    assert sandbox.files.read("/var/tmp/started") == "round\n", (
        "the start command of the lower template was not started"
    )
    assert "88888" in sandbox.commands.run("cat /proc/[0-9]*/cmdline; true").stdout
    sandbox.kill()
    server.gateway.call("DELETE", "/templates/upper:v1")


@pytest.mark.usefixtures("requires_one_host")
def test_a_recipe_can_start_from_a_template(server, create_sandbox):
    """This works on both kinds of host. The steps of the client work only on hosts with images."""
    recipe = {"name": "derived", "template": server.template, "setup": ["echo derived > /root/derived"]}
    build = server.gateway.call("POST", "/templates", recipe)
    info = e2b.BuildInfo(build["templateID"], build["buildID"], "derived", "derived")
    wait_until(lambda: e2b.Template.get_build_status(info).status is e2b.TemplateBuildStatus.READY)
    sandbox = create_sandbox("derived")
    assert sandbox.files.read("/root/derived") == "derived\n"
    sandbox.kill()
    server.gateway.call("DELETE", "/templates/derived")
    if not server.abilities.memory:
        with pytest.raises(e2b.BuildException, match="a jail host cannot run the steps of E2B's client"):
            e2b.Template.build(e2b.Template().from_template(server.template).run_cmd("true"), "refused")


def test_steps_that_are_not_supported_are_refused(server):
    aws_image = e2b.Template().from_aws_registry("registry.test/app:1", "key", "secret", "eu-west-1")
    with pytest.raises(e2b.BuildException, match=r"awsRegion: not supported, .* user name AWS"):
        e2b.Template.build(aws_image, "refused")
    if server.abilities.memory:
        with pytest.raises(e2b.BuildException, match="is not in a registry: send no user name and password"):
            e2b.Template.build(e2b.Template().from_image("oci:/srv/image", USER, PASSWORD), "refused")
    assert not e2b.Template.exists("refused")


@pytest.mark.core
def test_errors_have_their_own_classes(server, create_sandbox):
    with pytest.raises(e2b.SandboxException, match="template"):
        create_sandbox("no-such-template")
    with pytest.raises(e2b.AuthenticationException):
        Sandbox.create(server.template, api_key=f"e2b_{'0' * 40}")


def test_errors_have_a_status_code(create_sandbox):
    with pytest.raises(e2b.SandboxException, match="template") as not_found_info:
        create_sandbox("no-such-template")
    assert not_found_info.value.status_code == 404
    with pytest.raises(e2b.SandboxException) as invalid_info:
        create_sandbox(metadata={"a": "b"}, timeout=-7)
    assert invalid_info.value.status_code == 400


async def _build_with_async_client(template: e2b.AsyncTemplate, tag: str) -> list[str]:
    """Build a template whose name has a tag, and move another tag to it. Returns the log and a file of a sandbox."""
    messages: list[str] = []
    build = await e2b.AsyncTemplate.build(
        template, f"async:{tag}", cpu_count=1, memory_mb=256, on_build_logs=lambda entry: messages.append(entry.message)
    )
    assert (await e2b.AsyncTemplate.assign_tags(f"async:{tag}", "live")).build_id == build.build_id
    assert {each.tag: each.build_id for each in await e2b.AsyncTemplate.get_tags("async")} == {
        tag: build.build_id,
        "live": build.build_id,
    }
    await e2b.AsyncTemplate.remove_tags("async", "live")
    assert not await e2b.AsyncTemplate.exists("async:live")
    sandbox = await AsyncSandbox.create(f"async:{tag}")
    try:
        return [*messages, await sandbox.files.read("/srv/output")]
    finally:
        await sandbox.kill()


@pytest.mark.usefixtures("requires_memory")
def test_the_async_client_copies_files_into_a_template(server, tmp_path):
    layout = write_layout(tmp_path / "layout", [make_small_debian_layer(tmp_path)], {"Env": ["PATH=/usr/bin:/bin"]})
    context = tmp_path / "context"
    context.mkdir()
    (context / "run.sh").write_text("#!/bin/sh\necho copied\n")
    template = (
        e2b.AsyncTemplate(file_context_path=context)
        .from_image(f"oci:{layout}:test")
        .copy("run.sh", "/srv/bin/", mode=0o755)
        .run_cmd("/srv/bin/run.sh > /srv/output")
    )
    results = asyncio.run(_build_with_async_client(template, "v1"))
    assert "Uploaded 'run.sh'" in results and results[-1] == "copied\n"
    server.gateway.call("DELETE", "/templates/async:v1")


async def _use_async_client(server: Server) -> None:
    sandbox = await AsyncSandbox.create(server.template, metadata={"way": "async"})
    try:
        assert await sandbox.is_running()
        results = await asyncio.gather(*(sandbox.commands.run(f"echo {number}") for number in range(5)))
        assert [each.stdout for each in results] == [f"{number}\n" for number in range(5)]
        await sandbox.files.write("/root/a", "async")
        assert await sandbox.files.read("/root/a") == "async"
        snapshot = await sandbox.create_snapshot()
        fork = await AsyncSandbox.create(snapshot.snapshot_id)
        assert isinstance(fork, AsyncSandbox)
        assert await fork.files.read("/root/a") == "async"
        await fork.kill()
        await sandbox.kill()
        assert await AsyncSandbox.delete_snapshot(snapshot.snapshot_id)
    finally:
        await sandbox.kill()


@pytest.mark.core
def test_async_client_supports_the_same_operations(server):
    asyncio.run(_use_async_client(server))


async def _stream_input(server: Server) -> str:
    sandbox = await AsyncSandbox.create(server.template)
    try:
        handle = await sandbox.commands.run("cat; echo end", background=True, stdin=True)
        stream = sandbox.commands.stream_input(handle.pid)
        await stream.send("one\n")
        await stream.send(b"two\n")
        await stream.close()
        await handle.close_stdin()
        return (await handle.wait()).stdout
    finally:
        await sandbox.kill()


@covers("AsyncCommandInputHandle.send", "AsyncCommandInputHandle.close")
def test_async_client_streams_standard_input(server):
    assert asyncio.run(_stream_input(server)) == "one\ntwo\nend\n"
