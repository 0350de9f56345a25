"""Test the parsers of `zfs` output, which must parse any text correctly or reject it with their own exceptions."""

from __future__ import annotations

from typing import Any

import pytest
from hypothesis import assume, given
from hypothesis import strategies as st
from zfs_core import names, options, parse
from zfs_core.causes import Cause, find_cause, find_listed_datasets, join_lines
from zfs_core.exceptions import NameInvalid, NameTooLong, PropertyInvalid, ZFSOutputError
from zfs_core.parse import Property

_names = st.text(
    st.characters(exclude_characters="\t\n\0'", exclude_categories=["Cs"]), min_size=1, max_size=300
) | st.sampled_from(["pool/a b", "pool/-x", "-pool", "pool/ä€", "pool/" + "n" * 300, "pool/a@b c", "pool/x@"])
_props = st.from_regex(r"[a-z][a-z0-9]{0,10}(:[a-z0-9._-]{1,20})?", fullmatch=True)
_values = st.text(st.characters(exclude_characters="\0", exclude_categories=["Cs"]), max_size=60)
_sources = st.sampled_from(["local", "received", "default", "-", "none", "temporary"]) | _names.map(
    lambda name: f"inherited from {name}"
)
_lines = st.lists(st.builds(Property, _names, _props, _values, _sources), max_size=8)


def _contains_line_end(value: str) -> bool:
    """Return whether a value contains what looks like the end of a `zfs get` line, so that the output is ambiguous."""
    return any(
        parse._SOURCE.fullmatch(line.rpartition("\t")[2])
        for line in value.split("\n")[:-1]
        if "\t" in line or value.startswith(line)
    )


def _format_lines(lines: list[Property]) -> str:
    return "".join(f"{line.name}\t{line.prop}\t{line.value}\t{line.source}\n" for line in lines)


@given(_lines)
def test_zfs_get_output_is_parsed(lines: list[Property]) -> None:
    assume(not any(_contains_line_end(line.value) for line in lines))
    assert parse.parse_get(_format_lines(lines)) == lines


@pytest.mark.parametrize("value", ["two\nlines\tlocal\nand more", "\tlocal\nx", "a\n\tlocal\n\n"])
def test_a_value_like_a_line_end_does_not_hide_the_next_property(value: str) -> None:
    lines = [Property("p/a", "a:b", value, "local"), Property("p/b", "a:b", "1", "local")]
    with pytest.raises(ZFSOutputError):
        parse.parse_get(_format_lines(lines))


@given(_lines, st.data())
def test_truncated_output_is_detected(lines: list[Property], data: st.DataObject) -> None:
    assume(lines and not any(_contains_line_end(line.value) for line in lines))
    text = _format_lines(lines)
    length = data.draw(st.integers(0, len(text) - 1))
    with pytest.raises(ZFSOutputError):
        parsed_lines = parse.parse_get(text[:length])
        assert parsed_lines == lines[: len(parsed_lines)]
        expected_pairs = {(line.name, line.prop) for line in lines}
        if {(line.name, line.prop) for line in parsed_lines} == expected_pairs:
            raise ZFSOutputError(None)  # Only repeated lines were cut off, so nothing is missing.
        for name, prop in expected_pairs:
            parse.check_complete(parsed_lines, [name], [prop])


@given(st.text())
def test_arbitrary_text_is_parsed_or_rejected(text: str) -> None:
    for parse_text in (parse.parse_get, lambda text: parse.parse_table(text, 2)):
        try:
            parse_text(text)
        except ZFSOutputError as error:
            assert str(error)


@given(st.lists(st.tuples(_names, _values.filter(lambda value: not {"\t", "\n"} & set(value)))))
def test_tables_are_parsed(rows: list[tuple[str, str]]) -> None:
    text = "".join(f"{name}\t{value}\n" for name, value in rows)
    assert parse.parse_table(text, 2) == rows


@given(_names | st.text() | st.binary())
def test_names_are_validated_and_never_mistaken_for_options(name: str | bytes) -> None:
    for check in (
        names.validate_existing_name,
        names.validate_new_filesystem_name,
        names.validate_filesystem_name,
        names.validate_snapshot_name,
        names.validate_new_snapshot_name,
    ):
        try:
            text = check(name)
        except (NameInvalid, NameTooLong) as error:
            assert str(error)
        else:
            assert text and not text.startswith("-") and "\n" not in text and len(text.encode()) <= 255


