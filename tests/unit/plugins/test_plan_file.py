"""Test that plan files are saved completely, and that only valid and unedited ones are loaded, until they expire."""

from __future__ import annotations

import json
import os
import stat
from collections.abc import Callable
from datetime import UTC, datetime, timedelta
from pathlib import Path
from typing import Any

import pytest
from ansible import constants as C
from ansible_collections.grove.sandbox.plugins.callback.plan import CallbackModule
from ansible_collections.grove.sandbox.plugins.module_utils._failure import Failure
from ansible_collections.grove.sandbox.plugins.plugin_utils import _plan_file, _plan_journal
from hypothesis import given, settings
from hypothesis import strategies as st

from tests.support.plan_files import PLAN_FILES, REMOVED, PlanFile, set_value

NOW = datetime.now(UTC).replace(microsecond=0)
GATEWAY_ID = "0123456789abcdef"
ENTRY = {
    "host": "localhost",
    "task": "Fork it … again",
    "path": "play.yml:12",
    "gateway": GATEWAY_ID,
    "gateway_url": "unix:///run/gateway.sock",
    "actions": [
        {
            "verb": "fork",
            "changes": [
                {"kind": "sandbox", "name": "try-1", "before": None, "after": {"metadata": {"team": "red"}}},
                {"kind": "sandbox", "name": "try-2", "before": {"cpus": 1}, "after": None},
            ],
            "request": {"snapshot": "before", "names": ["try-1"]},
        }
    ],
    "reads": {"/snapshots/before": "known-after-apply-0001 g1 f0", "/sandboxes/x": ""},
    "created": {"try-1": "known-after-apply-0002"},
    "costs": {"memory_mb": 256, "disk_bytes": -1048576, "pause_ms": 5.5},
    "unknown": ["the cost of the first capture"],
    "failure": {"kind": "in_use", "message": "volume 'data' is in use", "blockers": ["copy"], "status": 409},
}


def make_document(
    *entries: dict[str, Any], created_at: datetime = NOW, lifetime_seconds: int = 86400
) -> dict[str, Any]:
    return _plan_file.make_document(
        entries or (ENTRY,),
        playbooks=["site.yml"],
        problems=[],
        created_at=created_at,
        lifetime_seconds=lifetime_seconds,
    )


def write_signed_file(path: Path, document: Any) -> str:
    """Write a document with the correct digest, whatever it contains."""
    signed_document = {**document, "digest": _plan_file.compute_digest(document)}
    path.write_text(json.dumps(signed_document, sort_keys=True, separators=(",", ":")) + "\n")
    return str(path)


def test_a_plan_is_made_from_journal_entries() -> None:
    document = make_document()
    assert document["gateways"] == {GATEWAY_ID: "unix:///run/gateway.sock"}
    assert "gateway_url" not in document["entries"][0] and "gateway_url" in ENTRY
    assert document["created_at"] == NOW.strftime("%Y-%m-%dT%H:%M:%SZ")
    assert document["expires_at"] == (NOW + timedelta(days=1)).strftime("%Y-%m-%dT%H:%M:%SZ")
    assert (
        document["digest"]
        == _plan_file.compute_digest(document)
        != _plan_file.compute_digest({**document, "playbooks": []})
    )


@pytest.mark.parametrize("lifetime_seconds", [0, -5, 365 * 86400 + 1, 10**30])
def test_lifetimes_that_are_not_allowed_are_refused(lifetime_seconds: int) -> None:
    with pytest.raises(Failure, match=rf"plan_lifetime must be from 1 to 31536000 seconds, not {lifetime_seconds}"):
        make_document(lifetime_seconds=lifetime_seconds)


def test_a_saved_plan_can_be_loaded(tmp_path: Path) -> None:
    path, document = tmp_path / "plan.json", make_document()
    path.write_text('{"created_at":"of an old plan')
    path.chmod(0o644)
    _plan_file.save(str(path), document)
    assert _plan_file.load(str(path)) == document == json.loads(path.read_text())
    assert stat.S_IMODE(path.stat().st_mode) == 0o600
    assert [*tmp_path.iterdir()] == [path], "a temporary file was left behind"


