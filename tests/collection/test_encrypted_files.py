"""The options `age_recipients` and `age_identity`, with the real `age`, the gateway, and a host in memory."""

from __future__ import annotations

import json
import os
from collections.abc import Callable
from pathlib import Path
from typing import Any

import httpx
import pytest
from ansible_collections.grove.sandbox.plugins.module_utils import _snapshot, _volume
from ansible_collections.grove.sandbox.plugins.module_utils._module import redact_options
from ansible_collections.grove.sandbox.plugins.module_utils._run import MASK, PLAN_KEY

from tests.collection.test_volume_file_options import list_actions, run_module
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

__all__ = ["key", "no_import_remains"]  # fixtures


@pytest.fixture(autouse=True)
def objects(api: httpx.Client) -> None:
    """The snapshots `golden` and `other`, whose files have several chunks of `age`, and the volume `data`."""
    api.post("/sandboxes", json={"templateID": "base", "name": "box"}).raise_for_status()
    api.post("/sandboxes/box/exec", json={"args": ["write", "/root/large", LARGE_TEXT]}).raise_for_status()
    for name in ("golden", "other"):
        api.post("/sandboxes/box/snapshots", json={"name": name}).raise_for_status()
    api.post("/volumes", json={"name": "data", "sizeMB": 64}).raise_for_status()
    api.post("/volumes/data/snapshots", json={"name": "monday"}).raise_for_status()


@pytest.fixture
def file(tmp_path: Path) -> Path:
    (tmp_path / "files").mkdir()
    return tmp_path / "files" / "golden"


@pytest.fixture
def export(memory_gateway: MemoryGateway, file: Path, key: Key) -> Callable[..., list[str]]:
    """A function that exports `golden`, encrypted for the key, and returns the actions."""

    def run_export(*, check: bool = False, **options: Any) -> list[str]:
        options = {"name": ["golden"], "export_to": str(file), "age_recipients": [key.recipient], **options}
        return list_actions(run_module(memory_gateway, _snapshot, check=check, **options))

    return run_export


@pytest.fixture
def import_(memory_gateway: MemoryGateway, file: Path, key: Key) -> Callable[..., dict[str, Any]]:
    """A function that imports the file as `copy`, and returns the result."""

    def run_import(*, check: bool = False, **options: Any) -> dict[str, Any]:
        options = {"name": ["copy"], "import_from": str(file), "age_identity": key.path, **options}
        return run_module(memory_gateway, _snapshot, check=check, **options)

    return run_import


def read_record(file: Path) -> dict[str, Any]:
    record: dict[str, Any] = json.loads(file.with_name(f".{file.name}.exported").read_text())
    return record


def test_an_encrypted_export_is_made_once_without_the_identity(
    api: httpx.Client, export: Callable[..., list[str]], file: Path, key: Key
) -> None:
    assert export(check=True) == ["export"] and not [*file.parent.iterdir()]
    assert export() == ["export"]
    assert decrypt(file, key) == api.get("/snapshots/golden/export").content
    record_file = file.with_name(".golden.exported")
    assert sorted(file.parent.iterdir()) == [record_file, file]
    assert {each.stat().st_mode & 0o777 for each in file.parent.iterdir()} == {0o600}
    status = file.stat()
    assert read_record(file) == {
        "snapshot_id": api.get("/snapshots/golden").json()["snapshotID"],
        "kind": "snapshot",
        "with_memory": True,
        "since": None,
        "recipients": [key.recipient],
        "size": status.st_size,
        "mtime_ns": status.st_mtime_ns,
    }
    Path(key.path).unlink()
    assert export(check=True) == [] and export() == []
    file.chmod(0o640)
    assert export(check=True) == ["protect"] and export() == ["protect"] and export() == []