@pytest.mark.parametrize(
    ("name", "error"),
    [
        ("", NameInvalid),
        ("-pool/a", NameInvalid),
        ("pool/-a", NameInvalid),
        ("pool/a b", NameInvalid),
        ("pool/ä", NameInvalid),
        ("pool//a", NameInvalid),
        ("pool/..", NameInvalid),
        ("pool/a@b", NameInvalid),
        ("pool/a\nb", NameInvalid),
        ("1pool/a", NameInvalid),
        (b"pool/\xff", NameInvalid),
        ("pool/" + "n" * 251, NameTooLong),
    ],
)
def test_invalid_names_of_new_filesystems_are_refused(name: str, error: type[Exception]) -> None:
    with pytest.raises(error):
        names.validate_new_filesystem_name(name)


def test_valid_names_of_new_datasets_are_accepted() -> None:
    for name in ("pool/a", "pool/_template-0123@base", "pool/A.b:c-d_e", "pool/" + "n" * 250):
        (names.validate_new_snapshot_name if "@" in name else names.validate_new_filesystem_name)(name)


@given(st.text() | _props, st.text() | st.binary() | st.integers() | st.booleans())
def test_properties_are_validated(key: str, value: str | bytes | int | bool) -> None:
    try:
        text = options.format_property_assignment(key, value)
    except PropertyInvalid as error:
        assert str(error)
    else:
        assert text.startswith(f"{key}=") and not text.startswith("-") and "\0" not in text


def test_a_property_value_may_have_8191_bytes() -> None:
    options.format_property_assignment("a:b", "x" * 8191)
    with pytest.raises(PropertyInvalid, match="8192 bytes long, but the limit is 8191"):
        options.format_property_assignment("a:b", "x" * 8192)


