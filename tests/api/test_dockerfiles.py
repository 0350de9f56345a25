"""Templates from Dockerfiles: the gateway's translation, and what the module does with the files of the context."""

from __future__ import annotations

import io
import itertools
import json
import os
import shlex
import socket
import tarfile
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import httpx
import pytest
from ansible_collections.grove.sandbox.plugins.module_utils import _build_context, _template
from ansible_collections.grove.sandbox.plugins.module_utils._run import PLAN_KEY, run

from tests.support.linux_images import refuse_images
from tests.support.memory_gateway import READ_KEY, MemoryGateway

IMAGE = "oci:/srv/images/app:1"
_run_numbers = itertools.count()


class Project:
    """A directory with a Dockerfile, which copies the file `run.sh` and the directory `app`."""

    def __init__(self, directory: Path) -> None:
        self.directory = directory
        self.dockerfile = directory / "Dockerfile"
        (directory / "app").mkdir(parents=True)
        (directory / "app" / "main.py").write_text("print('hello')\n")
        (directory / "run.sh").write_text("#!/bin/sh\n")
        self.write(
            "COPY --chmod=0755 run.sh /opt/", "COPY app /opt/app", "RUN /opt/run.sh", 'CMD ["/opt/run.sh", "-v"]'
        )

    def write(self, *lines: str) -> None:
        self.dockerfile.write_text("\n".join([f"FROM {IMAGE}", *lines, ""]))


@pytest.fixture
def project(tmp_path: Path) -> Project:
    return Project(tmp_path / "project")


@pytest.fixture(autouse=True)
def archive_directory(memory_gateway: MemoryGateway) -> Iterator[Path]:
    """The directory of uploaded archives, without those of other tests, which share the gateway."""
    directory = memory_gateway.root / "build-files"
    for path in directory.iterdir():
        path.unlink()
    yield directory
    for path in directory.iterdir():
        path.unlink()


def run_task(gateway: MemoryGateway, project: Project, *, check: bool = False, **options: Any) -> dict[str, Any]:
    defaults = {name: option.get("default") for name, option in _template.ARGUMENTS.items()}
    params = {"gateway_url": gateway.unix_url, "name": ["web"], "dockerfile": str(project.dockerfile), **options}
    if check:
        params["check_run"] = f"a check-mode run with a Dockerfile {next(_run_numbers)}"
    return run(_template, {**defaults, **params}, check_mode=check)


def build(gateway: MemoryGateway, project: Project, **options: Any) -> dict[str, Any]:
    """Predict the task, and run it twice. The prediction must be right, and the second run must change nothing."""
    predicted, result, repeated = (run_task(gateway, project, check=check, **options) for check in (True, False, False))
    assert not any(each.get("failed") for each in (predicted, result, repeated)), (predicted, result, repeated)
    assert predicted["changed"] == result["changed"] and predicted["diff"] == result["diff"]
    assert predicted["outcomes"] == result["outcomes"]
    assert not repeated["changed"]
    return result


def refuse(gateway: MemoryGateway, project: Project, **options: Any) -> str:
    """Return the error of the task, which must be the same in check mode. Nothing may be left behind."""
    results = [run_task(gateway, project, check=check, **options) for check in (True, False)]
    assert all(result["failed"] and not result["changed"] for result in results), results
    assert results[0]["msg"] == results[1]["msg"]
    assert list((gateway.root / "build-files").iterdir()) == []
    with gateway.client() as client:
        assert client.get("/templates/web").status_code == 404
    return str(results[1]["msg"])


def read_archives(directory: Path) -> dict[str, dict[str, str]]:
    """Return the type of each entry in the stored archives, by path, and by the first path in the archive."""
    contents = {}
    for path in directory.iterdir():
        with tarfile.open(path) as archive:
            members = archive.getmembers()
            contents[members[0].name] = {
                member.name: archive.extractfile(member).read().decode()  # type: ignore[union-attr]
                if member.isfile()
                else member.linkname or "directory"
                for member in members
            }
    return contents


def get_settings(command: str) -> dict[str, Any]:
    """Return the argument of the launcher."""
    words = shlex.split(command)
    assert words[:2] == ["exec", "/opt/sandbox/start"]
    settings: dict[str, Any] = json.loads(words[2])
    return settings