def test_the_order_and_the_comments_of_recipients_make_no_difference(
    export: Callable[..., list[str]], key: Key, tmp_path: Path
) -> None:
    other = make_key(tmp_path / "other").recipient
    ssh_key = "ssh-ed25519 AAAAC3NzaC1lZDI1NTE5AAAAIKZWBBkDccm1G6M2Hb5qstNzTIF0gzoK4uv7CumrmEgB"
    assert export(age_recipients=[key.recipient, other, ssh_key]) == ["export"]
    assert export(age_recipients=[f"{ssh_key} of a team\n", other, key.recipient, other]) == []


def replace_contents(file: Path) -> None:
    file.write_bytes(file.read_bytes()[:-1] + b"x")


def set_older_time(file: Path) -> None:
    os.utime(file, (0, 0))


def write_malformed_record(file: Path) -> None:
    file.with_name(".golden.exported").write_text(json.dumps({**read_record(file), "since": ["x"]}))


@pytest.mark.parametrize(
    "change",
    [
        replace_contents,
        set_older_time,
        write_malformed_record,
        lambda file: file.with_name(".golden.exported").write_text("["),
        lambda file: file.with_name(".golden.exported").write_text("[]"),
        lambda file: file.with_name(".golden.exported").unlink(),
        lambda file: file.unlink(),
    ],
    ids=["contents", "time", "malformed record", "no JSON", "a list", "no record", "no file"],
)
def test_an_export_that_was_changed_is_made_again(
    export: Callable[..., list[str]], file: Path, key: Key, change: Callable[[Path], object]
) -> None:
    export()
    change(file)
    assert export(check=True) == ["export"] and export() == ["export"] and export() == []
    assert decrypt(file, key)


def test_a_record_behind_a_link_is_ignored(export: Callable[..., list[str]], file: Path, tmp_path: Path) -> None:
    export()
    record_file = file.with_name(".golden.exported")
    record = record_file.rename(tmp_path / "elsewhere").read_text()
    record_file.symlink_to(tmp_path / "elsewhere")
    assert export() == ["export"] and export() == []
    assert not record_file.is_symlink() and (tmp_path / "elsewhere").read_text() == record


def test_an_export_of_something_else_is_made_again(
    memory_gateway: MemoryGateway, export: Callable[..., list[str]], file: Path, key: Key, tmp_path: Path
) -> None:
    export()
    other_key = make_key(tmp_path / "other")
    for options in ({"name": ["other"]}, {"age_recipients": [other_key.recipient]}):
        assert export(check=True, **options) == ["export"] and export(**options) == ["export"]
        assert export(**options) == []
        assert export() == ["export"]
    # A file without encryption is encrypted, but not the other way round.
    file.unlink()
    assert export(age_recipients=None) == ["export"] and export(age_recipients=None) == []
    assert export() == ["export"] and file.read_bytes().startswith(b"age-encryption.org/v1")
    encrypted_contents = file.read_bytes()
    for check in (True, False):
        options = {"name": ["golden"], "export_to": str(file)}
        refusal = run_module(memory_gateway, _snapshot, check=check, **options)
        assert f"{file} is encrypted: set age_recipients" in refusal["msg"] and not refusal["changed"]
    volume_options = {"name": ["data"], "snapshots": ["monday"], "age_recipients": [key.recipient]}
    refusal = run_module(memory_gateway, _volume, export_to=str(file), **volume_options)
    assert "contains a snapshot of a sandbox: use it with the module sandbox_snapshot" in refusal["msg"]
    assert file.read_bytes() == encrypted_contents


def test_sandboxctl_can_have_exported_a_snapshot_without_its_memory(
    export: Callable[..., list[str]], file: Path
) -> None:
    export()
    record_file = file.with_name(".golden.exported")
    record_file.write_text(json.dumps({**read_record(file), "with_memory": False}))
    assert export() == ["export"] and read_record(file)["with_memory"]


