"""The code interpreter: contexts, their kernels, and the results of cells. Loaded on its first request."""
