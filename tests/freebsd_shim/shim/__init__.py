"""Implement FreeBSD's commands with Linux namespaces. See ../README.md."""
