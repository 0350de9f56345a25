"""Test the encoding of records as user properties, and the interpretation of damaged records."""

from __future__ import annotations

import json

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from zfs_core.options import VALUE_MAX, format_property_assignment
from zfs_core.parse import Property

from sandbox_gateway.errors import Invalid
from sandbox_gateway.hosts.jail_zfs.storage import sandbox_scan
from sandbox_gateway.hosts.jail_zfs.storage.property_codec import (
    QUARANTINE_PROPERTY,
    RECORD_PROPERTY,
    Kind,
    decode,
    encode,
    find_stale_parts,
)
from sandbox_gateway.records import NewerFormat, Record, Sandbox, Snapshot, Volume, VolumeSnapshot

_texts = st.text(st.characters(exclude_categories=["Cs"]), max_size=3000)
_sandboxes = st.builds(
    Sandbox, name=st.just("web"), metadata=st.dictionaries(_texts, _texts, max_size=4), state_reason=_texts
)
_snapshots = st.builds(Snapshot, description=_texts, recipe=st.dictionaries(_texts, _texts, max_size=8))


_volumes = st.builds(Volume, name=st.just("data"), size_mb=st.integers(64, 1 << 26), host=st.just({"dataset": "p/v"}))
_volume_snapshots = st.builds(VolumeSnapshot, name=st.just("mark"), volume=st.just("0" * 12), size_mb=st.just(64))
_kinds: dict[type[Record], Kind] = {
    Sandbox: "sandbox",
    Snapshot: "snapshot",
    Volume: "volume",
    VolumeSnapshot: "volume-snapshot",
}


@given(_sandboxes | _snapshots | _volumes | _volume_snapshots, st.integers(1, 10**9))
def test_a_record_survives_a_round_trip(record: Record, generation: int) -> None:
    props = encode(record, generation)
    assert list(props)[-1] == RECORD_PROPERTY
    for prop, value in props.items():
        assert format_property_assignment(prop, value).isascii() and len(value) <= VALUE_MAX and "\n" not in value
    assert decode(props, _kinds[type(record)]) == (generation, record, "")
    for other_kind in set(_kinds.values()) - {_kinds[type(record)]}:
        with pytest.raises(ValueError, match="expected the record"):
            decode(props, other_kind)
    assert find_stale_parts(props) == []


def test_only_a_long_record_is_split() -> None:
    assert list(encode(Snapshot(), 1)) == [RECORD_PROPERTY]
    props = encode(Snapshot(id="0" * 12, recipe={"setup": ["x" * 20_000]}), 7)
    assert list(props) == [
        f"{RECORD_PROPERTY}.7.0",
        f"{RECORD_PROPERTY}.7.1",
        f"{RECORD_PROPERTY}.7.2",
        RECORD_PROPERTY,
    ]


def test_stale_parts_are_ignored_and_missing_parts_are_detected() -> None:
    old_props = encode(Snapshot(recipe={"setup": ["x" * 20_000]}), 7)
    new_props = encode(Snapshot(), 8)
    assert sorted(find_stale_parts(old_props | new_props)) == [f"{RECORD_PROPERTY}.7.{n}" for n in range(3)]
    del old_props[f"{RECORD_PROPERTY}.7.1"]
    with pytest.raises(ValueError, match=r"sandbox:record\.7\.1 is missing"):
        decode(old_props, "snapshot")


def test_changed_parts_are_detected() -> None:
    props = encode(Snapshot(recipe={"setup": ["x" * 20_000]}), 1)
    props[f"{RECORD_PROPERTY}.1.1"] = "y" * 8000
    with pytest.raises(ValueError, match="checksum"):
        decode(props, "snapshot")


def test_an_environment_is_never_encoded() -> None:
    sandbox = Sandbox(name="a", env={"KEY": "s3cret"})
    with pytest.raises(ValueError, match="must be in a file"):
        encode(sandbox, 1)
    file_name = f"{sandbox.id}.{'0' * 16}"
    props = encode(sandbox, 1, file_name)
    assert not any("s3cret" in value or "KEY" in value for value in props.values())
    assert decode(props, "sandbox") == (1, sandbox.model_copy(update={"env": {}}), file_name)
    assert json.loads(props[RECORD_PROPERTY])["v"] == 2, (
        "a release that reads only version 1 would lose the environment"
    )
    for damaged_name in ("../../etc/passwd", f"{file_name}/", 1, None):
        damaged_head = json.dumps(json.loads(props[RECORD_PROPERTY]) | {"secrets": damaged_name})
        with pytest.raises(ValueError, match="invalid file name"):
            decode({RECORD_PROPERTY: damaged_head}, "sandbox")


