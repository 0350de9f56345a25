"""Files: their contents, the entries of directories, and watching for changes."""
