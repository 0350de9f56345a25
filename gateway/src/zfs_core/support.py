"""Tell which functions of libzfs_core the installed ZFS supports."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from zfs_core.capabilities import Capabilities, detect_capabilities

_NEEDED_CAPABILITIES: dict[str, Callable[[Capabilities], bool]] = {
    **dict.fromkeys(
        ("lzc_bookmark", "lzc_get_bookmarks", "lzc_destroy_bookmarks", "lzc_snaprange_space"), lambda c: c.bookmarks
    ),
    **dict.fromkeys(("lzc_send_space", "lzc_send_resume"), lambda c: c.send_options),
    **dict.fromkeys(("lzc_receive_resumable", "lzc_receive_with_cmdprops"), lambda c: c.receive_options),
    "lzc_receive_with_heal": lambda c: c.corrective_receive,
    **dict.fromkeys(
        (
            *("lzc_sync", "lzc_reopen", "lzc_pool_checkpoint", "lzc_pool_checkpoint_discard"),
            *("lzc_channel_program", "lzc_channel_program_nosync"),
        ),
        lambda c: c.pool_commands,
    ),
    **dict.fromkeys(("lzc_load_key", "lzc_unload_key", "lzc_change_key"), lambda c: c.encryption),
    "lzc_list": lambda _: False,
}
"""The capability that each function needs, if not every version of ZFS has it."""


def is_supported(func: Callable[..., Any]) -> bool:
    """Return whether a function works with the installed ZFS. Otherwise, it raises NotImplementedError.

    Raises ValueError if ``func`` is not a function of libzfs_core.
    """
    name = getattr(func, "__name__", "")
    if not getattr(func, "__module__", "").startswith("zfs_core") or not name.startswith("lzc_"):
        raise ValueError(f"{name or func!r} is not a function of libzfs_core")
    needed_capability = _NEEDED_CAPABILITIES.get(name)
    return needed_capability is None or needed_capability(detect_capabilities())
