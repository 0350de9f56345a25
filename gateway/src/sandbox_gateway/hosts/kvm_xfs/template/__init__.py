"""Build templates: disk images that contain a root file system with the agent and the guest's settings.

``build`` is the entry point: ``debian`` (with ``apt``) builds a tree or finds a cached one, ``tarball`` unpacks it,
``guest_setup`` installs the agent and the files of ``guest_files``, and ``disk`` creates an image of the tree.
``guest/`` contains these files; ``guest/packages.txt`` lists the packages of every Debian template.
"""
