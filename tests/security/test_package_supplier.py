"""An attacker controls the index from which root on a host, or a developer, installs packages.

The index is a mirror on this machine, with the pinned files and the attacker's replacements. The gateway role's tasks
install from it, with a real pip and a real virtual environment.
"""

from __future__ import annotations

import html
import io
import json
import os
import re
import shutil
import subprocess
import sys
import tarfile
import threading
import zipfile
from collections.abc import Iterator
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any
from urllib.parse import unquote

import pytest
from packaging.utils import canonicalize_name

from requirements import sbom
from tests.support import session
from tests.support.roles import make_environment

GATEWAY_DIRECTORY = session.REPOSITORY / "gateway"
PACK_SCRIPT = session.REPOSITORY / "roles" / "gateway" / "files" / "pack.py"
REQUIREMENT_FILES = tuple(GATEWAY_DIRECTORY.glob("requirements*.txt"))
CHANGED_PACKAGE, CHANGED_MODULE = "annotated-doc", "annotated_doc"
"""The package that the attacker changes, and its module. pip fetches it early, so the tests are fast."""
FREEBSD_HOST = next(host for host in sbom.HOSTS if host["platform_system"] == "FreeBSD")
_INSTALL_TIMEOUT_SECONDS = 300


class Mirror(ThreadingHTTPServer):
    """A package index. ``files``: {name: contents}; ``requested_projects``: the projects that clients requested."""

    daemon_threads = True

    def __init__(self, files: dict[str, bytes]) -> None:
        super().__init__(("127.0.0.1", 0), _IndexHandler)
        self.files = files
        self.requested_projects: set[str] = set()

    @property
    def url(self) -> str:
        return f"http://127.0.0.1:{self.server_port}/simple"

    def find_file_name(self, project: str) -> str:
        """Return the name of a project's only file."""
        (name,) = (name for name in self.files if _parse_project(name) == project)
        return name


class _IndexHandler(BaseHTTPRequestHandler):
    server: Mirror

    def do_GET(self) -> None:
        kind, _, name = unquote(self.path).strip("/").partition("/")
        if kind == "files":
            self._send_response(self.server.files[name], "application/octet-stream")
            return
        self.server.requested_projects.add(name)
        links = [
            f'<a href="/files/{html.escape(file)}">{html.escape(file)}</a>'
            for file in self.server.files
            if _parse_project(file) == name
        ]
        self._send_response(f"<!DOCTYPE html><html><body>{''.join(links)}</body></html>".encode(), "text/html")

    def _send_response(self, content: bytes, content_type: str) -> None:
        self.send_response(200)
        self.send_header("Content-Type", content_type)
        self.send_header("Content-Length", str(len(content)))
        self.end_headers()
        self.wfile.write(content)

    def log_message(self, format: str, *args: object) -> None: ...


def _parse_project(file: str) -> str:
    return canonicalize_name(re.split(r"-\d", file)[0])


@pytest.fixture(scope="module")
def genuine_files(tmp_path_factory: pytest.TempPathFactory) -> dict[str, bytes]:
    """The contents of the pinned files that this machine would install, by file name."""
    directory = tmp_path_factory.mktemp("genuine")
    requirement_options = [word for path in REQUIREMENT_FILES for word in ("--requirement", str(path))]
    argv = [
        sys.executable,
        "-m",
        "pip",
        "download",
        "-q",
        "--no-deps",
        "--only-binary=:all:",
        "-d",
        str(directory),
        *requirement_options,
    ]
    subprocess.run([*argv, *requirement_options], capture_output=True, timeout=_INSTALL_TIMEOUT_SECONDS, check=True)
    return {path.name: path.read_bytes() for path in directory.iterdir()}


BUILD_BACKEND = """
import email
import shutil
import sys
from pathlib import Path

__legacy__ = sys.modules[__name__]  # the backend of packages without pyproject.toml

def prepare_metadata_for_build_wheel(metadata_directory, config_settings=None):
    metadata = email.message_from_string(Path("PKG-INFO").read_text())
    name = metadata["Name"].replace("-", "_")
    dist_info = Path(metadata_directory) / f"{name}-{metadata['Version']}.dist-info"
    dist_info.mkdir()
    shutil.copy("PKG-INFO", dist_info / "METADATA")
    return dist_info.name

prepare_metadata_for_build_editable = prepare_metadata_for_build_wheel

def get_requires_for_build_wheel(config_settings=None):
    return []

get_requires_for_build_sdist = get_requires_for_build_editable = get_requires_for_build_wheel

def build_wheel(*_args, **_options):
    raise NotImplementedError

build_sdist = build_editable = build_wheel
"""
"""A build backend that only returns the metadata of a source distribution, without which pip cannot download it.

Some packages have a backend of their own that takes all functions from the one of setuptools.
"""