def test_an_encrypted_snapshot_is_imported_once(
    api: httpx.Client, export: Callable[..., list[str]], import_: Callable[..., dict[str, Any]], file: Path
) -> None:
    export()
    snapshot_id = api.get("/snapshots/golden").json()["snapshotID"]
    for check in (True, False):
        result = import_(check=check)
        assert list_actions(result) == ["import"] and result["snapshot"]["imported_from"] == snapshot_id
    for check in (True, False):
        assert list_actions(import_(check=check)) == []
    file.unlink()
    assert list_actions(import_()) == []


def test_an_encrypted_volume_is_exported_and_imported_once(
    memory_gateway: MemoryGateway, api: httpx.Client, file: Path, key: Key
) -> None:
    export_options = {
        "name": ["data"], "snapshots": ["monday"], "export_to": str(file), "age_recipients": [key.recipient]
    }  # fmt: skip
    import_options = {"name": ["copy"], "import_from": str(file), "age_identity": key.path, "size_mb": 128}
    for options, actions in ((export_options, ["export"]), (import_options, ["import", "grow"])):
        for check, expected_actions in ((True, actions), (False, actions), (True, []), (False, [])):
            assert list_actions(run_module(memory_gateway, check=check, **options)) == expected_actions
    assert read_record(file)["kind"] == "volume" and api.get("/volumes/copy").json()["sizeMB"] == 128


@pytest.mark.usefixtures("no_import_remains")
def test_a_file_and_an_identity_that_do_not_belong_together_are_refused(
    export: Callable[..., list[str]], import_: Callable[..., dict[str, Any]], file: Path, tmp_path: Path
) -> None:
    export()
    other_key = make_key(tmp_path / "other")
    missing_path = str(tmp_path / "missing")
    for check in (True, False):
        refusal = import_(check=check, age_identity=None)
        assert f"{file} is encrypted: set age_identity" in refusal["msg"] and not refusal["changed"]
        refusal = import_(check=check, age_identity=other_key.path)
        assert f"{file} cannot be decrypted (no identity matched any of the recipients)" in refusal["msg"]
        refusal = import_(check=check, age_identity=missing_path)
        assert f"{missing_path}: no such file or directory" in refusal["msg"]
        assert refusal["failure"]["kind"] == "invalid"
    file.unlink()
    export(age_recipients=None)
    for check in (True, False):
        refusal = import_(check=check)
        assert f"{file} is not encrypted with age: omit age_identity" in refusal["msg"] and not refusal["changed"]
        assert bool(check) is (PLAN_KEY in refusal)


@pytest.mark.usefixtures("no_import_remains")
@pytest.mark.parametrize("damage", DAMAGES.values(), ids=DAMAGES)
def test_an_incomplete_or_changed_file_is_not_imported(
    export: Callable[..., list[str]],
    import_: Callable[..., dict[str, Any]],
    file: Path,
    damage: Callable[[bytes], bytes],
) -> None:
    export()
    file.write_bytes(damage(file.read_bytes()))
    refusal = import_()
    assert refusal["failed"] and f"{file} cannot be decrypted (" in refusal["msg"], refusal["msg"]
    assert not refusal["changed"] and refusal["failure"]["kind"] == "invalid"


