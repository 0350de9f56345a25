"""Export snapshots to files, push them to registries, and read them back.

* files: ``transfers`` exports and imports snapshots of sandboxes and volumes. A file is a ``container``: a
  ``manifest``, which says what is in it, and the chunks of its parts. ``interrupted`` keeps what has arrived of an
  import that ended early.
* registries: ``artifacts`` pushes and pulls snapshots. ``artifact_format`` defines how a registry stores a
  snapshot, with the same manifest; ``registry_client`` sends the requests, and ``kept_blobs`` keeps what has arrived
  of a pull that ended early.
* both: ``signing`` signs manifests and checks signatures. ``bases`` finds local snapshots that share data with one
  that is exported or arrives.
"""
