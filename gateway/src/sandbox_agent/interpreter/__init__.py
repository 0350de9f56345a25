"""The code interpreter, with contexts, their kernels, and the results of cells. It is imported on the first request."""