def list_pins_without_wheels(genuine_files: dict[str, bytes]) -> list[sbom.Pin]:
    """Return the pins that PyPI may offer for FreeBSD only as source: all pins without a portable wheel."""
    portable_projects = {_parse_project(name) for name in genuine_files if name.endswith("-none-any.whl")}
    pins = [pin for path in REQUIREMENT_FILES for pin in sbom.read_pins(path)]
    return [pin for pin in pins if sbom.is_for_host(pin.marker, FREEBSD_HOST) and pin.name not in portable_projects]


@pytest.fixture(scope="module")
def genuine_sdists(genuine_files: dict[str, bytes], tmp_path_factory: pytest.TempPathFactory) -> dict[str, bytes]:
    """The contents of the source distributions that FreeBSD builds, by file name. pip has checked their hashes."""
    directory, backend_directory = tmp_path_factory.mktemp("sdists"), tmp_path_factory.mktemp("backends")
    for name in ("maturin/__init__.py", "setuptools/__init__.py", "setuptools/build_meta.py"):
        (backend_directory / name).parent.mkdir(exist_ok=True)
        (backend_directory / name).write_text(BUILD_BACKEND)
    requirements = backend_directory / "requirements.txt"
    lines = [
        " ".join([f"{pin.name}=={pin.version}", *(f"--hash=sha256:{digest}" for digest in pin.hashes)])
        for pin in list_pins_without_wheels(genuine_files)
    ]
    requirements.write_text("\n".join(lines))
    argv = [
        *(sys.executable, "-m", "pip", "download", "-q", "--no-deps", "--no-binary=:all:", "--use-pep517"),
        *("--no-build-isolation", "--require-hashes", "-d", str(directory), "--requirement", str(requirements)),
    ]
    env = {**os.environ, "PYTHONPATH": str(backend_directory)}
    result = subprocess.run(
        argv, capture_output=True, text=True, timeout=_INSTALL_TIMEOUT_SECONDS, env=env, check=False
    )
    assert result.returncode == 0, result.stderr
    return {path.name: path.read_bytes() for path in directory.iterdir()}


@pytest.fixture
def mirror(genuine_files: dict[str, bytes]) -> Iterator[Mirror]:
    server = Mirror(dict(genuine_files))
    thread = threading.Thread(target=server.serve_forever)
    thread.start()
    yield server
    server.shutdown()
    thread.join()
    server.server_close()