_SAMPLE_ERRORS = [
    (Cause.EXISTS, "cannot create '{0}': dataset already exists"),
    (Cause.EXISTS, "cannot create snapshot '{0}': dataset already exists\nno snapshots were created"),
    (Cause.NO_PARENT, "cannot create '{0}': parent does not exist"),
    (Cause.NO_POOL, "cannot create '{0}': no such pool 'p'"),
    (Cause.MISSING, "cannot open '{0}': dataset does not exist"),
    (Cause.MISSING, "could not find any snapshots to destroy; check snapshot names."),
    (Cause.POOLS_DIFFER, "cannot create '{0}': source and target pools differ"),
    (Cause.POOLS_DIFFER, "cannot rename to '{0}': datasets must be within same pool"),
    (
        Cause.NOT_LATEST,
        "cannot rollback to '{0}': more recent snapshots or bookmarks exist\n"
        "use '-r' to force deletion of the following snapshots and bookmarks:\n{0}\nand 3 more",
    ),
    (Cause.NOT_LATEST, "cannot rollback to '{0}': clones of previous snapshots exist\nuse '-R' to force deletion"),
    (
        Cause.HAS_CLONES,
        "cannot destroy '{0}': snapshot has dependent clones\n"
        "use '-R' to destroy the following datasets:\np/dataset is busy\n{0}",
    ),
    (Cause.HAS_CLONES, "cannot destroy snapshot {0}: snapshot is cloned"),
    (
        Cause.HAS_CHILDREN,
        "cannot destroy '{0}': filesystem has children\nuse '-r' to destroy the following datasets:\n{0}@a\n{0}@b",
    ),
    (Cause.BUSY, "cannot destroy '{0}': dataset is busy"),
    (Cause.MOUNT_BUSY, "cannot mount '{0}': mountpoint or dataset is busy"),
    (Cause.HELD, "cannot destroy snapshot {0}: it's being held. Run 'zfs holds -r x' to see holders."),
    (Cause.IN_USE, "cannot unmount '{0}': pool or dataset is busy"),
    (
        Cause.IN_USE,
        "umount: /x: target is busy.\ncannot unmount '{0}': umount failed: umount child process failed",
    ),
    (Cause.NOT_CLONE, "cannot promote '{0}': not a cloned filesystem"),
    (Cause.SNAPSHOT_CONFLICT, "cannot promote '{0}': conflicting snapshot 'a' from parent 'b'"),
    (Cause.SIZE_TOO_SMALL, "cannot set property for '{0}': size is less than current used or reserved space"),
    (Cause.NO_SPACE, "cannot create '{0}': out of space"),
    (Cause.EXISTS, "cannot receive new filesystem stream: destination '{0}' exists\nmust specify -F to overwrite it"),
    (
        Cause.DESTINATION_MODIFIED,
        "cannot receive incremental stream: destination {0} has been modified\nsince most recent snapshot",
    ),
    (
        Cause.STREAM_MISMATCH,
        "cannot receive incremental stream: most recent snapshot of {0} does not\nmatch incremental source",
    ),
    (Cause.BAD_STREAM, "cannot receive new filesystem stream: invalid backup stream"),
    (Cause.STREAM_TRUNCATED, "cannot receive new filesystem stream: incomplete stream"),
    (
        Cause.UNREACHABLE,
        "connect: No such file or directory\nPlease make sure that the zfs-fuse daemon is running.\n"
        "internal error: failed to initialize ZFS library",
    ),
    (Cause.UNREACHABLE, "zfsfuse_ioctl_read_loop(): file descriptor closed\ncannot create '{0}': I/O error"),
    (Cause.UNREACHABLE, "The ZFS modules cannot be auto-loaded.\nTry running 'modprobe zfs' as root to load them."),
    (
        Cause.MOUNT_FAILED,
        "cannot mount '{0}': directory is not empty\nfilesystem successfully created, but not mounted",
    ),
    (Cause.ALREADY_MOUNTED, "cannot mount '{0}': filesystem already mounted"),
    (Cause.NOT_MOUNTED, "cannot unmount '{0}': not currently mounted"),
    (Cause.TAG_EXISTS, "cannot hold '{0}': tag already exists on this dataset"),
    (Cause.TAG_MISSING, "cannot release 'x' from '{0}': no such tag on this dataset"),
    (Cause.NAME_TOO_LONG, "cannot create '{0}': name is too long"),
    (Cause.NAME_INVALID, "cannot create '{0}': invalid character ' ' in name"),
    (Cause.NAME_INVALID, "cannot create '{0}': snapshot delimiter '@' in filesystem name"),
    (Cause.NAME_INVALID, "cannot create '{0}': empty component in name"),
    (Cause.PROPERTY_INVALID, "cannot create '{0}': bad numeric value 'banana'"),
    (
        Cause.PROPERTY_INVALID,
        "bad property list: invalid property '{0}'\nusage:\n\tget [-rHp] (dataset does not exist)",
    ),
    (Cause.PROPERTY_INVALID, "createtxg property is read-only"),
    (Cause.PROPERTY_READ_ONLY, "cannot set property for '{0}': 'creation' is readonly"),
    (
        Cause.PROPERTY_INVALID,
        "Key change error: Only keyformat, keylocation, and pbkdf2iters may be set with this command.",
    ),
    (Cause.WRONG_PARENT, "cannot create '{0}': parent is not a filesystem"),
    (Cause.WRONG_PARENT, "cannot receive new filesystem stream: parent '{0}' is not a filesystem"),
    (
        Cause.WRONG_PARENT,
        "cannot receive new filesystem stream: destination {0} is the root dataset\ncannot overwrite with a ZVOL",
    ),
    (Cause.EXISTS, "cannot create bookmark '{0}': bookmark exists"),
    (
        Cause.BOOKMARK_MISMATCH,
        "cannot create bookmark '{0}': source is not an ancestor of the new bookmark's dataset",
    ),
    (Cause.NOT_SUPPORTED, "cannot create bookmark '{0}': bookmark feature not enabled"),
    (Cause.KEY_LOADED, "Key load error: Key already loaded for '{0}'."),
    (Cause.KEY_INVALID, "Key load error: Incorrect key provided for '{0}'."),
    (Cause.KEY_NOT_LOADED, "Key unload error: Key already unloaded for '{0}'."),
    (Cause.KEY_NOT_LOADED, "Key change error: Key must be loaded."),
    (Cause.BUSY, "Key unload error: '{0}' is busy."),
    (Cause.CHECKPOINT_EXISTS, "cannot checkpoint '{0}': checkpoint exists"),
    (Cause.CHECKPOINT_MISSING, "cannot discard checkpoint in '{0}': checkpoint does not exist"),
    (Cause.CHECKPOINT_DISCARDING, "cannot checkpoint '{0}': currently discarding checkpoint"),
    (Cause.BROKEN_PIPE, "warning: cannot send '{0}': Broken pipe"),
    (
        Cause.STREAM_TRUNCATED,
        "cannot receive resume stream: checksum mismatch or incomplete stream.\nPartially received snapshot is saved.",
    ),
    (Cause.BAD_STREAM, "cannot receive incremental stream: checksum mismatch"),
    (Cause.SUSPENDED, "cannot open '{0}': pool I/O is currently suspended"),
    # OpenZFS, lib/libzfs/libzfs_sendrecv.c: zfs_receive_one, case EINVAL with -s, without it, and case ENOTSUP.
    (
        Cause.STREAM_INVALID,
        "cannot receive resume stream: kernel modules must be upgraded to receive this stream.",
    ),
    (
        Cause.STREAM_INCOMPATIBLE,
        "cannot receive new filesystem stream: incompatible embedded data stream feature with encrypted receive.",
    ),
    (
        Cause.NOT_SUPPORTED,
        "cannot receive new filesystem stream: pool must be upgraded to receive this stream.",
    ),
    # OpenZFS, lib/libzfs/libzfs_util.c: zfs_setprop_error, case ENOTSUP.
    (
        Cause.PROPERTY_NOT_SUPPORTED,
        "cannot set property for '{0}': pool and or dataset must be upgraded to set this property or value",
    ),
    # OpenZFS, lib/libzfs/libzfs_dataset.c: zfs_create, case ENOTSUP.
    (Cause.PROPERTY_NOT_SUPPORTED, "cannot create '{0}': pool must be upgraded to set this property or value"),
    # OpenZFS, lib/libzfs/libzfs_util.c: libzfs_error_description, case EZFS_IO.
    (Cause.IO_ERROR, "cannot open '{0}': I/O error"),
    # zfs_send_one in libzfs_sendrecv.c prints strerror(EIO).
    (Cause.IO_ERROR, "warning: cannot send '{0}': Input/output error"),
    (Cause.OTHER, ""),
]