@pytest.mark.usefixtures("no_import_remains")
def test_a_file_is_not_imported_if_its_decryption_fails_after_the_last_byte(
    export: Callable[..., list[str]],
    import_: Callable[..., dict[str, Any]],
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    export()
    write_program(tmp_path, FAILURE_AT_THE_END, monkeypatch)
    assert "cannot be decrypted (at the end)" in import_()["msg"]


@pytest.mark.usefixtures("no_import_remains")
def test_a_damaged_volume_is_not_imported(
    memory_gateway: MemoryGateway, file: Path, key: Key, api: httpx.Client
) -> None:
    memory_gateway.host.files[memory_gateway.engine.volumes.get("data").id] = {"large": LARGE_TEXT}
    export_options = {"snapshots": ["tuesday"], "export_to": str(file), "age_recipients": [key.recipient]}
    assert list_actions(run_module(memory_gateway, name=["data"], **export_options)) == ["capture", "export"]
    contents = file.read_bytes()
    for damage in DAMAGES.values():
        file.write_bytes(damage(contents))
        refusal = run_module(memory_gateway, name=["copy"], import_from=str(file), age_identity=key.path)
        assert f"{file} cannot be decrypted (" in refusal["msg"], refusal["msg"]
    assert api.get("/volumes/copy").status_code == 404


@pytest.mark.usefixtures("no_import_remains")
def test_check_mode_decrypts_only_the_beginning(
    export: Callable[..., list[str]], import_: Callable[..., dict[str, Any]], file: Path
) -> None:
    export()
    file.write_bytes(DAMAGES["cut off in the middle"](file.read_bytes()))
    assert list_actions(import_(check=True)) == ["import"]
    file.write_bytes(DAMAGES["cut off in the header"](file.read_bytes()))
    assert "cannot be decrypted" in import_(check=True)["msg"]


def test_a_missing_program_is_named_before_the_first_change(
    memory_gateway: MemoryGateway,
    api: httpx.Client,
    export: Callable[..., list[str]],
    import_: Callable[..., dict[str, Any]],
    file: Path,
    key: Key,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    export()
    (tmp_path / "empty").mkdir()
    monkeypatch.setenv("PATH", str(tmp_path / "empty"))
    export_options = {"export_to": str(tmp_path / "file"), "age_recipients": [key.recipient]}
    for check in (True, False):
        refusals = [
            run_module(memory_gateway, _snapshot, check=check, name=["new"], sandbox=["box"], **export_options),
            run_module(memory_gateway, _volume, check=check, name=["data"], snapshots=["new"], **export_options),
            import_(check=check),
        ]
        for refusal in refusals:
            assert "age is not installed: install the package age" in refusal["msg"] and not refusal["changed"]
            assert refusal["failure"]["kind"] == "unsupported"
        if check:
            unknown = [refusal[PLAN_KEY]["unknown"] for refusal in refusals]
            assert unknown[:2] == [["only if no earlier task of the run installs age"]] * 2
    assert {name for each in api.get("/snapshots").json() for name in each["names"]} == {"golden", "other"}
    assert [each["name"] for each in api.get("/volumes/data/snapshots").json()] == ["monday"]


def test_an_invalid_recipient_is_refused_before_the_first_change(
    memory_gateway: MemoryGateway, api: httpx.Client, file: Path
) -> None:
    options = {"name": ["new"], "sandbox": ["box"], "export_to": str(file), "age_recipients": ["age1" + "q" * 58]}
    for check in (True, False):
        refusal = run_module(memory_gateway, _snapshot, check=check, **options)
        assert "age_recipients cannot be used (malformed recipient" in refusal["msg"] and not refusal["changed"]
    assert api.get("/snapshots/new").status_code == 404 and not [*file.parent.iterdir()]


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"export_to": "/file", "age_recipients": []}, "age_recipients is empty"),
        ({"export_to": "/file", "age_recipients": ["me"]}, "contains 'me', which is not a recipient"),
        ({"export_to": "/file", "age_recipients": ["-R/etc/passwd"]}, "which is not a recipient"),
        ({"export_to": "/file", "age_recipients": ["age1x\nage1y"]}, "which is not a recipient"),
        ({"export_to": "/file", "age_recipients": ["AGE-SECRET-KEY-1XYZ"]}, "age_recipients contains a secret key"),
        ({"import_from": "/file", "age_identity": "AGE-SECRET-KEY-1XYZ"}, "age_identity contains a secret key"),
        ({"import_from": "/file", "age_identity": "/x/AGE-SECRET-KEY-1XYZ"}, "age_identity contains a secret key"),
    ],
)
@pytest.mark.parametrize("kind", [_snapshot, _volume], ids=["snapshot", "volume"])
def test_invalid_options_are_refused(
    memory_gateway: MemoryGateway, kind: Any, options: dict[str, Any], message: str
) -> None:
    if kind is _volume and "export_to" in options:
        options = {**options, "snapshots": ["monday"]}
    refusal = run_module(memory_gateway, kind, name=["data"], **options)
    assert message in refusal["msg"] and "KEY-1" not in refusal["msg"]