class Attack:
    """Creates malicious packages of several kinds. Their code creates the file ``mark`` if it runs."""

    def __init__(self, directory: Path) -> None:
        self.mark = directory / "attacked"
        self.code = f"open({str(self.mark)!r}, 'w').close()\n"

    @property
    def has_succeeded(self) -> bool:
        return self.mark.exists()

    def make_changed_wheel(self, wheel: bytes, module: str) -> bytes:
        """Return ``wheel`` with the code appended to the file ``module``."""
        buffer = io.BytesIO()
        with zipfile.ZipFile(io.BytesIO(wheel)) as original_wheel, zipfile.ZipFile(buffer, "w") as changed_wheel:
            for entry in original_wheel.infolist():
                suffix = self.code.encode() if entry.filename == module else b""
                changed_wheel.writestr(entry, original_wheel.read(entry) + suffix)
        return buffer.getvalue()

    def make_sdist(self, name: str, version: str) -> bytes:
        """Return a source distribution that runs the code when it is built."""
        buffer = io.BytesIO()
        with tarfile.open(fileobj=buffer, mode="w:gz") as archive:
            for path, text in {
                "PKG-INFO": f"Metadata-Version: 2.1\nName: {name}\nVersion: {version}\n",
                "setup.py": f"{self.code}import setuptools\nsetuptools.setup(name={name!r}, version={version!r})\n",
            }.items():
                entry = tarfile.TarInfo(f"{name}-{version}/{path}")
                entry.size = len(text)
                archive.addfile(entry, io.BytesIO(text.encode()))
        return buffer.getvalue()

    def add_setup_script(self, archive: Path, root: str) -> None:
        """Add the code as setup.py to the tar archive of a source distribution."""
        with tarfile.open(archive, "a") as tar_file:
            entry = tarfile.TarInfo(f"{root}/setup.py")
            text = f"{self.code}import setuptools\nsetuptools.setup()\n".encode()
            entry.size = len(text)
            tar_file.addfile(entry, io.BytesIO(text))

    def make_build_backend(self) -> bytes:
        """Return a wheel of a newer setuptools that runs the code when it is imported."""
        buffer = io.BytesIO()
        dist_info = "setuptools-9999.dist-info"
        with zipfile.ZipFile(buffer, "w") as archive:
            archive.writestr("setuptools/__init__.py", self.code)
            archive.writestr("setuptools/build_meta.py", "")
            archive.writestr(f"{dist_info}/METADATA", "Metadata-Version: 2.1\nName: setuptools\nVersion: 9999\n")
            archive.writestr(f"{dist_info}/WHEEL", "Wheel-Version: 1.0\nRoot-Is-Purelib: true\nTag: py3-none-any\n")
            archive.writestr(f"{dist_info}/RECORD", "")
        return buffer.getvalue()


@pytest.fixture
def attack(tmp_path: Path) -> Attack:
    return Attack(tmp_path)


class Host:
    """A stand-in for a managed host: the role installs the gateway package into its directory."""

    def __init__(self, directory: Path, mirror: Mirror) -> None:
        self.directory = directory
        self.install_directory = directory / "install"
        self.variables: dict[str, Any] = {
            "ansible_python_interpreter": "/usr/bin/python3",
            "gateway_install_dir": str(self.install_directory),
            "gateway_python": "/usr/bin/python3",
            "gateway_pip_args": ["--index-url", mirror.url],
            "gateway_stamp": "attacked",
            "gateway_effective_supervisor": "none",
            "gateway_pid_file": str(directory / "gateway.pid"),
        }

    def install(self) -> subprocess.CompletedProcess[str]:
        role = {"name": "grove.sandbox.gateway", "tasks_from": "package", "rolespec_validate": False}
        tasks = [{"ansible.builtin.include_role": role}]
        plays = [{"hosts": "localhost", "connection": "local", "gather_facts": False, "tasks": tasks}]
        playbook, variables_file = self.directory / "play.json", self.directory / "vars.json"
        playbook.write_text(json.dumps(plays))
        variables_file.write_text(json.dumps(self.variables))
        ansible_playbook = Path(sys.executable).parent / "ansible-playbook"
        argv = [str(ansible_playbook), "-i", "localhost,", "-e", f"@{variables_file}", str(playbook)]
        return _run_installer(argv, make_environment(self.directory))

    def has_program(self, program: str) -> bool:
        return (self.install_directory / "venv" / "bin" / program).exists()


@pytest.fixture
def host(tmp_path: Path, mirror: Mirror) -> Host:
    return Host(tmp_path, mirror)


def _run_installer(
    argv: list[str], variables: dict[str, str], **extra_variables: str
) -> subprocess.CompletedProcess[str]:
    """Run a command that installs packages. Ignores the pip settings of this machine."""
    env = {name: value for name, value in variables.items() if not name.startswith("PIP_")}
    env |= {"PIP_CONFIG_FILE": os.devnull, "PIP_NO_CACHE_DIR": "1", "PIP_NO_COMPILE": "1", **extra_variables}
    return subprocess.run(argv, capture_output=True, text=True, timeout=_INSTALL_TIMEOUT_SECONDS, env=env, check=False)


def _has_hash_mismatch(result: subprocess.CompletedProcess[str]) -> bool:
    return result.returncode != 0 and "DO NOT MATCH THE HASHES" in result.stdout + result.stderr


