"""Volumes: images on disk, and the servers that sandboxes mount them from."""
