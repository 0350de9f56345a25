"""Build templates: a root file system with the agent and the guest's settings, as a disk image.

``build`` is the entry point: ``debian`` (with ``apt``) builds a tree or unpacks a cached one, ``guest_setup`` installs
the agent and the files of ``guest_files``, ``disk`` creates an image of the tree. ``guest/`` contains these files;
``guest/packages.txt`` lists the packages of every Debian template.
"""
