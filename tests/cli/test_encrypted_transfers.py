"""`sandboxctl` encrypts exported files with the real `age`, and imports nothing that was not decrypted completely."""

from __future__ import annotations

import subprocess
from collections.abc import Callable
from pathlib import Path

import httpx
import pytest
from cryptography.hazmat.primitives import serialization
from cryptography.hazmat.primitives.asymmetric.ed25519 import Ed25519PrivateKey

from sandbox_gateway.cli import encryption
from tests.cli.running import SANDBOXCTL_COMMAND, Run, check_success
from tests.cli.test_transfers import taken_snapshot
from tests.support.age import (
    DAMAGES,
    FAILURE_AT_THE_END,
    LARGE_TEXT,
    Key,
    decrypt,
    key,
    make_key,
    no_import_remains,
    write_program,
)
from tests.support.memory_gateway import MemoryGateway
from tests.support.memory_host import MemorySource

__all__ = ["key", "no_import_remains", "taken_snapshot"]  # fixtures


@pytest.fixture
def large_snapshot(api: httpx.Client, taken_snapshot: None) -> None:
    """A snapshot with the name `large`, whose file has several chunks of `age`, which are 64 KiB."""
    request = {"args": ["write", "/root/large", LARGE_TEXT]}
    api.post("/sandboxes/source/exec", json=request).raise_for_status()
    api.post("/sandboxes/source/snapshots", json={"name": "large"}).raise_for_status()


@pytest.fixture
def exported(run: Run, large_snapshot: None, key: Key, tmp_path: Path) -> Path:
    """The snapshot `large` in an encrypted file."""
    file = tmp_path / "large.age"
    check_success(run("snapshot", "export", "large", str(file), "--age-recipient", key.recipient))
    assert file.stat().st_size > 4 * 65536
    return file


def test_an_encrypted_snapshot_is_exported_and_imported(
    run: Run, api: httpx.Client, key: Key, taken_snapshot: None, tmp_path: Path
) -> None:
    file, other_key = tmp_path / "file", make_key(tmp_path / "other-key")
    recipients = ["--age-recipient", key.recipient, "--age-recipient", other_key.recipient]
    outcome = check_success(run("snapshot", "export", "taken", str(file), *recipients))
    assert outcome.out == f"{file}: {file.stat().st_size} bytes\n"
    assert file.stat().st_mode & 0o777 == 0o600 and not (tmp_path / ".file.partial").exists()
    assert file.read_bytes().startswith(b"age-encryption.org/v1\n")
    for number, each in enumerate((key, other_key)):
        assert decrypt(file, each) == api.get("/snapshots/taken/export").content
        arguments = (str(file), "--age-identity", each.path, "--name", f"copy-{number}")
        assert check_success(run("--json", "snapshot", "import", *arguments)).json["names"] == [f"copy-{number}"]


def test_an_ssh_key_encrypts_and_decrypts(run: Run, taken_snapshot: None, tmp_path: Path) -> None:
    identity, file = tmp_path / "key", tmp_path / "file"
    key = Ed25519PrivateKey.generate()
    formats = (serialization.Encoding.PEM, serialization.PrivateFormat.OpenSSH)
    identity.write_bytes(key.private_bytes(*formats, serialization.NoEncryption()))
    public_formats = (serialization.Encoding.OpenSSH, serialization.PublicFormat.OpenSSH)
    recipient = key.public_key().public_bytes(*public_formats).decode() + " backup key of a team"
    check_success(run("snapshot", "export", "taken", str(file), "--age-recipient", recipient))
    check_success(run("snapshot", "import", str(file), "--age-identity", str(identity), "--name", "copy"))


def test_an_encrypted_volume_is_exported_and_imported(run: Run, key: Key, tmp_path: Path) -> None:
    check_success(run("volume", "create", "data", "--size", "64M"))
    check_success(run("volume", "snapshot", "data", "--name", "monday"))
    file = str(tmp_path / "data.age")
    check_success(run("volume", "export", "data@monday", file, "--age-recipient", key.recipient))
    refusal = run("volume", "import", file, "--name", "copy")
    assert refusal.code == 2 and "--age-identity" in refusal.err
    check_success(run("volume", "import", file, "--name", "copy", "--age-identity", key.path))
    assert "copy" in check_success(run("volume", "list")).out


def test_encrypted_files_can_be_piped(run: Run, memory_gateway: MemoryGateway, taken_snapshot: None, key: Key) -> None:
    command = [*SANDBOXCTL_COMMAND, "--url", memory_gateway.unix_url, "snapshot"]
    export_command = [*command, "export", "taken", "-", "--age-recipient", key.recipient]
    file = subprocess.run(export_command, capture_output=True, check=True, timeout=60).stdout
    assert file.startswith(encryption.BEGINNINGS[0])
    check_success(run("snapshot", "import", "-", "--name", "copy", "--age-identity", key.path, stdin=file))
    import_command = [*command, "import", "/dev/stdin", "--name", "other", "--age-identity", key.path]
    subprocess.run(import_command, input=file, capture_output=True, check=True, timeout=60)
    refusal = run("snapshot", "import", "-", "--name", "third", stdin=file)
    assert refusal.code == 2 and "- is encrypted" in refusal.err