def test_a_secret_key_in_an_option_is_masked_in_the_invocation() -> None:
    options = {"age_identity": "~/AGE-SECRET-KEY-1XYZ", "age_recipients": ["AGE-SECRET-KEY-1XYZ"]}
    assert redact_options(options) == {"age_identity": MASK, "age_recipients": MASK}
    options = {"age_identity": "/root/key", "age_recipients": ["age1xyz"]}
    assert redact_options(options) == options


def test_an_export_that_fails_keeps_the_older_file(
    memory_gateway: MemoryGateway, export: Callable[..., list[str]], file: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    export()
    before = {each.name: each.read_bytes() for each in file.parent.iterdir()}
    original_read = MemorySource.read

    def fail(source: MemorySource, part: str, *args: int) -> bytes:
        if part == "memory":
            raise OSError(5, "Input/output error")
        return original_read(source, part, *args)  # type: ignore[arg-type]

    monkeypatch.setattr(MemorySource, "read", fail)
    with pytest.raises(AssertionError, match="was lost"):
        export(name=["other"])
    monkeypatch.undo()
    assert {each.name: each.read_bytes() for each in file.parent.iterdir()} == before
    assert export() == []


def test_an_export_that_is_killed_before_the_last_step_is_made_again(
    export: Callable[..., list[str]], file: Path, key: Key, monkeypatch: pytest.MonkeyPatch
) -> None:
    export()
    contents = file.read_bytes()

    def end(*args: Any) -> None:
        raise KeyboardInterrupt

    monkeypatch.setattr(Path, "replace", end)
    with pytest.raises(KeyboardInterrupt):
        export(name=["other"])
    monkeypatch.undo()
    assert file.read_bytes() == contents, "the file must be replaced last"
    assert export(name=["other"]) == ["export"] and export(name=["other"]) == []


@pytest.mark.parametrize(
    ("script", "message"),
    [
        ("exec sleep 600", "age has not ended after 2 seconds"),
        ('[ "$(head -c 1)" ] && exec sleep 600; exit 0', "age has done nothing for 2 seconds"),
        ("[ \"$(head -c 1)\" ] && echo 'age: error: no room' >&2; exit 1", "age failed with status 1"),
        ("[ ! \"$(head -c 1)\" ] || { echo 'age: error: no room' >&2; exit 1; }", "cannot be encrypted (no room)"),
        ('[ "$(head -c 1)" ] && cat >/dev/null && exit 5; exit 0', "cannot be encrypted (age failed with status 5)"),
    ],
)
def test_a_program_that_fails_or_hangs_ends_the_export(
    memory_gateway: MemoryGateway,
    file: Path,
    key: Key,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    script: str,
    message: str,
) -> None:
    """Without input, the script only checks the recipients."""
    write_program(tmp_path, script, monkeypatch)
    options = {"name": ["golden"], "export_to": str(file), "age_recipients": [key.recipient], "gateway_timeout": 2}
    result = run_module(memory_gateway, _snapshot, **options)
    assert result["failed"] and message in result["msg"], result["msg"]
    assert not [*file.parent.iterdir()]


@pytest.mark.usefixtures("no_import_remains")
def test_a_program_that_hangs_ends_the_import(
    export: Callable[..., list[str]],
    import_: Callable[..., dict[str, Any]],
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    export()
    write_program(tmp_path, "cat >/dev/null; exec sleep 600", monkeypatch)
    result = import_(gateway_timeout=2)
    assert "age has done nothing for 2 seconds" in result["msg"] and result["failure"]["kind"] == "timeout"
