"""Build the file system of a template from an OCI image.

`registry` copies the image, `layers` checks and unpacks it, `settings` reads its entry point, and `runtime` adds what a
virtual machine needs. Everything that reads the image's files runs in the namespaces of `confinement`; `measuring`
limits how much these programs write.
"""