def test_an_armored_file_is_imported(run: Run, api: httpx.Client, key: Key, taken_snapshot: None) -> None:
    contents = api.get("/snapshots/taken/export").content
    command = ["age", "-a", "-r", key.recipient]
    file = subprocess.run(command, input=contents, capture_output=True, check=True, timeout=60).stdout
    check_success(run("snapshot", "import", "-", "--name", "copy", "--age-identity", key.path, stdin=file))


@pytest.mark.usefixtures("no_import_remains")
def test_a_file_and_an_identity_that_do_not_belong_together_are_refused(
    run: Run, exported: Path, key: Key, tmp_path: Path
) -> None:
    refusal = run("snapshot", "import", str(exported), "--name", "copy")
    assert refusal.code == 2 and f"{exported} is encrypted" in refusal.err and "--age-identity KEYFILE" in refusal.err
    plain_file = tmp_path / "plain"
    check_success(run("snapshot", "export", "taken", str(plain_file)))
    refusal = run("snapshot", "import", str(plain_file), "--name", "copy", "--age-identity", key.path)
    assert (
        refusal.code == 2 and f"{plain_file} is not encrypted" in refusal.err and "omit --age-identity" in refusal.err
    )
    other_key = make_key(tmp_path / "other-key")
    refusal = run("snapshot", "import", str(exported), "--name", "copy", "--age-identity", other_key.path)
    assert refusal.code == 1 and "no identity matched any of the recipients" in refusal.err
    refusal = run("snapshot", "import", str(exported), "--name", "copy", "--age-identity", str(tmp_path / "missing"))
    assert refusal.code == 1 and f"{tmp_path}/missing: no such file or directory" in refusal.err


@pytest.mark.usefixtures("no_import_remains")
@pytest.mark.parametrize("damage", DAMAGES.values(), ids=DAMAGES)
@pytest.mark.parametrize("uses_stdin", [False, True], ids=["file", "stdin"])
def test_an_incomplete_or_changed_file_is_not_imported(
    run: Run, exported: Path, key: Key, damage: Callable[[bytes], bytes], uses_stdin: bool
) -> None:
    damaged_file = damage(exported.read_bytes())
    exported.write_bytes(damaged_file)
    file = "-" if uses_stdin else str(exported)
    arguments = ("snapshot", "import", file, "--name", "copy", "--age-identity", key.path)
    refusal = run(*arguments, stdin=damaged_file if uses_stdin else b"")
    assert refusal.code == 1 and f"cannot decrypt {file}: " in refusal.err, refusal.err
    assert "copy the file again" in refusal.err