def test_a_template_is_built_once(memory_gateway: MemoryGateway, project: Project, archive_directory: Path) -> None:
    result = build(memory_gateway, project)
    assert result["changed"] and result["outcomes"][0]["actions"] == ["build"]
    recipe = result["template"]["recipe"]
    assert (recipe["from"], recipe["image"], recipe["setup_network"]) == ("image", IMAGE, False)
    assert [get_settings(command)["args"][0] for command in recipe["setup"]] == [
        "/opt/sandbox/copy",
        "/opt/sandbox/copy",
        "/bin/sh",
    ]
    assert get_settings(recipe["start_command"]) == {"cmd": ["/opt/run.sh", "-v"]}
    assert read_archives(archive_directory) == {
        "run.sh": {"run.sh": "#!/bin/sh\n"},
        "app": {"app": "directory", "app/main.py": "print('hello')\n"},
    }


def test_each_change_of_a_copied_file_or_a_line_builds_the_template_again(
    memory_gateway: MemoryGateway, project: Project
) -> None:
    build(memory_gateway, project)
    os.utime(project.directory / "run.sh", (1, 1))
    (project.directory / "notes").write_text("not copied")
    assert not build(memory_gateway, project)["changed"]
    (project.directory / "app" / "main.py").write_text("print('hellO')\n")
    diff = build(memory_gateway, project)["diff"]
    commands = [diff[side]["web"]["recipe"]["setup"] for side in ("before", "after")]
    assert [before == after for before, after in zip(*commands, strict=True)] == [True, False, True]
    (project.directory / "run.sh").chmod(0o700)
    assert build(memory_gateway, project)["changed"]
    project.write("COPY app /opt/app", "RUN true")
    assert build(memory_gateway, project)["changed"]
    assert build(memory_gateway, project, setup_network=True)["changed"]


def test_the_options_add_to_the_dockerfile(memory_gateway: MemoryGateway, project: Project, tmp_path: Path) -> None:
    project.write("ENV A=1", "RUN true")
    options = {"setup": ["echo more"], "start_command": "sleep 1", "ready_probe": "true", "context": str(tmp_path)}
    recipe = build(memory_gateway, project, **options)["template"]["recipe"]
    assert recipe["setup"][1:] == ["echo more"] and recipe["start_command"] == "sleep 1"


@pytest.mark.parametrize("setup_network", [None, False, True])
def test_the_machine_has_no_network_unless_the_task_asks_for_it(
    memory_gateway: MemoryGateway, project: Project, monkeypatch: pytest.MonkeyPatch, setup_network: bool | None
) -> None:
    policies = []
    fork = memory_gateway.host.fork

    async def record_policy(snapshot: Any, sandbox: Any, **options: Any) -> None:
        policies.append(sandbox.network.egress)
        await fork(snapshot, sandbox, **options)

    monkeypatch.setattr(memory_gateway.host, "fork", record_policy)
    result = run_task(memory_gateway, project, setup_network=setup_network)
    assert result["changed"] and policies == [(bool(setup_network), [], [])]
    with memory_gateway.client() as client:
        client.post("/sandboxes", json={"templateID": "web"}).raise_for_status()
        client.post("/templates", json={"name": "debian", "setup": ["true"]}).raise_for_status()
        client.get("/templates/debian/builds/-/logs", params={"follow": True})
    assert policies[1] == (True, [], [])


def test_check_mode_uploads_nothing(memory_gateway: MemoryGateway, project: Project, archive_directory: Path) -> None:
    result = run_task(memory_gateway, project, check=True)
    assert result["changed"] and result["template"]["status"] == "ready"
    assert list(archive_directory.iterdir()) == []
    entry = json.dumps(result[PLAN_KEY])
    assert "main.py" not in entry


def test_a_read_key_predicts_a_build(memory_gateway: MemoryGateway, project: Project) -> None:
    options = {"gateway_url": memory_gateway.url, "gateway_token": READ_KEY}
    result = run_task(memory_gateway, project, check=True, **options)
    assert result["changed"] and not result.get("failed"), result
    assert run_task(memory_gateway, project, **options)["failure"]["kind"] == "forbidden"


def test_only_missing_archives_are_uploaded(
    memory_gateway: MemoryGateway, project: Project, archive_directory: Path
) -> None:
    build(memory_gateway, project)
    times = {path.name: path.stat().st_ino for path in archive_directory.iterdir()}
    build(memory_gateway, project, name=["web", "again"])
    assert {path.name: path.stat().st_ino for path in archive_directory.iterdir()} == times


