"""Define the constants of ``libzfs_core``: limits, enumerations and the error numbers that only ZFS uses."""

from __future__ import annotations

import errno
import sys
from enum import IntEnum, auto

MAXNAMELEN = 255
"""Maximum length, in bytes, of the full name of a dataset, snapshot or bookmark, and of the name of a property."""
WRAPPING_KEY_LEN = 32
"""Length of an encryption key, in bytes."""
ZCP_DEFAULT_INSTRLIMIT = 10_000_000
"""Default limit of a channel program, in Lua instructions."""
ZCP_DEFAULT_MEMLIMIT = 10 << 20
"""Default limit of a channel program, in bytes of memory."""

if sys.platform.startswith("freebsd"):
    ECHRNG, ECKSUM, ETIME = errno.ENXIO, 97, errno.ETIMEDOUT
else:
    ECHRNG, ECKSUM, ETIME = errno.ECHRNG, errno.EBADE, errno.ETIME


class zfs_key_location(IntEnum):  # libzfs_core's name
    ZFS_KEYLOCATION_NONE = 0
    ZFS_KEYLOCATION_PROMPT = auto()
    ZFS_KEYLOCATION_URI = auto()


class zfs_keyformat(IntEnum):
    ZFS_KEYFORMAT_NONE = 0
    ZFS_KEYFORMAT_RAW = auto()
    ZFS_KEYFORMAT_HEX = auto()
    ZFS_KEYFORMAT_PASSPHRASE = auto()


class zio_encrypt(IntEnum):
    ZIO_CRYPT_INHERIT = 0
    ZIO_CRYPT_ON = auto()
    ZIO_CRYPT_OFF = auto()
    ZIO_CRYPT_AES_128_CCM = auto()
    ZIO_CRYPT_AES_192_CCM = auto()
    ZIO_CRYPT_AES_256_CCM = auto()
    ZIO_CRYPT_AES_128_GCM = auto()
    ZIO_CRYPT_AES_192_GCM = auto()
    ZIO_CRYPT_AES_256_GCM = auto()


class zfs_errno(IntEnum):
    """The error numbers that only ZFS uses."""

    ZFS_ERR_CHECKPOINT_EXISTS = 1024
    ZFS_ERR_DISCARDING_CHECKPOINT = auto()
    ZFS_ERR_NO_CHECKPOINT = auto()
    ZFS_ERR_DEVRM_IN_PROGRESS = auto()
    ZFS_ERR_VDEV_TOO_BIG = auto()
    ZFS_ERR_IOC_CMD_UNAVAIL = auto()
    ZFS_ERR_IOC_ARG_UNAVAIL = auto()
    ZFS_ERR_IOC_ARG_REQUIRED = auto()
    ZFS_ERR_IOC_ARG_BADTYPE = auto()
    ZFS_ERR_WRONG_PARENT = auto()
    ZFS_ERR_FROM_IVSET_GUID_MISSING = auto()
    ZFS_ERR_FROM_IVSET_GUID_MISMATCH = auto()
    ZFS_ERR_SPILL_BLOCK_FLAG_MISSING = auto()
    ZFS_ERR_UNKNOWN_SEND_STREAM_FEATURE = auto()
    ZFS_ERR_EXPORT_IN_PROGRESS = auto()
    ZFS_ERR_BOOKMARK_SOURCE_NOT_ANCESTOR = auto()
    ZFS_ERR_STREAM_TRUNCATED = auto()
    ZFS_ERR_STREAM_LARGE_BLOCK_MISMATCH = auto()
    ZFS_ERR_RESILVER_IN_PROGRESS = auto()
    ZFS_ERR_REBUILD_IN_PROGRESS = auto()
    ZFS_ERR_BADPROP = auto()
    ZFS_ERR_VDEV_NOTSUP = auto()
    ZFS_ERR_NOT_USER_NAMESPACE = auto()
    ZFS_ERR_RESUME_EXISTS = auto()
    ZFS_ERR_CRYPTO_NOTSUP = auto()
    ZFS_ERR_RAIDZ_EXPAND_IN_PROGRESS = auto()


ZFS_ERR_CHECKPOINT_EXISTS = zfs_errno.ZFS_ERR_CHECKPOINT_EXISTS
ZFS_ERR_DISCARDING_CHECKPOINT = zfs_errno.ZFS_ERR_DISCARDING_CHECKPOINT
ZFS_ERR_NO_CHECKPOINT = zfs_errno.ZFS_ERR_NO_CHECKPOINT
ZFS_ERR_DEVRM_IN_PROGRESS = zfs_errno.ZFS_ERR_DEVRM_IN_PROGRESS
ZFS_ERR_VDEV_TOO_BIG = zfs_errno.ZFS_ERR_VDEV_TOO_BIG
ZFS_ERR_WRONG_PARENT = zfs_errno.ZFS_ERR_WRONG_PARENT
ZFS_ERR_VDEV_NOTSUP = zfs_errno.ZFS_ERR_VDEV_NOTSUP
ZFS_ERR_RAIDZ_EXPAND_IN_PROGRESS = zfs_errno.ZFS_ERR_RAIDZ_EXPAND_IN_PROGRESS
