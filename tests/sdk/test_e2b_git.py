"""Test that the class `Git` of the unmodified ``e2b`` client runs git commands in a sandbox."""

from __future__ import annotations

import shutil
from collections.abc import Iterator
from pathlib import Path

import e2b
import pytest
from e2b import Sandbox

from tests.sdk import test_e2b
from tests.sdk.coverage import covers
from tests.sdk.servers import Server

client_environment = test_e2b.client_environment
create_sandbox = test_e2b.create_sandbox

GIT_PATH = shutil.which("git")
_GIT_LIBRARIES = ("libpcre2-8.so.0", "libz.so.1")
_GIT_NOTE = "the template needs git"


@pytest.fixture
def sandbox(create_sandbox: test_e2b.CreateSandbox) -> Iterator[Sandbox]:
    """A sandbox with a copy of this machine's git, which the tests' templates do not contain."""
    if GIT_PATH is None:
        pytest.skip("git is not installed on this machine")
    sandbox = create_sandbox()
    libraries = {str(path): path for name in _GIT_LIBRARIES for path in Path("/lib/x86_64-linux-gnu").glob(name)}
    for path, source in {"/usr/local/bin/git": Path(GIT_PATH), **libraries}.items():
        if not sandbox.files.exists(path):
            sandbox.files.write(path, source.read_bytes())
    link_command = "for each in upload-pack receive-pack; do ln -sf git /usr/local/bin/git-$each; done"
    sandbox.commands.run(f"chmod +x /usr/local/bin/git && cd /usr/local/bin && {link_command} && git --version")
    yield sandbox


@covers("Git.init", "Git.configure_user", "Git.set_config", "Git.get_config", note=_GIT_NOTE)
@covers("Git.add", "Git.commit", "Git.status", "Git.reset", "Git.restore", note=_GIT_NOTE)
@covers("Git.create_branch", "Git.checkout_branch", "Git.branches", "Git.delete_branch", note=_GIT_NOTE)
@covers("Git.remote_add", "Git.remote_get", "Git.clone", "Git.push", "Git.pull", note=_GIT_NOTE)
def test_git_commands_work(server: Server, sandbox: Sandbox) -> None:
    git, files, repository = sandbox.git, sandbox.files, "/root/repo"
    git.configure_user("Ada", "ada@example.com")
    assert git.get_config("user.name") == "Ada" and git.get_config("user.none") is None
    git.init(repository, initial_branch="main")
    git.set_config("pull.rebase", "true", scope="local", path=repository)
    assert git.get_config("pull.rebase", scope="local", path=repository) == "true"

    files.write(f"{repository}/note", "one")
    assert [entry.name for entry in git.status(repository).file_status] == ["note"]
    git.add(repository)
    git.commit(repository, "first")
    assert git.status(repository).is_clean
    files.write(f"{repository}/note", "two")
    git.restore(repository, ["note"])
    assert files.read(f"{repository}/note") == "one"
    files.write(f"{repository}/note", "two")
    git.reset(repository, mode="hard")
    assert files.read(f"{repository}/note") == "one"

    git.create_branch(repository, "side")
    assert git.branches(repository).current_branch == "side"
    git.checkout_branch(repository, "main")
    git.delete_branch(repository, "side")
    assert git.branches(repository).branches == ["main"]

    git.init("/root/origin", bare=True, initial_branch="main")
    git.remote_add(repository, "origin", "file:///root/origin")
    assert git.remote_get(repository, "origin") == "file:///root/origin"
    git.push(repository, remote="origin", branch="main")
    git.clone("file:///root/origin", "/root/clone")
    assert files.read("/root/clone/note") == "one"
    files.write(f"{repository}/more", "2")
    git.add(repository)
    git.commit(repository, "second")
    git.push(repository)
    git.pull("/root/clone")
    assert files.read("/root/clone/more") == "2"
    with pytest.raises((e2b.CommandExitException, e2b.GitAuthException)):
        git.clone("file:///root/none", "/root/other")


@covers("Git.dangerously_authenticate", note=f"{_GIT_NOTE}; stores the password in the sandbox")
def test_credentials_are_stored_in_the_sandbox(server: Server, sandbox: Sandbox) -> None:
    sandbox.git.dangerously_authenticate("ada", "secret", host="git.example.com")
    assert sandbox.files.read("/root/.git-credentials") == "https://ada:secret@git.example.com\n"
