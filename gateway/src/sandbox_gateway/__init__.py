"""The sandbox gateway: an HTTP API that captures and forks sandboxes."""

__version__ = "0.1.0"