def test_an_oversized_record_is_refused_and_a_remedy_is_named() -> None:
    with pytest.raises(Invalid, match="shorten its metadata"):
        encode(Sandbox(name="a", env={"A": "x" * 300_000}), 1)


_json_values = st.recursive(
    st.none() | st.booleans() | st.integers() | st.text(max_size=20),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=10), inner, max_size=3),
    max_leaves=10,
)
_heads = (
    st.text(max_size=100)
    | _json_values.map(json.dumps)
    | st.fixed_dictionaries(
        {
            "v": st.just(1) | _json_values,
            "kind": st.sampled_from(["sandbox", "snapshot"]) | _json_values,
            "generation": _json_values,
        },
        optional={"record": _json_values, "parts": _json_values, "sha256": _json_values},
    ).map(json.dumps)
    | st.tuples(_snapshots | _sandboxes, st.integers(0, 400)).map(
        lambda pair: encode(pair[0], 1)[RECORD_PROPERTY][: pair[1]]
    )
)


@given(_heads, st.sampled_from(["sandbox", "snapshot"]))
def test_a_damaged_record_is_reported_as_damaged(head: str, kind: str) -> None:
    try:
        decode({RECORD_PROPERTY: head}, kind)  # type: ignore[arg-type]
    except (ValueError, NewerFormat) as error:
        assert str(error)
    find_stale_parts({RECORD_PROPERTY: head, f"{RECORD_PROPERTY}.1.0": "x"})


_ROOT = "p/r"
_names = st.sampled_from(
    [
        *[f"{_ROOT}/sandboxes/{i}" for i in ("0" * 12, "1" * 12, "odd one", "")],
        *[f"{_ROOT}/sandboxes/{'0' * 12}@{s}" for s in ("2" * 12, "3" * 12, "ä")],
        *[f"{_ROOT}/retired/{i}{s}" for i in "ab" for s in ("", "@x")],
        *[f"{_ROOT}/_template-{'4' * 12}{s}" for s in ("", "@base")],
        f"{_ROOT}/other/child@s",
        _ROOT,
    ]
)
_valid_props = (
    st.builds(Sandbox, id=st.just("a" * 12), name=st.just("n"), instance=st.sampled_from(["0" * 12, "1" * 12]))
    | st.builds(Snapshot, id=st.sampled_from(["b" * 12, "c" * 12]))
).flatmap(lambda record: st.integers(1, 3).map(lambda generation: encode(record, generation)))
_props = _valid_props | st.fixed_dictionaries(
    {}, optional={RECORD_PROPERTY: _heads, QUARANTINE_PROPERTY: st.text(max_size=20)}
)


@settings(max_examples=300)
@given(st.dictionaries(_names, _props, max_size=10), st.booleans(), st.integers(0, 10))
def test_damaged_properties_never_prevent_a_scan(local: dict[str, dict[str, str]], deferred: bool, txg: int) -> None:
    facts = {
        name: {
            "createtxg": Property(name, "createtxg", str(txg), "-"),
            "canmount": Property(name, "canmount", "noauto" if txg % 2 else "on", "local"),
            "defer_destroy": Property(name, "defer_destroy", "on" if deferred and "@" in name else "off", "-"),
        }
        for name in local
    }
    findings = sandbox_scan.interpret_sandboxes(_ROOT, facts, local)
    ids = [record.id for record in (*findings.snapshots, *findings.sandboxes)]
    assert len(ids) == len(set(ids))
    removed_instances = {*findings.uncommitted_instances, *findings.superseded_instances}
    assert not removed_instances & {sandbox.instance for sandbox in findings.sandboxes}
    assert not set(findings.pending_moves) & set(findings.empty_datasets)
    for name, reason in findings.marks.pending_marks.items():
        format_property_assignment(QUARANTINE_PROPERTY, reason or "x")
        assert name.rpartition("/")[2] not in removed_instances
