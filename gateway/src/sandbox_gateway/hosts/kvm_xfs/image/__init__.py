"""Files on disk: their layout, reflinks, and the files of machines and snapshots."""