def test_a_file_is_read_again_only_if_it_has_changed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path = tmp_path / "plan.json"
    _plan_file.save(str(path), make_document())
    plan = _plan_file.load(str(path))
    with monkeypatch.context() as patch:
        patch.delattr(_plan_file, "parse")
        assert _plan_file.load(str(path)) is plan
    status, text = path.stat(), path.read_text()
    path.write_text(text.replace("Fork it", "Fork IT"))
    os.utime(path, ns=(status.st_atime_ns, status.st_mtime_ns))
    assert (path.stat().st_size, path.stat().st_ino) == (status.st_size, status.st_ino)
    with pytest.raises(Failure, match="has been edited"):
        _plan_file.load(str(path))
    other_document = make_document(lifetime_seconds=3600)
    _plan_file.save(str(path), other_document)
    assert _plan_file.load(str(path)) == other_document
    path.unlink()
    with pytest.raises(Failure, match="does not exist"):
        _plan_file.load(str(path))


@pytest.mark.parametrize("is_variable", [False, True])
def test_a_plan_expires_until_a_run_has_begun_to_apply_it(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, is_variable: bool
) -> None:
    path, document = str(tmp_path / "plan.json"), make_document()
    _plan_file.save(path, document)
    monkeypatch.setattr(C, "DEFAULT_LOCAL_TMP", str(tmp_path))
    # This replaces the plugin loader, which needs the collection in a separate directory.
    monkeypatch.setattr(_plan_journal.callback_loader, "get", lambda *_args, **_options: CallbackModule)
    monkeypatch.setattr(C.config, "get_config_value", lambda *_args, **_options: path)
    variables = {_plan_journal.EXTRA_VARIABLE: document} if is_variable else {}
    monkeypatch.setattr(_plan_journal, "load_extra_vars", lambda _loader: variables)

    class Tomorrow(datetime):
        @classmethod
        def now(cls, tz: Any = None) -> Any:
            return datetime.now(tz) + timedelta(days=1)

    assert _plan_journal.load_applied_plan() == document
    monkeypatch.setattr(_plan_file, "datetime", Tomorrow)
    with pytest.raises(Failure, match=r"expired at"):
        _plan_journal.load_applied_plan()
    with _plan_journal.task_approved(document, {"host": "localhost", "path": "play.yml:1"}):
        pass
    assert _plan_journal.load_applied_plan() == document


