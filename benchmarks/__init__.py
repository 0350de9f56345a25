"""Measure the performance of this software and, in the same run, a floor to compare it with. See README.md."""
