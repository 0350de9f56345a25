"""Convert the values of native properties between the numbers of libzfs_core and the words of the command.

In libzfs_core, the value of a property with a fixed set of values is its index, such as 0 for ``atime=off``.
"""

from __future__ import annotations

_ON_OFF = {"off": 0, "on": 1}
_CHECKSUMS = {
    "on": 1,
    "off": 2,
    "fletcher2": 6,
    "fletcher4": 7,
    "sha256": 8,
    "noparity": 10,
    "sha512": 11,
    "skein": 12,
    "edonr": 13,
    "blake3": 14,
}

INDEXES: dict[str, dict[str, int]] = {
    **dict.fromkeys(
        (
            *("atime", "devices", "exec", "jailed", "nbmand", "overlay", "readonly", "relatime", "setuid"),
            *("utf8only", "vscan", "zoned"),
        ),
        _ON_OFF,
    ),
    "aclinherit": {"discard": 0, "noallow": 1, "passthrough": 3, "restricted": 4, "passthrough-x": 5},
    "aclmode": {"discard": 0, "groupmask": 2, "passthrough": 3, "restricted": 4},
    "acltype": {"off": 0, "posix": 1, "nfsv4": 2},
    "canmount": {"off": 0, "on": 1, "noauto": 2},
    "casesensitivity": {"sensitive": 0, "insensitive": 1, "mixed": 2},
    "checksum": _CHECKSUMS,
    "compression": {
        "on": 1,
        "off": 2,
        "lzjb": 3,
        **{f"gzip-{level}": 4 + level for level in range(1, 10)},
        "zle": 14,
        "lz4": 15,
        "zstd": 16,
    },
    "copies": {"1": 1, "2": 2, "3": 3},
    "dedup": {**_CHECKSUMS, "verify": 257},
    "encryption": {
        "on": 1,
        "off": 2,
        "aes-128-ccm": 3,
        "aes-192-ccm": 4,
        "aes-256-ccm": 5,
        "aes-128-gcm": 6,
        "aes-192-gcm": 7,
        "aes-256-gcm": 8,
    },
    "keyformat": {"none": 0, "raw": 1, "hex": 2, "passphrase": 3},
    "logbias": {"latency": 0, "throughput": 1},
    "primarycache": {"none": 0, "metadata": 1, "all": 2},
    "redundant_metadata": {"all": 0, "most": 1, "some": 2, "none": 3},
    "secondarycache": {"none": 0, "metadata": 1, "all": 2},
    "snapdev": {"hidden": 0, "visible": 1},
    "snapdir": {"hidden": 0, "visible": 1, "disabled": 2},
    "sync": {"standard": 0, "always": 1, "disabled": 2},
    "volmode": {"default": 0, "full": 1, "dev": 2, "none": 3},
    "xattr": {"off": 0, "on": 1, "sa": 2},
}
"""The words and indexes of each property with a fixed set of values."""
TEXT_PROPERTIES = frozenset(
    (
        "mountpoint",
        "sharenfs",
        "sharesmb",
        "mlslabel",
        "keylocation",
        "context",
        "fscontext",
        "defcontext",
        "rootcontext",
    )
)
"""The native properties whose value is text. The values of all other native properties are numbers."""


def find_word(prop: str, number: int) -> str | None:
    """Return the word for the index ``number`` of a property, or None if the index does not exist.

    For a property without indexes, this is the number itself.
    """
    if prop not in INDEXES:
        return str(number)
    return next((word for word, index in INDEXES[prop].items() if index == number), None)


def find_number(prop: str, word: str) -> int | str:
    """Return the index or number that ``word`` means as the value of a native property, or else ``word``."""
    if prop in INDEXES:
        return INDEXES[prop].get(word, word)
    return int(word) if word.isdecimal() and prop not in TEXT_PROPERTIES else word
