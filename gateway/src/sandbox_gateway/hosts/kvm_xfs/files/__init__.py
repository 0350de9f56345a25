"""Manage the files of machines and snapshots: disks, kernels and memory images.

``layout`` defines the paths of machines, snapshots, templates, volumes and memory images. ``instances`` creates the
files of a machine, ``snapshots`` commits and finds snapshots and templates, and ``reflink`` shares blocks between
files. These files are in the state root, except for memory images in a memory root: ``memory_roots`` stores images
there, and ``held_images`` preserves the images that machines use, on either file system.
"""
