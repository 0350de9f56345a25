"""Read and write files, list directories, and watch directories for changes."""