def test_a_plan_that_cannot_be_saved_leaves_the_file_unchanged(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path, document = tmp_path / "plan.json", make_document()
    _plan_file.save(str(path), document)
    old_text = path.read_text()
    with pytest.raises(Failure, match=r"entries\[0\].host must be a non-empty string, not 3. Report this bug"):
        _plan_file.save(str(path), set_value(document, "entries/0/host", 3))

    def fail(*_: Any) -> None:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(os, "fsync", fail)
    with pytest.raises(Failure, match=r"cannot be saved in .*: No space left on device. Set plan_file to"):
        _plan_file.save(str(path), document)
    monkeypatch.setattr(_plan_file, "_MAX_FILE_BYTES", 100)
    with pytest.raises(Failure, match=r"bytes long, but a plan file is at most 100 bytes long: split the playbook"):
        _plan_file.save(str(path), document)
    with pytest.raises(Failure, match=r"No such file or directory"):
        monkeypatch.undo()
        _plan_file.save(str(tmp_path / "none" / "plan.json"), document)
    assert path.read_text() == old_text and [*tmp_path.iterdir()] == [path]


WRONG_VALUES: dict[str, tuple[Any, ...]] = {
    "format": (0, True, 1.0, "1", None, REMOVED),
    "created_at": (5, "2026-11-24", "2026-13-24T17:40:00Z", "٢٠٢٦-11-24T17:40:00Z", REMOVED),
    "expires_at": (None, "2026-11-24T17:40:00+00:00", "2001-01-01T00:00:00Z", REMOVED),
    "problems": (None, "none", [1], [""], REMOVED),
    "playbooks": ({}, [None], ["a/site.yml"], [""], REMOVED),
    "gateways": ([], {"0123": "unix:///a"}, {GATEWAY_ID: None}, {GATEWAY_ID: ""}, {}, REMOVED),
    "entries": (None, {}, [None], [[]], REMOVED),
    "entries/0/host": (None, "", 1, REMOVED),
    "entries/0/task": (None, ["a"], REMOVED),
    "entries/0/path": (None, 12, REMOVED),
    "entries/0/gateway": ("fedcba9876543210", "x", None, REMOVED),
    "entries/0/actions": (None, {"verb": "fork"}, ["fork"], REMOVED),
    "entries/0/actions/0/verb": ("", "Fork", "rm -rf", None, REMOVED),
    "entries/0/actions/0/changes": (None, {}, [None], REMOVED),
    "entries/0/actions/0/request": (None, [], "x", REMOVED),
    "entries/0/actions/0/changes/0/kind": ("host", None, [], REMOVED),
    "entries/0/actions/0/changes/0/name": ("", None, 1, REMOVED),
    "entries/0/actions/0/changes/0/before": (False, [], "x", REMOVED),
    "entries/0/actions/0/changes/0/after": (0, [], None, REMOVED),
    "entries/0/reads": (None, [], {"": "1"}, {"/sandboxes/x": None}, REMOVED),
    "entries/0/created": (None, [], {"try-1": "0123456789ab"}, {"try-1": 2}, {"": "known-after-apply-0002"}, REMOVED),
    "entries/0/costs": (None, [], {"gold": 1}, REMOVED),
    "entries/0/costs/memory_mb": (None, "256", True, 10**400, 1 << 53),
    "entries/0/costs/disk_bytes": (None, [], -(10**400)),
    "entries/0/costs/pause_ms": (None, -1, False),
    "entries/0/unknown": (None, "much", [None], [""], REMOVED),
    "entries/0/failure": (False, 1, "no space", REMOVED),
    "entries/0/failure/kind": ("", 1, None, REMOVED),
    "entries/0/failure/message": (1, None, REMOVED),
    "entries/0/failure/blockers": ("a", None, [1], REMOVED),
    "entries/0/failure/status": ("409", 99, 600, True, 409.0, REMOVED),
    "surprise": (1,),
    "entries/0/surprise": (1,),
    "entries/0/actions/0/surprise": (1,),
    "entries/0/actions/0/changes/0/surprise": (1,),
}


@pytest.mark.parametrize(
    ("location", "value"), [(location, value) for location, values in WRONG_VALUES.items() for value in values]
)
def test_every_wrong_field_is_refused(tmp_path: Path, location: str, value: Any) -> None:
    """The digest of these files is correct."""
    path = write_signed_file(tmp_path / "plan.json", set_value(make_document(), location, value))
    with pytest.raises(Failure) as error_info:
        _plan_file.load(path)
    assert "is invalid: " in error_info.value.message and "Make a new plan" in error_info.value.message
    field = location.rpartition("/")[2]
    assert field in error_info.value.message or field == "gateways", error_info.value.message


@pytest.mark.parametrize("text", ["", "{", "[]x", "NaN", "\ufeff{}", "[" * 200_000, '{"a": ' * 200_000, "1" * 5000])
def test_files_that_are_not_json_are_refused(tmp_path: Path, text: str) -> None:
    path = tmp_path / "plan.json"
    path.write_text(text)
    with pytest.raises(
        Failure, match=r"is truncated, or it is not JSON. Make a new plan: run ansible-playbook --check"
    ):
        _plan_file.load(str(path))


@pytest.mark.parametrize("text", ["null", "[]", "3", '"plan"', "{}", '{"format": null}'])
def test_json_that_is_not_a_plan_is_refused(tmp_path: Path, text: str) -> None:
    path = tmp_path / "plan.json"
    path.write_text(text)
    with pytest.raises(
        Failure, match=r"is invalid: (the document must be an object|format must be a positive integer)"
    ):
        _plan_file.load(str(path))


def test_deep_nesting_is_refused(tmp_path: Path) -> None:
    value: Any = {}
    for _ in range(60):
        value = [value]
    path = write_signed_file(
        tmp_path / "plan.json", set_value(make_document(), "entries/0/actions/0/request", {"x": value})
    )
    with pytest.raises(Failure, match=r"nested more than 40 levels deep"):
        _plan_file.load(path)


def test_missing_and_unreadable_files_are_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    with pytest.raises(Failure, match=r"does not exist. Make it first: run ansible-playbook --check"):
        _plan_file.load(str(tmp_path / "plan.json"))
    with pytest.raises(Failure, match=r"cannot be read: .*null byte.* Name the file that the check-mode run saved"):
        _plan_file.load("plan\0.json")
    os.mkfifo(tmp_path / "pipe")
    for path in (tmp_path, tmp_path / "pipe"):
        with pytest.raises(Failure, match=r"is not a regular file|cannot be read: Is a directory"):
            _plan_file.load(str(path))
    path = tmp_path / "plan.json"
    _plan_file.save(str(path), make_document())
    monkeypatch.setattr(_plan_file, "_MAX_FILE_BYTES", path.stat().st_size - 1)
    with pytest.raises(Failure, match=r"bytes, so it cannot be a plan"):
        _plan_file.load(str(path))


def rename_task(text: str) -> str:
    return text.replace("Fork it", "Fork IT")


def reformat_text(text: str) -> str:
    return json.dumps(json.loads(text), indent=1)


def repeat_key(text: str) -> str:
    return text.replace('"problems":[]', '"problems":["x"],"problems":[]')


def exceed_range(text: str) -> str:
    return text.replace('"memory_mb":256', '"memory_mb":1e999')


def remove_digest(text: str) -> str:
    return json.dumps({key: value for key, value in json.loads(text).items() if key != "digest"})


@pytest.mark.parametrize("edit", [rename_task, reformat_text, repeat_key, exceed_range, remove_digest])
def test_edited_plans_are_refused(tmp_path: Path, edit: Callable[[str], str]) -> None:
    path = tmp_path / "plan.json"
    _plan_file.save(str(path), make_document())
    text = path.read_text()
    path.write_text(edit(text))
    assert path.read_text() != text
    with pytest.raises(Failure, match=r"has been edited since it was made: its digest does not match. Make a new plan"):
        _plan_file.load(str(path))


def test_newer_formats_are_refused_before_their_fields(tmp_path: Path) -> None:
    path = tmp_path / "plan.json"
    path.write_text('{"format": 4, "news": [1]}')
    with pytest.raises(Failure, match=r"has format 4, but this release reads only format 3. Use the"):
        _plan_file.load(str(path))


def test_expired_plans_are_refused() -> None:
    hour_ago = datetime.now(UTC) - timedelta(hours=1)
    with pytest.raises(Failure, match=r"'plan' expired at \d{4}-\S+Z. Make a new plan"):
        _plan_file.check_expiry(make_document(created_at=hour_ago, lifetime_seconds=3600), "plan")
    _plan_file.check_expiry(make_document(created_at=hour_ago, lifetime_seconds=3660), "plan")


@settings(deadline=None)
@given(data=st.data())
def test_damaged_files_are_always_refused(data: st.DataObject, tmp_path_factory: pytest.TempPathFactory) -> None:
    path = tmp_path_factory.getbasetemp() / "damaged.json"
    path.unlink(missing_ok=True)
    _plan_file.save(str(path), make_document())
    content = bytearray(path.read_bytes())
    position = data.draw(st.integers(0, len(content) - 1))
    if data.draw(st.booleans()):
        content = content[:position]
    else:
        content[position] ^= data.draw(st.integers(1, 255))
    path.write_bytes(content)
    with pytest.raises(Failure):
        _plan_file.load(str(path))


@pytest.mark.parametrize("plan_file", PLAN_FILES, ids=lambda each: each.name)
def test_the_collection_accepts_the_same_files_as_all_readers(plan_file: PlanFile, tmp_path: Path) -> None:
    path = str(tmp_path / "plan.json")
    sentence = plan_file.write(tmp_path / "plan.json")

    def load_plan() -> None:
        _plan_file.check_expiry(_plan_file.load(path), path)

    if not sentence:
        load_plan()
        return
    with pytest.raises(Failure) as error_info:
        load_plan()
    assert error_info.value.message.startswith(f"{sentence}. "), error_info.value.message
