"""Store the datasets, snapshots and records of a jail host in ZFS.

``storage`` is the entry point. These modules store objects:

    object              changes                                 scan at start-up
    sandbox             instances                               sandbox_scan
    its snapshots       snapshots                               sandbox_scan
    volume              volumes (operations), volume_datasets   volume_scan
    its snapshots       volume_snapshots                        volume_scan

``volume_datasets`` keeps track of the datasets that a volume has had: each rollback adds one. The scans only interpret
the properties of datasets, and ``marks`` collects what they find wrong.

Sandboxes and volumes share ``dataset_tree`` (destroy or retire a dataset), ``snapshot_names`` (ids to full names),
``snapshot_removal``, and ``property_codec`` and ``property_store`` (records in user properties). ``root`` manages the
root dataset, ``host_lock`` locks it, ``ballast`` reserves space in it, and ``zfs_errors`` translates ZFS's errors.
"""