def test_dockerignore_excludes_files(memory_gateway: MemoryGateway, project: Project, archive_directory: Path) -> None:
    project.write("COPY . /srv")
    (project.directory / ".dockerignore").write_text("# comment\n*\n!app\napp/*.log\n**/cache\n!app/cache/kept\n")
    for name in ("debug.log", "cache/kept", "cache/lost", "sub/file"):
        path = project.directory / "app" / name
        path.parent.mkdir(exist_ok=True)
        path.write_text(name)
    build(memory_gateway, project)
    (contents,) = read_archives(archive_directory).values()
    assert {*contents} == {".", "app", "app/main.py", "app/sub", "app/sub/file", "app/cache/kept"}
    (project.directory / "Dockerfile.dockerignore").write_text("app\n")
    assert build(memory_gateway, project)["changed"]


def test_patterns_and_links(memory_gateway: MemoryGateway, project: Project, archive_directory: Path) -> None:
    (project.directory / "current").symlink_to("app")
    (project.directory / "app" / "away").symlink_to("/etc/passwd")
    (project.directory / "[x].txt").write_text("brackets")
    os.link(project.directory / "run.sh", project.directory / "second.sh")
    project.write("COPY *.sh /opt/", "COPY current /opt/current", "COPY [[]x].txt /opt/", "COPY c[t-v]*/m* /m/")
    build(memory_gateway, project)
    archives = read_archives(archive_directory)
    assert archives == {
        "run.sh": {"run.sh": "#!/bin/sh\n", "second.sh": "#!/bin/sh\n"},
        "current": {"current": "directory", "current/away": "/etc/passwd", "current/main.py": "print('hello')\n"},
        "[x].txt": {"[x].txt": "brackets"},
        "current/main.py": {"current/main.py": "print('hello')\n"},
    }


@pytest.mark.parametrize(
    ("line", "message"),
    [
        ("COPY ../secret /", r"line 2 of the Dockerfile: the source '../secret' leads outside the context"),
        ("COPY app/../../x /", r"leads outside the context"),
        ("COPY /etc/passwd /", r"the source '/etc/passwd' is absolute: use a path relative to the context"),
        ("COPY missing /", r"the source 'missing' \(line 2 of the Dockerfile\) matches no file in .*project that"),
        ("COPY *.txt /", r"matches no file"),
        ("COPY outside /", r"is or contains the link 'outside', which leads outside the context"),
        ("COPY outside/passwd /", r"is or contains the link 'outside', which leads outside the context"),
        ("COPY out*/pass* /", r"is or contains the link 'outside'"),
        ("COPY broken /", r"nothing does not exist"),
        ("COPY pipe /", r"pipe is neither a file nor a directory nor a link: remove it, or list it in .dockerignore"),
        ("COPY . /", r"pipe is neither a file"),
        ("COPY a[ /", r"line 2 .*the pattern 'a\[' is malformed"),
        ("HEALTHCHECK CMD true", r"line 2 of the Dockerfile: HEALTHCHECK is not supported: .*ready_probe"),
        ("RUN a && \\\n  \\", r"line 3 of the Dockerfile: the file ends after a continuation"),
    ],
)
def test_bad_lines_are_refused(memory_gateway: MemoryGateway, project: Project, line: str, message: str) -> None:
    (project.directory / "outside").symlink_to("/etc")
    (project.directory / "broken").symlink_to("nothing")
    os.mkfifo(project.directory / "pipe")
    project.write(line)
    assert_matches(message, refuse(memory_gateway, project))


def assert_matches(pattern: str, text: str) -> None:
    with pytest.raises(AssertionError, match=pattern):
        raise AssertionError(text)


