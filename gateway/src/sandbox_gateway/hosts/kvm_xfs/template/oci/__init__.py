"""Build the file system of a template from an OCI image.

``builder`` is the entry point. ``registry`` copies the image, ``layers`` checks and unpacks it, ``settings`` reads its
entry point, and ``runtime`` adds what a virtual machine needs. Everything that reads the image's files runs in the
namespaces of ``confinement``, including ``check_layers``, the program that checks the layers; ``measuring`` limits how
much these programs write.
"""
