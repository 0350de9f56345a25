"""The memory of a running machine, and its capture."""
