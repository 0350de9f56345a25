"""The command `forkd`, over a sandbox gateway."""

__version__ = "0.1.0"
