"""Write snapshots to files and read them back: the format, its signature, and the operations."""