@pytest.mark.parametrize(("cause", "message"), _SAMPLE_ERRORS)
def test_causes_are_recognized(cause: Cause, message: str) -> None:
    assert find_cause(message.format("tank/grove/x@y")) is cause


@given(
    st.sampled_from([sample for sample in _SAMPLE_ERRORS if "'{0}'" in sample[1] and "\n{0}" not in sample[1]]), _names
)
def test_a_name_is_not_mistaken_for_a_cause(sample: tuple[Cause, str], name: str) -> None:
    cause, message = sample
    assert find_cause(message.format(name)) is cause
    assert find_cause(message.format("dataset is busy, out of space, already exists")) is cause


@pytest.mark.parametrize(
    "name",
    ["tank/dev/zfs@a", "tank /dev/zfs", "tank/out of space", "tank/a@it's already exists", "tank/a name too long"],
)
def test_the_name_that_a_command_was_given_does_not_decide_the_cause(name: str) -> None:
    for cause, message in _SAMPLE_ERRORS:
        unquoted_message = message.replace("'{0}'", "{0}").replace("{0}@a\n{0}@b", "")
        assert find_cause(unquoted_message.format(name), ["-o", "a=b", name]) is cause, message


def test_parts_of_names_and_paths_do_not_decide_the_cause() -> None:
    args = ["tank/a@1,2,no such pool"]
    assert find_cause("cannot destroy snapshot tank/a@no such pool: dataset is busy", args) is Cause.BUSY
    assert find_cause("cannot send tank/dev/zfs: dataset is busy", args) is Cause.BUSY
    assert find_cause("umount: /srv/dev/zfs: target is busy", args) is Cause.IN_USE
    assert find_cause("cannot open 'tank': pool I/O is currently suspended", ["I/O", "tank"]) is Cause.SUSPENDED
    for message in ("/dev/zfs and /proc/self/mounts are required.", "cannot open /dev/zfs: No such file or directory"):
        assert find_cause(message, args) is Cause.UNREACHABLE


def test_names_are_extracted_from_errors() -> None:
    stderr = (
        "cannot destroy 'a@b': snapshot has dependent clones\nuse '-R' to destroy the following datasets:\nc@d\nc\n"
    )
    assert find_listed_datasets(stderr) == ["c@d", "c"]
    assert find_listed_datasets("dataset is busy") == []


