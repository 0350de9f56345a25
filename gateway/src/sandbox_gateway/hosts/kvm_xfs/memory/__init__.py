"""The memory of a running machine, and its capture.

In the order of use: ``capture`` takes one capture; its ``window`` chooses the mode and the base image; ``listing`` asks
the kernel which pages were written; ``ram`` locates and reads them; ``copying`` writes those that differ to the image.
``runs`` is the arithmetic on sets of pages, ``image_check`` detects damaged images.

``tracker`` is a helper process that has the kernel track a machine's writes (``injection``); ``tracker_client`` is the
gateway's side of it. docs/design.md explains the modes and lists the steps of a capture.
"""
