"""Build templates: disk images that contain a root file system with the agent and the guest's settings.

``build`` is the entry point. It creates a tree from a recipe:

* `from: debootstrap`: ``debian`` (with ``apt``) builds a Debian tree or finds a cached one, and ``tarball`` unpacks it.
* `from: rootfs`: ``tarball`` unpacks a tarball, or the tree is copied from a directory.
* `from: image`: the package ``oci`` creates the tree from an OCI image.

For the first two, ``guest_setup`` installs the agent and the files of ``guest_files``; ``oci`` does this itself.
``disk`` then creates an image of the tree.

``guest_files`` reads the directory `guest/`, whose README lists the files. Among them are the lists of Debian's
packages (`packages.txt`) and kernels (`kernels.txt`).
"""
