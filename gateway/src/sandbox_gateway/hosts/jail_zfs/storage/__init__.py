"""Datasets, snapshots and records of a jail host in ZFS.

``storage`` is the entry and scans at start-up: ``sandbox_scan`` and ``volume_scan`` interpret what is there, ``marks``
writes findings back. ``instances`` and ``snapshots`` are the datasets of sandboxes and their snapshots; ``volumes``,
``volume_datasets`` and ``volume_snapshots`` those of volumes; ``snapshot_names`` maps ids to full names.
``property_codec`` and ``property_store`` keep records in user properties. ``root`` is the dataset above all of them,
``ownership`` its lock, ``ballast`` its reserve, ``translation`` translates ZFS's errors.
"""