@pytest.mark.usefixtures("no_import_remains")
def test_a_file_is_not_imported_if_its_decryption_fails_after_the_last_byte(
    run: Run, exported: Path, key: Key, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    write_program(tmp_path, FAILURE_AT_THE_END, monkeypatch)
    refusal = run("snapshot", "import", str(exported), "--name", "copy", "--age-identity", key.path)
    assert refusal.code == 1 and f"cannot decrypt {exported}: at the end" in refusal.err


@pytest.mark.usefixtures("no_import_remains")
def test_a_damaged_volume_is_not_imported(run: Run, memory_gateway: MemoryGateway, key: Key, tmp_path: Path) -> None:
    check_success(run("volume", "create", "data", "--size", "64M"))
    memory_gateway.host.files[memory_gateway.engine.volumes.get("data").id] = {"large": LARGE_TEXT}
    check_success(run("volume", "snapshot", "data", "--name", "monday"))
    file = tmp_path / "data.age"
    check_success(run("volume", "export", "data@monday", str(file), "--age-recipient", key.recipient))
    for damage in DAMAGES.values():
        damaged_file = damage(file.read_bytes())
        refusal = run("volume", "import", "-", "--name", "copy", "--age-identity", key.path, stdin=damaged_file)
        assert refusal.code == 1 and "cannot decrypt -: " in refusal.err, refusal.err
    assert "copy" not in check_success(run("volume", "list")).out


@pytest.mark.parametrize("lost_part", ["kernel", "memory"])
def test_an_encrypted_export_that_fails_leaves_no_file(
    run: Run, taken_snapshot: None, key: Key, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, lost_part: str
) -> None:
    original_read = MemorySource.read

    def fail(source: MemorySource, part: str, *args: int) -> bytes:
        if part == lost_part:
            raise OSError(5, "Input/output error")
        return original_read(source, part, *args)  # type: ignore[arg-type]

    monkeypatch.setattr(MemorySource, "read", fail)
    outcome = run("snapshot", "export", "taken", str(tmp_path / "file"), "--age-recipient", key.recipient)
    assert outcome.code == 5 and "was lost" in outcome.err and not [*tmp_path.iterdir()]


def test_what_an_earlier_export_left_behind_is_replaced(
    run: Run, taken_snapshot: None, key: Key, api: httpx.Client, tmp_path: Path
) -> None:
    (tmp_path / ".file.partial").write_bytes(api.get("/snapshots/taken/export").content[:1000])
    file = tmp_path / "file"
    check_success(run("snapshot", "export", "taken", str(file), "--age-recipient", key.recipient))
    assert [*tmp_path.iterdir()] == [file]
    check_success(run("snapshot", "import", str(file), "--age-identity", key.path, "--name", "copy"))
    # The beginning of an encrypted file is of no use to an export without encryption.
    (tmp_path / ".plain.partial").write_bytes(file.read_bytes()[:1000])
    check_success(run("snapshot", "export", "taken", str(tmp_path / "plain")))
    assert (tmp_path / "plain").read_bytes() == api.get("/snapshots/taken/export").content


@pytest.mark.parametrize(
    ("recipient", "message"),
    [
        ("", "'' is not a recipient"),
        ("someone", "'someone' is not a recipient"),
        ("-i/etc/passwd", "is not a recipient"),
        ("age1xyz\nage1", "is not a recipient"),
        ("ecdsa-sha2-nistp256 AAAA", "is not a recipient"),
        ("age1" + "q" * 58, "cannot encrypt"),
        ("ssh-ed25519 AAAA", "cannot encrypt"),
    ],
)
def test_an_invalid_recipient_is_refused(
    run: Run, taken_snapshot: None, tmp_path: Path, recipient: str, message: str
) -> None:
    refusal = run("snapshot", "export", "taken", str(tmp_path / "file"), "--age-recipient", recipient)
    assert refusal.code in (1, 2) and message in refusal.err, refusal.err
    assert not [*tmp_path.iterdir()]


def test_a_secret_key_in_place_of_a_path_or_a_recipient_is_not_repeated(run: Run, key: Key, tmp_path: Path) -> None:
    secret = Path(key.path).read_text().split()[-1]
    assert secret.startswith("AGE-SECRET-KEY-")
    file = str(tmp_path / "file")
    for arguments in (("import", file, "--age-identity", secret), ("export", "taken", file, "--age-recipient", secret)):
        refusal = run("snapshot", *arguments)
        assert refusal.code == 2 and "contains a secret key" in refusal.err and secret not in refusal.err


def test_a_missing_program_is_named(
    run: Run, exported: Path, key: Key, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("PATH", str(tmp_path))
    for arguments in (
        ("export", "taken", str(tmp_path / "file"), "--age-recipient", key.recipient),
        ("import", str(exported), "--age-identity", key.path, "--name", "copy"),
    ):
        refusal = run("snapshot", *arguments)
        assert refusal.code == 1 and "age is not installed" in refusal.err and "install the package age" in refusal.err
    assert [*tmp_path.iterdir()] == [exported]


@pytest.mark.parametrize(
    ("script", "message"),
    [
        ("yes 'a long line' | head -c 999999 >&2; echo '\033[31mage: error: no room' >&2; exit 3", "no room"),
        ("cat >/dev/null; head -c 99999 /dev/zero | tr '\\0' x >&2; exit 1", "x" * 300),
        ("exit 4", "age failed with status 4"),
        ("exec <&-; exit 0", "age has ended too early"),
        ("exec <&-; exec sleep 600", "age has not ended after 2 seconds"),
        ("exec sleep 600", "age has done nothing for 2 seconds"),
    ],
)
def test_a_program_that_fails_or_hangs_ends_the_export(
    run: Run, large_snapshot: None, key: Key, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, script: str, message: str
) -> None:
    program_path = tmp_path / "bin"
    program_path.mkdir()
    write_program(program_path, script, monkeypatch)
    monkeypatch.setattr(encryption, "_STALLED_SECONDS", 2.0)
    file = tmp_path / "file"
    outcome = run("snapshot", "export", "large", str(file), "--age-recipient", key.recipient)
    assert outcome.code == 1 and message in outcome.err and "x" * 301 not in outcome.err, outcome.err
    assert [*tmp_path.iterdir()] == [program_path]


@pytest.mark.usefixtures("no_import_remains")
@pytest.mark.parametrize(
    ("script", "message"),
    [
        ("cat >/dev/null; exec sleep 600", "age has done nothing for 2 seconds"),
        ("cat >/dev/null; exec >&-; exec sleep 600", "age has not ended after 2 seconds"),
    ],
)
def test_a_program_that_hangs_ends_the_import(
    run: Run, exported: Path, key: Key, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, script: str, message: str
) -> None:
    write_program(tmp_path, script, monkeypatch)
    monkeypatch.setattr(encryption, "_STALLED_SECONDS", 2.0)
    outcome = run("snapshot", "import", str(exported), "--name", "copy", "--age-identity", key.path)
    assert outcome.code == 1 and message in outcome.err
