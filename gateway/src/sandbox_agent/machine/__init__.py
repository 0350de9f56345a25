"""Manage the machine's users, identity, clock, entropy, file system freezes and mounts.

``identity`` applies the identity that a fork receives, over HTTP or the serial port (``line``). ``freezer`` freezes the
file system for a capture, ``mounts`` mounts volumes, and ``users`` finds the user of a request. ``system`` contains the
interfaces to the kernel.
"""
