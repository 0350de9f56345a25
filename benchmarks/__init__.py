"""Measure the performance of this software, next to a floor that is measured in the same run. See README.md."""
