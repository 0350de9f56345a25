"""Manage the files below the state root: disks, memory images, and the files of machines and snapshots.

``layout`` defines all paths below the state root, ``instances`` creates the files of a machine, ``snapshots`` commits
and finds snapshots and templates, ``reflink`` shares blocks between files. ``memory_roots`` stores memory images on
another file system, and ``held_images`` keeps images alive for machines.
"""
