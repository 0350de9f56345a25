"""Implement the API of `libzfs_core` (pyzfs) with the commands `zfs` and `zpool`.

This package knows nothing about sandboxes.

The functions `lzc_*` have the same names, argument order and exceptions as in libzfs_core of OpenZFS 2.3. Names may
be str or bytes; if the first argument is bytes, names in results and exceptions are bytes. `is_supported` tells which
functions work with the installed ZFS. All other functions raise NotImplementedError.

The functions differ from libzfs_core where the commands do. If several objects are created or destroyed with one
command each (bookmarks, holds, and snapshots on zfs-fuse), this is not atomic: the functions check first that all can
succeed, and undo what they did if one fails. Some functions have more keyword arguments than in libzfs_core, which does
not mount filesystems: `mounted`, `unmounted`, `remounted`.

The other functions list datasets, mount them, read their properties, and detect changes since a snapshot. They have no
counterpart in pyzfs. All functions block (use ``asyncio.to_thread``). Each command has a timeout of
`zfs_core.process.TIMEOUT_SECONDS`, or `TRANSFER_TIMEOUT_SECONDS` if it transfers a stream.

* functions: ``datasets``, ``snapshots``, ``bookmarks``, ``holds``, ``properties``, ``encryption``, ``send``,
  ``receive``, ``pools``; ``support`` tells which of them work. Without a counterpart in pyzfs: ``listing``, ``mounts``,
  ``changes``.
* names and values: ``names`` checks names, ``options`` formats properties as arguments, ``property_values`` converts
  their values, ``parse`` parses the output of commands, ``constants`` and ``exceptions`` have the names of libzfs_core.
* formats: ``stream_format`` reads and writes parts of streams, ``nvlist`` the lists in them.
* commands: ``run`` runs them, with retries, as a ``process``; ``command_register`` keeps track of them, ``outcome`` and
  ``causes`` explain failures, ``capabilities`` detects what the installed ZFS can do, and ``hold_descriptors`` releases
  holds when a descriptor is closed.

The package ``cli`` is the command `lzc`.
"""

from zfs_core import exceptions
from zfs_core.bookmarks import lzc_bookmark, lzc_destroy_bookmarks, lzc_get_bookmarks
from zfs_core.capabilities import detect_capabilities
from zfs_core.changes import has_changed_since
from zfs_core.command_register import RunningCommand, count_timeouts, list_running_commands
from zfs_core.constants import (
    MAXNAMELEN,
    WRAPPING_KEY_LEN,
    ZCP_DEFAULT_INSTRLIMIT,
    ZCP_DEFAULT_MEMLIMIT,
    zfs_errno,
    zfs_key_location,
    zfs_keyformat,
    zio_encrypt,
)
from zfs_core.datasets import lzc_clone, lzc_create, lzc_destroy, lzc_promote, lzc_rename
from zfs_core.encryption import lzc_change_key, lzc_load_key, lzc_unload_key
from zfs_core.holds import lzc_get_holds, lzc_hold, lzc_release
from zfs_core.listing import (
    check_reachable,
    is_comparison_snapshot,
    list_clones,
    list_datasets,
    list_snapshots,
    lzc_exists,
    lzc_list,
    lzc_list_children,
    lzc_list_snaps,
)
from zfs_core.mounts import is_mounted, list_mounted_dependents, mount, unmount
from zfs_core.pools import (
    lzc_channel_program,
    lzc_channel_program_nosync,
    lzc_pool_checkpoint,
    lzc_pool_checkpoint_discard,
    lzc_reopen,
    lzc_sync,
)
from zfs_core.properties import (
    get_props,
    get_tree,
    local_props,
    local_tree,
    lzc_get_props,
    lzc_inherit,
    lzc_inherit_prop,
    lzc_set_prop,
    lzc_set_props,
    set_writable_property,
    sync,
    used_bytes,
    written_bytes,
)
from zfs_core.receive import (
    abort_receive,
    lzc_receive,
    lzc_receive_one,
    lzc_receive_resumable,
    lzc_receive_with_cmdprops,
    lzc_receive_with_header,
    lzc_receive_with_heal,
    lzc_recv,
    receive_header,
)
from zfs_core.send import lzc_send, lzc_send_resume, lzc_send_space
from zfs_core.snapshots import (
    lzc_destroy_snaps,
    lzc_rollback,
    lzc_rollback_to,
    lzc_snap,
    lzc_snaprange_space,
    lzc_snapshot,
)
from zfs_core.stream_format import mark_as_clone, parse_resume_token
from zfs_core.support import is_supported

__all__ = [
    "MAXNAMELEN",
    "WRAPPING_KEY_LEN",
    "ZCP_DEFAULT_INSTRLIMIT",
    "ZCP_DEFAULT_MEMLIMIT",
    "RunningCommand",
    "abort_receive",
    "check_reachable",
    "count_timeouts",
    "detect_capabilities",
    "exceptions",
    "get_props",
    "get_tree",
    "has_changed_since",
    "is_comparison_snapshot",
    "is_mounted",
    "is_supported",
    "list_clones",
    "list_datasets",
    "list_mounted_dependents",
    "list_running_commands",
    "list_snapshots",
    "local_props",
    "local_tree",
    "lzc_bookmark",
    "lzc_change_key",
    "lzc_channel_program",
    "lzc_channel_program_nosync",
    "lzc_clone",
    "lzc_create",
    "lzc_destroy",
    "lzc_destroy_bookmarks",
    "lzc_destroy_snaps",
    "lzc_exists",
    "lzc_get_bookmarks",
    "lzc_get_holds",
    "lzc_get_props",
    "lzc_hold",
    "lzc_inherit",
    "lzc_inherit_prop",
    "lzc_list",
    "lzc_list_children",
    "lzc_list_snaps",
    "lzc_load_key",
    "lzc_pool_checkpoint",
    "lzc_pool_checkpoint_discard",
    "lzc_promote",
    "lzc_receive",
    "lzc_receive_one",
    "lzc_receive_resumable",
    "lzc_receive_with_cmdprops",
    "lzc_receive_with_header",
    "lzc_receive_with_heal",
    "lzc_recv",
    "lzc_release",
    "lzc_rename",
    "lzc_reopen",
    "lzc_rollback",
    "lzc_rollback_to",
    "lzc_send",
    "lzc_send_resume",
    "lzc_send_space",
    "lzc_set_prop",
    "lzc_set_props",
    "lzc_snap",
    "lzc_snaprange_space",
    "lzc_snapshot",
    "lzc_sync",
    "lzc_unload_key",
    "mark_as_clone",
    "mount",
    "parse_resume_token",
    "receive_header",
    "set_writable_property",
    "sync",
    "unmount",
    "used_bytes",
    "written_bytes",
    "zfs_errno",
    "zfs_key_location",
    "zfs_keyformat",
    "zio_encrypt",
]
