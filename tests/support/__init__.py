"""Shared code of the tests, except for fixtures."""
