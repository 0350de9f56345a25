"""Find and copy the memory pages that a capture needs (``kvm_xfs.capture``).

``write_tracking`` chooses the mode and the base image, ``listing`` gets the written pages from the kernel, ``ram``
locates and reads them, and ``copying`` writes the pages that differ to the image. ``page_runs`` combines and splits
runs of pages, and ``image_check`` detects damaged images.

``tracker`` is a helper process that makes the kernel track a machine's writes (``injection``). The gateway uses it
through ``tracker_client``. docs/design.md explains the modes and lists the steps of a capture.
"""
