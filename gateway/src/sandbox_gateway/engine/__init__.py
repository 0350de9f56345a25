"""The gateway's operations, built on capture and fork: names, ordering, locks, undo, retention, lineage."""