def test_bad_files_are_refused(memory_gateway: MemoryGateway, project: Project) -> None:
    project.dockerfile.write_bytes(b"FROM a\nRUN \xff\n")
    assert_matches(r"Dockerfile is not UTF-8 \(byte 11\): save it as UTF-8", refuse(memory_gateway, project))
    project.dockerfile.write_text("#" * (10 << 20))
    assert_matches(r"Dockerfile is 10485760 bytes long, but can have at most 262144", refuse(memory_gateway, project))
    project.dockerfile.write_text("")
    assert_matches("the Dockerfile has no FROM", refuse(memory_gateway, project))
    project.dockerfile.unlink()
    assert_matches("Dockerfile does not exist: correct the path", refuse(memory_gateway, project))
    project.dockerfile.mkdir()
    assert_matches("Dockerfile is not a regular file", refuse(memory_gateway, project))
    project.dockerfile.rmdir()
    with socket.socket(socket.AF_UNIX) as server:
        server.bind(os.path.relpath(project.dockerfile))
        assert_matches("Dockerfile cannot be read", refuse(memory_gateway, project))
    project.dockerfile.unlink()
    project.write("RUN true")
    assert_matches("context .*/nowhere is not a directory", refuse(memory_gateway, project, context="/nowhere"))
    (project.directory / ".dockerignore").write_text("a\n[")
    assert_matches(r"\.dockerignore file is not valid: .*'\['", refuse(memory_gateway, project))


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"image": "app"}, "name the image with FROM in the Dockerfile"),
        ({"packages": ["git"]}, "install them with RUN"),
        ({"from": "debootstrap"}, "dockerfile cannot be combined with from: debootstrap"),
        ({"artifact": "registry.test/a:1"}, "dockerfile cannot be combined with artifact"),
        ({"state": "absent"}, "dockerfile cannot be combined with state: absent"),
    ],
)
def test_options_that_contradict_the_dockerfile_are_refused(
    memory_gateway: MemoryGateway, project: Project, options: dict[str, Any], message: str
) -> None:
    assert message in refuse(memory_gateway, project, **options)


def test_a_huge_context_is_refused_before_it_is_read(memory_gateway: MemoryGateway, project: Project) -> None:
    with (project.directory / "huge").open("wb") as file:
        file.truncate(1 << 40)
    project.write("RUN true", "COPY . /srv")
    message = r"the source '.' \(line 3 of the Dockerfile\) take up more than \d+ MiB \(limits.upload_mb\)"
    assert_matches(message, refuse(memory_gateway, project))


def test_a_file_that_changes_during_the_upload_is_not_stored(
    memory_gateway: MemoryGateway, project: Project, monkeypatch: pytest.MonkeyPatch, archive_directory: Path
) -> None:
    read_pieces = _build_context.Archive.read_pieces

    def change_file(archive: _build_context.Archive) -> Iterator[bytes]:
        (project.directory / "run.sh").write_text("#!/bin/SH\n")
        return read_pieces(archive)

    monkeypatch.setattr(_build_context.Archive, "read_pieces", change_file)
    result = run_task(memory_gateway, project)
    assert "the files of the source 'run.sh' were changed during the upload: try again" in result["msg"]
    assert list(archive_directory.iterdir()) == []


def test_a_jail_host_refuses_dockerfiles(
    memory_gateway: MemoryGateway, project: Project, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(memory_gateway.host, "check_recipe", refuse_images)
    assert refuse(memory_gateway, project).startswith("a jail host cannot build templates from images")


def test_the_gateway_needs_all_digests(api: httpx.Client) -> None:
    body = {"dockerfile": f"FROM {IMAGE}\nCOPY a b /c/\n"}
    answer = api.post("/dockerfiles", json=body).json()
    assert answer["image"] == IMAGE and answer["setup"] is answer["startCommand"] is None
    assert [(each["source"], each["line"]) for each in answer["sources"]] == [("a", 2), ("b", 2)]
    response = api.post("/dockerfiles", json={**body, "digests": {"a": "0" * 64}})
    assert (
        response.status_code == 400 and "line 2 of the Dockerfile: send the digest of the source 'b'" in response.text
    )
    digests = {"a": "0" * 64, "b": "1" * 64}
    answer = api.post("/dockerfiles", json={**body, "digests": digests}).json()
    assert answer["missingDigests"] == ["0" * 64, "1" * 64] and len(answer["setup"]) == 2
    assert api.post("/dockerfiles", json={**body, "digests": {"a": "../x", "b": "1"}}).status_code == 400


def test_archives_are_valid_for_other_programs(tmp_path: Path) -> None:
    """Long names, names that are not UTF-8, and empty files and directories."""
    names = ["a" * 150, os.fsdecode(b"\xff.bin"), "empty", "ü"]
    (tmp_path / "dir").mkdir()
    for name in names:
        (tmp_path / name).write_bytes(name.encode(errors="surrogateescape") if name != "empty" else b"")
    packer = _build_context._Packer(str(tmp_path), [], 1 << 20)
    archive = packer.pack({"source": ".", "line": 1, "components": []})
    data = b"".join(archive.read_pieces())
    assert len(data) == archive.size
    with tarfile.open(fileobj=io.BytesIO(data)) as tar:
        assert {member.name for member in tar} == {".", "dir", *names}