@given(st.text())
def test_any_error_becomes_one_line(stderr: str) -> None:
    assert isinstance(find_cause(stderr), Cause)
    assert len(join_lines(stderr).splitlines()) <= 1
    find_listed_datasets(stderr)


def test_names_are_split_into_pool_and_filesystem() -> None:
    for name, pool, filesystem in (
        ("pool", "pool", "pool"),
        ("pool/a/b", "pool", "pool/a/b"),
        ("pool/a@b", "pool", "pool/a"),
        ("pool@b", "pool", "pool"),
        ("pool#mark", "pool", "pool#mark"),
    ):
        assert (names.get_pool_name(name), names.get_filesystem_name(name)) == (pool, filesystem)
    assert names.decode_name("ä") == names.decode_name("ä".encode()) == "ä"
    with pytest.raises(NameInvalid):
        names.decode_name(b"\xff")


@pytest.mark.parametrize(
    ("check", "valid_names", "invalid_names"),
    [
        (
            names.validate_existing_name,
            ["p", "p/a b", "p/-x", "p" * 255, b"p/a"],
            ["", "-p", "/p", "p/", "p\n", "p\x7f", "p\0x", "p" * 256, "ä" * 128],
        ),
        (
            names.validate_new_filesystem_name,
            ["p", "p/_a.:-1", "P/0"],
            ["1p", "_p", "p//a", "p/.a", "p/-a", "p/a b", "p@a"],
        ),
        (names.validate_snapshot_name, ["p@a", "p/a@-b c"], ["p", "@a", "p@", "p@a@b", "p@a/b", "-p@a"]),
        (names.validate_new_snapshot_name, ["p@a", "p@_a.:-1"], ["p", "p@-a", "p@a b", "p@.a"]),
        (names.validate_filesystem_name, ["p", "p/a b"], ["p@a", "p#a", "-p"]),
    ],
    ids=lambda value: getattr(value, "__name__", ""),
)
def test_invalid_names_are_quoted_in_the_error(check: Any, valid_names: list[Any], invalid_names: list[str]) -> None:
    for name in valid_names:
        assert check(name) == (name if isinstance(name, str) else name.decode())
    for name in invalid_names:
        with pytest.raises((NameInvalid, NameTooLong)) as error_info:
            check(name)
        assert error_info.value.name == name


def test_properties_are_formatted_for_the_command() -> None:
    assert options.format_property_options(None) == []
    assert options.format_property_options({"canmount": False, "atime": True, "refquota": 7, b"a:b": b"x=y"}) == [
        *("-o", "canmount=off", "-o", "atime=on", "-o", "refquota=7", "-o", "a:b=x=y")
    ]
    assert options.format_property_assignment("a:b", "x" * 8191) == "a:b=" + "x" * 8191
    for value, message in (
        ("", "its value is empty, or contains a NUL character or a lone surrogate"),
        ("a\0b", "its value is empty, or contains a NUL character or a lone surrogate"),
        ("\ud800", "its value is empty, or contains a NUL character or a lone surrogate"),
        (b"\xff", "its value is not UTF-8"),
        ("x" * 8192, "its value is 8192 bytes long, but the limit is 8191"),
        ("ä" * 4096, "its value is 8192 bytes long, but the limit is 8191"),
    ):
        with pytest.raises(PropertyInvalid) as error_info:
            options.format_property_assignment("a:b", value)
        assert error_info.value.name == "a:b" and message in str(error_info.value)


def test_property_names_are_validated() -> None:
    for name in ("canmount", "a:b", "sandbox:owner", "written@snap:x", "a:" + "b" * 253):
        assert options.validate_property_name(name) == name
    for name in ("", "A", "a=b", "1a", "-a:b", "a b", "a:B"):
        with pytest.raises(PropertyInvalid) as error_info:
            options.validate_property_name(name)
        assert error_info.value.name == name
    with pytest.raises(PropertyInvalid, match="its name is longer than 255 bytes"):
        options.validate_property_name("a:" + "b" * 254)


def test_missing_properties_are_reported() -> None:
    properties = [Property("p", "a", "1", "-"), Property("p", "b", "1", "-"), Property("q", "a", "1", "-")]
    parse.check_complete(properties, ["p"], ["a", "b"])
    with pytest.raises(ZFSOutputError, match="the output lacks the b property") as error_info:
        parse.check_complete(properties, ["p", "q"], iter(["a", "b"]))
    assert error_info.value.name == "q"