def test_a_changed_wheel_is_not_installed(mirror: Mirror, host: Host, attack: Attack) -> None:
    file_name = mirror.find_file_name(CHANGED_PACKAGE)
    mirror.files[file_name] = attack.make_changed_wheel(mirror.files[file_name], f"{CHANGED_MODULE}/__init__.py")
    result = host.install()
    assert _has_hash_mismatch(result), result.stdout
    assert not list((host.install_directory / "venv").rglob(CHANGED_MODULE))
    assert not host.has_program("sandbox-gateway")


@pytest.mark.slow
def test_an_sdist_instead_of_a_wheel_is_not_built(mirror: Mirror, host: Host, attack: Attack) -> None:
    file_name = mirror.find_file_name("setuptools")
    version = file_name.split("-")[1]
    del mirror.files[file_name]
    mirror.files[f"setuptools-{version}.tar.gz"] = attack.make_sdist("setuptools", version)
    result = host.install()
    assert not attack.has_succeeded
    assert _has_hash_mismatch(result), result.stdout


def test_pins_include_the_sdists_that_freebsd_builds(
    genuine_files: dict[str, bytes], genuine_sdists: dict[str, bytes]
) -> None:
    """Otherwise, someone would have to turn off hash checking on FreeBSD."""
    names = {pin.name for pin in list_pins_without_wheels(genuine_files)}
    assert {"maturin", "pydantic-core"} <= names
    assert {_parse_project(name) for name in genuine_sdists} == names
    assert all(name.endswith(".tar.gz") for name in genuine_sdists)


@pytest.mark.slow
def test_a_changed_sdist_is_not_built(
    mirror: Mirror, genuine_sdists: dict[str, bytes], host: Host, attack: Attack
) -> None:
    """As on FreeBSD, the mirror has no wheel of the package, and the pins list the genuine source distribution."""
    del mirror.files[mirror.find_file_name("pydantic-core")]
    (file_name,) = (name for name in genuine_sdists if _parse_project(name) == "pydantic-core")
    version = file_name.removesuffix(".tar.gz").split("-")[1]
    mirror.files[file_name] = attack.make_sdist("pydantic-core", version)
    result = host.install()
    assert not attack.has_succeeded
    assert _has_hash_mismatch(result), result.stdout
    assert not host.has_program("sandbox-gateway")


@pytest.mark.slow
def test_a_newer_build_backend_is_not_used(mirror: Mirror, host: Host, attack: Attack) -> None:
    mirror.files["setuptools-9999-py3-none-any.whl"] = attack.make_build_backend()
    result = host.install()
    assert not attack.has_succeeded
    assert result.returncode == 0, result.stdout
    assert host.has_program("sandbox-gateway")
    assert mirror.requested_projects <= {_parse_project(name) for name in mirror.files}, (
        "a project that is not pinned was requested"
    )


def test_builds_can_run_the_installed_build_tools(host: Host) -> None:
    """Packages with maturin run its program, which pip finds only on the PATH, because build isolation is off."""
    fake_python, log = host.directory / "python", host.directory / "paths"
    fake_python.write_text(
        f'#!/bin/sh\nfor venv; do :; done\nmkdir -p "$venv/bin"\n'
        f'printf \'#!/bin/sh\\necho "$PATH" >>{log}\\n\' >"$venv/bin/python"\n'
        'chmod +x "$venv/bin/python"\n'
    )
    fake_python.chmod(0o755)
    host.variables["gateway_python"] = str(fake_python)
    result = host.install()
    assert result.returncode == 0, result.stdout
    *dependency_paths, _ = log.read_text().splitlines()
    assert dependency_paths
    for path in dependency_paths:
        first, *others = path.split(":")
        assert first == str(host.install_directory / "venv" / "bin")
        assert "/usr/local/bin" in others, "cargo is there on FreeBSD"


@pytest.mark.slow
def test_a_changed_gateway_package_is_not_built(host: Host, attack: Attack) -> None:
    """The program that creates the virtual environment replaces the package after the role has copied it."""
    tarball, fake_python = host.install_directory / "sandbox-gateway.tar.gz", host.directory / "python"
    changed_archive = host.directory / "evil.tar"
    subprocess.run(
        [sys.executable, PACK_SCRIPT, GATEWAY_DIRECTORY, f"{changed_archive}.gz"],
        capture_output=True,
        timeout=60,
        check=True,
    )
    subprocess.run(["gzip", "--decompress", f"{changed_archive}.gz"], timeout=60, check=True)
    attack.add_setup_script(changed_archive, "sandbox-gateway")
    fake_python.write_text(f'#!/bin/sh\ngzip <{changed_archive} >{tarball}\nexec /usr/bin/python3 "$@"\n')
    fake_python.chmod(0o755)
    host.variables["gateway_python"] = str(fake_python)
    result = host.install()
    assert not attack.has_succeeded
    assert _has_hash_mismatch(result), result.stdout
    assert not host.has_program("sandbox-gateway")


