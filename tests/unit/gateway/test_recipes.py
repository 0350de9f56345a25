"""The digests of a recipe and of its source change if and only if the result of a build would."""

from __future__ import annotations

import os
from pathlib import Path

import pytest
from pydantic import ValidationError

from sandbox_gateway import recipes
from sandbox_gateway.errors import Invalid
from sandbox_gateway.recipes import Recipe, compute_source_digest


def digest_source(path: Path) -> str:
    return compute_source_digest(Recipe.model_validate({"source": "rootfs", "path": str(path)}))


def test_the_digest_does_not_change_between_versions() -> None:
    """If the digest changed, for example because of a new recipe field, an upgrade would rebuild every template."""
    recipe = Recipe.model_validate({"packages": ["git", "curl", "git"], "setup": ["echo é"]})
    assert recipe.compute_digest("guest", "files") == "6d99ed476c968fe3666c39c13da2c734a11eab17e8932b4afb7850c5cab8a574"


def test_the_digest_covers_every_field_and_salt() -> None:
    bodies = [
        {},
        {"suite": "trixie"},
        {"mirror": "http://deb.example"},
        {"packages": ["curl"]},
        {"setup": ["true"]},
        {"setup": ["true", "true"]},
        {"start_command": "true"},
        {"ready_probe": "true"},
        {"ready_timeout": 61},
        {"setup_timeout": 61},
        {"setup_network": False},
        {"resources": {"cpus": 2}},
        {"source": "rootfs", "path": "/x"},
        {"source": "image", "image": "app:1"},
        {"source": "image", "image": "app:2"},
    ]
    digests = [
        Recipe.model_validate(body).compute_digest(*salts)
        for body in bodies
        for salts in ((), ("a",), ("b",), ("a", "b"))
    ]
    assert len(set(digests)) == len(digests)
    assert all(len(digest) == 64 and int(digest, 16) >= 0 for digest in digests)


def test_a_directorys_digest_covers_names_modes_sizes_and_times(tmp_path: Path) -> None:
    root = tmp_path / "root"
    (root / "etc").mkdir(parents=True)
    file = root / "etc" / "motd"
    file.write_text("hello")
    os.utime(file, (1, 1))
    digests = [digest_source(root)]
    assert digest_source(root) == digests[0]
    for change in (
        lambda: (file.write_text("hello!"), os.utime(file, (1, 1))),
        lambda: os.utime(file, (2, 2)),
        lambda: file.chmod(0o600),
        lambda: file.rename(file.with_name("issue")),
        lambda: (root / "dangling").symlink_to("nowhere"),
    ):
        change()
        assert digest_source(root) not in digests
        digests.append(digest_source(root))


def test_a_tarballs_digest_covers_only_its_contents(tmp_path: Path) -> None:
    first_tarball, second_tarball = tmp_path / "one.tar", tmp_path / "other.tar"
    first_tarball.write_bytes(b"content")
    second_tarball.write_bytes(b"content")
    os.utime(second_tarball, (1, 1))
    assert (
        digest_source(first_tarball)
        == digest_source(second_tarball)
        == "ed7002b439e9ac845f22357d822bac1444730fbdb6016d3ec9432297b9ec9f73"
    )
    second_tarball.write_bytes(b"contents")
    assert digest_source(second_tarball) != digest_source(first_tarball)


@pytest.mark.parametrize("kind", ["pipe", "device"])
def test_a_source_that_never_ends_is_refused(tmp_path: Path, kind: str) -> None:
    if kind == "pipe":
        os.mkfifo(tmp_path / "source")
    else:
        (tmp_path / "source").symlink_to("/dev/zero")
    with pytest.raises(Invalid, match="source cannot be read on the gateway's host: it is not a regular file"):
        digest_source(tmp_path / "source")


def test_a_pipe_that_replaces_a_source_during_the_check_is_refused(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    os.mkfifo(tmp_path / "source")
    status = Path(__file__).stat()
    with monkeypatch.context() as patch, pytest.raises(OSError, match="it is not a regular file"):
        patch.setattr(Path, "stat", lambda path: status)
        recipes.digest_file(tmp_path / "source")


def test_a_source_that_is_too_large_is_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    for number in range(3):
        (tmp_path / str(number)).write_bytes(b"x")
    digest_source(tmp_path)
    monkeypatch.setattr(recipes, "_MAX_DIGEST_ENTRIES", 2)
    with pytest.raises(Invalid, match="it contains more than 2 files"):
        digest_source(tmp_path)
    monkeypatch.setattr(recipes, "_MAX_DIGEST_SECONDS", 0)
    for path in (tmp_path, tmp_path / "1"):
        with pytest.raises(Invalid, match="reading it takes longer than 0 s"):
            digest_source(path)


def test_an_unreadable_path_is_reported_with_the_reason() -> None:
    with pytest.raises(Invalid) as error_info:
        digest_source(Path("/nowhere/at/all"))
    assert error_info.value.message == (
        "the root file system /nowhere/at/all cannot be read on the gateway's host: No such file or directory. "
        "Correct 'path', or copy the files to that host"
    )
    assert compute_source_digest(Recipe()) == ""


def test_only_a_rootfs_recipe_needs_and_accepts_a_path() -> None:
    with pytest.raises(ValidationError, match="'path' is valid only with 'from: rootfs'"):
        Recipe.model_validate({"path": "/x"})
    with pytest.raises(ValidationError, match="needs the field 'path': set it to the absolute path"):
        Recipe.model_validate({"source": "rootfs"})


def test_only_an_image_recipe_needs_and_accepts_an_image() -> None:
    with pytest.raises(ValidationError, match="'image' is valid only with 'from: image'"):
        Recipe.model_validate({"image": "app:1"})
    with pytest.raises(ValidationError, match="needs the field 'image': set it to a reference such as"):
        Recipe.model_validate({"source": "image"})
    with pytest.raises(ValidationError, match="is not valid: use docker://"):
        Recipe.model_validate({"source": "image", "image": "dir:/x"})
    with pytest.raises(ValidationError, match="'packages' cannot be added to an image"):
        Recipe.model_validate({"source": "image", "image": "app:1", "packages": ["curl"]})
    with pytest.raises(ValidationError, match="'path' is valid only with 'from: rootfs'"):
        Recipe.model_validate({"source": "image", "image": "app:1", "path": "/x"})


def test_package_names_follow_apts_rules() -> None:
    valid_packages = ["curl", "g++", "libc6:amd64", "python3.11", "git=1:2.39.5-0+deb12u2", "a" * 128]
    assert Recipe(packages=valid_packages).packages == valid_packages
    for invalid_package in ("a", "-a", "Curl", "curl:", "curl=", "curl;id", "curl git", "a" * 129, "b" * 200):
        with pytest.raises(ValidationError) as error_info:
            Recipe(packages=["git", invalid_package])
        assert f"{invalid_package[:80]!r} is not a valid Debian package name" in str(error_info.value)
