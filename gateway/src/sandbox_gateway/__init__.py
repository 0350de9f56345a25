"""The sandbox gateway: captures and forks sandboxes, behind one HTTP API."""

__version__ = "0.1.0"
