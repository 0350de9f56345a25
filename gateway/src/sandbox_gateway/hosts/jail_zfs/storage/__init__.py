"""Store the sandboxes, volumes, snapshots and records of a jail host in ZFS.

``storage`` is the entry point. These modules store objects:

    object           changes                                         scan at start-up
    sandbox          ``instances``                                   ``sandbox_scan``
    its snapshots    ``snapshots``                                   ``sandbox_scan``
    volume           ``volumes`` (operations), ``volume_datasets``   ``volume_scan``
    its snapshots    ``volume_snapshots``                            ``volume_scan``

``volume_datasets`` keeps track of the datasets that a volume has had: each rollback adds one. The scan modules
only interpret properties, and ``marks`` collects the problems that they find.

``snapshot_streams`` and ``volume_streams`` send snapshots and volumes as streams, and receive them.

Sandboxes and volumes share several modules: ``dataset_tree`` destroys or retires datasets, ``snapshot_names`` maps ids
to full names, ``snapshot_removal`` destroys or hides snapshots, and ``property_codec`` and ``property_store`` keep
records in user properties. ``secret_files`` keeps the environments of sandboxes in files. ``root`` manages the root
dataset, ``host_lock`` locks it, ``ballast`` reserves space in it, ``zfs_errors`` translates ZFS errors, and
``slow_commands`` finds commands that hang.
"""
