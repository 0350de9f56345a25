"""Benchmarks of this software. Each result is shown next to a floor measured in the same run. See README.md."""
