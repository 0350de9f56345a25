"""Store the datasets, snapshots and records of a jail host in ZFS.

``storage`` is the entry point and scans at start-up: ``sandbox_scan`` and ``volume_scan`` interpret the datasets, and
``marks`` collects the findings. ``instances`` and ``snapshots`` manage the datasets and snapshots of sandboxes;
``volumes``, ``volume_datasets`` and ``volume_snapshots`` manage those of volumes; ``snapshot_names`` maps ids to full
names. ``property_codec`` and ``property_store`` store records in user properties. ``root`` manages the root dataset,
``ownership`` locks it, ``ballast`` reserves space in it, and ``translation`` translates ZFS's errors.
"""
