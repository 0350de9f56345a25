"""Build templates: a root file system with the agent and the guest's settings, as a disk image.

``build`` is the entry: ``debian`` (with ``apt``) makes a tree or unpacks a cached one, ``guest_setup`` installs the
agent and the files of ``guest_files``, ``disk`` makes an image of it. ``guest/`` holds these files, and
``guest/packages.txt`` the packages of every Debian template.
"""
