"""Kinds of host: each folder implements one platform, independent of the engine's operations.

``base`` is the interface. Both kinds use ``rootfs_common``, ``guest_digest``, ``addresses`` and ``connect``;
``directory_records`` commits records in directories.
"""
