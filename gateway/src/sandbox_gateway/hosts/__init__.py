"""Kinds of host: each folder implements one platform, independent of the engine's operations."""
