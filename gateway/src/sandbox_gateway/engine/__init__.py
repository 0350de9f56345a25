"""The verbs, in terms of capture and fork: names, order, locks, undo, retention, lineage."""
