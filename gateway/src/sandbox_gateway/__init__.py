"""The sandbox gateway: capture and fork of sandboxes, behind one HTTP surface."""

__version__ = "0.1.0"
