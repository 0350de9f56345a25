"""The command `forkd`, implemented on top of a sandbox gateway."""

__version__ = "0.1.0"