@pytest.fixture
def checkout(tmp_path: Path) -> Path:
    """A checkout with the files from which `./dev` creates .venv, and with only the gateway's requirements."""
    directory = tmp_path / "checkout"
    shutil.copytree(
        GATEWAY_DIRECTORY, directory / "gateway", ignore=shutil.ignore_patterns("*.egg-info", "__pycache__", "build")
    )
    shutil.copy(session.REPOSITORY / "dev", directory)
    (directory / "requirements").mkdir()
    shutil.copy(GATEWAY_DIRECTORY / "requirements.txt", directory / "requirements" / "dev.txt")
    return directory


def test_dev_does_not_install_a_changed_wheel(mirror: Mirror, checkout: Path, attack: Attack) -> None:
    file_name = mirror.find_file_name(CHANGED_PACKAGE)
    mirror.files[file_name] = attack.make_changed_wheel(mirror.files[file_name], f"{CHANGED_MODULE}/__init__.py")
    assert _has_hash_mismatch(_run_dev(checkout, mirror))
    assert not list((checkout / ".venv").rglob(CHANGED_MODULE))


@pytest.mark.slow
def test_dev_does_not_use_a_newer_build_backend(mirror: Mirror, checkout: Path, attack: Attack) -> None:
    mirror.files["setuptools-9999-py3-none-any.whl"] = attack.make_build_backend()
    result = _run_dev(checkout, mirror)
    assert not attack.has_succeeded
    assert (checkout / ".venv" / "bin" / "sandbox-gateway").exists(), result.stderr
    assert mirror.requested_projects <= {_parse_project(name) for name in mirror.files}


def test_dev_pins_builds_nothing() -> None:
    """It fetches new versions, so there are no hashes yet, and a build would fetch its tools unchecked."""
    commands = re.findall(r"^ *uv pip .*$", (session.REPOSITORY / "dev").read_text(), re.MULTILINE)
    assert len(commands) == 2
    assert all("--no-build" in command.split() for command in commands), commands


def _run_dev(checkout: Path, mirror: Mirror) -> subprocess.CompletedProcess[str]:
    """Run `./dev test unit`, which first creates .venv. The checkout contains no tests."""
    return _run_installer([str(checkout / "dev"), "test", "unit"], dict(os.environ), PIP_INDEX_URL=mirror.url)


def test_the_commands_that_install_forkd_use_only_pinned_packages(
    mirror: Mirror, tmp_path: Path, attack: Attack
) -> None:
    mirror.files["setuptools-9999-py3-none-any.whl"] = attack.make_build_backend()
    collection = tmp_path / ".ansible" / "collections" / "ansible_collections" / "grove" / "sandbox"
    shutil.copytree(
        GATEWAY_DIRECTORY,
        collection / "gateway",
        ignore=shutil.ignore_patterns("*.egg-info", "__pycache__", "build", "sandbox_*"),
    )
    shutil.copytree(
        GATEWAY_DIRECTORY / "extras" / "forkd",
        collection / "gateway" / "extras" / "forkd",
        ignore=shutil.ignore_patterns("*.egg-info", "__pycache__", "build"),
        dirs_exist_ok=True,
    )
    page = (session.REPOSITORY / "docs" / "forkd.md").read_text()
    (commands,) = (block for block in re.findall(r"```sh\n(.*?)```", page, re.DOTALL) if "pip install" in block)
    environment = {"HOME": str(tmp_path), "PATH": "/usr/bin:/bin", "PIP_INDEX_URL": mirror.url}
    result = _run_installer(["sh", "-ec", f"{commands}\nforkd --help"], {}, **environment)
    assert not attack.has_succeeded
    assert result.returncode == 0, result.stderr
    assert "usage: forkd" in result.stdout
    assert mirror.requested_projects <= {_parse_project(name) for name in mirror.files}
